"""Regular files, read up to a size: a pipe would wait for a writer for ever, a device has no end.
Knows paths and bytes."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MAX_JSON_BYTES = 256 * 2**20  # a tokenizer.json of 250,000 tokens has about 35 MB


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises OSError for anything else, and as
    `open` does."""
    # Without O_NONBLOCK the open itself would wait for a pipe's writer
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, f"it is {_name_of(mode)}, not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError for another kind of file, and for one of more
    than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data


def _name_of(mode: int) -> str:
    names = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return names.get(stat.S_IFMT(mode), "a special file")
