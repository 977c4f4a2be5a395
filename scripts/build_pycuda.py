"""Builds pycuda on a machine without CUDA's toolkit and without a GPU, for the tests that run it on
a stand-in of CUDA's driver: headers come from NVIDIA's wheels, and the driver's library is an empty
one to link to. On a device `pip install pycuda` does it with what is there.

    python scripts/build_pycuda.py DIR     # about 90 seconds; PYTHONPATH=DIR then has pycuda
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PYCUDA = "pycuda==2026.1"
NEEDS = ["pytools", "siphash24", "platformdirs", "mako", "MarkupSafe", "typing_extensions"]
# Of CUDA 13.0: cuda.h, curand.h and what they include
HEADERS = ["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*", "nvidia-cuda-cccl==13.0.*"]
HEADERS += ["nvidia-cuda-profiler-api==13.0.*"]
SETTINGS = """\
CUDA_ROOT = {root!r}
CUDA_INC_DIR = [{root!r} + "/include"]
CUDADRV_LIB_DIR = [{links!r}]
CUDA_ENABLE_CURAND = False
"""


def main(out: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="pycuda-") as folder:
        work = Path(folder)
        wheels, links = work / "wheels", work / "links"
        run([*pip, "install", "--no-deps", "--target", str(wheels), *HEADERS])
        links.mkdir()
        (links / "empty.c").touch()
        line = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(links / "libcuda.so")]
        run([*line, str(links / "empty.c")])
        (root,) = wheels.glob("nvidia/cu*")
        # pycuda's setup reads its settings from the home directory
        settings = SETTINGS.format(root=str(root), links=str(links))
        (work / ".aksetup-defaults.py").write_text(settings, encoding="utf-8")
        # The empty library is named as needed, though it has nothing of what is
        environment = {**os.environ, "HOME": str(work), "LDFLAGS": "-Wl,--no-as-needed"}
        line = [*pip, "install", "--no-deps", "--no-binary", "pycuda", "--no-cache-dir"]
        run([*line, "--upgrade", "--target", str(out), PYCUDA], environment)
        run([*pip, "install", "--no-deps", "--upgrade", "--target", str(out), *NEEDS])


def run(line: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(line, check=True, env=environment)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
