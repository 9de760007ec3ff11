"""What is particular to chat: from the API's messages to the template's, and (later) from text to tool calls."""
