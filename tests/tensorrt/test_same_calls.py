"""The simulator's builder half ends the same calls as NVIDIA's TensorRT-RTX does, or refuses more.

What cannot be compared: texts, numbers of layers, sizes of engines, whether the log or the recorder
tells what a parser refuses, and all of the runtime's half, which wants a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tensorrt import rtx
from tests.tensorrt.same_calls import CASES, REAL

pytestmark = pytest.mark.tensorrt
ROOT = Path(__file__).parents[2]
# The simulator refuses what TensorRT-RTX takes, in the releases from the line on
STRICTER = {
    "a_cache_of_double": (0, 0),  # no graph of ours has such a type
    "attention_with_one_bool_mask": (11, 0),  # those of two attentions fail, so none may be
}


@cache
def outcomes(which: str) -> dict[str, dict[str, Any]]:
    """What came of each call, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tensorrt.same_calls", which],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path[1:]])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def compared(found: dict[str, Any]) -> Any:
    """What is compared of a call: its outcome, and by which codes errors are told."""
    parsed = isinstance(found["outcome"], list) and len(found["outcome"]) == 5
    if parsed and found["outcome"][0] is False:
        return found["outcome"], found["log"] or bool(found["recorder"])
    return found["outcome"], found["log"], found["recorder"]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    rtx.bindings()


@pytest.mark.parametrize("name", CASES)
def test_a_call_ends_alike(name: str) -> None:
    real, simulated = outcomes(REAL)[name], outcomes(rtx.bindings().__version__)[name]
    if name in STRICTER and rtx.version().line >= STRICTER[name]:
        assert passes(real), "TensorRT-RTX refuses it too: it is no exception any more"
        assert not passes(simulated)
        return
    assert compared(simulated) == compared(real)


def passes(found: dict[str, Any]) -> bool:
    """Whether all steps of a call came to something."""
    return False not in found["outcome"]
