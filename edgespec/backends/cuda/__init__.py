"""A CUDA device and what an engine keeps on it: memory, caches, hidden states and logits that stay
there, and the project's own kernels. Knows rows and lanes. Knows nothing of TensorRT.
"""
