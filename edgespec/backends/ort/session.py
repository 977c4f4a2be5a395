"""The options that every session of ONNX Runtime has.

Knows the CPU's features. Knows no graph, and imports no ONNX.
"""

from __future__ import annotations

import os
import platform

import onnxruntime as ort

from edgespec.backends.machine import cores
from edgespec.backends.ort.fingerprint import cpu_features

X64 = ("x86_64", "AMD64")
# Errors are raised as well; its log would reach the terminal in colors, with names from the graph
FATAL = 4
# Without it a session that fails prints on stdout and is made once more, on the same CPU
NO_FALLBACK = {"enable_fallback": 0}
# How long a thread spins for its next work before it sleeps: from one operator to the next, not
# from one call to the next (decision 0004)
SPIN_US = 20
EXACT_FEATURES = {"avx_vnni", "avx512_vnni", "amx_int8"}


def session_options() -> ort.SessionOptions:
    """The options of every session: as many threads as there are cores that the process may use,
    which do not wait awake from call to call, and int8 products that are exact, also where the CPU
    has no instruction for them."""
    options = ort.SessionOptions()
    if (count := cores()) < (os.cpu_count() or 1):  # ONNX Runtime counts the machine's
        options.intra_op_num_threads = count
    options.log_severity_level = FATAL
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    options.add_session_config_entry("session.prepack.enable_parallel", "1")
    if not adds_exactly():
        options.add_session_config_entry("session.x64quantprecision", "1")
    return options


def adds_exactly() -> bool:
    """Whether int8 products are exact without asking for it, as they are with VNNI and AMX.

    Asking then costs eightfold on many rows (decision 0009); without them pairs of products would
    saturate at 16 bits.
    """
    return platform.machine() not in X64 or bool(EXACT_FEATURES & set(cpu_features()))
