"""From an engine directory and options to engines that are open, with what drafts."""
