"""Keys that drafts of several methods share, because one library writes them. Knows no methods."""

from __future__ import annotations

from edgespec.config.fields import Fields


def base_name(top: Fields) -> str | None:
    """The base that a draft's config.json names: speculators' verifier, or ModelOpt's key."""
    verifier = top.optional_section("speculators_config").optional_section("verifier")
    return verifier.text("name_or_path") or top.text("base_model_name_or_path")
