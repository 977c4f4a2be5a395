"""What stands in the page cache once a file is renewed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from edgespec.artifacts import page_cache


def is_cached(path: Path) -> bool:
    """Whether the file's first page can be read without its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(handle, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            pytest.skip("this file system does not say what it has in memory")
        raise
    finally:
        os.close(handle)


@pytest.mark.skipif(sys.platform != "linux", reason="others have no posix_fadvise")
def test_a_large_file_leaves_the_page_cache_and_a_small_one_stays(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(b"1" * page_cache.MIN_BYTES)
    small.write_bytes(b"1" * (page_cache.MIN_BYTES - 1))
    for path in (large, small):
        assert is_cached(path)
        page_cache.renew(path)
    if Path("/proc/mounts").read_text().find(f" {tmp_path} tmpfs ") >= 0:
        pytest.skip("files in memory alone stay there")
    assert not is_cached(large)
    assert is_cached(small)
    assert large.read_bytes() == b"1" * page_cache.MIN_BYTES
