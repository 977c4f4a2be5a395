"""The project's own kernels as ONNX Runtime loads them: a shared library beside this file, which
the installation compiles.

Knows where it stands, whether it is of this version, and which level of instructions it uses.
Where it is missing, engines run on ONNX Runtime's own kernels.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import EnvironmentProblem

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime as ort
    from numpy.typing import NDArray

    from edgespec.backends.ort.native.layout import WeightLayout

DOMAIN = "edgespec"  # of the operators
LAYOUT_VERSION = 2  # the newest of packed weights, as in matmul.h
MOST_TOP = 64  # logits of a row that a search finds, as in head.h
LEVEL_VARIABLE = "EDGESPEC_KERNEL_LEVEL"
PATH = Path(__file__).parent / "libedgespec_kernels.so"
BUILD_IT = "Install a C++17 compiler (g++ or clang++) and install edgespec again."


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded library."""

    path: Path
    library: ctypes.CDLL

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of instructions that are usable here, the best one first; all give the same
        bits. Each is proven where it was not yet, which takes 25 ms."""
        names: bytes = self.library.edgespec_levels()
        return tuple(names.decode().split(","))

    @property
    def level(self) -> str:
        """The level in use."""
        name: bytes = self.library.edgespec_level()
        return name.decode()

    def use_level(self, name: str) -> None:
        """Run the kernels of another level from now on. EnvironmentProblem for one that is not
        usable here."""
        if not self.library.edgespec_use_level(name.encode()):
            message = f"the kernels have no level {name!r} on this machine"
            raise EnvironmentProblem(message, f"Choose one of: {', '.join(self.levels)}.")

    def low_bit_matmul(
        self,
        layout: WeightLayout,
        rounding: int,
        scale: float,
        packed: NDArray[np.uint8],
        x: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """The product [rows, out] of x [rows, in] and a packed weight, on this thread; rows have a
        scale per block (`rounding` 0), one each (1), or `scale` (2)."""
        import numpy as np

        from edgespec.backends.ort.native.layout import CODEBOOKS, PARTS

        assert packed.nbytes == layout.num_bytes
        assert x.shape[1:] == (layout.in_features,)
        packed, x = np.ascontiguousarray(packed), np.ascontiguousarray(x, np.float32)
        y = np.empty((len(x), layout.out_features), np.float32)
        self.library.edgespec_low_bit_matmul(
            ctypes.c_int64(layout.in_features),
            ctypes.c_int64(layout.out_features),
            layout.bits,
            ctypes.c_int64(layout.block),
            list(PARTS).index(layout.scales),
            ctypes.c_int64(layout.super_block),
            ["", *CODEBOOKS].index(layout.codebook),
            ctypes.c_float(layout.global_scale),
            rounding,
            ctypes.c_float(scale),
            packed.ctypes.data_as(ctypes.c_void_p),
            x.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(x)),
            y.ctypes.data_as(ctypes.c_void_p),
        )
        return y

    def find(
        self,
        logits: NDArray[np.float32],
        ids: int,
        count: int,
        outputs: Sequence[NDArray[np.generic]],
        *,
        sums: bool,
    ) -> None:
        """Search the first `ids` logits of rows [R, V], on this thread, for the `count` largest of
        each. `outputs` are the arrays for ids and values [R, count], and for the logarithm of the
        sum of exponentials (NaN without `sums`) and whether all are finite [R]."""
        import numpy as np

        assert 1 <= count <= min(MOST_TOP, ids) <= ids <= logits.shape[1]
        assert logits.dtype == np.float32
        assert logits.strides[1] == logits.itemsize
        assert all(array.flags.c_contiguous for array in outputs)
        self.library.edgespec_find(
            ctypes.c_int64(count),
            ctypes.c_int64(ids),
            int(sums),
            logits.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(logits)),
            ctypes.c_int64(logits.strides[0] // logits.itemsize),
            *(array.ctypes.data_as(ctypes.c_void_p) for array in outputs),
        )

    def register(self, options: ort.SessionOptions) -> None:
        """Let sessions with these options run graphs that have the operators."""
        options.register_custom_ops_library(str(self.path))


def kernels() -> Kernels:
    """The library. EnvironmentProblem where there is none that this version can use."""
    loaded = load()
    if isinstance(loaded, str):
        raise EnvironmentProblem(loaded, BUILD_IT)
    return loaded


def why_missing() -> str | None:
    """Why there are no kernels of our own here; None where there are."""
    loaded = load()
    return loaded if isinstance(loaded, str) else None


@cache
def load(path: Path = PATH) -> Kernels | str:
    """The library at `path`, or why it cannot be used. EnvironmentProblem where the level that the
    environment names is not usable."""
    if not path.is_file():
        return "edgespec's own kernels were not compiled when it was installed"
    try:
        library = ctypes.CDLL(str(path))
        version: int = library.edgespec_layout_version()
        library.edgespec_low_bit_matmul.restype = library.edgespec_find.restype = None
        library.edgespec_level.restype = library.edgespec_levels.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return f"edgespec's own kernels cannot be loaded: {error}"
    if version != LAYOUT_VERSION:
        return f"edgespec's own kernels are of another version ({version}, not {LAYOUT_VERSION})"
    kernels = Kernels(path, library)
    if wanted := os.environ.get(LEVEL_VARIABLE):
        kernels.use_level(wanted)
    return kernels
