"""Quantization schemes as a table, and a quantized weight as a value."""
