"""Image files below the directories that may be read, and nothing outside them.

Links are followed first, and what counts is where the file is that was opened. Knows paths and
bytes.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from edgespec.errors import RequestError
from edgespec.safe_read.regular import open_regular

logger = logging.getLogger(__name__)


def read(
    name: str,
    shown: str,
    directory: Path | None,
    roots: tuple[Path, ...],
    max_bytes: int,
    *,
    also_working_directory: bool = False,
) -> bytes:
    """The bytes of a file, one more than `max_bytes` at most.

    A relative name begins at `directory`, None being the working directory. Where there is no such
    file it begins, with `also_working_directory`, at the working directory, as TensorRT Edge-LLM
    has it; that is logged. Raises RequestError for a file outside `directory` (then: the working
    directory) and `roots`, and for what is no regular file.
    """
    work = _working_directory()
    beside = work if directory is None else directory
    again = also_working_directory and not Path(name).is_absolute()
    for start in dict.fromkeys((beside, work) if again else (beside,)):
        image_bytes = (
            None if start is None else _read(start / name, (start, *roots), shown, max_bytes)
        )
        if image_bytes is not None:
            if start != beside:
                logger.warning(
                    "image %s is not beside the input file: read from the working directory", shown
                )
            return image_bytes
    raise RequestError(f"image {shown} is not there.", "Write its path as seen from `image_root`.")


def _working_directory() -> Path | None:
    """None where it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def _read(path: Path, allowed: tuple[Path, ...], shown: str, max_bytes: int) -> bytes | None:
    """The bytes of a file, or None where there is none."""
    try:
        real = os.path.realpath(path)
        roots = tuple(os.path.realpath(root) for root in allowed)
        if not _is_below(real, roots):
            raise _outside(shown)
        if not stat.S_ISREG(os.stat(real).st_mode):  # noqa: PTH116 - a device may react to `open`
            raise RequestError(f"image {shown} is not a regular file.", "Write the path of a file.")
        with open_regular(Path(real)) as file:
            if not _is_below(_opened_path(file.fileno(), real), roots):
                raise _outside(shown)  # a directory has become a link in between
            return file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        message = f"image {shown} cannot be read: {reason}."
        raise RequestError(message, "Write the path of a readable file.") from error


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(Path(path).is_relative_to(root) for root in roots)


def _opened_path(handle: int, real: str) -> str:
    """Where an open file is: by Linux itself, else where `real` leads now, if that is the file."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115 - no path of the file system
    except OSError:
        again = os.path.realpath(real)
        same = os.path.samestat(os.stat(again), os.fstat(handle))  # noqa: PTH116
        return again if same else ""


def _outside(shown: str) -> RequestError:
    return RequestError(
        f"image {shown} is outside the directories that may be read.",
        "Put it in `image_root`, or allow its directory: `allow_image_root`.",
    )
