"""Whether two libraries of kernels give the same bits, as other compilers made them: the kernels' tests
run on each, and what every call returned or wrote is compared.

    python scripts/same_bits.py LIBRARY [OTHER]    # a .so or a wheel; OTHER is the one beside the sources

A copy of the sources and tests in a temporary directory has the library in turn. Prints how many
outputs of how many tests were compared; the exit code is 1 where a test failed or a bit differs. As a plugin of
pytest this module records: a hash for each call, by test.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path("edgespec/backends/ort/native/libedgespec_kernels.so")
TESTS = "tests/unit/backends/ort/native"
ELSEWHERE = ("test_arm.py", "test_amx.py", "test_library.py")  # they compile, or are about the file
OUT = "EDGESPEC_RECORDED"


def compare(one: Path, other: Path) -> str:
    """What was compared. SystemExit with the first difference, or where a test failed."""
    first, second = recorded(one), recorded(other)
    differing = [
        test for test in first.keys() | second.keys() if first.get(test) != second.get(test)
    ]
    if differing or not first:
        sys.exit(
            f"{one} and {other} differ in {len(differing)} tests, such as {min(differing, default=None)}"
        )
    return f"the same bits: {sum(map(len, first.values()))} outputs of {len(first)} tests of the kernels"


def recorded(library: Path) -> dict[str, list[str]]:
    """The hashes of all outputs by test, with this library."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as directory:
        copy = Path(directory)
        for name in ("edgespec", "tests"):
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / LIBRARY).write_bytes(content(library))
        out = copy / "recorded.json"
        line = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-p",
            Path(__file__).stem,
            "--hypothesis-seed=0",
        ]
        line += [TESTS, *(f"--ignore={TESTS}/{name}" for name in ELSEWHERE)]
        paths = os.pathsep.join([str(copy), str(Path(__file__).parent)])
        environment = os.environ | {"PYTHONPATH": paths, OUT: str(out)}
        if subprocess.run(line, cwd=copy, env=environment).returncode != 0:
            sys.exit(f"the tests of the kernels fail with {library}")
        found: dict[str, list[str]] = json.loads(out.read_text())
        return found


def content(library: Path) -> bytes:
    """A library, or that of a wheel."""
    if library.suffix == ".whl":
        with zipfile.ZipFile(library) as wheel:
            return wheel.read(LIBRARY.as_posix())
    return library.read_bytes()


# The plugin

calls: dict[str, list[str]] = defaultdict(list)


def record(owner: type, name: str) -> None:
    """Hash what each call of a method returns, and its arguments after it: caches are written in place."""
    inner = getattr(owner, name)

    def outer(*arguments: Any, **named: Any) -> Any:
        found = inner(*arguments, **named)
        digest = hashlib.sha256()
        add(digest, [written(found, *arguments), *arguments[1:], *named.values()])
        calls[os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]].append(
            digest.hexdigest()
        )
        return found

    setattr(owner, name, outer)


def written(found: Any, *arguments: Any) -> Any:
    """The outputs without the logits of lanes that were asked not to be written: those hold anything."""
    feeds = arguments[-1]
    if isinstance(feeds, dict) and "written" in feeds:
        return [found[0][feeds["written"]], *found[1:]]
    return found


def add(digest: Any, value: Any) -> None:
    """A NaN is a NaN: which of two operands its bits come from is a compiler's choice."""
    import numpy as np

    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            value = np.where(np.isnan(value), np.array(np.nan, value.dtype), value)
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            add(digest, part)


def pytest_sessionstart(session: object) -> None:
    import onnxruntime as ort

    from edgespec.backends.ort.native.library import Kernels

    record(ort.InferenceSession, "run")
    for name in ("low_bit_matmul", "find"):
        record(Kernels, name)


def pytest_sessionfinish(session: object) -> None:
    Path(os.environ[OUT]).write_text(json.dumps(calls))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    print(compare(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else ROOT / LIBRARY))
