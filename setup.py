"""Builds the kernels of edgespec/backends/ort/native, a plain shared library; all else stands in
pyproject.toml.

Without a compiler, or with one that fails, the package installs all the same: engines then run on
ONNX Runtime's own kernels.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOM = Path("edgespec/backends/ort/native")
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
# A file whose name ends in a level of instructions is compiled with them, and with no others.
LEVELS = {
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
}


def level_flags(source: str) -> tuple[str, ...]:
    """The flags of the longest level that the file's name ends in; none for the others."""
    stem = Path(source).stem
    fitting = [level for level in LEVELS if stem.endswith(f"_{level}")]
    return LEVELS[max(fitting, key=len)] if fitting else ()


def sources() -> list[str]:
    """The files to compile on this machine."""
    x64 = platform.machine() in ("x86_64", "AMD64")
    return [str(path) for path in sorted(ROOM.glob("*.cpp")) if x64 or not level_flags(str(path))]


class BuildKernels(build_ext):
    """Compiles each file with its own flags, and links a library that is no Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where the library stands: under its plain name, as no Python imports it."""
        return f"{fullname.replace('.', '/')}.so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None beside those that the sources mark: it has no PyInit."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; errors are warnings, as the extension is optional."""
        extra = os.environ.get("EDGESPEC_KERNEL_FLAGS", "").split()  # such as -fsanitize=address
        objects: list[str] = []
        for source in ext.sources:
            flags = [*FLAGS, *level_flags(source), *extra]
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=ext.depends
            )
        target = self.get_ext_fullpath(ext.name)
        self.compiler.link_shared_object(
            objects, target, extra_postargs=extra, target_lang="c++", build_temp=self.build_temp
        )


class PlatformWheel(bdist_wheel):
    """A wheel for a platform, and for any Python: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of the wheel."""
        _, _, platform_name = super().get_tag()
        return "py3", "none", platform_name


def extensions() -> list[Extension]:
    """The library; the kernels are written for GCC and Clang."""
    if sys.platform == "win32":
        return []
    headers = [str(path) for path in sorted(ROOM.glob("*.h"))]
    name = "edgespec.backends.ort.native.libedgespec_kernels"
    return [Extension(name, sources(), depends=headers, language="c++", optional=True)]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
