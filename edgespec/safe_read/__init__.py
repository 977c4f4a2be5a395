"""What is read from disk, checked before it is used: JSON objects, files of a manifest, headers of
tensors.

Knows types and bounds. Knows no model, no graph and no engine.
"""
