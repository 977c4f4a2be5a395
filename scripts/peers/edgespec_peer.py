"""edgespec itself: int4 engines, plain and with EAGLE-3.

    python edgespec_peer.py ENGINES [--spec-rate 0.7]

Runs where edgespec is. With --spec-rate drafts are a chain of 3: the draft model runs, and each of
its tokens is then right with that probability (benchmark.Oracle). Threads are as many as the
process has cores to run on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from environment import Place, Prepared, run
from measuring import Event, Stream, arguments, measure, own_birth, report

if TYPE_CHECKING:
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.tree import DraftPlan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark.py

CAPACITY = 2304
CHAIN = (1, 3, 4)  # top_k, steps, verify_size


def prepare(place: Place, block: int, cache: str, rate: float | None = None) -> Prepared:
    """Exports and builds a pair once."""
    room = place.models / "edgespec"
    engines = room / f"int4-{block}-{cache}"
    cli = [sys.executable, "-m", "edgespec.cli.main"]
    base = str(place.models / "base")
    for name, flag in (("base", ["--eagle-base"]), ("draft", ["--base-model-dir", base])):
        onnx = room / name / "llm"
        if not (room / name).is_dir():
            run([*cli, "export", str(place.models / name), str(room / name), *flag])
        if not (engines / f"spec_{name}.onnx").is_file():
            sizes = ["--max-input-len", "2048", "--max-kv-cache-capacity", str(CAPACITY)]
            kind = ["--weights", "int4", "--weight-block", str(block), "--kv-cache-dtype", cache]
            where = ["--onnx-dir", str(onnx), "--engine-dir", str(engines)]
            run([*cli, "build", *where, *kind, *sizes])
    command = [sys.executable, str(Path(__file__).resolve()), str(engines)]
    read = engines / "spec_base.onnx.data"
    if rate is not None:
        return Prepared([*command, "--spec-rate", str(rate)], [engines])
    return Prepared(command, [read.with_suffix(""), read], read)


def answer(engine: Engine, prompt: list[int], tokens: int, plan: DraftPlan) -> Iterator[Event]:
    """Yields how many tokens each step made."""
    from edgespec import SamplingParams

    sampling = SamplingParams(temperature=0, max_generate_length=tokens)
    for chunk in engine.stream(prompt, sampling, plan):
        if chunk.token_ids:
            yield len(chunk.token_ids), 1


@contextmanager
def plain(engines: Path) -> Iterator[Stream]:
    """Opens the base alone, to decode plainly."""
    from edgespec import PLAIN
    from edgespec.runtime.engine import Engine

    with Engine(engines, spec_decode=False, prefix_cache_bytes=0) as engine:
        yield lambda prompt, tokens: answer(engine, prompt, tokens, PLAIN)


@contextmanager
def speculative(engines: Path, rate: float) -> Iterator[Stream]:
    """Opens base and draft; a draft's token is right with probability `rate`.

    The plain answer, which says what is right, is made before the clock starts.
    """
    from benchmark import Oracle

    from edgespec import PLAIN, SamplingParams
    from edgespec.runtime.engine import Engine

    with Engine(engines, spec_decode=True, prefix_cache_bytes=0) as engine:
        drafter = engine.session.drafter

        def stream(prompt: list[int], tokens: int) -> Iterator[Event]:
            sampling = SamplingParams(temperature=0, max_generate_length=tokens)
            engine.session.drafter = drafter
            right = engine.generate(prompt, sampling, PLAIN).token_ids
            engine.session.drafter = Oracle(engine, {tuple(prompt): list(right)}, rate)
            return answer(engine, prompt, tokens, engine.plan(*CHAIN))

        yield stream


def main() -> None:
    """Prints one measurement."""
    parser = arguments(__doc__)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--spec-rate", type=float)
    args = parser.parse_args()
    birth = own_birth()
    import onnxruntime

    import edgespec
    import edgespec.runtime.engine

    rate = args.spec_rate
    opened = partial(plain, args.engines)
    if rate is not None:
        opened = partial(speculative, args.engines, rate)
    found = measure(opened, args.contexts, args.tokens, birth)
    report(found, edgespec=edgespec.__version__, onnxruntime=onnxruntime.__version__)


if __name__ == "__main__":
    main()
