"""From logits to a token, and to drafts that are drawn."""
