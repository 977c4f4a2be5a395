"""The library of kernels as it is found, loaded and refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.backends.ort.native import library
from edgespec.errors import EnvironmentProblem
from tests.unit.backends.ort.native.sessions import compiled


def test_a_missing_or_damaged_library_says_why(tmp_path: Path) -> None:
    assert library.load(tmp_path / "none.so") == (
        "edgespec's own kernels were not compiled when it was installed"
    )
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"no library")
    assert "cannot be loaded" in str(library.load(damaged))


@pytest.mark.skipif(not os.environ.get("CI"), reason="a desk may have no compiler; CI may not")
def test_ci_tests_the_kernels() -> None:
    assert library.why_missing() is None


@compiled
def test_portable_kernels_are_always_usable() -> None:
    kernels = library.kernels()
    assert kernels.levels[-1] == "portable"
    assert kernels.level in kernels.levels


@compiled
def test_what_has_avx512_uses_it_without_vnni_too() -> None:
    known = library.kernels().levels
    assert ("avx512" in known) == ("avx512f" in Path("/proc/cpuinfo").read_text())


RUNTIMES = """
import ctypes
from ctypes import CFUNCTYPE, POINTER, addressof, c_char_p, c_uint32, c_void_p, cast

library, added, kept = ctypes.CDLL({path!r}), [], []
library.RegisterCustomOps.argtypes, library.RegisterCustomOps.restype = [c_void_p] * 2, c_void_p

def base(table):
    get_api = CFUNCTYPE(c_void_p, c_uint32)(lambda version: table)
    found = (c_void_p * 2)(cast(get_api, c_void_p))
    kept.append((get_api, found))
    return addressof(found)

def table(number):
    create = CFUNCTYPE(c_void_p, c_char_p, POINTER(c_void_p))(
        lambda name, at: at.__setitem__(0, number)
    )
    add_operator = CFUNCTYPE(c_void_p, c_void_p, c_void_p)(lambda domain, operator: None)
    add_domain = CFUNCTYPE(c_void_p, c_void_p, c_void_p)(
        lambda options, domain: added.append(domain)
    )
    found = (c_void_p * 300)()
    found[26:29] = [cast(one, c_void_p) for one in (create, add_operator, add_domain)]
    kept.append((create, add_operator, add_domain, found))
    return addressof(found)

assert library.RegisterCustomOps(None, base(None)) is None  # a runtime of another age
runtimes = [base(table(8)), base(table(16))]
for runtime in [*runtimes, runtimes[0]]:
    assert library.RegisterCustomOps(None, runtime) is None
assert added == [8, 16, 8], added
"""


@compiled
def test_each_onnx_runtime_of_a_process_has_operators_of_its_own() -> None:
    script = RUNTIMES.format(path=str(library.PATH))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@compiled
def test_an_unknown_level_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EnvironmentProblem, match="no level 'mmx'") as found:
        library.kernels().use_level("mmx")
    assert "portable" in found.value.remedy
    monkeypatch.setenv(library.LEVEL_VARIABLE, "mmx")
    with pytest.raises(EnvironmentProblem, match="no level 'mmx'"):
        library.load(library.PATH.parent / "." / library.PATH.name)
