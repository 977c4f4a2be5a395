"""Structured output: what a grammar allows behind a path, and what that means for drafts."""
