"""A strict simulator of TensorRT for tests: its Python interface with its rules of lifecycle and
shapes, over ONNX Runtime and host memory. It is no TensorRT: it shows that build and runner keep
the rules as they are documented, and that what they bind is what the graph computes on.

It stands in for the library at one place, `bindings.load`, and is never importable as `tensorrt`.
"""
