"""From a conversation with image files to token ids and pixels: the same as transformers' processor
of a vision-language model makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from edgespec.config.values import ImageTokens
from edgespec.images import ImageReader, ImageRules
from edgespec.images.processor import parse_processor
from edgespec.prompts import parse_requests
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.vision.placeholders import expand, refuse_marks
from tests.toys.tokenizer import write_tokenizer
from tests.unit.images.samples import picture, saved, seen_by_transformers, turned
from tests.unit.prompts.test_template_images import QWEN2_5_VL, QWEN3_VL

MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {"size": {"shortest_edge": 3136, "longest_edge": 784 * 64}},
    "qwen3-vl": {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
TEMPLATES = {"qwen2.5-vl": QWEN2_5_VL, "qwen3-vl": QWEN3_VL}


def item(name: str) -> dict[str, object]:
    return {"type": "image", "image": name}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one image": [{"role": "user", "content": [item("a.png"), text("What is it?")]}],
    "texts around images of odd sizes": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [text("One "), item("a.png"), text(", two "), item("b.jpg"), text(".")],
        },
    ],
    "images in several turns": [
        {"role": "user", "content": [item("c.jpg")]},
        {"role": "assistant", "content": "A boat."},
        {"role": "user", "content": "Which one?"},
        {"role": "assistant", "content": "The small one."},
        {"role": "user", "content": [text("And this?"), item("a.png"), item("a.png")]},
    ],
    "no image": [{"role": "user", "content": "Which boat?"}],
}


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 400, 4096)
    whole = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    whole.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.png").write_bytes(saved(picture(111, 67), "PNG"))
    (tmp_path / "b.jpg").write_bytes(saved(picture(400, 300, seed=1), "JPEG"))
    (tmp_path / "c.jpg").write_bytes(turned(6))
    return tmp_path


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("family", PROCESSORS)
def test_ids_and_pixels_are_those_of_transformers(
    tokenizer_dir: Path, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = CONVERSATIONS[name]
    raw = PROCESSORS[family]
    (tokenizer_dir / "chat_template.jinja").write_text(TEMPLATES[family])

    # A processor wants one of videos as well, which needs torchvision
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    library = LibraryTokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    theirs = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(**raw | {"size": dict(raw["size"])}),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=library),
        video_processor=None,
        chat_template=TEMPLATES[family],
    )
    rendered = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    names = [
        part["image"]
        for message in conversation
        for part in message["content"]
        if isinstance(part, dict) and "image" in part
    ]
    images = [seen_by_transformers(tokenizer_dir / name) for name in names]
    expected = theirs(text=[rendered], images=images or None, return_tensors="np")

    request = parse_requests({"requests": [{"messages": conversation}]}, "x").requests[0]
    ours = Tokenizer.open(tokenizer_dir)
    tokens = ImageTokens(*(library.token_to_id(mark) for mark in MARKS))
    refuse_marks(request.messages, image=MARKS[0], video=MARKS[1])
    ids = ours.encode(
        ours.render(request.messages),
        add_special_tokens=not ours.template.has_special_tokens,
    )
    processor = parse_processor(raw | {"image_processor_type": "Qwen2VLImageProcessor"}, "x")
    reader = ImageReader(ImageRules(directory=tokenizer_dir), processor)
    found = [reader.read(i) for message in request.messages for i in message.images]
    prompt = expand(ids, tokens, [image.num_tokens for image in found])

    assert list(prompt.tokens) == expected["input_ids"][0].tolist()
    assert len(found) == len(names)
    for image, start in zip(found, prompt.starts, strict=True):
        slots = prompt.tokens[start - 1 : start + image.num_tokens + 1]
        assert slots == (tokens.vision_start, *[tokens.image] * image.num_tokens, tokens.vision_end)
    if found:
        assert [list(image.grid) for image in found] == expected["image_grid_thw"].tolist()
        values = np.concatenate([image.pixel_values for image in found])
        assert np.array_equal(values, expected["pixel_values"])
