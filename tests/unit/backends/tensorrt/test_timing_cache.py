"""The timing cache: keyed by what it holds for, read whole, written whole."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.backends.tensorrt import timing_cache
from edgespec.backends.tensorrt.devices import DeviceModel
from edgespec.backends.tensorrt.versions import RTX, TENSORRT
from edgespec.errors import OutputError

THOR = DeviceModel("NVIDIA Thor", 110, "13.0", 122 << 30)


class Cache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data


class Config:
    """A builder's config that takes the caches that it made for this device."""

    def __init__(self, takes: bytes = b"measured here") -> None:
        self.takes, self.cache, self.ignored = takes, None, False

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Cache:
        return Cache(serialized_timing_cache)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        self.ignored |= ignore_mismatch
        fits = cache.data in (b"", self.takes)
        if fits:
            self.cache = cache  # type: ignore[assignment]
        return fits

    def get_timing_cache(self) -> Cache | None:
        return self.cache


def test_a_library_that_gives_no_cache_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config()
    timing_cache.attach(config, tmp_path / "times")
    monkeypatch.setattr(Cache, "serialize", lambda self: None)
    timing_cache.store(config, tmp_path / "times")
    assert not (tmp_path / "times").exists()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_each_version_device_and_driver_has_a_file_of_its_own(home: Path) -> None:
    rows = [
        (TENSORRT, "10.13.3.9", THOR),
        (TENSORRT, "10.16.2", THOR),
        (RTX, "10.13.3.9", THOR),
        (TENSORRT, "10.13.3.9", replace(THOR, driver="13.2")),
        (TENSORRT, "10.13.3.9", replace(THOR, name="NVIDIA Thor/T4000")),
        (TENSORRT, "10.13.3.9", replace(THOR, memory_bytes=64 << 30)),
    ]
    paths = {timing_cache.cache_path(*row) for row in rows}
    assert len(paths) == len(rows)
    assert {path.parent for path in paths if path} == {home / "tensorrt"}


def test_what_was_stored_is_used_again(tmp_path: Path) -> None:
    path, config = tmp_path / "new" / "times", Config()
    assert timing_cache.attach(config, path) is False
    config.cache = Cache(b"measured here")  # type: ignore[assignment]
    timing_cache.store(config, path)
    assert path.read_bytes() == b"measured here"
    assert list(path.parent.iterdir()) == [path]
    again = Config()
    assert timing_cache.attach(again, path) is True
    assert not again.ignored  # never with times of another device


def test_a_cache_of_another_device_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, config = tmp_path / "times", Config()
    path.write_bytes(b"measured elsewhere")
    with caplog.at_level(logging.WARNING):
        assert timing_cache.attach(config, path) is False
    assert config.cache is not None
    assert config.cache.data == b""
    assert "does not fit" in caplog.text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = Config()
    timing_cache.attach(config, tmp_path / "times")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        timing_cache.store(config, tmp_path / "file" / "times")


def test_a_write_that_is_cut_short_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    path, config = tmp_path / "times", Config()
    path.write_bytes(b"measured here")
    timing_cache.attach(config, path)
    config.cache = Cache(b"measured here and more")  # type: ignore[assignment]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="no space left"):
        timing_cache.store(config, path)
    assert path.read_bytes() == b"measured here"
    assert [*tmp_path.iterdir()] == [path]
