"""OpenVINO GenAI: int4 in symmetric blocks of 128, plain, with EAGLE-3 and with DFlash.

    python openvino_peer.py MODEL [--draft DRAFT --chain 3]

Runs in its own environment, which also has what converts a checkpoint (optimum-intel and NNCF).
Every matrix is int4, the embedding and lm_head included, as edgespec's are. It steps the continuous
batching pipeline, on which OpenVINO GenAI runs LLMs on x86 by itself; its cache is INT8. No option
of it accepts drafts at a given rate: a random draft is never right, so what is measured with a
draft is a step, in which as many tokens are drafted and verified as if they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from environment import Place, Prepared, run
from measuring import Event, Stream, arguments, measure, own_birth, report

REQUIREMENTS = (
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "openvino==2026.4.1",
    "optimum-intel==2.2.0",
    "optimum==2.3.0",
    "nncf==3.4.0",
    "transformers==5.5.4",
    "torch==2.13.0",
    # What optimum-intel's file of drafts imports, whichever draft it is
    "diffusers==0.37.1",
    "einops==0.8.2",
)
WEIGHTS = (
    "--weight-format",
    "int4",
    "--group-size",
    "128",
    "--sym",
    "--ratio",
    "1",
    "--all-layers",
)
CACHE_GB, BATCHED_TOKENS = 1, 2304
CHECKPOINTS = {"eagle3": "draft", "dflash": "dflash"}


def prepare(place: Place, draft: str | None = None, chain: int = 0) -> Prepared:
    """Converts base and draft once; `draft` is eagle3 or dflash."""
    python = place.python("openvino-genai", *REQUIREMENTS)
    model = converted(python, place.models / "base", place.models / "openvino-128")
    command = [str(python), str(Path(__file__).resolve()), str(model)]
    if draft is None:
        return Prepared(command, [model], (model / "openvino_model.bin",))
    checkpoint, out = place.models / CHECKPOINTS[draft], place.models / f"openvino-128-{draft}"
    # The classes of drafts count as remote code
    converted(python, checkpoint, out, "--trust-remote-code")
    return Prepared([*command, "--draft", str(out), "--chain", str(chain)], [model, out])


def converted(python: Path, checkpoint: Path, out: Path, *flags: str) -> Path:
    """Returns the folder of a converted checkpoint; converts it once."""
    if not (out / "openvino_model.bin").is_file():
        cli = python.with_name("optimum-cli")
        task = ["--task", "text-generation-with-past"]
        command = [cli, "export", "openvino", "-m", checkpoint, *task, *WEIGHTS, *flags, out]
        run(command, HF_HUB_OFFLINE="1")
    return out


@contextmanager
def opened(directory: Path, draft: Path | None, chain: int, threads: int) -> Iterator[Stream]:
    """Opens the model, and its draft."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    schedule = genai.SchedulerConfig()
    schedule.cache_size, schedule.max_num_batched_tokens = CACHE_GB, BATCHED_TOKENS
    schedule.enable_prefix_caching = False
    kind: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    drafts = {} if draft is None else {"draft_model": genai.draft_model(str(draft), "CPU", **kind)}
    pipeline = genai.ContinuousBatchingPipeline(str(directory), schedule, "CPU", kind | drafts)
    numbers = count()

    def stream(prompt: list[int], tokens: int) -> Iterator[Event]:
        options = genai.GenerationConfig()
        # The last steps of an answer draft less, which is not what is measured
        options.max_new_tokens, made = tokens + (0 if draft is None else chain), 0
        options.do_sample, options.ignore_eos = False, True
        if draft is not None:
            options.num_assistant_tokens = chain
        ids = openvino.Tensor(np.array([prompt], np.int64))
        handle = pipeline.add_request(next(numbers), ids, options)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            came = 0
            while handle.can_read():
                came += sum(len(one.generated_ids) for one in handle.read().values())
            made += came
            if came and made - came < tokens:
                yield came, 1

    yield stream


def main() -> None:
    """Prints one measurement."""
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--chain", type=int, default=3)
    args = parser.parse_args()
    birth = own_birth()
    from importlib.metadata import version

    import openvino  # noqa: F401 - before the clock of the load starts
    import openvino_genai  # noqa: F401

    started = partial(opened, args.model, args.draft, args.chain, args.threads)
    found = measure(started, args.contexts, args.tokens, birth)
    names = ("openvino-genai", "openvino", "nncf", "optimum-intel")
    report(found, **{name: version(name) for name in names})


if __name__ == "__main__":
    main()
