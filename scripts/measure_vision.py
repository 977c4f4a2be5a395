"""Measures our image encoder beside transformers' own, at the shape of Qwen2.5-VL-7B with random
weights.

    python scripts/measure_vision.py [--depth 32] [--sizes 448x448 644x476] [--threads 2] [--runs 5]

One process, float32 on both sides unless --weights says otherwise, runs alternating; of each the
median of wall time and of processor time. A machine that does something else at the time shows it:
the two times differ by more than the threads explain. Prints the largest difference of the rows,
relative to their largest value, and their cosine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from edgespec.backends.build import build
from edgespec.backends.ort.options import parse_options
from edgespec.contract import Limits
from edgespec.export.options import ExportOptions
from edgespec.export.resolve import resolve
from edgespec.export.vision import vision_component, write_vision
from edgespec.progress import Silent
from edgespec.runtime.vision.encoder import VisionEncoder
from edgespec.vision.grid import Grid

PATCH = 14
VISION = {
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "window_size": 112,
    "patch_size": PATCH,
}
TEXT = {
    "vocab_size": 512,
    "hidden_size": 3584,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
Run = Callable[[], Any]


@dataclass(frozen=True)
class Patches:
    """Random patches of one image."""

    pixel_values: Any
    grid: Grid
    key: str = "random"
    source: str = "a random image"


def made(directory: Path, depth: int) -> Any:
    """Write a checkpoint with such an encoder; its model."""
    full = [i for i in range(depth) if i % 8 == 7 or i == depth - 1]
    vision = VISION | {"depth": depth, "fullatt_block_indexes": full}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=TEXT, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    return model.model.visual


def built(checkpoint: Path, out: Path, weights: list[str]) -> dict[str, Path]:
    """The directory of an engine for each format of weights."""
    request = resolve(str(checkpoint), ExportOptions(golden=False))
    component = vision_component(request)
    assert component is not None
    (out / "visual").mkdir(parents=True)
    write_vision(component, out / "visual", request, {}, Silent())
    limits = Limits(max_image_tokens=4096, max_image_tokens_per_image=4096)
    for name in weights:
        scheme, _, block = name.partition(":")
        options = parse_options({"weights": scheme, "weight_block": block or None})
        build(out / "visual", out / name, limits, options=options)
    return {name: out / name for name in weights}


def image(size: str) -> Patches:
    """Random patches of an image of height x width pixels."""
    height, width = (int(pixels) // PATCH for pixels in size.split("x"))
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((height * width, 3 * 2 * PATCH**2), np.float32)
    return Patches(pixels, (1, height, width))


def timed(runs: dict[str, Run], count: int) -> dict[str, tuple[float, float]]:
    """The median wall and processor time of each, in seconds; they take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(count):
        for name, run in runs.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return {
        name: (statistics.median(w for w, _ in found), statistics.median(p for _, p in found))
        for name, found in times.items()
    }


def limit_threads(count: int) -> None:
    """Give both sides so many threads: ours takes one for each core that the process may use."""
    torch.set_num_threads(count)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def cosine(a: Any, b: Any) -> float:
    """The cosine of two arrays."""
    return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


def main() -> None:
    """Measure, and print a line for each side and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--sizes", nargs="+", default=["448x448", "644x476"])
    parser.add_argument("--weights", nargs="+", default=["fp32", "int8", "int8:0"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    if asked.threads > (cores := len(os.sched_getaffinity(0))):
        parser.error(f"--threads {asked.threads}: this process may use {cores} cores")
    limit_threads(asked.threads)
    with tempfile.TemporaryDirectory() as directory:
        visual = made(Path(directory) / "checkpoint", asked.depth)
        engines = built(Path(directory) / "checkpoint", Path(directory) / "out", asked.weights)
        encoders = {name: VisionEncoder.open(path) for name, path in engines.items()}
        for size in asked.sizes:
            measure(visual, encoders, size, asked.runs)


def measure(visual: Any, encoders: dict[str, VisionEncoder], size: str, count: int) -> None:
    """Print what an image of this size takes on each side."""
    one = image(size)
    pixels, grid = torch.from_numpy(one.pixel_values), torch.tensor([one.grid])

    def reference() -> Any:
        with torch.no_grad():
            return visual(pixels, grid_thw=grid).pooler_output.numpy()

    runs: dict[str, Run] = {"transformers": reference}
    for name, encoder in encoders.items():
        runs[name] = lambda encoder=encoder: encoder.encode(one).embeds
    wanted = reference()
    times = timed(runs, count)
    usual_wall, usual_processor = times["transformers"]
    for name, (wall, processor) in times.items():
        rows = runs[name]()
        off = float(np.abs(rows - wanted).max() / np.abs(wanted).max())
        print(
            f"{size} {name:14} {1 / wall:7.3f} images/s {wall:7.2f} s wall {processor:7.2f} s"
            f" processor; {usual_wall / wall:5.2f} x wall {usual_processor / processor:5.2f} x"
            f" processor; off {off:.1e}, cosine {cosine(rows, wanted):.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
