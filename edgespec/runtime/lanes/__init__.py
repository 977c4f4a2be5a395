"""Engines with memory: a lane is the KV cache of one sequence."""
