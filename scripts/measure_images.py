"""Measures what images cost before the encoder, beside transformers' own processor.

    python scripts/measure_images.py [--size 1280x960] [--rounds 25] [--image FILE]

One thread and its processor time, in milliseconds: medians of rounds in which both take turns. Both
read the file anew each time; the patches must be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from edgespec.images import ImageProcessor, ImageReader, ImageRules
from edgespec.images.decode import check_size, decode
from edgespec.images.preprocess import prepare
from edgespec.prompts import ImageItem

PROCESSORS = {
    "qwen2.5-vl": ImageProcessor(max_pixels=12845056),
    "qwen3-vl": ImageProcessor(
        patch_size=16,
        min_pixels=65536,
        max_pixels=16777216,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="1280x960")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--image", type=Path, help="an image file in place of a drawn JPEG")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.image or drawn(Path(folder) / "a.jpg", args.size)
        for name, processor in PROCESSORS.items():
            print(json.dumps({"processor": name, **measured(path, processor, args.rounds)}))


def drawn(path: Path, size: str) -> Path:
    """A JPEG with edges and slopes."""
    width, height = map(int, size.split("x"))
    small = np.random.default_rng(0).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    image.save(path, quality=90)
    return path


def measured(path: Path, processor: ImageProcessor, rounds: int) -> dict[str, object]:
    size = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    theirs = Qwen2VLImageProcessorPil(
        size=size,
        patch_size=processor.patch_size,
        image_mean=processor.image_mean,
        image_std=processor.image_std,
    )
    reader = ImageReader(ImageRules(directory=path.parent), processor)
    data = path.read_bytes()
    header = check_size(data, "x")
    image = decode(data, header, "x")
    steps: dict[str, Callable[[], object]] = {
        "ours": lambda: reader.read(ImageItem(path.name)),
        "transformers": lambda: theirs([load_image(str(path))], return_tensors="np"),
        "ours_decode": lambda: decode(data, header, "x"),
        "ours_prepare": lambda: prepare(image, processor, "x"),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.thread_time()
            step()
            times[name].append(1e3 * (time.thread_time() - start))
    found = reader.read(ImageItem(path.name))
    expected = theirs([load_image(str(path))], return_tensors="np")
    medians = {f"{name}_ms": round(statistics.median(t), 1) for name, t in times.items()}
    return {
        "size": f"{image.width}x{image.height}",
        "tokens": found.num_tokens,
        "same_bits": bool(np.array_equal(found.pixel_values, expected["pixel_values"])),
        **medians,
        "times_as_fast": round(medians["transformers_ms"] / medians["ours_ms"], 2),
    }


if __name__ == "__main__":
    main()
