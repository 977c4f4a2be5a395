"""The main job on the demo pair: export, build, infer. What `make demo` runs.

    python scripts/demo.py                    # into ./demo-out, made anew each time
    python scripts/demo.py --out /tmp/demo

Each step is the command that a user would type; it is shown before it runs. Then the answers are streamed through the
Python API, and `infer --check-lossless` compares every one of them with plain decoding.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from edgespec.cli.main import run

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "demo"
CHAIN = ["--spec-draft-top-k", "1", "--spec-draft-step", "4", "--spec-verify-size", "5"]
console = Console(highlight=False)


def step(*args: str | Path) -> None:
    """Show a command and run it; the demo ends with its exit code if it fails."""
    words = [str(arg) for arg in args]
    shown = [str(Path(word).relative_to(Path.cwd())) if word.startswith(str(Path.cwd())) else word for word in words]
    console.print(f"\n$ edgespec {shlex.join(shown)}", style="bold", markup=False, soft_wrap=True)
    code = run(words)
    if code:
        sys.exit(code)


def stream(engine_dir: Path, requests_file: Path) -> None:
    """Print the answers as they come; tokens that the draft foresaw are green on a terminal."""
    import edgespec
    from edgespec.prompts import read_requests
    from edgespec.runtime.jobs import Chunk

    with edgespec.load(engine_dir) as engine:
        plan = engine.plan(1, 4, 5)
        for request in read_requests(requests_file).requests:
            console.print(f"\n{request.messages[-1].content}", style="dim", markup=False)
            for item in engine.stream(engine.encode(request.messages), request.sampling, plan):
                if isinstance(item, Chunk):
                    console.print(Text(item.text, "green" if item.accepted else ""), end="")
            console.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="directory for graphs, engines and output")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    step("export", RECIPE / "base", out / "onnx" / "base", "--eagle-base")
    step("export", RECIPE / "draft", out / "onnx" / "draft", "--base-model-dir", RECIPE / "base")
    for role in ("base", "draft"):
        step("build", "--onnx-dir", out / "onnx" / role / "llm", "--engine-dir", out / "engines", f"--spec-{role}")
    stream(out / "engines", RECIPE / "input.json")
    files = ("--input-file", RECIPE / "input.json", "--output-file", out / "output.json")
    step("infer", "--engine-dir", out / "engines", *files, "--spec-decode", *CHAIN, "--check-lossless")


if __name__ == "__main__":
    main()
