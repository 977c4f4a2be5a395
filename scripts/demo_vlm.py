"""The vision-language demo: pictures are drawn, and a tiny Qwen2.5-VL with an EAGLE-3 draft is asked
about them. What `make demo METHOD=vlm` runs, by way of `demo.py`.

Knows the commands and what their output has. The base is trained by `train_demo_vlm.py`, and its
draft by `edgespec train`, where they are not there yet; scenes are new ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawn_pictures import Scene, scenes, told
from rich.console import Console

Step = Callable[..., None]
FIXED = (
    "\nThis base is so small that drafts take longer than the steps that they save: drafting"
    " adaptively, edgespec would mostly decode plainly. --spec-policy fixed drafts always, and shows"
    " what is accepted."
)
SEED, NUM_SCENES = 4242, 6
console = Console(highlight=False)


def make_engines(pair: Path, out: Path, step: Step) -> Path:
    """Exports and builds base, draft and image encoder below `out`. Returns the directory of the
    engines."""
    base, onnx, engines = pair / "base", out / "onnx", out / "engines"
    step("export", base, onnx / "base", "--eagle-base")
    step("export", pair / "draft", onnx / "draft", "--base-model-dir", base)
    step("build", "--onnx-dir", onnx / "base" / "llm", "--engine-dir", engines, "--spec-base")
    step("build", "--onnx-dir", onnx / "draft" / "llm", "--engine-dir", engines, "--spec-draft")
    images = ("--min-image-tokens", "4", "--max-image-tokens-per-image", "64")
    step("build", "--onnx-dir", onnx / "base" / "visual", "--engine-dir", engines, *images)
    return engines


def requests_of(shown: list[Scene], pictures: Path | None) -> list[dict[str, Any]]:
    """Two questions about each scene: with its picture, or told in words where `pictures` is
    None."""
    found = []
    for number, scene in enumerate(shown):
        for question, _ in scene.questions()[:2]:
            text = {"type": "text", "text": question}
            content: list[dict[str, str]] = [text]
            if pictures is not None:
                content.insert(0, {"type": "image", "image": str(pictures / f"{number}.png")})
            else:
                text["text"] = f"{told(scene)} {question}"
            found.append({"messages": [{"role": "user", "content": content}]})
    return found


def answer(engines: Path, out: Path, name: str, requests: list[Any], step: Step) -> Path:
    """Answers requests with drafts, each compared with plain decoding. Returns the output file."""
    source, target = out / f"{name}.json", out / f"{name}_output.json"
    settings = {"temperature": 0.0, "max_generate_length": 64}
    source.write_text(json.dumps(settings | {"requests": requests}, indent=2))
    files = ("--input-file", source, "--output-file", target)
    how = ("--spec-decode", "--spec-policy", "fixed", "--check-lossless")
    step("infer", "--engine-dir", engines, *files, *how)
    return target


def told_of(path: Path) -> dict[str, Any]:
    """What an output file says all in all: tokens, steps, acceptance length, equal answers."""
    answers = json.loads(path.read_text())["responses"]
    blocks = [one["metrics"]["speculative_decoding"] for one in answers]
    steps = sum(block["num_spec_steps"] for block in blocks)
    accepted = sum(block["num_accepted_draft_tokens"] for block in blocks)
    equal = sum(one["lossless"]["equal"] for one in answers)
    return {"acceptance": 1 + accepted / steps, "equal": equal, "answers": len(answers)}


def show(path: Path, shown: list[Scene]) -> None:
    """Prints each picture's path with its questions, answers, and what is right."""
    answers = json.loads(path.read_text())["responses"]
    asked = [(scene, pair) for scene in shown for pair in scene.questions()[:2]]
    last = None
    for (_, (question, right)), one in zip(asked, answers, strict=True):
        picture = one["messages"][-1]["content"][0]["image"]
        if picture != last:
            console.print(f"\n{picture}", style="bold", markup=False)
        last, text = picture, one["output_text"].strip()
        console.print(f"  {question}", style="dim", markup=False)
        console.print(f"  {text}", markup=False)
        if text != right:
            console.print(f"  (right: {right})", style="dim", markup=False)


def run(pair: Path, out: Path, step: Step) -> Path:
    """The demo, into `out`. Returns the directory of the engines."""
    engines, pictures = make_engines(pair, out, step), out / "pictures"
    pictures.mkdir()
    shown = scenes(NUM_SCENES, SEED)
    for number, scene in enumerate(shown):
        scene.picture().save(pictures / f"{number}.png")
    console.print(FIXED, markup=False)
    seen = answer(engines, out, "seen", requests_of(shown, pictures), step)
    words = answer(engines, out, "in_words", requests_of(shown, None), step)
    show(seen, shown)
    for name, path in (("with the picture", seen), ("told in words", words)):
        found = told_of(path)
        console.print(
            f"\n{name}: acceptance length {found['acceptance']:.2f},"
            f" {found['equal']} of {found['answers']} answers as plain decoding gives them",
            markup=False,
        )
    return engines
