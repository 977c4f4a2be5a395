"""Hugging Face transformers: bfloat16 as the checkpoint is, greedy, its own growing cache.

    python transformers_peer.py CHECKPOINT

Runs in its own environment. Its weights have four times the bytes of int4: it is the row that most
people start from, not one of equal size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from environment import Place, Prepared
from measuring import Event, Stream, arguments, measure, own_birth, report

REQUIREMENTS = ("torch==2.13.0", "transformers==5.14.1")


def prepare(place: Place) -> Prepared:
    """Names the checkpoint; nothing is converted."""
    python = place.python("transformers", *REQUIREMENTS)
    model = place.models / "base"
    command = [str(python), str(Path(__file__).resolve()), str(model)]
    return Prepared(command, [model], (model / "model.safetensors",))


@contextmanager
def opened(checkpoint: Path, threads: int) -> Iterator[Stream]:
    """Opens the model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()

    def stream(prompt: list[int], tokens: int) -> Iterator[Event]:
        ids, past = torch.tensor([prompt]), None
        for _ in range(tokens):
            with torch.inference_mode():
                made = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            ids, past = made.logits[:, -1:].argmax(-1), made.past_key_values
            ids.tolist()  # the token is read, as a caller would
            yield 1, 1

    yield stream


def main() -> None:
    """Prints one measurement."""
    parser = arguments(__doc__)
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args()
    birth = own_birth()
    import torch
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401 - lazily imported until here

    started = partial(opened, args.checkpoint, args.threads)
    found = measure(started, args.contexts, args.tokens, birth)
    report(found, torch=str(torch.__version__), transformers=transformers.__version__)


if __name__ == "__main__":
    main()
