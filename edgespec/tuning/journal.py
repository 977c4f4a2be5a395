"""What was measured so far, a line each, so that a run that was stopped can go on.

Knows JSON and files. A journal is bound to what it was measured of: one of other engines, prompts
or options is begun anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from edgespec.artifacts import atomic
from edgespec.errors import OutputError

FORMAT = 1
MAX_BYTES = 256 * 2**20
SAMPLE, RUN = "sample", "run"


class TuneJournal:
    """An open journal; use it in a `with` block. `resumed` says how many measurements of an earlier
    run it has, `other` whether there was one of something else, which is gone.

    Raises OutputError where it cannot be written.
    """

    def __init__(self, path: Path, bound_to: dict[str, Any]) -> None:
        self.path = path
        lines = [*read_lines(path)]
        same = bool(lines) and lines[0] == {"format": FORMAT, "of": bound_to}
        self.other = bool(lines) and not same
        if lines and not (isinstance(lines[0], dict) and "format" in lines[0]):
            raise OutputError(f"{path} is no journal of tune", "Name another `journal`.")
        self.kept: dict[tuple[str, str], Any] = {}
        if same:
            self.kept = {(e["kind"], e["key"]): e["value"] for e in lines[1:] if is_entry(e)}
        self.resumed = len(self.kept)
        with atomic.writing(path):
            if not same:
                atomic.replace_file(path, line({"format": FORMAT, "of": bound_to}))
            elif not path.read_bytes().endswith(b"\n"):  # a killed run's last line
                atomic.replace_file(path, b"".join(line(entry) for entry in lines))
            self.file: IO[bytes] = path.open("ab")

    def __enter__(self) -> TuneJournal:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # what could not be written was reported
            self.file.close()

    def get(self, kind: str, key: str) -> Any:
        """What was measured; None where it was not yet."""
        return self.kept.get((kind, key))

    def put(self, kind: str, key: str, value: Any) -> None:
        """Keep a measurement. Raises OutputError."""
        self.kept[kind, key] = value
        with atomic.writing(self.path):
            self.file.write(line({"kind": kind, "key": key, "value": value}))
            self.file.flush()
            os.fsync(self.file.fileno())

    def remove(self) -> None:
        """The run is complete: the next one measures again. Raises OutputError."""
        self.file.close()
        with atomic.writing(self.path):
            self.path.unlink(missing_ok=True)


def line(entry: object) -> bytes:
    """An entry as it is kept."""
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def read_lines(path: Path) -> Iterator[Any]:
    """The entries of a file up to the first that is none; nothing where there is no file. Raises
    OutputError for what is no file."""
    if not path.exists():
        return
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise OutputError(f"{path} is no journal of tune", "Name another `journal`.")
    for number, text in enumerate(path.read_bytes().splitlines()):
        try:
            yield json.loads(text)
        except (ValueError, RecursionError):
            if number == 0:
                yield None
            return


def is_entry(entry: object) -> bool:
    """Whether a line is a measurement."""
    if not isinstance(entry, dict) or entry.keys() != {"kind", "key", "value"}:
        return False
    return isinstance(entry["kind"], str) and isinstance(entry["key"], str)
