"""A toy pair at hand, and `infer` on it: in this process, in one of its own, and in one to which
something happens.

Knows how commands are called and what they leave. Knows nothing of what they should say.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.cli.main import run
from tests import toys
from tests.forked import COMMAND, Forked

REFUSING = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tool here') }}{%"
    " endif %}{% endfor %}"
)
TEMPLATE = REFUSING + toys.CHAT_TEMPLATE
NO_EOS = {"0": -100, "2": -100}  # a logit_bias: toys end by chance otherwise
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "demo"
ENVIRON = os.environ | {"PYTHONPATH": str(ROOT)}

# Runs a command in which something happens at the n-th call of a function or method.
HAPPENING = """
import importlib, os, resource, signal, sys, time
place, calls, code = sys.argv[1], int(sys.argv[2]), compile(sys.argv[3], 'code', 'exec')
module, _, name = place.partition(":")
owner = importlib.import_module(module)
*classes, name = name.split(".")
for part in classes:
    owner = getattr(owner, part)
real = getattr(owner, name)
def happening(*args, **kwargs):
    global calls
    calls -= 1
    if calls == 0:
        exec(code)
    return real(*args, **kwargs)
setattr(owner, name, happening)
from edgespec.cli.main import main
main(sys.argv[4:])
"""
HALT = "print('at it', flush=True); time.sleep(60)"
ENGINE_CALL = "edgespec.backends.ort.runner:OrtRunner.run"
JOURNAL_ADD = "edgespec.prompts.output:Journal.add"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run one command line in this process, with stdin's text where it is read; nothing but an exit
    code may come out of it."""

    def call(*args: object, stdin: str | bytes | None = None) -> Outcome:
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            if stdin is not None:
                raw = stdin.encode() if isinstance(stdin, str) else stdin
                patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
            code = run([str(arg) for arg in args])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Outcome(code, out, err)

    return call


def process(*args: object, **env: str) -> Outcome:
    """The same in a process of its own."""
    with Forked(COMMAND, *args, env=ENVIRON | env) as child:
        return ended(child)


def happening(place: str, calls: int, code: str, *args: object, **env: str) -> Outcome:
    """The same, and something happens at a call of `place`."""
    with Forked(HAPPENING, place, calls, code, *args, env=ENVIRON | env) as child:
        return ended(child)


@contextmanager
def halted(place: str, calls: int, *args: object, code: str = HALT) -> Iterator[Forked]:
    """A command that has come to a call of `place`, and waits there."""
    with Forked(HAPPENING, place, calls, code, *args, env=ENVIRON) as child:
        assert child.stdout.readline() == "at it\n", child.communicate()
        yield child


def send(child: Forked, number: int, said: str = "") -> None:
    """Send a signal, and wait until stderr has a line with what it is answered with."""
    child.send_signal(number)
    while said and said not in (line := child.stderr.readline()):
        assert line, "the process ended without saying it"


def ended(child: Forked, timeout_s: float = 60) -> Outcome:
    out, err = child.communicate(timeout_s)
    assert "Traceback" not in out + err, err
    return Outcome(child.wait(), out, err)


def script(name: str, *args: str | Path, constants: dict[str, Any] | None = None) -> str:
    """Run a script as `python scripts/NAME` does, in this process: torch is imported already.
    `constants` stand in place of its own. Returns what it printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(ROOT / "scripts")
        patch.setattr(sys, "argv", [name, *map(str, args)])
        run_as = "__main__" if constants is None else "script"
        module = runpy.run_path(str(ROOT / "scripts" / name), run_name=run_as)
        if constants is not None:
            module["main"].__globals__.update(constants)
            module["main"]()
    return out.getvalue()


# ---- requests and responses


def asked(text: str, **settings: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **settings}


def infer(
    engine: Path, tmp_path: Path, *requests: dict[str, object], **settings: object
) -> list[object]:
    """The arguments of `infer` for these requests, greedy and of eight tokens unless they say
    otherwise."""
    source = tmp_path / "input.json"
    usual = {"temperature": 0.0, "max_generate_length": 8, "logit_bias": NO_EOS}
    source.write_text(json.dumps(usual | settings | {"requests": requests or [asked("one two")]}))
    return [
        "infer",
        "--engine-dir",
        engine,
        "--input-file",
        source,
        "--output-file",
        tmp_path / "output.json",
    ]


def responses(tmp_path: Path, name: str = "output.json") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((tmp_path / name).read_text(encoding="utf-8"))[
        "responses"
    ]
    return found


def check_tuning(cli: Cli, engines: Path, tmp_path: Path, *flags: object) -> dict[str, Any]:
    """`tune` on a copy of the engines: the report, in which own drafts were sampled and
    measured."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [f"one two {i}"]}) for i in range(3)))
    mine = shutil.copytree(engines, tmp_path / "engines")
    quick = ("--num-prompts", 3, "--output-tokens", 10, "--measure", 2, "--json", *flags)
    done = cli("tune", mine, "--prompts", prompts, *quick)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    own = [row for row in found["measured"] if row["own"]]
    assert own
    assert all(row["over_plain"]["median"] > 0 for row in own)
    assert all(
        0 <= rate <= 1 for rates in found["acceptance"].values() for r in rates for rate in r
    )
    return found


def check_rejection(cli: Cli, engines: Path, tmp_path: Path) -> None:
    """Rejection acceptance with a draft engine: its drafts are drawn from known probabilities, at
    temperature 0 the answer is the exact one, and above the report promises the distribution."""
    with edgespec.load(engines, acceptance="rejection") as engine:
        engine.stop_ids = frozenset()
        greedy = edgespec.SamplingParams(temperature=0, max_generate_length=12)
        plain = engine.plainly("one two", greedy)
        assert engine.generate("one two", greedy).token_ids == plain.token_ids
        sampling = edgespec.SamplingParams(temperature=1, seed=3, max_generate_length=12)
        trees = [chunk.tree for chunk in engine.stream("one two", sampling)]
        drafted = [tree for tree in trees if tree is not None and len(tree) > 1]
        assert drafted
        for tree in drafted:
            assert tree.drawn_from is not None
            for token, found in zip(tree.tokens[1:], tree.drawn_from[1:], strict=True):
                assert found is not None
                assert found.probs[found.ids.tolist().index(token)] > 0
    line = [*infer(engines, tmp_path, asked("one two")), "--spec-decode"]
    sampled = [*line, "--acceptance", "rejection", "--temperature", 1, "--seed", 3]
    done = cli(*sampled)
    assert done.code == 0, done.err
    assert "rejection: lossless in distribution" in done.out
    (answer,) = responses(tmp_path)
    acceptance = answer["metrics"]["acceptance"]
    assert acceptance == {"rule": "rejection", "lossless": "distribution"}
    refused = cli(*sampled, "--check-lossless")
    assert (refused.code, "samples at temperature 1" in refused.err) == (3, True), refused.err
    checked = cli(*line, "--acceptance", "rejection", "--temperature", 0, "--check-lossless")
    assert checked.code == 0, checked.err
    assert responses(tmp_path)[0]["lossless"]["equal"] is True


def said(found: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """What must not depend on who else was asked."""
    return [
        (r.get("output_ids"), r["output_text"], r["finish_reason"], r.get("seed")) for r in found
    ]


def kept_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A real file system of so many pages, a new one each time; skipped where one may not be
    mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def unmount() -> None:
        nonlocal mounted
        if mounted:
            subprocess.run(["umount", place], check=True)
        mounted = False

    def mount(num_pages: int) -> Path:
        nonlocal mounted
        unmount()
        if shutil.which("mount") is None:
            pytest.skip("there is no mount")
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_pages * 4096}", "none", place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
        mounted = True
        return place

    yield mount
    unmount()


INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
