"""How many threads sessions of ONNX Runtime have in tests: one, or as many as ONNX Runtime takes by
itself, where that is what a test is about. In processes that tests start, this holds for none of
them. Of torch and OpenBLAS tests/__init__.py says it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import onnxruntime as ort
import pytest

SessionOptions = ort.SessionOptions


class OneThread(SessionOptions):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 1


@contextmanager
def one_per_session() -> Iterator[None]:
    """What is opened and computed inside has one thread. Toys are too small to share out: with more
    threads these tests take four times as long."""
    if (torch := sys.modules.get("torch")) is not None:  # where something else imported it first
        torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "SessionOptions", OneThread)
        yield


@contextmanager
def default_threads() -> Iterator[None]:
    """Sessions opened inside have as many threads as there are cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "SessionOptions", SessionOptions)
        yield
