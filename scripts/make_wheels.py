"""Makes what is uploaded: an sdist, and from it a wheel for each machine, on one machine.

    make wheels                            # into dist/; URL=https://... names the repository in the metadata
    python scripts/make_wheels.py --tools .venv/wheel-tools --out dist [--url URL] [--machine aarch64]

The compiler is zig's, a Clang, with the symbols of glibc 2.28 at most. A wheel that lacks its library, or runs
on fewer systems than its name says, or is larger than 2 MB, is an error and not kept; so is one for this machine whose
library gives other bits than the one that `make` compiled here. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import same_bits

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "NOTICE",
    "requirements-cpu.txt",
)
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)  # as the dependencies' own wheels need
MOST_BYTES = 2_000_000
NOTICES = ("LICENSE", "NOTICE")
# zig takes no -march for ARM, and GCC's headers want one
COMPILER = """#!/bin/sh
for one; do
    shift
    case "$one" in -march=armv8.2-a+*) one="-mcpu=generic+${one#*+}" ;; esac
    set -- "$@" "$one"
done
exec %s %s -Wno-unknown-warning-option "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tools", type=Path, required=True, help="where requirements-wheels.txt is installed"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", help="of the repository, for the page of the package")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES)
    args = parser.parse_args()
    tools = args.tools.resolve()
    with tempfile.TemporaryDirectory(prefix="wheels-") as directory:
        work = Path(directory)
        made = work / "made"
        sdist = make_sdist(copy_of_sources(work / "source", args.url), made, tools)
        for machine in args.machine:
            wheel = make_wheel(sdist, machine, work / machine, made, tools)
            print(f"{wheel.name}: {checked(wheel, machine, tools)}", flush=True)
            if machine == platform.machine() and (ROOT / same_bits.LIBRARY).is_file():
                print(same_bits.compare(wheel, ROOT / same_bits.LIBRARY), flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        for path in made.iterdir():
            print(f"{shutil.copy(path, args.out)}: {path.stat().st_size / 1e6:.2f} MB")
    if not args.url:
        print("The metadata name no repository: make wheels URL=https://... before an upload.")


def copy_of_sources(place: Path, url: str | None) -> Path:
    """What the sdist is made from, without what was compiled; with the URL in its metadata."""
    place.mkdir()
    for name in FILES:
        shutil.copyfile(ROOT / name, place / name)
    shutil.copytree(
        ROOT / "edgespec", place / "edgespec", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    if url:
        with (place / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(f'\n[project.urls]\nRepository = "{url}"\n')
    return place


def make_sdist(source: Path, out: Path, tools: Path) -> Path:
    build(["--sdist", str(source)], out, tools, {})
    (path,) = out.glob("*.tar.gz")
    return path


def make_wheel(sdist: Path, machine: str, work: Path, out: Path, tools: Path) -> Path:
    """The wheel for a machine, compiled from the unpacked sdist."""
    with tarfile.open(sdist) as packed:
        packed.extractall(work, filter="data")
    (source,) = work.iterdir()
    target = f"-target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    zig = shlex.quote(str(tools / "ziglang" / "zig"))
    for name in ("cc", "c++"):
        compiler = work / name
        compiler.write_text(COMPILER % (f"{zig} {name}", target))
        compiler.chmod(0o755)
    environment = {
        "CC": shlex.quote(str(work / "cc")),
        "CXX": shlex.quote(str(work / "c++")),
        "LDFLAGS": "-s",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    build(
        ["--wheel", f"--config-setting=--build-option=--plat-name={tag}", str(source)],
        out,
        tools,
        environment,
    )
    (path,) = out.glob(f"*-py3-none-{tag}.whl")
    return path


def build(words: list[str], out: Path, tools: Path, environment: dict[str, str]) -> None:
    """Without isolation: that would install the newest setuptools, whatever it does."""
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *words]
    subprocess.run(
        line,
        env=os.environ | {"PYTHONPATH": str(tools)} | environment,
        check=True,
        stdout=sys.stderr,
    )


def checked(wheel: Path, machine: str, tools: Path) -> str:
    """What auditwheel says of a wheel. SystemExit where it is not as its name says."""
    line = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(
        line, env=os.environ | {"PYTHONPATH": str(tools)}, capture_output=True, text=True
    )
    found = re.search(r'platform\s+tag:\s+"(manylinux_(\d+)_(\d+)_(\w+))"', done.stdout)
    if found is None or found[4] != machine or (int(found[2]), int(found[3])) > GLIBC:
        sys.exit(f"{wheel.name} is not what its name says:\n{done.stdout}{done.stderr}")
    if (size := wheel.stat().st_size) > MOST_BYTES:
        sys.exit(f"{wheel.name} has {size:,} bytes, more than {MOST_BYTES:,}")
    with zipfile.ZipFile(wheel) as packed:
        names = {Path(name).name for name in packed.namelist() if ".dist-info/licenses/" in name}
    if lacking := set(NOTICES) - names:
        sys.exit(f"{wheel.name} lacks {', '.join(sorted(lacking))}")
    return f"{size / 1e6:.2f} MB, runs on {found[1]} and newer"


if __name__ == "__main__":
    main()
