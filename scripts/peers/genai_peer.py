"""onnxruntime-genai: int4 in symmetric blocks of 128, plain.

    python genai_peer.py MODEL

Runs in its own environment, which also has what its model builder imports. It drafts with a draft
model, MTP, DFlash 2 and DSpark, not with EAGLE-3, and no option of it accepts drafts at a given
rate: random drafts would never be accepted, so only plain decoding is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from environment import Place, Prepared, run
from measuring import Event, Stream, arguments, measure, own_birth, report

REQUIREMENTS = (
    "onnxruntime-genai==0.18.0",
    "onnxruntime==1.32.0",
    "torch==2.13.0",
    "transformers==5.14.1",
    "onnx==1.23.2",
    "onnx-ir==1.1.0",
)
OPTIONS = ("int4_block_size=128", "int4_is_symmetric=true", "int4_accuracy_level=4")


def prepare(place: Place) -> Prepared:
    """Converts the base once."""
    python = place.python("onnxruntime-genai", *REQUIREMENTS)
    model = place.models / "genai-128"
    if not (model / "genai_config.json").is_file():
        base = ["-i", str(place.models / "base"), "-o", str(model), "-c", str(place.work / "cache")]
        kind = ["-p", "int4", "-e", "cpu", "--extra_options", *OPTIONS]
        run([python, "-m", "onnxruntime_genai.models.builder", *base, *kind])
    return Prepared([str(python), str(Path(__file__).resolve()), str(model)], [model])


@contextmanager
def opened(directory: Path, threads: int) -> Iterator[Stream]:
    """Opens the model."""
    import onnxruntime_genai as genai

    config = genai.Config(str(directory))
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = genai.Model(config)

    def stream(prompt: list[int], tokens: int) -> Iterator[Event]:
        params = genai.GeneratorParams(model)
        length = len(prompt) + tokens
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt)
        for _ in range(tokens):
            generator.generate_next_token()
            yield 1, 1

    yield stream


def main() -> None:
    """Prints one measurement."""
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    birth = own_birth()
    from importlib.metadata import version

    import onnxruntime_genai  # noqa: F401 - before the clock of the load starts

    found = measure(partial(opened, args.model, args.threads), args.contexts, args.tokens, birth)
    names = ("onnxruntime-genai", "onnxruntime")
    report(found, **{name: version(name) for name in names})


if __name__ == "__main__":
    main()
