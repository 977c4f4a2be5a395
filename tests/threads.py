"""How many threads sessions of ONNX Runtime have in tests: one, as the other cores belong to other
workers, or as many as ONNX Runtime takes by itself, where that is what a test is about.

Processes that tests start are as users have them.
"""

from __future__ import annotations

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
    """Sessions opened inside have one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "SessionOptions", OneThread)
        yield


@contextmanager
def default_threads() -> Iterator[None]:
    """Sessions opened inside have as many threads as there are cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "SessionOptions", SessionOptions)
        yield
