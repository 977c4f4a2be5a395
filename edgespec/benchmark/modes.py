"""The modes of a benchmark. Knows names alone, so that the command line may read it."""

from __future__ import annotations

MODES = ("prefill", "decode", "verify", "speculative")
PREFILL, DECODE, VERIFY, SPECULATIVE = MODES
