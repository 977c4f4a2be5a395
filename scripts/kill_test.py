"""Kills export, build and infer at random moments and sees whether what they leave is ever taken for
something finished.

    python scripts/kill_test.py                     # 120 kills on the demo pair, about ten minutes
    python scripts/kill_test.py --kills 12 --seed 7

After each SIGKILL every directory that is left is looked at (`inspect --verify`), built from or
answered with: it must be refused, or be as a run makes it that nobody killed. Then the same command
runs again: it must succeed, and leave nothing but its result. What a killed `infer` had finished is
kept on purpose, in its journal. Prints one JSON object; the exit code is 1 where something was
falsely accepted, a second run failed, or something was left.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.artifacts import file_names, hashes
from edgespec.backends.manifest import EngineManifest
from edgespec.cli.main import run

DEMO = Path(__file__).resolve().parents[1] / "recipes" / "demo"
LIMITS = ["--max-input-len", "128", "--max-kv-cache-capacity", "256"]
NUM_REQUESTS, NUM_TOKENS = 6, 24
EARLY = (
    0.2  # the share of kills at any moment since the start; the others come while files are written
)
REFUSED = 3
POLL_S = 0.002


@dataclass
class Shop:
    """The demo pair at each stage, made by runs that nobody killed, and a place for those that are
    killed."""

    root: Path
    made: Path = field(init=False)
    work: Path = field(init=False)

    def __post_init__(self) -> None:
        self.made, self.work = self.root / "made", self.root / "work"

    def make(self) -> None:
        """Run each command once, undisturbed."""
        self.made.mkdir(parents=True)
        requests = [
            {"messages": [{"role": "user", "content": f"def f{i}(x):"}]}
            for i in range(NUM_REQUESTS)
        ]
        settings = {"temperature": 0, "max_generate_length": NUM_TOKENS}
        text = json.dumps(settings | {"requests": requests})
        (self.made / "input.json").write_text(text)
        for case in CASES:
            if case.needs:  # it does again what another one has done
                continue
            code, said = quietly(case.command(self, self.made))
            assert code == 0, said


@dataclass(frozen=True)
class Case:
    """A command that is killed. `name` is its own; its result is at `result` in a directory.

    `prepare` puts there what an earlier command has made. `false` yields what was falsely accepted
    after a kill, `left` what is there after the second run and should not be.
    """

    name: str
    result: str
    command: Callable[[Shop, Path], list[str]]
    false: Callable[[Shop, Path], Iterator[str]]
    left: Callable[[Shop, Path], Iterator[str]]
    needs: tuple[str, ...] = ()

    def prepare(self, shop: Shop, place: Path) -> None:
        """Copy what the command begins with, unless it is there."""
        for name in self.needs:
            if not (place / name).exists():
                shutil.copytree(shop.made / name, place / name)


def quietly(args: list[str]) -> tuple[int, str]:
    """The exit code of a command that nobody kills, and what it said."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = run(args)
    return code, out.getvalue()


def same_files(one: Path, other: Path) -> bool:
    """Whether two directories have the same files with the same bytes; manifests record commands
    and times, and are compared by what they list."""
    names = [sorted(path.name for path in place.iterdir()) for place in (one, other)]
    hashed = [name for name in names[0] if name != file_names.MANIFEST]
    return names[0] == names[1] and all(
        hashes.sha256_file(one / name) == hashes.sha256_file(other / name) for name in hashed
    )


# ---- export


def export_args(role: str) -> Callable[[Shop, Path], list[str]]:
    """The export of the base or of the draft."""

    def args(shop: Shop, place: Path) -> list[str]:
        out = str(place / f"onnx_{role}")
        if role == "base":
            return ["export", str(DEMO / "base"), out, "--eagle-base"]
        return ["export", str(DEMO / "draft"), out, "--base-model-dir", str(DEMO / "base")]

    return args


def false_export(role: str) -> Callable[[Shop, Path], Iterator[str]]:
    """Whatever lies below OUT may be built only if it is whole."""

    def false(shop: Shop, place: Path) -> Iterator[str]:
        out = place / f"onnx_{role}"
        for found in sorted(out.iterdir()) if out.is_dir() else ():
            whole = same_files(found, shop.made / f"onnx_{role}" / "llm")
            if quietly(["inspect", "--verify", str(found)])[0] != REFUSED and not whole:
                yield f"inspect accepts {found}"
            engines = place / "tried"
            code, said = quietly(build_command(found, engines))
            if code == 0 and not whole:
                yield f"build accepts {found}"
            if code not in (0, REFUSED):
                yield f"build of {found} ends with {code}: {said}"
            shutil.rmtree(engines, ignore_errors=True)

    return false


def left_of_export(role: str) -> Callable[[Shop, Path], Iterator[str]]:
    """OUT holds the component, as a run makes it that nobody killed, and nothing else."""

    def left(shop: Shop, place: Path) -> Iterator[str]:
        names = [path.name for path in (place / f"onnx_{role}").iterdir()]
        if names != ["llm"]:
            yield f"OUT has {names}"
        if not same_files(place / f"onnx_{role}" / "llm", shop.made / f"onnx_{role}" / "llm"):
            yield "the export is not as usual"

    return left


# ---- build


def build_command(onnx: Path, engines: Path) -> list[str]:
    """The build of an export, without the measuring: most kills would fall into it."""
    files = ["--onnx-dir", str(onnx), "--engine-dir", str(engines)]
    return ["build", *files, *LIMITS, "--no-measure-costs"]


def build_args(role: str) -> Callable[[Shop, Path], list[str]]:
    """The build of the base or of the draft."""
    return lambda shop, place: build_command(shop.made / f"onnx_{role}" / "llm", place / "engines")


def false_engines(shop: Shop, place: Path) -> Iterator[str]:
    """An engine that is accepted answers as one that was built undisturbed."""
    engines = place / "engines"
    if not engines.is_dir() or not any(engines.iterdir()):
        return
    listed = EngineManifest.read(engines).engines
    faults = [
        str(fault)
        for entry in listed.values()
        for fault in hashes.faults(engines, entry.files_dict())
    ]
    if faults and quietly(["inspect", "--verify", str(engines)])[0] == 0:
        yield f"inspect accepts {engines}: {faults[0]}"
    for flags in ([], ["--spec-decode"]):
        out = place / "tried.json"
        code, said = quietly([*infer_command(shop, engines, out), *flags])
        if code == 0 and answers(out) != answers(shop.made / "output.json"):
            yield f"infer answers otherwise with {engines}"
        if code not in (0, REFUSED):
            yield f"infer with {engines} ends with {code}: {said}"
        out.unlink(missing_ok=True)


def left_of_build(shop: Shop, place: Path) -> Iterator[str]:
    """The directory has the files of its engines and its manifest, and nothing else."""
    engines = place / "engines"
    names = {path.name for path in engines.iterdir()}
    listed = EngineManifest.read(engines).files | {file_names.MANIFEST}
    if names != listed:
        yield f"{engines} has {sorted(names ^ listed)}"
    code, said = quietly(["inspect", "--verify", str(engines)])
    if code != 0:
        yield f"inspect refuses {engines}: {said}"
    yield from false_engines(shop, place)


# ---- infer


def infer_command(shop: Shop, engines: Path, out: Path) -> list[str]:
    """Plain decoding of the requests."""
    source = str(shop.made / "input.json")
    return [
        "infer",
        "--engine-dir",
        str(engines),
        "--input-file",
        source,
        "--output-file",
        str(out),
    ]


def infer_args(shop: Shop, place: Path) -> list[str]:
    """The same with drafts."""
    return [*infer_command(shop, shop.made / "engines", place / "output.json"), "--spec-decode"]


def answers(path: Path) -> list[list[int]]:
    """The tokens of each response of an output.json."""
    return [response["output_ids"] for response in json.loads(path.read_text())["responses"]]


def false_output(shop: Shop, place: Path) -> Iterator[str]:
    """The output is whole or not there; each line of a journal is a response."""
    expected = answers(shop.made / "output.json")
    if (place / "output.json").exists() and answers(place / "output.json") != expected:
        yield "output.json has other answers"
    for journal in place.glob("output.json.partial*"):
        for line in journal.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue  # the last one, of which infer takes no notice
            response = json.loads(line)
            if response["output_ids"] != expected[response["request_idx"]]:
                yield f"{journal} has another answer"


def left_of_infer(shop: Shop, place: Path) -> Iterator[str]:
    """The output, and the journal of the killed run where it had finished something."""
    for path in place.iterdir():
        journal = path.name.startswith("output.json.partial") and path.stat().st_size
        if path.name != "output.json" and not journal:
            yield f"infer leaves {path.name}"
    yield from false_output(shop, place)


CASES = (
    Case(
        "export base",
        "onnx_base",
        export_args("base"),
        false_export("base"),
        left_of_export("base"),
    ),
    Case(
        "export draft",
        "onnx_draft",
        export_args("draft"),
        false_export("draft"),
        left_of_export("draft"),
    ),
    Case("build base", "engines", build_args("base"), false_engines, left_of_build),
    Case("build draft", "engines", build_args("draft"), false_engines, left_of_build),
    Case("build base again", "engines", build_args("base"), false_engines, left_of_build, ("engines",)),
    Case("build draft again", "engines", build_args("draft"), false_engines, left_of_build, ("engines",)),
    Case("infer", "output.json", infer_args, false_output, left_of_infer),
)  # fmt: skip


# ---- killing


@dataclass
class Killed:
    """A command that was killed: how long it wrote before, and whether it had ended by itself."""

    wrote_s: float | None  # None: nothing was there yet
    ended: bool


def first_write(shop: Shop) -> bool:
    """Whether the command has written something."""
    return any(
        path.name.startswith(".") or path.name == "output.json.partial.jsonl"
        for path in shop.work.rglob("*")
    )


def killed(shop: Shop, args: list[str], delay_s: float, *, since_write: bool) -> Killed:
    """Run a command and kill it after a delay, from its start or from its first write."""
    command = [sys.executable, "-m", "edgespec.cli.main", *args]
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    began, wrote = time.monotonic(), None
    while child.poll() is None:
        now = time.monotonic()
        if wrote is None and first_write(shop):
            wrote = now
        start = wrote if since_write else began
        if start is not None and now - start >= delay_s:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            break
        time.sleep(POLL_S)
    ended = child.returncode != -signal.SIGKILL
    return Killed(None if wrote is None else time.monotonic() - wrote, ended)


def fresh(shop: Shop, case: Case) -> None:
    """An empty place with what the command begins with."""
    shutil.rmtree(shop.work, ignore_errors=True)
    shop.work.mkdir()
    case.prepare(shop, shop.work)


def durations(shop: Shop, case: Case) -> tuple[float, float]:
    """How long a command takes in all, and from its first write to its end."""
    fresh(shop, case)
    began = time.monotonic()
    found = killed(shop, case.command(shop, shop.work), 1e9, since_write=False)
    return time.monotonic() - began, found.wrote_s or 0.0


def kill_once(
    shop: Shop, case: Case, rng: random.Random, times: tuple[float, float]
) -> Counter[str]:
    """Kill a command at a random moment, look at what it leaves, and run it again."""
    fresh(shop, case)
    since_write = rng.random() >= EARLY
    delay_s = rng.uniform(0, times[1] if since_write else times[0])
    args, found = case.command(shop, shop.work), Counter[str]()
    result = killed(shop, args, delay_s, since_write=since_write)
    found["ended by themselves" if result.ended else "killed"] += 1
    if not result.ended:
        found["killed while writing" if result.wrote_s is not None else "killed before"] += 1
    for fault in case.false(shop, shop.work):
        complain(case, delay_s, fault)
        found["falsely accepted"] += 1
    code, said = quietly(args)
    if code != 0:
        complain(case, delay_s, f"the second run ends with {code}: {said}")
        found["second runs that failed"] += 1
        return found
    for fault in case.left(shop, shop.work):
        complain(case, delay_s, fault)
        found["left behind"] += 1
    return found


def complain(case: Case, delay_s: float, fault: str) -> None:
    """Print a fault on stderr."""
    print(f"{case.name}, killed after {delay_s:.3f} s: {fault}", file=sys.stderr)


FAULTS = ("falsely accepted", "second runs that failed", "left behind")


def kill_all(shop: Shop, kills: int, seed: int) -> dict[str, dict[str, int]]:
    """Kill the commands in turn until `kills` were killed. Returns what was counted, by command."""
    rng = random.Random(seed)
    times = {case.name: durations(shop, case) for case in CASES}
    counts: dict[str, Counter[str]] = {case.name: Counter() for case in CASES}
    while sum(count["killed"] for count in counts.values()) < kills:
        for case in CASES:
            counts[case.name] += kill_once(shop, case, rng, times[case.name])
        done = sum(count["killed"] for count in counts.values())
        print(f"{done} of {kills} kills", file=sys.stderr)
    return {name: dict(count) for name, count in counts.items()}


def main() -> int:
    """Prints what was counted. Returns 1 where there were faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=120, help="how many at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgespec-kills-") as root:
        shop = Shop(Path(root))
        shop.make()
        counts = kill_all(shop, options.kills, options.seed)
    total: Counter[str] = Counter()
    for count in counts.values():
        total.update(count)
    shown = {"seed": options.seed, "total": dict(total) | {f: total[f] for f in FAULTS}, **counts}
    print(json.dumps(shown, indent=2))
    return int(any(total[fault] for fault in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
