"""Measured times of steps, and what they and acceptance come to."""
