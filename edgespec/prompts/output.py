"""Responses on disk: `output.json`, whole or not at all, and until it is written a journal of what
is finished.

Knows files. Knows nothing of what stands in a response.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from edgespec.artifacts import atomic
from edgespec.errors import OutputError

Response = Mapping[str, object]


def write_output(
    path: str | os.PathLike[str], input_file: str | os.PathLike[str], responses: Sequence[Response]
) -> None:
    """Write `output.json` whole or not at all. Raises OutputError."""
    target = Path(path)
    check_writable(target)
    data = document(input_file, responses)
    try:
        atomic.replace_file(_follow_links(target), data)
    except OSError as error:
        raise _cannot_write(target, error) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Prove before any work that `output.json` can be written: try, and leave nothing. Raises
    OutputError."""
    target = Path(path)
    try:
        if target.is_dir():
            raise OutputError(
                f"{target} is a directory.", "Name a file in it, for example output.json."
            )
        if target.exists() and not target.is_file():
            raise OutputError(
                f"{target} is not an ordinary file.",
                "Name an ordinary file, which is replaced as a whole, or - for stdout.",
            )
        if target.exists() and not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
            raise OutputError(
                f"{target} is read-only.", "Allow writing (chmod u+w), or name another path."
            )
        if not _follow_links(target).parent.is_dir():
            raise OutputError(
                f"{target} cannot be written: there is no directory {target.parent}.",
                "Create the directory first, or name another path.",
            )
        real = _follow_links(target)
        atomic.remove_dead(real.parent, real.name)
        probe = real.parent / atomic.temporary_name(real.name)
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise _cannot_write(target, error) from error


class Journal:
    """What is finished, one JSON line a response beside `output.json`, so that no kill and no full
    disk takes it away.

    Use it in a `with` block: the file `path` is there, locked, until `finish` has written the
    output. `leftover` is the journal of an earlier run that was killed: it is left alone. `failure`
    is why a response is not in the journal yet; it does not stop the run, and each `add` tries
    again. Raises OutputError where another run writes this output now.
    """

    def __init__(self, output_path: str | os.PathLike[str]) -> None:
        self.output_path = Path(output_path)
        self.leftover: Path | None = None
        self.failure: OSError | None = None
        self._names = _partial_names(_follow_links(self.output_path))
        self.path = next(self._names)
        while os.path.lexists(self.path):
            check_nobody_writes(self.path, self.output_path)
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()  # of a run that was killed before it had finished anything
                break
            self.leftover, self.path = self.path, next(self._names)
        self._file: FileIO | None = None
        self._size_bytes = 0  # of whole lines in the file
        self.num_lines = 0
        self._waiting: deque[bytes] = deque()

    def __enter__(self) -> Journal:
        try:
            self._file = self._open()
        except OSError as error:
            self.failure = error
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def add(self, response: Response) -> None:
        """Append one finished response. A file that cannot be written does not raise: see
        `failure`."""
        self._waiting.append(_encode(response) + b"\n")
        self._write_waiting()

    def finish(self, responses: Sequence[Response], input_file: str | os.PathLike[str]) -> Path:
        """Write `output.json` and remove the journal; returns the path of the output.

        Raises OutputError when the output cannot be written; it says where the responses are kept
        instead.
        """
        try:
            write_output(self.output_path, input_file, responses)
        except OutputError as error:
            raise self._rescue(error, responses, input_file) from error
        self._waiting.clear()
        self._size_bytes = 0
        self._close()
        return self.output_path

    def _rescue(
        self, error: OutputError, responses: Sequence[Response], input_file: str | os.PathLike[str]
    ) -> OutputError:
        self._write_waiting()
        if self._is_in_place() and self.num_lines >= len(responses):
            return OutputError(
                f"{error.what} The responses are kept in {self.path}, one JSON object a line.",
                f"{error.remedy} Nothing needs to run again: each line of that file is an entry of"
                " responses, and jq -s '{responses: .}' makes an output.json of them.",
            )
        return keep_elsewhere(error, document(input_file, responses), self._part_kept())

    def _part_kept(self) -> str:
        return (
            f" The first {self.num_lines} are kept in {self.path}." if self._is_in_place() else ""
        )

    def _is_in_place(self) -> bool:
        """True when the file holds what was written, and nobody has removed it."""
        if self._file is None or not self.num_lines:
            return False
        try:
            return self.path.stat().st_size == self._size_bytes
        except OSError:
            return False

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
            self.failure = None
        except OSError as error:
            self.failure = error
            self._cut()

    def _append(self, line: bytes) -> None:
        """Write behind the last whole line: half of one, from an attempt that was stopped, is
        written over."""
        file = self._file = self._file or self._open()
        file.seek(self._size_bytes)
        rest = memoryview(line)
        while rest:
            rest = rest[file.write(rest) :]
        self._size_bytes += len(line)
        self.num_lines += 1

    def _open(self) -> FileIO:
        """A new file; a name that another run took meanwhile is left to it."""
        while True:
            try:
                file = self.path.open("xb", buffering=0)
            except FileExistsError:
                self.path = next(self._names)
                continue
            fcntl.flock(file, fcntl.LOCK_EX)
            return file

    def _cut(self) -> None:
        """Take half a line away."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(self._size_bytes)

    def _close(self) -> None:
        """Close the file, and remove it where it holds nothing."""
        if self._file is None:
            return
        self._cut()
        with suppress(OSError):
            self._file.close()
        self._file = None
        if not self._size_bytes:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


class NoJournal:
    """In place of a Journal where responses are shown and not kept."""

    path = leftover = failure = None
    num_lines = 0

    def __enter__(self) -> NoJournal:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def add(self, response: Response) -> None:
        """Keeps nothing."""

    def finish(self, responses: Sequence[Response], input_file: str | os.PathLike[str]) -> None:
        """Writes nothing."""


def check_nobody_writes(journal: Path, output: Path) -> None:
    """OutputError where a run that goes on holds the journal: the last one to end would take the
    other's output."""
    try:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        remedy = "Wait until it has ended, or name another output."
        raise OutputError(f"Another run writes {output} now.", remedy) from error
    except OSError:  # nothing that can be read is no journal of ours
        return


def _partial_names(output: Path) -> Iterator[Path]:
    yield Path(f"{output}.partial.jsonl")
    for number in itertools.count(2):
        yield Path(f"{output}.partial-{number}.jsonl")


def document(input_file: str | os.PathLike[str], responses: Sequence[Response]) -> bytes:
    """The bytes of `output.json`."""
    value = {
        "input_file": os.fsencode(input_file).decode("utf-8", "replace"),
        "responses": responses,
    }
    return _encode(value, indent=4) + b"\n"


def _encode(value: object, indent: int | None = None) -> bytes:
    """JSON with its characters as they are; with escapes where one has no UTF-8, as in the name of
    a file."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent, ensure_ascii=True, allow_nan=False).encode()


def keep_elsewhere(error: OutputError, data: bytes, otherwise: str = "") -> OutputError:
    """The error, with where the whole output is kept instead; `otherwise` is what is kept where
    even that cannot be written."""
    try:
        kept = _write_elsewhere(data)
    except OSError as again:
        return OutputError(
            f"{error.what} The responses could not be saved anywhere else:"
            f" {again.strerror}.{otherwise}",
            f"{error.remedy} Then run again.",
        )
    return OutputError(
        f"{error.what} The responses are kept in {kept}.",
        f"{error.remedy} Nothing needs to run again: that file is the whole output; move it"
        " where you want it.",
    )


def _write_elsewhere(data: bytes) -> Path:
    """The data in a new file, readable by its owner alone, where temporary files go."""
    descriptor, name = tempfile.mkstemp(
        prefix="edgespec-output-", suffix=".json", dir=tempfile.gettempdir()
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _follow_links(path: Path) -> Path:
    """The file that a symbolic link means: replacing must not turn the link into a file."""
    return Path(os.path.realpath(path))


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path} cannot be written: {error.strerror}.",
        "Free space or permissions there, or name another path.",
    )
