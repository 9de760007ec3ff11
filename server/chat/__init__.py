"""What is particular to chat: from the API's messages to the template's, and from text to thoughts, content and calls."""
