"""What edgespec writes on disk: exports, engines and quantized checkpoints, with their file names,
hashes, config.json and manifest.json, whole or not at all. Knows no graph and no engine.
"""
