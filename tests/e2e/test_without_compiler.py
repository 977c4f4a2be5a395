"""Installations on machines whose compiler is missing or broken: they succeed, engines run on ONNX
Runtime's kernels, and what needs kernels of our own says why there are none.

On a copy of the sources, with the interpreter of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec.backends.ort.native.library import BUILD_IT, PATH
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.contract import Limits
from tests import made, toys
from tests.unit.backends.ort.native.sessions import compiled

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = PATH.relative_to(ROOT)
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
COMPILERS = {"broken": "false", "missing": "/nonexistent/g++"}
NOT_COMPILED = "edgespec's own kernels were not compiled when it was installed"
LIMITS = Limits(max_input_len=64, max_kv_cache_capacity=64)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="nothing is compiled on Windows"),
]


def sources(path: Path) -> Path:
    """A copy of the sources without the library."""
    path.mkdir()
    for name in FILES:
        shutil.copyfile(ROOT / name, path / name)
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "edgespec", path / "edgespec", ignore=left_out)
    return path


def run(
    arguments: Sequence[str | Path], cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an installation that was made with a broken compiler."""
    work = tmp_path_factory.mktemp("installed")
    place = work / "site"
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--no-index", "--no-build-isolation", "--no-compile", "--target", str(place), "."]
    done = run(words, sources(work / "sources"), CC="false", CXX="false")
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_build_whose_compiler_fails_succeeds_and_leaves_no_older_library(
    tmp_path: Path, compiler: str
) -> None:
    """As `pip install -e` builds it: beside the sources."""
    place = sources(tmp_path / "sources")
    (place / LIBRARY).write_bytes(b"of an older version")
    path = COMPILERS[compiler]
    done = run(["setup.py", "build_ext", "--inplace"], place, CC=path, CXX=path)
    assert done.returncode == 0, done.stderr
    assert "libedgespec_kernels" in done.stderr
    assert "failed" in done.stderr
    assert not (place / LIBRARY).exists()


def test_a_wheel_for_others_without_its_library_is_not_made(tmp_path: Path) -> None:
    place = sources(tmp_path / "sources")
    words = ["setup.py", "bdist_wheel", "--plat-name", "manylinux_2_28_x86_64"]
    done = run(words, place, CC="false", CXX="false")
    assert done.returncode != 0
    assert "manylinux_2_28_x86_64 has no libedgespec_kernels.so" in done.stderr
    assert not list(place.glob("dist/*.whl"))


def test_an_installation_without_kernels_builds_and_infers_and_says_why(
    installed: Path, tmp_path: Path
) -> None:
    assert (installed / "edgespec").is_dir()
    assert not (installed / LIBRARY).exists()
    onnx = made.exported(toys.make_base(tmp_path / "base", "qwen3", layers=1)) / "llm"
    words = ["-m", "edgespec", "build", "--onnx-dir", onnx, "--engine-dir", "engines"]
    words += ["--max-kv-cache-capacity", "64", "--max-input-len", "64", "--weights", "int8"]
    built = run(words, tmp_path, PYTHONPATH=str(installed))
    assert built.returncode == 0, built.stderr
    said = " ".join((built.stdout + built.stderr).split())
    assert f"on ONNX Runtime's kernels: {NOT_COMPILED}" in said
    request = {"requests": [{"messages": [{"role": "user", "content": "Hello"}]}]}
    (tmp_path / "input.json").write_text(json.dumps(request))
    words = ["-m", "edgespec", "infer", "--engine-dir", "engines", "--input-file", "input.json"]
    words += ["--output-file", "output.json", "--max-generate-length", "4"]
    answered = run(words, tmp_path, PYTHONPATH=str(installed))
    assert answered.returncode == 0, answered.stderr
    (response,) = json.loads((tmp_path / "output.json").read_text())["responses"]
    assert response["metrics"]


@compiled
def test_what_needs_the_kernels_is_refused_with_the_remedy(installed: Path, tmp_path: Path) -> None:
    """Building for them, and an engine that another installation built for them."""
    onnx = made.exported(toys.make_base(tmp_path / "base", "qwen3", layers=1)) / "llm"
    engines = made.built(LIMITS, onnx, options=WeightFormat("int8", 128, kernels=NATIVE))
    builds = ["build", "--onnx-dir", onnx, "--engine-dir", "e", "--kernels", "native", "--dry-run"]
    infers = ["infer", "--engine-dir", engines, "--input-file", "i.json", "--output-file", "o.json"]
    request = {"requests": [{"messages": [{"role": "user", "content": "Hello"}]}]}
    (tmp_path / "i.json").write_text(json.dumps(request))
    for words in (builds, infers):
        done = run(["-m", "edgespec", *words], tmp_path, PYTHONPATH=str(installed))
        said = " ".join(done.stderr.split())
        assert done.returncode == 4, said
        assert NOT_COMPILED in said
        assert BUILD_IT in said
