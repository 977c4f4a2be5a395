"""Plant faults in copies of the code and see whether the tests find them.

`faults.toml` has the faults: a text of the package, what stands in its place, and the tests that
must notice. A text that the package no longer has once is an error: look for where the code went.

    python scripts/plant_faults.py                 # all faults
    python scripts/plant_faults.py mask position   # those whose name or file has one of these words
    python scripts/plant_faults.py --jobs 4        # four at a time, each in a copy of its own
    python scripts/plant_faults.py --list          # only look whether all can be planted

The tests of a fault end at the first that fails. Tests that do not end count as failed, and are
reported as such. First each test file is run without any fault: it must pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("faults.toml")
COPIED = ("edgespec", "tests", "scripts", "recipes", "pyproject.toml", "Makefile", "docs")
Item = TypeVar("Item")
PASSED, FAILED = 0, 1  # pytest's exit status; others mean that it could not run the tests
# The tests of a fault may take so many times as long as without it, and so many seconds in any case
LIMIT_TIMES, LIMIT_S = 3, 30
LIMIT_WITHOUT_S = 600
# What takes seconds to import, and is no part of the project: runs of tests are forks of a process
# that has done so
SLOW_IMPORTS = (
    "torch",
    "transformers.generation.logits_process",
    "scipy.stats",
    "onnxruntime",
    "onnx_ir.passes.common",
    "tokenizers",
    "safetensors.torch",
    "hypothesis",
    "pytest",
)
FORKS = multiprocessing.get_context("forkserver")
# Without it a property that fails would be shrunk for minutes, and drawn from other examples each
# time; and a busy machine would count as a fault that was caught
PROFILE = "planted_profile"
PROFILE_TEXT = """
from hypothesis import HealthCheck, Phase, settings

phases, checks = [Phase.explicit, Phase.generate], list(HealthCheck)
own = {"deadline": None, "suppress_health_check": checks}
settings.register_profile("planted", phases=phases, database=None, derandomize=True, **own)
settings.load_profile("planted")
"""


@dataclass(frozen=True)
class Fault:
    """`old`, which the file `path` has once, is replaced by `new`; `tests` are files. One that
    changes nothing that anybody can see is `equivalent`, and says why."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """Of a run of tests: by what a fault was caught, None where all of them passed."""

    caught_by: str | None
    seconds: float


# ---- the data


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """The faults of a data file, in its order. Raises TypeError for a key that is none."""
    files = tomllib.loads(path.read_text(encoding="utf-8"))["file"]
    return [
        Fault(**{"path": file["path"], "tests": file["tests"]} | fault)
        for file in files
        for fault in file["fault"]
    ]


def problems(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """Why faults cannot be planted, or their tests not be run; empty where all is well."""
    found = [f"{name}: there are {n} of it" for name, n in names(faults).items() if n > 1]
    for fault in faults:
        found += [f"{fault.name}: {what}" for what in problems_of(fault, root)]
    return found


def names(faults: Sequence[Fault]) -> Counter[str]:
    """How many faults have each name."""
    return Counter(fault.name for fault in faults)


def problems_of(fault: Fault, root: Path) -> Iterator[str]:
    """What is wrong with one fault."""
    yield from (f"there is no {test}" for test in fault.tests if not (root / test).is_file())
    if not fault.tests:
        yield "it has no tests"
    path = root / fault.path
    if not path.is_file():
        yield f"there is no {fault.path}"
        return
    text = path.read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        yield f"{fault.path} has {count} of:\n{fault.old}"
    elif fault.planted(text) == text:
        yield "it changes nothing"
    else:
        try:
            compile(fault.planted(text), fault.path, "exec")
        except SyntaxError as error:
            yield f"{fault.path} is no Python with it: {error}"


def chosen(faults: Sequence[Fault], words: Sequence[str]) -> list[Fault]:
    """The faults whose name or file has one of the words; all without words."""
    return [f for f in faults if not words or any(w in f.name or w in f.path for w in words)]


# ---- a copy of the tree


def copy_tree(target: Path) -> Path:
    """A copy of the project, to plant in."""
    for name in COPIED:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)
    (target / f"{PROFILE}.py").write_text(PROFILE_TEXT, encoding="utf-8")
    return target


@contextmanager
def planted(tree: Path, fault: Fault) -> Iterator[None]:
    """The tree has the fault inside, and not afterwards."""
    path = tree / fault.path
    before = path.read_text(encoding="utf-8")
    write(path, fault.planted(before))
    try:
        yield
    finally:
        write(path, before)


def write(path: Path, text: str) -> None:
    """Write a source, and remove what was compiled of it: a time stamp may be the same."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


# ---- runs


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    """Run test files until one test fails. Ends the program where pytest cannot run them."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("r", prefix="edgespec-tests-", suffix=".txt") as output:
        process = FORKS.Process(target=run_pytest, args=(tree, tests, output.name))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            found: str | None = f"no end within {limit_s:.0f} s"
        else:
            found = caught_by(process.exitcode, output.read(), tests)
    return Outcome(found, time.monotonic() - began)


def run_pytest(tree: Path, tests: Sequence[str], output: str) -> None:
    """What a process of its own does: its exit status is pytest's, its output goes to a file."""
    os.setsid()  # with whatever it starts, it can be killed at once
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)  # of processes that tests start
    import pytest

    options = ("-x", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", PROFILE)
    status = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(status)


def caught_by(status: int, output: str, tests: Sequence[str]) -> str | None:
    """What an exit status of pytest says: the test that failed, or a process that died."""
    if status == PASSED:
        return None
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status != FAILED or not failed:
        sys.exit(f"{', '.join(tests)} could not be run:\n{output[-3000:]}")
    return failed[0].partition(" ")[2].partition(" - ")[0]


class Plantation:
    """As many copies of the tree as there are jobs, in a directory. `say` shows a line."""

    def __init__(
        self, directory: Path, jobs: int, limit_s: float | None, say: Callable[[str], None]
    ) -> None:
        self.jobs, self.limit_s, self.say = jobs, limit_s, say
        self.free: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            self.free.put(copy_tree(directory / str(job)))
        self.usual_s: dict[str, float] = {}  # of each test file, without a fault

    @contextmanager
    def tree(self) -> Iterator[Path]:
        """A copy that nobody else uses."""
        tree = self.free.get()
        try:
            yield tree
        finally:
            self.free.put(tree)

    def run_without(self, tests: Sequence[str]) -> None:
        """Run test files as they are; ends the program where one fails."""
        for test, outcome in zip(tests, self.each(self.without, tests), strict=True):
            self.usual_s[test] = outcome.seconds
        self.say(f"{len(tests)} test files pass without a fault")

    def run_with(self, faults: Sequence[Fault]) -> list[Outcome]:
        """Plant each fault; the outcomes, in order."""
        outcomes = []
        for fault, outcome in zip(faults, self.each(self.with_fault, faults), strict=True):
            self.say(line_of(fault, outcome))
            outcomes.append(outcome)
        return outcomes

    def each(self, run: Callable[[Item], Outcome], items: Sequence[Item]) -> Iterator[Outcome]:
        """The outcomes of `run` on all items, in order, as many at a time as there are jobs."""
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                yield from pool.map(run, items)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # where one ended the program

    def without(self, test: str) -> Outcome:
        with self.tree() as tree:
            outcome = run_tests(tree, [test], self.limit_s or LIMIT_WITHOUT_S)
        if outcome.caught_by is not None:
            sys.exit(f"without any fault: {outcome.caught_by}; repair that first")
        return outcome

    def with_fault(self, fault: Fault) -> Outcome:
        usual_s = sum(self.usual_s[test] for test in fault.tests)
        limit_s = self.limit_s or max(LIMIT_S, LIMIT_TIMES * usual_s)
        with self.tree() as tree, planted(tree, fault):
            return run_tests(tree, fault.tests, limit_s)


# ---- what is said


def line_of(fault: Fault, outcome: Outcome) -> str:
    """One line on a fault, and one on what caught it."""
    word = "SURVIVED" if outcome.caught_by is None else "caught  "
    if fault.equivalent:
        word = "equal   " if outcome.caught_by is None else "NOT EQUAL"
    line = f"{word} {outcome.seconds:4.0f} s  {fault.name}"
    return line if outcome.caught_by is None else f"{line}\n{'':18}{outcome.caught_by}"


def summary(faults: Sequence[Fault], outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """The score without equivalents, and whether all is as it should be."""
    pairs = list(zip(faults, outcomes, strict=True))
    survived = [f.name for f, o in pairs if not f.equivalent and o.caught_by is None]
    unequal = [f.name for f, o in pairs if f.equivalent and o.caught_by is not None]
    real = sum(not fault.equivalent for fault in faults)
    share = f" ({100 * (real - len(survived)) / real:.1f} %)" if real else ""
    lines = [f"{real - len(survived)} of {real} faults are caught{share}"]
    if len(faults) > real:
        lines.append(f"{len(faults) - real} more change nothing")
    lines += [f"survived: {name}" for name in survived]
    lines += [f"said to change nothing, and caught: {name}" for name in unequal]
    return "\n".join(lines), not survived and not unequal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="faults whose name or file has one of these words")
    parser.add_argument("--list", action="store_true", help="only look whether all can be planted")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (1)")
    parser.add_argument(
        "--limit",
        type=float,
        help="seconds for the tests of a fault (three times the usual, at least 30)",
    )
    args = parser.parse_args()
    faults = chosen(read_faults(), args.words)
    if wrong := problems(faults):
        sys.exit(
            "cannot be planted; say in scripts/faults.toml where it went:\n" + "\n".join(wrong)
        )
    if args.list:
        print("\n".join(f"{fault.path}: {fault.name}" for fault in faults))
        return
    FORKS.set_forkserver_preload([*SLOW_IMPORTS])
    with tempfile.TemporaryDirectory(prefix="edgespec-faults-") as directory:
        plantation = Plantation(
            Path(directory), args.jobs, args.limit, lambda line: print(line, flush=True)
        )
        plantation.run_without(sorted({test for fault in faults for test in fault.tests}))
        outcomes = plantation.run_with(faults)
    text, well = summary(faults, outcomes)
    print(text)
    sys.exit(not well)


if __name__ == "__main__":
    main()
