"""Draft, verify, commit: which request runs when, and what a step does."""
