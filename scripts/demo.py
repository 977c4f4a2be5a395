"""The main job on a demo pair: export, build, infer. What `make demo` runs.

    python scripts/demo.py                    # into ./demo-out, emptied each time
    python scripts/demo.py --method dflash    # the same base with another draft
    python scripts/demo.py --method suffix    # without a draft: from the text itself; ngram likewise
    python scripts/demo.py --method mtp       # a Qwen3.5 hybrid, trained first where build/demo-mtp/model is not there
    python scripts/demo.py --method vlm       # a vision-language pair that is asked about drawn pictures, trained likewise
    python scripts/demo.py --method eagle1    # a draft that is trained likewise; medusa, jetspec, dspark, draft_model

The base is float32 and its draft int8: a draft's rounding changes how much is accepted, not the
answer. Each step is a command of the command line and is printed before it runs. Then the Python API
streams the responses, and `infer --check-lossless` compares each of them with plain decoding. At last
each method whose checkpoint is here is measured beside plain decoding; all draft as far as that pays.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_base import is_for
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgespec.checkpoint.files import open_checkpoint
from edgespec.cli.main import run
from edgespec.errors import EdgeSpecError

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "demo"
HYBRID = ROOT / "build" / "demo-mtp" / "model"
DRAFT_MODEL = ROOT / "build" / "demo-draft-model"
CHATS = ROOT / "build" / "demo-chats.jsonl"  # answers of the base, which drafts learn
EAGLE1 = ROOT / "build" / "demo-eagle1"
MEDUSA = ROOT / "build" / "demo-medusa"
JETSPEC = ROOT / "build" / "demo-jetspec"
DSPARK = ROOT / "build" / "demo-dspark"
VLM = ROOT / "build" / "demo-vlm"
BY_RECIPE = "half an hour"
# How methods are compared: each prompt of the demo three times, plain and drafted in turn
MEASURED = ("--input-file", str(RECIPE / "input.json"), "--repeats", "3", "--output-tokens", "96")
DEFAULT_OUT, MARK = "demo-out", ".edgespec-demo"
INTERRUPTED = 130
COMPARED = ("eagle3", "dflash", "mtp")  # the last one where it was trained before
console = Console(highlight=False)


@dataclass(frozen=True)
class Method:
    """The export of a method's pair, or of the base alone where `drafter` needs no draft."""

    export: Callable[[Path], tuple[Path, ...]]  # directory for exports -> those of base and draft
    drafter: str | None = None

    @property
    def flags(self) -> list[str]:
        """What says how to draft, for `infer`."""
        return ["--spec-decode"] if self.drafter is None else ["--drafter", self.drafter]


def export_base(out: Path) -> tuple[Path, ...]:
    """Exports the base plainly. Returns its directory."""
    step("export", RECIPE / "base", out)
    return (out / "llm",)


def export_eagle1(out: Path) -> tuple[Path, ...]:
    """Exports the EAGLE-1 pair. Returns the directories of base and draft."""
    base, draft = RECIPE / "base", the_eagle1_draft()
    step("export", base, out / "base", "--eagle1-base")
    step("export", draft, out / "draft", "--base-model-dir", base)
    return out / "base" / "llm", out / "draft" / "llm"


def export_medusa(out: Path) -> tuple[Path, ...]:
    """Exports the base and its Medusa heads. Returns the directories of both."""
    base, heads = RECIPE / "base", the_medusa_heads()
    step("export", base, out, "--medusa-base")
    step("export", heads, out, "--base-model-dir", base)
    return out / "llm", out / "medusa_draft"


def export_eagle3(out: Path) -> tuple[Path, ...]:
    """Exports the EAGLE-3 pair. Returns the directories of base and draft."""
    step("export", RECIPE / "base", out / "base", "--eagle-base")
    step("export", RECIPE / "draft", out / "draft", "--base-model-dir", RECIPE / "base")
    return out / "base" / "llm", out / "draft" / "llm"


def export_mtp(out: Path) -> tuple[Path, ...]:
    """Exports the hybrid with its MTP head. Returns the directories of base and draft."""
    step("export", the_hybrid(), out, "--mtp")
    return out / "llm", out / "mtp_draft"


def export_dflash(out: Path) -> tuple[Path, ...]:
    """Exports the DFlash pair. Returns the directories of base and draft."""
    return export_block("dflash", RECIPE / "dflash_draft", out)


def export_jetspec(out: Path) -> tuple[Path, ...]:
    """Exports the JetSpec pair. Returns the directories of base and draft."""
    return export_block("jetspec", the_jetspec_draft(), out)


def export_dspark(out: Path) -> tuple[Path, ...]:
    """Exports the DSpark pair. Returns the directories of base and draft."""
    return export_block("dspark", the_dspark_draft(), out)


def export_block(method: str, draft: Path, out: Path) -> tuple[Path, ...]:
    """Exports the base and a block draft. Returns the directories of both."""
    base, directory = RECIPE / "base", (f"--{method}-draft-dir", draft)
    step("export", base, out / "base_export", f"--{method}-base", *directory)
    step("export", base, out / "draft_export", f"--{method}-draft", *directory)
    return out / "base_export" / "llm", out / "draft_export" / f"{method}_draft"


def export_draft_model(out: Path) -> tuple[Path, ...]:
    """Exports the base plainly, and the draft model. Returns the directories of both."""
    base = RECIPE / "base"
    step("export", base, out)
    step("export", the_draft_model(), out, "--draft-model", "--base-model-dir", base)
    return out / "llm", out / "draft_model"


METHODS = {
    "eagle3": Method(export_eagle3),
    "eagle1": Method(export_eagle1),
    "medusa": Method(export_medusa),
    "mtp": Method(export_mtp),
    "dflash": Method(export_dflash),
    "jetspec": Method(export_jetspec),
    "dspark": Method(export_dspark),
    "draft_model": Method(export_draft_model),
    "suffix": Method(export_base, drafter="suffix"),
    "ngram": Method(export_base, drafter="ngram"),
}


def the_hybrid() -> Path:
    """Returns the checkpoint with the MTP head, and trains it first if it is missing."""
    base, chats = HYBRID.parent / "base", HYBRID.parent / "chats.jsonl"
    lines: list[tuple[str | Path, ...]] = []
    if not is_whole(base, "model.norm.weight"):
        lines.append(("scripts/train_demo_mtp.py", "--out", base))
    if lines or not chats.exists():
        asked = ("--library", "--answers", "512", "--tokens", "96")
        lines.append(("scripts/demo_answers.py", "--base", base, *asked, "--out", chats))
    recipe = "recipes/training/demo_mtp.yaml"
    lines.append(("-m", "edgespec", "train", recipe, "--output-dir", HYBRID))
    return made_by(lines, HYBRID, "mtp", "mtp.fc.weight", "ten minutes", for_base=False)


def the_eagle1_draft() -> Path:
    """Returns the EAGLE-1 draft, and trains it first if it is missing."""
    return trained_by_recipe(EAGLE1, "eagle1", "fc.weight")


def the_medusa_heads() -> Path:
    """Returns the Medusa heads, and trains them first if they are missing."""
    return trained_by_recipe(MEDUSA, "medusa", "0.1.weight")


def the_jetspec_draft() -> Path:
    """Returns the JetSpec draft, and trains it first if it is missing."""
    return trained_by_recipe(JETSPEC, "jetspec", "norm.weight", BY_RECIPE)


def the_dspark_draft() -> Path:
    """Returns the DSpark draft, and trains it first if it is missing."""
    return trained_by_recipe(DSPARK, "dspark", "confidence_head.proj.weight", BY_RECIPE)


def the_draft_model() -> Path:
    """Returns the draft model, and trains it first if it is missing."""
    name, tensor = "train_demo_draft_model.py", "model.norm.weight"
    return trained(DRAFT_MODEL, name, "draft_model", tensor, "ten minutes")


def the_vlm_pair() -> Path:
    """Returns the directory of the vision-language pair, and trains it first if it is missing."""
    draft, lines = VLM / "draft", list[tuple[str | Path, ...]]()
    if not is_whole(VLM / "base", "model.norm.weight"):
        lines.append(("scripts/train_demo_vlm.py", "--out", VLM))
    recipe = "recipes/training/demo_vlm.yaml"
    lines.append(("-m", "edgespec", "train", recipe, "--output-dir", draft))
    return made_by(lines, draft, "vlm", "norm.weight", "ten minutes", for_base=False).parent


def trained(
    path: Path, script: str, method: str, tensor: str, time: str, *, for_base: bool = True
) -> Path:
    """Returns the checkpoint `path`, and lets a script train it first if that must be."""
    line = (f"scripts/{script}", "--out", path, "--prompts", "0")
    return made_by([line], path, method, tensor, time, for_base=for_base)


def trained_by_recipe(path: Path, method: str, tensor: str, time: str = "half an hour") -> Path:
    """Returns the draft `path`, and lets `edgespec train` make it first if that must be, of answers
    of the base that are kept for other drafts."""
    recipe = f"recipes/training/demo_{method}.yaml"
    lines: list[tuple[str | Path, ...]] = [
        ("-m", "edgespec", "train", recipe, "--output-dir", path)
    ]
    base = RECIPE / "base" / "model.safetensors"
    if not CHATS.exists() or CHATS.stat().st_mtime < base.stat().st_mtime:
        lines = [("scripts/demo_answers.py", "--out", CHATS), *lines]
    return made_by(lines, path, method, tensor, time)


def made_by(
    lines: Sequence[tuple[str | Path, ...]],
    path: Path,
    method: str,
    tensor: str,
    time: str,
    *,
    for_base: bool = True,
) -> Path:
    """Returns the checkpoint `path`, and lets Python run the lines first if it is missing, or if it
    was trained `for_base` and that was another one. `time` is what that takes on two cores, and is
    said before."""
    why = f"{shown(path)} is not there and"
    if is_whole(path, tensor):
        if not for_base or is_for(path):
            return path
        why = f"{shown(path)} was trained for another base than {shown(RECIPE / 'base')}: it"
    if importlib.util.find_spec("transformers") is None:
        sys.exit(
            "The model of this demo is trained first, with torch and transformers. Run: make demo"
            f" METHOD={method}"
        )
    console.print(
        f"\n{why} is trained first: about {time} on two idle cores, once. Ctrl-C ends it.",
        markup=False,
    )
    shutil.rmtree(path, ignore_errors=True)
    for line in lines:
        words = [str(w.relative_to(ROOT)) if isinstance(w, Path) else w for w in line]
        command = f"$ python {shlex.join(words)}"
        console.print(command, style="bold", markup=False, soft_wrap=True)
        code = subprocess.run([sys.executable, *words], check=False, cwd=ROOT).returncode
        if code:
            sys.exit(code)
    return path


def is_whole(path: Path, tensor: str = "mtp.fc.weight") -> bool:
    """Returns whether a trained checkpoint is complete, with one of its last tensors."""
    try:
        return path.is_dir() and tensor in open_checkpoint(path).tensors
    except EdgeSpecError as error:
        console.print(f"{path} is trained again: {error}", markup=False)
        return False


def make_anew(out: Path) -> None:
    """Empties the output directory of an earlier demo, which a marker file identifies.

    Exits with a message for any other directory that is not empty: nothing else is removed.
    """
    inputs = (HYBRID.parent, DRAFT_MODEL, EAGLE1, MEDUSA, JETSPEC, DSPARK, VLM, RECIPE)
    if any(place.is_relative_to(out) for place in (*inputs, ROOT)) or any(
        out.is_relative_to(place) for place in inputs
    ):
        sys.exit(f"{out} contains input of the demo. Give --out another directory.")
    if out.exists() and not out.is_dir():
        sys.exit(f"{out} is a file. Give --out a directory.")
    there = [*out.iterdir()] if out.is_dir() else []
    if there and not (out / MARK).is_file() and out.name != DEFAULT_OUT:
        sys.exit(
            f"{out} is not empty, and no demo made it. Give --out another directory, or empty this"
            " one."
        )
    for path in there:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def step(*args: str | Path) -> None:
    """Prints a command and runs it. Exits with its exit code if it fails."""
    words = [str(arg) for arg in args]
    line = shlex.join(map(shown, words))
    console.print(f"\n$ edgespec {line}", style="bold", markup=False, soft_wrap=True)
    code = run(words)
    if code:
        sys.exit(code)


def shown(word: str | Path) -> str:
    """Returns a word of a command; a path below this directory without the way to it."""
    path, here = Path(word), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(word)


def stream(engine_dir: Path, requests_file: Path, method: Method) -> None:
    """Prints the responses as they are generated; accepted draft tokens are green on a terminal."""
    import edgespec
    from edgespec.prompts import read_requests

    with edgespec.load(engine_dir, drafter=method.drafter) as engine:
        for request in read_requests(requests_file).requests:
            console.print(f"\n{request.messages[-1].content}", style="dim", markup=False)
            for chunk in engine.stream(request.messages, request.sampling):
                console.print(Text(chunk.text, "green" if chunk.accepted else ""), end="")
            console.print()


def make_engines(method: Method, out: Path) -> Path:
    """Exports and builds a method's pair below `out`. Returns the directory of the engines."""
    exported = method.export(out / "onnx")
    for role, onnx_dir in zip(("base", "draft"), exported, strict=False):
        spec = [f"--spec-{role}"] if len(exported) > 1 else []
        spec += ["--weights", "int8"] if role == "draft" else []
        step("build", "--onnx-dir", onnx_dir, "--engine-dir", out / "engines", *spec)
    return out / "engines"


def compare(chosen: str, out: Path) -> None:
    """Prints plain decoding beside adaptive drafting on the demo's prompts, for the methods that are
    compared and whose checkpoints are here. MTP drafts for a base of its own."""
    table = Table("method", "plain, tokens/s", "adaptive, tokens/s", "adaptive over plain")
    for name in COMPARED:
        if name == "mtp" and not is_whole(HYBRID):
            table.add_row(name, "-", "-", "make demo METHOD=mtp trains it")
            continue
        engines, report = out / "engines", out / name / "bench.json"
        if name != chosen:
            with contextlib.redirect_stdout(io.StringIO()), console.capture():
                engines = make_engines(METHODS[name], out / name)
        report.parent.mkdir(exist_ok=True)
        words = ["bench", "run", engines, "--mode", "speculative", "--json", report, *MEASURED]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = run([str(word) for word in words])
        if code:
            sys.exit(f"bench of {name} failed with exit code {code}")
        plain, drafted = json.loads(report.read_text())["rows"]
        speeds = [row["figures"]["tokens_per_s"]["median"] for row in (plain, drafted)]
        ratio = drafted["speed_over_plain"]
        spread = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        table.add_row(name, *(f"{speed:.0f}" for speed in speeds), spread)
    console.print("\nEach method beside plain decoding, in turn, by edgespec bench:", markup=False)
    console.print(table)


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=(*METHODS, "vlm"), default="eagle3")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(DEFAULT_OUT),
        help="directory for graphs, engines and output",
    )
    args = parser.parse_args()
    out = args.out.resolve()
    make_anew(out)
    if args.method == "vlm":
        import demo_vlm  # draws pictures, with a library that no other demo needs

        invite(demo_vlm.run(the_vlm_pair(), out, step), [])
        return
    method = METHODS[args.method]
    make_engines(method, out)
    stream(out / "engines", RECIPE / "input.json", method)
    files = ("--input-file", RECIPE / "input.json", "--output-file", out / "output.json")
    checked = (*method.flags, "--check-lossless")
    step("infer", "--engine-dir", out / "engines", *files, *checked)
    if method.drafter is None:
        compare(args.method, out)
    invite(out / "engines", [] if method.drafter is None else ["--drafter", method.drafter])


def invite(engines: Path, flags: list[str]) -> None:
    """Prints how to talk with the engines."""
    chat = shlex.join(["edgespec", "chat", "--engine-dir", shown(engines), *flags])
    activate = "" if shutil.which("edgespec") else "source .venv/bin/activate && "
    console.print(f"\nNow talk with it: {activate}{chat}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
