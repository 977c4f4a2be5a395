"""Builds the kernels of edgespec/backends/ort/native, a plain shared library; all else stands in
pyproject.toml.

Without a compiler, or with one that fails, the package installs all the same: engines then run on
ONNX Runtime's own kernels. A wheel that is made for others (`--plat-name`) must hold them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOM = Path("edgespec/backends/ort/native")
LIBRARY = "edgespec.backends.ort.native.libedgespec_kernels"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # bits must not depend on what a compiler fuses
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    # GCC 12 takes the undefined registers of its own headers for mistakes
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
# A file whose name ends in a level of instructions is for the machines that may have it, and is
# compiled with it; the others are for all machines, and are compiled with none.
LEVELS = {
    "x86_64": {
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx_vnni": ("-mavx2", "-mfma", "-mf16c"),  # its instruction is written in assembler
        "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "avx512_vnni": (
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mavx512vnni",
            "-mfma",
            "-mf16c",
        ),
        "amx_int8": (
            "-mavx512f",
            "-mavx512bw",
            "-mavx512dq",
            "-mavx512vl",
            "-mfma",
            "-mf16c",
            "-mamx-tile",
            "-mamx-int8",
        ),
    },
    "aarch64": {
        "neon": (),  # that each such machine has
        "neon_dotprod": ("-march=armv8.2-a+dotprod",),
        "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    },
}
SAME_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def machine() -> str:
    """The machine to compile for; "" for one whose levels are not known. As a cross compilation
    names it in _PYTHON_HOST_PLATFORM, and otherwise this one."""
    name = sysconfig.get_platform().rsplit("-", 1)[-1]
    known = SAME_MACHINES.get(name, name)
    # A Python of 32 bits has a compiler of 32 bits, whatever the machine's kernel is
    return known if known in LEVELS and sys.maxsize > 2**32 else ""


def level_of(source: str) -> tuple[str, str] | None:
    """The machine and the level that the file's name ends in, the longest one; None for a file of
    all machines."""
    stem = Path(source).stem
    fitting = [
        (level, name) for name, of in LEVELS.items() for level in of if stem.endswith(f"_{level}")
    ]
    level, name = max(fitting, key=lambda one: len(one[0]), default=("", ""))
    return (name, level) if fitting else None


def level_flags(source: str) -> tuple[str, ...]:
    """The flags of the file's level."""
    found = level_of(source)
    return LEVELS[found[0]][found[1]] if found else ()


def sources() -> list[str]:
    """The files to compile for this machine."""
    here = [None, machine()]
    files = [(str(path), level_of(str(path))) for path in sorted(ROOM.glob("*.cpp"))]
    return [path for path, level in files if (level and level[0]) in here]


class BuildKernels(build_ext):
    """Compiles each file with its own flags, and links a library that is no Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where the library stands: under its plain name, as no Python imports it."""
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None beside those that the sources mark: it has no PyInit."""
        return []

    def copy_extensions_to_source(self) -> None:
        """Put the library beside the sources. What older ones made goes first: where this one was
        not compiled, that would be taken for it."""
        for ext in self.extensions:
            Path(self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; errors are warnings, as the extension is optional. What an older
        source made goes first: it would be taken for this one's."""
        target = self.get_ext_fullpath(ext.name)
        Path(target).unlink(missing_ok=True)
        extra = os.environ.get("EDGESPEC_KERNEL_FLAGS", "").split()  # such as -fsanitize=address

        def compiled(source: str) -> list[str]:
            flags = [*FLAGS, *level_flags(source), *extra]
            found: list[str] = self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=ext.depends
            )
            return found

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [one for found in pool.map(compiled, ext.sources) for one in found]
        if sys.platform == "linux":
            extra.append(f"-Wl,--version-script={ROOM / 'exports.map'}")
        self.compiler.link_shared_object(
            objects, target, extra_postargs=extra, target_lang="c++", build_temp=self.build_temp
        )


class PlatformWheel(bdist_wheel):
    """A wheel for a platform, and for any Python: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of the wheel."""
        _, _, platform_name = super().get_tag()
        return "py3", "none", platform_name

    def write_wheelfile(self, *arguments: str) -> None:
        """Once all files are there. SetupError where the wheel names the systems it is for and has
        no library for them."""
        library = Path(self.bdist_dir, *LIBRARY.split(".")).with_suffix(".so")
        if self.plat_name_supplied and not library.is_file():
            raise SetupError(
                f"the wheel for {self.plat_name} has no {library.name}: it was not compiled, see"
                " above. Set CC and CXX to a compiler for that machine, or leave out --plat-name."
            )
        super().write_wheelfile(*arguments)


def extensions() -> list[Extension]:
    """The library; the kernels are written for GCC and Clang."""
    if sys.platform == "win32":
        return []
    headers = [str(path) for name in ("*.h", "*.map") for path in sorted(ROOM.glob(name))]
    return [Extension(LIBRARY, sources(), depends=headers, language="c++", optional=True)]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
