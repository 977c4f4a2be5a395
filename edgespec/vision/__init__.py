"""Image encoders where host and device meet: what their graphs read and give, what a grid of
patches means to them, and the config.json of what is exported and built. What they give in a
prompt: its rows, its places and its positions.

Knows values and arrays. Knows no graph, no engine and no image.
"""
