"""The CUDA device that engines run on: memory, one stream, graphs and the project's own kernels,
behind one small interface (`base`) with an implementation for each Python package of CUDA.
"""
