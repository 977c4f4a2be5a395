"""Measure a vision-language pair on drawn pictures: losslessness over mixed requests, acceptance with
and without pictures, and the time to the first token by the tokens of an image.

    python scripts/demo.py --method vlm --out OUT
    python scripts/measure_vlm.py --engine-dir OUT/engines

Knows the Python API and `drawn_pictures.py`. Every answer with drafts is compared with the plain one
of the same seed; a difference of two nearly equal candidates is counted apart. All figures are
medians of runs that take turns; they mean something on an idle machine alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from drawn_pictures import Scene, scenes, told

import edgespec
from edgespec.prompts import Message
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.requests.lossless_check import first_difference

BATCH = 4
SIDES = (56, 112, 168, 224)  # of pictures for the time to the first token, in pixels


def requests_of(count: int, directory: Path) -> Iterator[tuple[Message, edgespec.SamplingParams]]:
    """Questions about scenes, by turns with one picture, in words, with two pictures, and plain
    text; half of them sampled."""
    rng = np.random.default_rng(7)
    for number, scene in enumerate(scenes(count, 70)):
        question = scene.questions()[rng.integers(3)][0]
        names = [directory / f"{number}-{i}.png" for i in range(2)]
        side = int(rng.integers(3, 9)) * 28
        scene.picture(side).save(names[0])
        scene.picture().save(names[1])
        parts: list[str | edgespec.ImageItem] = [question]
        if number % 4 in (0, 2):
            images = [edgespec.ImageItem(str(name)) for name in names[: 1 + number % 4 // 2]]
            parts = [*images, question]
        elif number % 4 == 1:
            parts = [f"{told(scene)} {question}"]
        temperature = 0.0 if number % 8 < 4 else 0.8
        sampling = edgespec.SamplingParams(
            temperature=temperature, seed=number, max_generate_length=48
        )
        yield Message.of("user", parts), sampling


def compared(engine: Engine, directory: Path, wanted: int) -> dict[str, Any]:
    """Batches of mixed requests until so many tokens are compared with plain decoding."""
    asked = [*requests_of(wanted // 12, directory)]
    tokens = differing = unexplained = 0
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        prompts, samplings = [[message] for message, _ in batch], [own for _, own in batch]
        drafted = engine.generate_batch(prompts, samplings)
        plain = engine.generate_batch(prompts, samplings, edgespec.PLAIN)
        for one, other, sampling in zip(drafted, plain, samplings, strict=True):
            assert isinstance(one, Response)
            assert isinstance(other, Response)
            tokens += len(one.token_ids)
            found = first_difference(engine, other, one, sampling, BATCH)
            differing += found is not None
            unexplained += found is not None and not found.explained
        if tokens >= wanted:
            break
    return {"tokens": tokens, "answers_that_differ": differing, "unexplained": unexplained}


def acceptance(engine: Engine, directory: Path, count: int) -> dict[str, Any]:
    """Acceptance length of fixed chains of 3 on greedy descriptions, of the same scenes in both
    forms."""
    shown: list[Scene] = scenes(count, 71)
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=64)
    plan, found = engine.plan(top_k=1, steps=3), dict[str, Any]()
    for name in ("with_picture", "in_words"):
        tokens = steps = 0
        for number, scene in enumerate(shown):
            question, path = scene.questions()[0][0], directory / f"a{number}.png"
            scene.picture().save(path)
            parts: list[str | edgespec.ImageItem] = [f"{told(scene)} {question}"]
            if name == "with_picture":
                parts = [edgespec.ImageItem(str(path)), question]
            metrics = engine.generate([Message.of("user", parts)], sampling, plan).metrics
            tokens, steps = tokens + metrics.decode_tokens, steps + metrics.steps
        found[name] = round(tokens / steps, 3)
    return found


def first_tokens(engine: Engine, directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds to the first token, by the size of a picture that was not seen before; those of
    reading it and of the encoder apart."""
    assert engine.images is not None
    rows = list[dict[str, Any]]()
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=2)
    found: dict[int, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
    for number, scene in enumerate(scenes(repeats * len(SIDES), 72)):
        side = SIDES[number % len(SIDES)]
        path = directory / f"t{number}.png"
        scene.picture(side).save(path)
        before = engine.images.stats
        message = Message.of("user", [edgespec.ImageItem(str(path)), "What is in the picture?"])
        response = engine.generate([message], sampling)
        spent = engine.images.stats - before
        first_s = response.metrics.time_to_first_token
        found[side].append((first_s, spent.read_s, spent.encode_s))
    for side, times in found.items():
        first, read, encode = (1000 * median(column) for column in zip(*times, strict=True))
        rows.append(
            {
                "image_tokens": (side // 28) ** 2,
                "prefill_ms": round(first, 2),
                "read_ms": round(read, 2),
                "encode_ms": round(encode, 2),
                "first_token_ms": round(first + read + encode, 2),
            }
        )
    return rows


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--scenes", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as place,
        edgespec.load(args.engine_dir, spec_decode=True, image_root=place) as engine,
    ):
        directory = Path(place)
        report: dict[str, Any] = {"acceptance_length": acceptance(engine, directory, args.scenes)}
        report["first_token"] = first_tokens(engine, directory, args.repeats)
        report["lossless"] = compared(engine, directory, args.tokens)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
