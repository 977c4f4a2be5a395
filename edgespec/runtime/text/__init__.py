"""Prompts, tokens and texts."""
