"""Change checkpoints, exports and engines in hundreds of ways, and see that each is refused.

Makes a toy pair, exports and builds it, applies each row of `tests/tampers.py` to a copy, and runs
the real command on it in a process of its own, with a time limit and bounded memory: `export` for
checkpoints, `build` for exports, `infer` for engines. A refusal is exit code 3 (or 2) with a message
that names what was changed. Prints what is none, and the number of refusals.

    python scripts/tamper.py                  # all rows
    python scripts/tamper.py --list           # their names
    python scripts/tamper.py d2t manifest     # those whose name has one of these words
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import tampers, toys
from tests.tampers import TAMPERS, Tamper

LIMIT_S = 30.0
MEMORY_BYTES = 16 << 30  # of addresses: what allocates without end fails
REFUSED = (2, 3)
OURS = ("Traceback", "This is a bug")


@dataclass(frozen=True)
class Outcome:
    """`code` is None where the time was up."""

    code: int | None
    said: str
    seconds: float

    def refuses(self, tamper: Tamper) -> bool:
        message = self.said.lower()
        named = tamper.said.lower() in message
        return self.code in REFUSED and named and not any(o.lower() in message for o in OURS)


def run_command(args: list[str], log: Path, limit_s: float = LIMIT_S) -> Outcome:
    """One command line in a fork of this process."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            from edgespec.cli.main import run

            code = run(args)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        seconds = time.monotonic() - began
        if done:
            said = log.read_text(errors="replace")
            return Outcome(os.waitstatus_to_exitcode(status), said, seconds)
        if seconds > limit_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Outcome(None, log.read_text(errors="replace"), seconds)
        time.sleep(0.005)


def make_sound(path: Path) -> None:
    """The toy pair, its exports and its engines."""
    base = toys.make_base(path / "base", "llama", layers=8)
    draft = toys.make_draft(path / "draft", base, "eagle")
    log = path / "log"
    sizes = ["--max-input-len", "48", "--max-kv-cache-capacity", "64"]
    for args in (
        ["export", str(base), str(path / "ob"), "--eagle-base"],
        ["export", str(draft), str(path / "od"), "--base-model-dir", str(base)],
        [
            "build",
            "--onnx-dir",
            str(path / "ob/llm"),
            "--engine-dir",
            str(path / "engines"),
            *sizes,
        ],
        [
            "build",
            "--onnx-dir",
            str(path / "od/llm"),
            "--engine-dir",
            str(path / "engines"),
            *sizes,
        ],
    ):
        outcome = run_command(args, log, limit_s=120)
        assert outcome.code == 0, outcome.said
    (path / "ob/llm").rename(path / "onnx_base")
    (path / "od/llm").rename(path / "onnx_draft")
    messages = [{"role": "user", "content": "a" * 20}]
    asked: dict[str, object] = {"requests": [{"messages": messages}], "max_generate_length": 4}
    asked["apply_chat_template"] = False
    (path / "input.json").write_text(json.dumps(asked))


def command_for(where: str, directory: Path, out: Path, sound: Path) -> list[str]:
    """The command that reads such a directory."""
    if where == "base":
        return ["export", str(directory), str(out), "--eagle-base"]
    if where == "draft":
        return ["export", str(directory), str(out), "--base-model-dir", str(sound / "base")]
    if where.startswith("onnx"):
        sizes = ["--max-input-len", "48", "--max-kv-cache-capacity", "64"]
        return ["build", "--onnx-dir", str(directory), "--engine-dir", str(out), *sizes]
    files = ["--input-file", str(sound / "input.json"), "--output-file", str(out)]
    return ["infer", "--engine-dir", str(directory), *files, "--spec-decode"]


def tried(tamper: Tamper, sound: Path, work: Path) -> Outcome:
    """A tampered copy, and what the command says to it."""
    directory, out = work / tamper.where, work / "out"
    shutil.copytree(sound / tamper.where, directory)
    tampers.apply(tamper, directory)
    outcome = run_command(command_for(tamper.where, directory, out, sound), work / "log")
    if outcome.code == 0 or out.exists():
        return Outcome(outcome.code if outcome.code else 98, outcome.said, outcome.seconds)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--part", default="1/1", help="which of how many parts: 1/2")
    parser.add_argument("--all", action="store_true", help="print refusals too")
    args = parser.parse_args()
    words = [word.lower() for word in args.words]
    rows = [t for t in TAMPERS if not words or any(w in t.name.lower() for w in words)]
    part, parts = map(int, args.part.split("/"))
    rows = rows[part - 1 :: parts]
    if args.list:
        print("\n".join(row.name for row in rows))
        return 0
    import edgespec.cli.build
    import edgespec.cli.export
    import edgespec.cli.infer  # noqa: F401

    refused, slowest = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="edgespec-tamper-") as name:
        sound = Path(name) / "sound"
        sound.mkdir()
        make_sound(sound)
        for where in ("base", "draft", "onnx_base", "onnx_draft", "engines"):
            check_sound(where, sound, Path(name) / "check")
        for row in rows:
            work = Path(name) / "work"
            work.mkdir()
            outcome = tried(row, sound, work)
            shutil.rmtree(work)
            good = outcome.refuses(row)
            refused += good
            slowest = max(slowest, outcome.seconds)
            if args.all or not good:
                code = "time is up" if outcome.code is None else f"exit {outcome.code}"
                verb = "ok  " if good else "BAD "
                last = [line for line in outcome.said.strip().splitlines() if line][-3:]
                print(f"{verb}{code}, {outcome.seconds:.1f} s: {row.name} [{row.said}]", flush=True)
                print("\n".join(f"        {line[:240]}" for line in last), flush=True)
    print(f"{refused} of {len(rows)} refused by name; the slowest took {slowest:.1f} s")
    return 0 if refused == len(rows) else 1


def check_sound(where: str, sound: Path, work: Path) -> None:
    """What nobody changed is accepted: a row that any directory would fail shows nothing."""
    work.mkdir()
    command = command_for(where, sound / where, work / "out", sound)
    outcome = run_command(command, work / "log", limit_s=120)
    assert outcome.code == 0, outcome.said
    shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
