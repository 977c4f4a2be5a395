"""Variants of prompts by a YAML file in ModelOpt's form: a language or a style that all turns of
the user ask for, or a system prompt where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.data.sources.row import Messages
from edgespec.errors import RequestError

TEXTS = {"user_suffix": "text", "system_prompt": "content"}  # the key with the text of each type
LIKE = 'Write augmentations: [{type: user_suffix, text: " Please reply in French."}].'


@dataclass(frozen=True, slots=True)
class Variant:
    """One change of a conversation."""

    type: str
    text: str

    def of(self, messages: Messages) -> Messages:
        """The conversation, changed; the same where it has a system prompt of its own."""
        if self.type == "user_suffix":
            suffix = {"user": self.text}
            return tuple(
                m | {"content": m["content"] + suffix.get(m["role"], "")} for m in messages
            )
        if messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self.text}, *messages)


def variants_of(values: dict[str, Any], source: str) -> list[Variant]:
    """Those of a file that are enabled. Raises RequestError."""
    entries = values.get("augmentations")
    if not isinstance(entries, list):
        raise RequestError(f"{source} has no list of augmentations.", LIKE)
    read = [variant_of(entry, f"{source}: augmentations[{n}]") for n, entry in enumerate(entries)]
    found = [variant for variant in read if variant is not None]
    if not found:
        raise RequestError(f"{source} has no augmentation that is enabled.", LIKE)
    return found


def variant_of(entry: Any, where: str) -> Variant | None:
    """An entry; None where it is not enabled. Raises RequestError."""
    found = entry if isinstance(entry, dict) else {}
    kind = str(found.get("type"))
    text = found.get(TEXTS.get(kind))
    if not isinstance(text, str) or not text or found.keys() - {"type", "enabled", TEXTS[kind]}:
        raise RequestError(f"{where} is {entry!r:.80}, which is no augmentation.", LIKE)
    return Variant(kind, text) if found.get("enabled", True) else None
