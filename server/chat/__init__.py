"""What is particular to chat: the API's messages -> the template's; the text -> thoughts, content and calls."""
