"""Draft trees, grown and static."""
