"""OpenVINO GenAI: int4 in symmetric blocks of 128, plain, and with an EAGLE-3 draft.

    python openvino_peer.py MODEL [--draft DRAFT]

Runs in its own environment, which also has what converts a checkpoint (optimum-intel and NNCF).
Every matrix is int4, the embedding and lm_head included, as edgespec's are. It steps the continuous
batching pipeline, on which OpenVINO GenAI runs LLMs on x86 by itself; its cache is INT8. No option
of it accepts drafts at a given rate: a random draft is never right, so what is measured with a
draft is a step, in which three tokens are drafted and four rows verified.
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
CACHE_GB, BATCHED_TOKENS, CHAIN = 1, 2304, 3


def prepare(place: Place, drafts: bool = False) -> Prepared:
    """Converts base and draft once."""
    python = place.python("openvino-genai", *REQUIREMENTS)
    model = converted(python, place.models / "base", place.models / "openvino-128")
    read = model / "openvino_model.bin"
    command = [str(python), str(Path(__file__).resolve()), str(model)]
    if not drafts:
        return Prepared(command, [model], read)
    draft = place.models / "openvino-128-eagle3"
    # Its class of EAGLE-3 drafts counts as remote code
    converted(python, place.models / "draft", draft, "--trust-remote-code")
    return Prepared([*command, "--draft", str(draft)], [model, draft])


def converted(python: Path, checkpoint: Path, out: Path, *flags: str) -> Path:
    """Returns the folder of a converted checkpoint; converts it once."""
    if not (out / "openvino_model.bin").is_file():
        cli = python.with_name("optimum-cli")
        task = ["--task", "text-generation-with-past"]
        command = [cli, "export", "openvino", "-m", checkpoint, *task, *WEIGHTS, *flags, out]
        run(command, HF_HUB_OFFLINE="1")
    return out


@contextmanager
def opened(directory: Path, draft: Path | None, threads: int) -> Iterator[Stream]:
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
        options.max_new_tokens, options.do_sample, options.ignore_eos = tokens, False, True
        if draft is not None:
            options.num_assistant_tokens = CHAIN
        ids = openvino.Tensor(np.array([prompt], np.int64))
        handle = pipeline.add_request(next(numbers), ids, options)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            came = 0
            while handle.can_read():
                came += sum(len(made.generated_ids) for made in handle.read().values())
            if came:
                yield came, 1

    yield stream


def main() -> None:
    """Prints one measurement."""
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    args = parser.parse_args()
    birth = own_birth()
    from importlib.metadata import version

    import openvino  # noqa: F401 - before the clock of the load starts
    import openvino_genai  # noqa: F401

    started = partial(opened, args.model, args.draft, args.threads)
    found = measure(started, args.contexts, args.tokens, birth)
    names = ("openvino-genai", "openvino", "nncf", "optimum-intel")
    report(found, **{name: version(name) for name in names})


if __name__ == "__main__":
    main()
