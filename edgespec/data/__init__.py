"""Conversations that drafts learn from: prepared from published data sets, and answered by the base
itself. Knows no losses and no draft."""
