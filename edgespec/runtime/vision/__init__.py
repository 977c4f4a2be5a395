"""Images on their way into a prompt: where they stand in it, their rows and their positions."""
