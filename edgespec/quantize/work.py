"""The directory of an unfinished calibration, beside the output: finished parts, and where the next
one begins.

Knows files, their hashes and the request they belong to. Knows nothing of what a part is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.errors import BuildError, BundleError, OutputError
from edgespec.quantize.tensors import array_piece, to_numpy, write_safetensors

FORMAT = 2
REQUEST, PROGRESS, WEIGHTS, LOCK = "request.json", "progress.json", "weights.json", "lock"
_NAME = re.compile(r"(part|states)-(\d{5})\.safetensors")
_VERSIONS = ("edgespec", "nvidia-modelopt", "torch", "transformers")


def directory_of(out: Path) -> Path:
    return out.absolute().parent / f".{out.absolute().name}.quantize"


def versions() -> dict[str, str | None]:
    return {name: bundle.installed_version(name) for name in _VERSIONS}


class OtherRun(OutputError):
    """What is kept belongs to another run: the same command would not go on from it."""


class Work:
    """Parts and states by their number. A part or state counts once progress.json has its hash."""

    def __init__(self, directory: Path, stale: str = "") -> None:
        self.directory = directory
        self.stale = stale  # why an earlier directory was removed
        self.entries: dict[str, dict[str, Any]] = recorded_entries(directory)
        self.parts = {number for number in self.numbers("part") if self.sound(part_name(number))}
        self.resumed_at: int | None = None  # the first part that an earlier run had not finished

    def numbers(self, kind: str) -> list[int]:
        return [
            int(match[2])
            for name in self.entries
            if (match := _NAME.fullmatch(name)) and match[1] == kind
        ]

    def sound(self, name: str) -> bool:
        """Whether a file is what was recorded; what is not is forgotten, and made again."""
        path, entry = self.directory / name, self.entries[name]
        if (
            path.is_file()
            and path.stat().st_size == entry["bytes"]
            and bundle.sha256_file(path) == entry["sha256"]
        ):
            return True
        del self.entries[name]
        return False

    def path(self, number: int) -> Path:
        return self.directory / part_name(number)

    def keep_part(self, number: int, tensors: Mapping[str, Any]) -> None:
        self._keep(part_name(number), tensors)
        self.parts.add(number)

    def keep_states(self, number: int, states: Sequence[Any]) -> None:
        """The states that part `number` begins with; those of earlier parts are not needed any
        more."""
        old = [states_name(found) for found in self.numbers("states") if found < number]
        self._keep(
            states_name(number), {f"{i:05}": state for i, state in enumerate(states)}, forget=old
        )
        for path in self.directory.glob("states-*.safetensors"):
            if path.name not in self.entries:
                path.unlink(missing_ok=True)

    def states(self, number: int) -> tuple[int, list[Any]] | None:
        """The latest kept states that part `number` can be reached from, and whose they are."""
        from safetensors.torch import load_file

        for found in sorted(self.numbers("states"), reverse=True):
            if found <= number and self.sound(states_name(found)):
                tensors = load_file(self.directory / states_name(found))
                return found, [tensors[name] for name in sorted(tensors)]
        return None

    def check_weights(self, digest: str, out: Path) -> None:
        """Raises OtherRun where finished parts were made from other weights than those of
        `digest`."""
        path = self.directory / WEIGHTS
        if self.entries:
            with suppress(BundleError):
                if bundle.read_json(path).get("sha256") == digest:
                    return
            what = f"the weights have changed since an unfinished run to {out} began."
            raise OtherRun(what, anew(self.directory, "Put the old ones back"))
        bundle.write_json(path, {"sha256": digest})

    def _keep(self, name: str, tensors: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        path = self.directory / name
        staged = path.with_suffix(".tmp")
        write_safetensors(
            staged,
            [array_piece(key, to_numpy(value)) for key, value in tensors.items()],
            lambda _: None,
        )
        entry = {"bytes": staged.stat().st_size, "sha256": bundle.sha256_file(staged)}
        staged.replace(path)
        left = {key: value for key, value in self.entries.items() if key not in forget}
        bundle.write_json(self.directory / PROGRESS, left | {name: entry})
        self.entries = left | {name: entry}


def part_name(number: int) -> str:
    return f"part-{number:05}.safetensors"


def states_name(number: int) -> str:
    return f"states-{number:05}.safetensors"


def recorded_entries(directory: Path) -> dict[str, dict[str, Any]]:
    """What progress.json lists; nothing where it is not there or cannot be read."""
    if not (directory / PROGRESS).is_file():
        return {}
    try:
        listed = bundle.listed_files(directory, bundle.read_json(directory / PROGRESS))
    except BundleError:
        return {}
    return {name: entry for name, entry in listed.items() if _NAME.fullmatch(name)}


@contextmanager
def opened(out: Path, request: Mapping[str, Any]) -> Iterator[Work]:
    """The work directory of a request, new or resumed; it stays where a part is finished, until
    `finish` removes it.

    Raises OutputError where another run works on it, or an unfinished run of another request is
    there.
    """
    directory = directory_of(out)
    made = not directory.parent.exists()
    with locked(directory):
        wanted = recorded(request)
        stale = why_stale(directory, wanted, out)
        if stale is not None:
            clear(directory)
            with bundle.writing(directory):
                bundle.write_json(directory / REQUEST, wanted)
        work = Work(directory, stale or "")
        try:
            with bundle.writing(directory):
                yield work
        except OtherRun:
            raise
        except OutputError as error:
            raise OutputError(error.what, f"{error.remedy} {kept(out)}".strip()) from error
        except BuildError:
            work.parts.clear()  # it would fail again
            raise
        finally:
            if not work.parts:
                finish(directory)
                if made:
                    bundle.remove_if_empty(directory.parent)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Alone with the directory, which is made where it is not there. Raises OutputError where
    another run works on it.

    A run that ends takes the directory away, lock and all: what was opened before may not be what
    is there now.
    """
    path = directory / LOCK
    while True:
        with bundle.writing(directory):
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(exist_ok=True)
            try:
                lock = path.open("a")
            except FileNotFoundError:
                continue
        with lock:
            lock_or_refuse(lock, directory)
            if is_at(lock, path):
                yield
                return


def lock_or_refuse(lock: Any, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(
            f"another run works on {directory}.", "Wait for it, or choose another --output-dir."
        ) from error


def is_at(file: Any, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def recorded(request: Mapping[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(
        json.dumps({"format": FORMAT, "request": request, "versions": versions()})
    )
    return value


def nameless(value: Any) -> Any:
    """What identifies a request. Names are only told: '.' and a link are the same checkpoint."""
    if isinstance(value, dict):
        return {key: nameless(inner) for key, inner in value.items() if key != "name"}
    return value


def why_stale(directory: Path, wanted: Mapping[str, Any], out: Path) -> str | None:
    """None: what is there is this request's. Empty: nothing is there. Raises OtherRun for another
    request's."""
    found = found_request(directory)
    if found is None or not recorded_entries(directory):
        return ""
    theirs, ours = found["request"], wanted["request"]
    if nameless(theirs["source"]) != nameless(ours["source"]):
        what = (
            f"an unfinished run to {out} is of {told(theirs['source'])}, this one of"
            f" {told(ours['source'])}."
        )
        raise OtherRun(what, anew(directory))
    theirs, ours = theirs["options"], ours["options"]
    apart = [
        f"{key} {theirs.get(key)!r} instead of {ours[key]!r}"
        for key in ours
        if nameless(theirs.get(key)) != nameless(ours[key])
    ]
    if apart:
        raise OtherRun(
            f"an unfinished run to {out} was asked for {'; '.join(apart)}.", anew(directory)
        )
    if found.get("format") != FORMAT or found.get("versions") != wanted["versions"]:
        return "an unfinished run of other versions was removed"
    return None


def found_request(directory: Path) -> dict[str, Any] | None:
    """request.json of an unfinished run; None where there is none that can be read."""
    try:
        found = bundle.read_json(directory / REQUEST)
    except BundleError:
        return None
    request = found.get("request")
    sections = (
        [request.get(key) for key in ("source", "options")] if isinstance(request, dict) else [None]
    )
    return found if all(isinstance(section, dict) for section in sections) else None


def told(source: Mapping[str, Any]) -> str:
    weights, texts = (str(source.get(key))[:12] for key in ("identity", "texts"))
    return f"{source.get('name')} (weights {weights}, config and texts {texts})"


def anew(directory: Path, finish: str = "Run its command again to finish it") -> str:
    return f"{finish}, choose another --output-dir, or start anew: rm -r {directory}"


def refuse_unfinished(out: Path, request: Mapping[str, Any]) -> None:
    """For work that keeps no parts. Raises OutputError where an unfinished run of another request
    is beside `out`."""
    directory = directory_of(out)
    if (directory / REQUEST).is_file():
        with locked(directory):
            why_stale(directory, recorded(request), out)


def forget_finished(out: Path, request: Mapping[str, Any]) -> None:
    """The directory of a run that was stopped after its result was there; not that of another
    request."""
    directory = directory_of(out)
    if (directory / REQUEST).is_file():
        with locked(directory):
            found = found_request(directory)
            if found is not None and nameless(found["request"]) == nameless(
                recorded(request)["request"]
            ):
                finish(directory)


def clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != LOCK:
            path.unlink()


def finish(directory: Path) -> None:
    """Remove it, the lock last: from then on it is the next run's."""
    with suppress(OSError):
        clear(directory)
        (directory / LOCK).unlink(missing_ok=True)
        directory.rmdir()


def kept(out: Path) -> str:
    """What to tell who stopped a run; empty where nothing is kept."""
    count = sum(name.startswith("part-") for name in recorded_entries(directory_of(out)))
    if not count:
        return ""
    there = (
        f"{count} finished {'layer is' if count == 1 else 'layers are'} kept in {directory_of(out)}"
    )
    return f"{there}: the same command goes on from there."
