"""The work directory of an unfinished calibration: finished parts, and the states of the next one.

Knows files, their hashes and the request they belong to. Knows nothing of what a part is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, hashes, json_files, provenance
from edgespec.artifacts.manifest import QuantizeRequest, QuantizeSource
from edgespec.artifacts.work_lock import LOCK, locked
from edgespec.checkpoint.writing import array_piece, to_numpy, write_safetensors
from edgespec.errors import BuildError, BundleError, OutputError
from edgespec.safe_read.fields import BundleFields
from edgespec.safe_read.records import Record

FORMAT = 3
REQUEST, PROGRESS = "request.json", "progress.json"
_NAME = re.compile(r"(part|states)-(\d{5})\.safetensors")
_VERSIONS = ("edgespec", "nvidia-modelopt", "torch", "transformers")


def directory_of(out: Path) -> Path:
    """Returns the work directory of the output directory `out`."""
    return out.absolute().parent / f".{out.absolute().name}.quantize"


def versions() -> dict[str, str | None]:
    """Returns the versions of the packages that shape the result."""
    return {name: provenance.installed_version(name) for name in _VERSIONS}


class OtherRun(OutputError):
    """The work directory belongs to another run, from which this command cannot continue."""


class CalibrationWork:
    """The parts and states in a work directory, by number.

    A part or state is valid once progress.json has its hash.
    """

    def __init__(self, directory: Path, stale: str = "") -> None:
        self.directory = directory
        self.stale = stale  # why an earlier directory was removed
        self.entries: dict[str, dict[str, Any]] = recorded_entries(directory)
        self.parts = {number for number in self.numbers("part") if self.intact(part_name(number))}
        self.resumed_at: int | None = None  # the first part that an earlier run had not finished

    def numbers(self, kind: str) -> list[int]:
        """Returns the numbers of the recorded files of a kind: "part" or "states"."""
        return [
            int(match[2])
            for name in self.entries
            if (match := _NAME.fullmatch(name)) and match[1] == kind
        ]

    def intact(self, name: str) -> bool:
        """Returns whether a file has its recorded size and hash; if not, drops its entry."""
        path, entry = self.directory / name, self.entries[name]
        same_size = path.is_file() and path.stat().st_size == entry["bytes"]
        if same_size and hashes.sha256_file(path) == entry["sha256"]:
            return True
        del self.entries[name]
        return False

    def path(self, number: int) -> Path:
        """Returns the path of a part."""
        return self.directory / part_name(number)

    def keep_part(self, number: int, tensors: Mapping[str, Any]) -> None:
        """Writes the tensors of a finished part."""
        self._keep(part_name(number), tensors)
        self.parts.add(number)

    def keep_states(self, number: int, states: Sequence[Any]) -> None:
        """Writes the input states of part `number`, and removes those of earlier parts."""
        old = [states_name(layer) for layer in self.numbers("states") if layer < number]
        self._keep(
            states_name(number), {f"{i:05}": state for i, state in enumerate(states)}, forget=old
        )
        for path in self.directory.glob("states-*.safetensors"):
            if path.name not in self.entries:
                path.unlink(missing_ok=True)

    def states(self, number: int) -> tuple[int, list[Any]] | None:
        """Returns the latest saved states at or before part `number`, and the part's number."""
        from safetensors.torch import load_file

        for layer in sorted(self.numbers("states"), reverse=True):
            if layer <= number and self.intact(states_name(layer)):
                tensors = load_file(self.directory / states_name(layer))
                return layer, [tensors[name] for name in sorted(tensors)]
        return None

    def _keep(self, name: str, tensors: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        path = self.directory / name
        staged = path.with_suffix(".tmp")
        pieces = [array_piece(key, to_numpy(value)) for key, value in tensors.items()]
        write_safetensors(staged, pieces, lambda _: None)
        entry = {"bytes": staged.stat().st_size, "sha256": hashes.sha256_file(staged)}
        staged.replace(path)
        left = {key: value for key, value in self.entries.items() if key not in forget}
        json_files.write_json(self.directory / PROGRESS, left | {name: entry})
        self.entries = left | {name: entry}


def part_name(number: int) -> str:
    """Returns the file name of a part."""
    return f"part-{number:05}.safetensors"


def states_name(number: int) -> str:
    """Returns the file name of the input states of a part."""
    return f"states-{number:05}.safetensors"


def recorded_entries(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries of progress.json; none if it is missing or unreadable."""
    if not (directory / PROGRESS).is_file():
        return {}
    try:
        listed = hashes.listed_files(directory, json_files.read_json(directory / PROGRESS))
    except BundleError:
        return {}
    return {name: entry for name, entry in listed.items() if _NAME.fullmatch(name)}


@contextmanager
def opened(out: Path, request: QuantizeRequest) -> Iterator[CalibrationWork]:
    """Opens the work directory of a request, new or resumed.

    After the block it stays if a part is finished, until `finish` removes it. Raises OutputError if
    another run holds the lock, and OtherRun for an unfinished run of another request.
    """
    directory = directory_of(out)
    made = not directory.parent.exists()
    with locked(directory):
        wanted = WorkRecord.of(request)
        stale = why_stale(directory, wanted, out)
        if stale is not None:
            remove_files(directory)
            with atomic.writing(directory):
                json_files.write_json(directory / REQUEST, wanted.to_dict())
        work = CalibrationWork(directory, stale or "")
        try:
            with atomic.writing(directory):
                yield work
        except OtherRun:
            raise
        except OutputError as error:
            raise OutputError(error.what, f"{error.remedy} {resume_hint(out)}".strip()) from error
        except BuildError:
            work.parts.clear()  # the next run would fail again
            raise
        finally:
            if not work.parts:
                finish(directory)
                if made:
                    atomic.remove_if_empty(directory.parent)


@dataclass(frozen=True, slots=True)
class WorkRecord(Record):
    """The request.json of a work directory: the request that it belongs to, and the versions of
    the packages that shape the result."""

    format: int
    request: QuantizeRequest
    versions: Mapping[str, Any]

    @classmethod
    def of(cls, request: QuantizeRequest) -> WorkRecord:
        """The record of a request that begins now."""
        return cls(FORMAT, request, versions())

    @classmethod
    def in_directory(cls, directory: Path) -> WorkRecord | None:
        """That of an unfinished run; None if it is missing or unreadable."""
        path = directory / REQUEST
        try:
            return cls.read(BundleFields(json_files.read_json(path), str(path)))
        except BundleError:
            return None


def why_stale(directory: Path, wanted: WorkRecord, out: Path) -> str | None:
    """Returns why the work directory must be emptied; None if this request can continue from it.

    The reason is empty if there is nothing to continue from. Raises OtherRun for an unfinished run
    of another request.
    """
    record = WorkRecord.in_directory(directory)
    if record is None or not recorded_entries(directory):
        return ""
    theirs, ours = record.request.unnamed(), wanted.request.unnamed()
    if theirs.source != ours.source:
        message = (
            f"an unfinished run to {out} is of {described(record.request.source)}, this one of"
            f" {described(wanted.request.source)}."
        )
        raise OtherRun(message, remedy_of(directory))
    shown = record.request.options, wanted.request.options
    differences = [
        f"{key} {shown[0].get(key)!r} instead of {shown[1][key]!r}"
        for key in ours.options
        if theirs.options.get(key) != ours.options[key]
    ]
    if differences:
        message = f"an unfinished run to {out} has other options: {'; '.join(differences)}."
        raise OtherRun(message, remedy_of(directory))
    if (record.format, record.versions) != (wanted.format, wanted.versions):
        return "an unfinished run of other versions was removed"
    return None


def described(source: QuantizeSource) -> str:
    """Returns the name and the digests of a source for messages."""
    weights, texts = (str(digest)[:12] for digest in (source.identity, source.texts))
    return f"{source.name} (weights {weights}, config and texts {texts})"


def remedy_of(directory: Path) -> str:
    """Returns the remedy for a work directory of another run."""
    return (
        "Run its command again to finish it, choose another `output_dir`, or start over: rm -r"
        f" {directory}"
    )


def refuse_unfinished(out: Path, request: QuantizeRequest) -> None:
    """Raises OutputError if `out` has an unfinished run of another request.

    For work that keeps no parts.
    """
    directory = directory_of(out)
    if (directory / REQUEST).is_file():
        with locked(directory):
            why_stale(directory, WorkRecord.of(request), out)


def forget_finished(out: Path, request: QuantizeRequest) -> None:
    """Removes the work directory of a run that was stopped after it wrote its result.

    Leaves the directory of another request.
    """
    directory = directory_of(out)
    if (directory / REQUEST).is_file():
        with locked(directory):
            record = WorkRecord.in_directory(directory)
            if record is not None and record.request.unnamed() == request.unnamed():
                finish(directory)


def remove_files(directory: Path) -> None:
    """Removes all files but the lock."""
    for path in directory.iterdir():
        if path.name != LOCK:
            path.unlink()


def finish(directory: Path) -> None:
    """Removes the directory. The lock goes last: from then on the next run may take it."""
    with suppress(OSError):
        remove_files(directory)
        (directory / LOCK).unlink(missing_ok=True)
        directory.rmdir()


def resume_hint(out: Path) -> str:
    """Returns a sentence on how to resume a stopped run; empty if no part is finished."""
    directory = directory_of(out)
    count = sum(name.startswith("part-") for name in recorded_entries(directory))
    if not count:
        return ""
    finished = f"{count} finished {'layer is' if count == 1 else 'layers are'}"
    return f"{finished} kept in {directory}: the same command resumes from there."
