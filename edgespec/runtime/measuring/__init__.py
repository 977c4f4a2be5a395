"""Steps of an open engine, timed, and what the times mean in words."""
