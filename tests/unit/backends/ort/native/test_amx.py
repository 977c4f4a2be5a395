"""The product by AMX's tiles, on a stand-in of its registers in memory: no run of AMX."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec.backends.ort.native import library
from tests.unit.backends.ort.native.sessions import levels

NATIVE = Path(library.__file__).parent
FLAGS = "-std=c++17 -O1 -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all"
WIDE = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma"

needs_it = pytest.mark.skipif(
    shutil.which("g++") is None or "avx512_vnni" not in levels(),
    reason="needs a compiler, and a machine with AVX-512",
)


@needs_it
@pytest.mark.deep
def test_tiles_give_the_portable_bits_and_their_trial_survives_a_fault(tmp_path: Path) -> None:
    sources = [
        (Path(__file__).parent / "amx_stand_in.cpp", WIDE),
        (NATIVE / "matmul_portable.cpp", ""),
        (NATIVE / "matmul_amx_int8.cpp", f"{WIDE} -mamx-tile -mamx-int8"),
    ]
    compilers = []
    for source, flags in sources:
        into = ["-I", str(NATIVE), "-c", str(source), "-o", str(tmp_path / f"{source.stem}.o")]
        compilers.append(subprocess.Popen(["g++", *FLAGS.split(), *flags.split(), *into]))
    assert [one.wait() for one in compilers] == [0, 0, 0]
    objects = [str(tmp_path / f"{source.stem}.o") for source, _ in sources]
    program = str(tmp_path / "stand_in")
    subprocess.run(["g++", *FLAGS.split(), *objects, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "154 products, 0 failures\n"), done.stderr
