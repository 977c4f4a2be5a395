"""How fast one core reads memory: libc's memchr looks for a byte that is not there.

    python bandwidth.py

Prints GB a second of processor time, the most of several passes over half a gigabyte in huge pages.
memchr keeps nothing and writes nothing, and a compiler's loop over the same memory is no faster.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time

import numpy as np

BYTES, PASSES = 1 << 29, 7


def main() -> None:
    """Prints one number."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    data = np.ones(BYTES, np.uint8)  # written once, so that each page is one of its own
    find = ctypes.CDLL(None).memchr
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    seconds = []
    for _ in range(PASSES):
        began = time.thread_time()
        found = find(data.ctypes.data, 7, BYTES)
        seconds.append(time.thread_time() - began)
        if found is not None:
            raise SystemExit("memchr found a byte that was never written.")
    print(json.dumps(round(BYTES / min(seconds) / 1e9, 2)))


if __name__ == "__main__":
    main()
