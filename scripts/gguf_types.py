"""Writes the demo base as GGUF files, one for each type of ggml, by llama.cpp's own quantizers.

    python scripts/gguf_types.py LIBGGML_BASE OUT [TYPE ...]
    python scripts/measure_exactness.py mt_bench.jsonl --method eagle3 --gguf OUT/*.gguf

LIBGGML_BASE is libggml-base.so of a build of llama.cpp (`cmake --build BUILD --target ggml-base`).
Rows that are no multiple of a type's block are Q8_0.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from demo_pairs import BASE, ROOT
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT))
from edgespec.checkpoint.gguf.types import TYPES
from tests import gguf_files

NUMBERS = ("i8", "i16", "i32", "i64", "f64")  # of tables, never of weights
NAMES = tuple(row.name.upper() for row in TYPES.values() if row.name not in NUMBERS)


def encode(ggml: Any, array: NDArray[np.float32], kind: Type) -> tuple[NDArray[Any], Type]:
    """The blocks of a matrix, each weight as important as the next, and their type."""
    columns = array.shape[-1]
    kind = kind if columns % GGML_QUANT_SIZES[kind][0] == 0 else Type.Q8_0
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty((*array.shape[:-1], columns // block * size), np.uint8)
    source, evenly = np.ascontiguousarray(array), np.ones(columns, np.float32)
    at = [ctypes.c_void_p(made.ctypes.data) for made in (source, out, evenly)]
    first, rows, width = map(ctypes.c_int64, (0, array.size // columns, columns))
    written = ggml.ggml_quantize_chunk(int(kind), *at[:2], first, rows, width, at[2])
    assert written == out.nbytes
    return out, kind


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, metavar="LIBGGML_BASE")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("types", nargs="*", choices=[*NAMES, []], metavar="TYPE")
    args = parser.parse_args()
    ggml = ctypes.CDLL(str(args.library.resolve()))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.types or NAMES:
        gguf_files.write(BASE, args.out / f"{name}.gguf", name, encode=partial(encode, ggml))
        print(args.out / f"{name}.gguf")


if __name__ == "__main__":
    main()
