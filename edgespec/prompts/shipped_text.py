"""The text that comes with edgespec, in two parts: one to calibrate with, and one that is held out,
on which it is measured what quantization costs.

Knows paragraphs. Knows no tokens.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).with_name("calibration.txt")
EVERY = 5  # of so many paragraphs one is held out, the fourth: prose, code, tables, HTML
FOURTH = 3


def calibration_text() -> str:
    """Four fifths of the text, for GPTQ and the like."""
    return "\n\n".join(part for i, part in enumerate(paragraphs()) if i % EVERY != FOURTH)


def held_out_text() -> str:
    """The other fifth, of which no weight may know."""
    return "\n\n".join(paragraphs()[FOURTH::EVERY])


def paragraphs() -> list[str]:
    """The paragraphs of the whole text, in their order."""
    return PATH.read_text(encoding="utf-8").strip().split("\n\n")
