"""Images on their way into a prompt: encoded, and put in their places."""
