"""Nemotron Post-Training V2, and the collection V3: what models of NVIDIA's were trained on, with
tools, and with reasoning that `/think` and `/no_think` turn on and off for these models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgespec.data.sources.row import Messages, Part, Source
from edgespec.prompts.chats import Turn, messages_of

MODES = re.compile(r"\s*/(?:no_)?think\b\s*")
V2 = "nvidia/Nemotron-Post-Training-Dataset-v2"
LANGUAGES = ("ja", "de", "it", "es", "fr")


def read(record: Mapping[str, Any]) -> Messages:
    """The messages without the words for a mode, developers as system, without empty system turns
    and without roles that no template knows."""
    turns = map(without_mode, messages_of(record))
    known = ("user", "assistant", "tool")
    return tuple(t for t in turns if t["role"] in known or (t["role"] == "system" and t["content"]))


def without_mode(turn: Turn) -> Turn:
    """A turn as any base reads it."""
    role = {"developer": "system"}.get(turn["role"], turn["role"])
    if role not in ("system", "user"):
        return turn
    return {**turn, "role": role, "content": MODES.sub(" ", turn["content"]).strip()}


NEMOTRON_V2 = Source(
    (
        Part(V2, ("stem", "chat", "math", "code")),
        Part(V2, tuple(f"multilingual_{name}" for name in LANGUAGES), 100_000, augmented=False),
    ),
    read,
)
NEMOTRON_V3 = Source(
    (
        Part("nvidia/Nemotron-Math-v2", ("high_part00",), 200_000),
        Part("nvidia/Nemotron-SFT-Math-v3", ("train",), 200_000),
        Part("nvidia/Nemotron-Math-Proofs-v1", cap=50_000),
        Part("nvidia/Nemotron-Competitive-Programming-v1", cap=100_000),
        Part("nvidia/Nemotron-SFT-Competitive-Programming-v2", cap=100_000),
        Part("nvidia/Nemotron-Science-v1", ("MCQ", "RQA")),
        Part("nvidia/Nemotron-Instruction-Following-Chat-v1"),
        Part("nvidia/Nemotron-SFT-Instruction-Following-Chat-v2", cap=100_000),
        Part("nvidia/Nemotron-SFT-Safety-v1"),
        Part("nvidia/Nemotron-SpecializedDomains-Finance-v1", cap=100_000),
        Part("nvidia/Nemotron-SFT-Multilingual-v1", cap=10_000, augmented=False),
        Part("nvidia/Nemotron-SWE-v1"),
        Part("nvidia/Nemotron-SFT-SWE-v2"),
        Part("nvidia/Nemotron-SFT-OpenCode-v1"),
        Part("nvidia/Nemotron-Agentic-v1"),
        Part("nvidia/Nemotron-SFT-Agentic-v2"),
    ),
    read,
)
