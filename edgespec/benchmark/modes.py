"""The modes of a benchmark, of an engine and of a server. Knows names alone, so that the command
line may read it."""

from __future__ import annotations

MODES = ("prefill", "decode", "verify", "speculative")
PREFILL, DECODE, VERIFY, SPECULATIVE = MODES
SERVED = ("serve_plain", "serve_speculative")  # what the clients of a server see
SERVED_PLAIN, SERVED_SPECULATIVE = SERVED
