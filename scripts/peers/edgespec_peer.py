"""edgespec itself: int4 engines, plain, with EAGLE-3 and with DFlash; and GGUF files as they are.

    python edgespec_peer.py ENGINES [--spec-rate 0.7 --chain 3]
    python edgespec_peer.py ENGINES --rows 4 8 16

Runs where edgespec is. With --spec-rate so many tokens are drafted a step: the draft model runs, and
each of its tokens is then right with that probability (benchmark.dialled). With --rows a drafter that
is always wrong fills a step up to so many rows. Threads are as many as the process has cores to run on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from environment import Place, Prepared, run
from measuring import Event, Stream, arguments, measure, own_birth, report

if TYPE_CHECKING:
    from edgespec import DraftContext
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.trees.tree import DraftPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark.py

CAPACITY = 2304


def prepare(
    place: Place,
    block: int,
    cache: str,
    draft: str = "eagle3",
    rate: float | None = None,
    chain: int = 0,
) -> Prepared:
    """Exports and builds a pair once; `cache` is fp32, fp16 or int8, and `draft` eagle3 or dflash."""
    models, room = place.models, place.models / "edgespec"
    checkpoint, flags, graph = models / "draft", ["--eagle-base"], "llm"
    if draft == "dflash":
        checkpoint, graph = models / "dflash", "dflash_draft"
        flags = ["--dflash-base", "--dflash-draft-dir", str(checkpoint)]
    engines = room / f"int4-{block}-{cache}-{draft}"
    build(models / "base", room / f"{draft}-base", flags, "llm", engines, block, cache)
    flags = ["--base-model-dir", str(models / "base")]
    build(checkpoint, room / f"{draft}-draft", flags, graph, engines, block, cache)
    command = [sys.executable, str(Path(__file__).resolve()), str(engines)]
    entry = json.loads((engines / "manifest.json").read_text())["engines"]["base"]
    cost = entry.get("divergence")
    if rate is not None:
        flags = ["--spec-rate", str(rate), "--chain", str(chain)]
        return Prepared([*command, *flags], [engines], divergence=cost)
    weights = json.loads((engines / "base_config.json").read_text())["weights"]
    read = engines / "spec_base.onnx.data", engines / weights["largest"]["file"]  # the lm_head
    return Prepared(command, [engines / "spec_base.onnx", *read], read, cost)


def prepare_file(place: Place, file: Path) -> Prepared:
    """Exports and builds the engine of a GGUF file once, with a float16 cache as llama.cpp has."""
    cli, room = [sys.executable, "-m", "edgespec.cli.main"], place.work / "GGUF" / file.stem
    engines = room / "engine"
    if not (engines / "manifest.json").is_file():
        run([*cli, "export", str(file), str(room / "onnx")])
        sizes = ["--max-input-len", "2048", "--max-kv-cache-capacity", str(CAPACITY)]
        where = ["--onnx-dir", str(room / "onnx" / "llm"), "--engine-dir", str(engines)]
        run([*cli, "build", *where, "--kv-cache-dtype", "fp16", *sizes])
    command = [sys.executable, str(Path(__file__).resolve()), str(engines)]
    entry = json.loads((engines / "manifest.json").read_text())["engines"]["llm"]
    return Prepared(command, [file], divergence=entry.get("divergence"))


def build(
    model: Path, onnx: Path, flags: list[str], graph: str, engines: Path, block: int, cache: str
) -> None:
    """Exports a checkpoint and builds its engine, each once."""
    cli = [sys.executable, "-m", "edgespec.cli.main"]
    role = "base" if "--base-model-dir" not in flags else "draft"
    if not (engines / f"spec_{role}.onnx").is_file():
        if not onnx.is_dir():
            run([*cli, "export", str(model), str(onnx), *flags])
        sizes = ["--max-input-len", "2048", "--max-kv-cache-capacity", str(CAPACITY)]
        kind = ["--weights", "int4", "--weight-block", str(block), "--kv-cache-dtype", cache]
        where = ["--onnx-dir", str(onnx / graph), "--engine-dir", str(engines)]
        run([*cli, "build", *where, *kind, *sizes])


def answer(
    engine: Engine, prompt: list[int], tokens: int, plan: DraftPlan, further: int = 0
) -> Iterator[Event]:
    """Yields how many tokens each step made, until so many came. `further` tokens are asked for
    beyond them: the last steps of an answer draft less, which is not what is measured."""
    from edgespec import SamplingParams

    sampling, came = SamplingParams(temperature=0, max_generate_length=tokens + further), 0
    with closing(engine.stream(prompt, sampling, plan)) as chunks:
        for chunk in chunks:
            if chunk.token_ids:
                came += len(chunk.token_ids)
                yield len(chunk.token_ids), 1
            if came >= tokens:
                return


@contextmanager
def plain(engines: Path) -> Iterator[Stream]:
    """Opens the base alone, to decode plainly."""
    from edgespec import PLAIN
    from edgespec.runtime.engine import Engine

    with Engine(engines, spec_decode=False, prefix_cache_bytes=0) as engine:
        yield lambda prompt, tokens: answer(engine, prompt, tokens, PLAIN)


class Wrong:
    """Drafts the beginning of the prompt, which nobody would say."""

    def propose(self, context: DraftContext) -> list[int]:
        """As many tokens as the plan has room for."""
        return list(context.tokens[: context.max_draft_len])


@contextmanager
def wrong(engines: Path) -> Iterator[Stream]:
    """Opens the base alone; steps have so many rows, of which the first alone is right."""
    from edgespec import PLAIN
    from edgespec.runtime.engine import Engine

    options = {"time_budget_ms": None}
    with Engine(engines, drafter=Wrong(), drafter_options=options, prefix_cache_bytes=0) as engine:

        def stream(prompt: list[int], tokens: int, rows: int = 1) -> Iterator[Event]:
            if rows == 1:
                return answer(engine, prompt, tokens, PLAIN)
            return answer(engine, prompt, tokens, engine.plan(1, None, rows), rows)

        yield stream


@contextmanager
def speculative(engines: Path, rate: float, chain: int) -> Iterator[Stream]:
    """Opens base and draft; each of `chain` drafts is right with probability `rate`.

    The plain answer, which says what is right, is made before the clock starts.
    """
    from benchmark import dialled

    from edgespec import PLAIN, SamplingParams
    from edgespec.runtime.engine import Engine

    with Engine(engines, spec_decode=True, prefix_cache_bytes=0) as engine:
        drafter = engine.session.drafter

        def stream(prompt: list[int], tokens: int) -> Iterator[Event]:
            sampling = SamplingParams(temperature=0, max_generate_length=tokens + chain)
            engine.session.drafter = drafter
            right = engine.generate(prompt, sampling, PLAIN).token_ids
            engine.session.drafter = dialled(engine, {tuple(prompt): list(right)}, rate)
            return answer(engine, prompt, tokens, engine.plan(1, None, chain + 1), chain)

        yield stream


def main() -> None:
    """Prints one measurement."""
    parser = arguments(__doc__)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--spec-rate", type=float)
    parser.add_argument("--chain", type=int, default=3)
    args = parser.parse_args()
    birth = own_birth()
    import onnxruntime

    import edgespec
    import edgespec.runtime.engine

    rate = args.spec_rate
    opened = partial(wrong if args.rows else plain, args.engines)
    if rate is not None:
        opened = partial(speculative, args.engines, rate, args.chain)
    found = measure(opened, args.contexts, args.tokens, birth, rows=args.rows)
    report(found, edgespec=edgespec.__version__, onnxruntime=onnxruntime.__version__)


if __name__ == "__main__":
    main()
