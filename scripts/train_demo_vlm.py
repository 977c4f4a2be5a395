"""Train a tiny vision-language base of Qwen2.5-VL's layout, and write what its draft is trained on:
what `make demo METHOD=vlm` asks about drawn pictures.

Knows how such a base lies on disk: transformers' `Qwen2_5_VLForConditionalGeneration` with its
processor's settings. Pictures and questions are those of `drawn_pictures.py`. Knows nothing of
engines and drafts.

    python scripts/train_demo_vlm.py --out build/demo-vlm    # under ten minutes on two cores
    edgespec train recipes/training/demo_vlm.yaml
    python scripts/train_demo_vlm.py --out /tmp/tiny --smoke # a minute, to see that it runs

Half of the conversations have a picture, half tell the same scene in words.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from draft_training import replaced
from drawn_pictures import Scene, scenes, told
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_demo_model import console, fit
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PAD, _, END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
PATCH, MERGE, WINDOW = 14, 2, 56  # pixels, patches a side, pixels
# Of weights before training. After 300 steps 60 of 120 answers about words were right, and 28 with
# transformers' 0.02, which is for wider models
INITIAL = 0.06
IGNORED = -100  # a label that does not count


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run."""

    vocab: int = 512
    hidden: int = 192
    intermediate: int = 448
    layers: int = 8
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    vision_hidden: int = 96
    vision_intermediate: int = 256
    vision_layers: int = 4
    vision_heads: int = 3
    batch: int = 24
    base_steps: int = 800
    base_minutes: float = 7.0  # at most: a slower machine takes fewer steps
    chats: int = 2400

    @property
    def mrope_section(self) -> list[int]:
        """Pairs of a head that turn by time, height and width."""
        pairs = self.head_dim // 2
        return [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8]


SMOKE = Size(
    hidden=64,
    intermediate=128,
    heads=2,
    kv_heads=1,
    head_dim=32,
    vision_hidden=32,
    vision_intermediate=64,
    vision_heads=2,
    batch=2,
    base_steps=2,
    chats=8,
)


# ---- questions


@dataclass(frozen=True)
class Question:
    """A question about a scene: with a picture of it, or with the scene told in words."""

    scene: Scene
    text: str
    answer: str
    picture: bool

    @property
    def message(self) -> list[dict[str, str]]:
        """The content of the user's message."""
        if self.picture:
            return [{"type": "image"}, {"type": "text", "text": self.text}]
        return [{"type": "text", "text": f"{told(self.scene)} {self.text}"}]


def questions(count: int, seed: int) -> list[Question]:
    """So many questions, each about a scene of its own; every other one with a picture."""
    rng, found = np.random.default_rng(seed), list[Question]()
    for number, scene in enumerate(scenes(count, seed)):
        asked = scene.questions()
        text, answer = asked[rng.integers(len(asked)) if rng.random() < 0.7 else 0]
        found.append(Question(scene, text, answer, picture=number % 2 == 0))
    return found


def train_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Qwen2.5-VL's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocab,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts = [f"user\n{told(q.scene)} {q.text}\nassistant\n{q.answer}" for q in questions(2000, 9)]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@dataclass(frozen=True)
class Row:
    """A conversation as the model reads it: `ids` of prompt and answer; the answer begins at
    `start`."""

    ids: list[int]
    start: int
    pixels: torch.Tensor | None  # [P, D]
    grid: tuple[int, int, int] | None


class Reader:
    """Turns questions into rows, with one processor and tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, processor: Any) -> None:
        self.tokenizer, self.processor = tokenizer, processor

    def prompt(self, question: Question) -> Row:
        """A question without its answer."""
        message = {"role": "user", "content": question.message}
        text = self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        pixels, grid = self.picture(question.scene.picture()) if question.picture else (None, None)
        ids = list[int]()
        for token in self.tokenizer(text).input_ids:
            tokens = 1 if token != IMAGE or grid is None else grid[1] * grid[2] // MERGE**2
            ids += [token] * tokens
        return Row(ids, len(ids), pixels, grid)

    def whole(self, question: Question) -> Row:
        """A question with its answer."""
        row = self.prompt(question)
        return replace(row, ids=row.ids + self.tokenizer(f"{question.answer}<|im_end|>").input_ids)

    def picture(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Pixel values [P, D] and the grid (t, h, w) in patches."""
        found = self.processor(images=[image], return_tensors="pt")
        return found["pixel_values"], tuple(found["image_grid_thw"][0].tolist())


def batch_of(rows: Sequence[Row]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of the model, padded on the right, and labels [B, S] of the answers."""
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [PAD] * (width - len(row.ids)) for row in rows])
    mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows])
    labels = torch.where(mask.bool(), ids, IGNORED)
    for number, row in enumerate(rows):
        labels[number, : row.start] = IGNORED
    given = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).int()}
    pixels = [row.pixels for row in rows if row.pixels is not None]
    if pixels:
        grids = [row.grid for row in rows if row.grid is not None]
        given |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return given, labels


# ---- the base


def make_base(size: Size) -> VLModel:
    """An untrained base."""
    text = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": size.mrope_section,
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "initializer_range": INITIAL,
    }
    vision = {
        "depth": size.vision_layers,
        "hidden_size": size.vision_hidden,
        "intermediate_size": size.vision_intermediate,
        "num_heads": size.vision_heads,
        "out_hidden_size": size.hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": WINDOW,
        "fullatt_block_indexes": [*range(1, size.vision_layers, 2)],
        "initializer_range": INITIAL,
    }
    return VLModel(
        Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            tie_word_embeddings=True,
            initializer_range=INITIAL,
        )
    )


def processor() -> Any:
    """The image processor, whose settings stand in preprocessor_config.json."""
    side = PATCH * MERGE
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, min_pixels=4 * side**2, max_pixels=64 * side**2
    )


class Feed:
    """Batches of questions, each asked once."""

    def __init__(self, reader: Reader, count: int, size: int, seed: int) -> None:
        self.reader, self.size = reader, size
        self.questions = questions(count * size, seed)

    def rows(self, step: int) -> list[Row]:
        """The rows of a step."""
        place = step * self.size
        return [self.reader.whole(q) for q in self.questions[place : place + self.size]]


def train_base(base: VLModel, reader: Reader, size: Size, seed: int) -> None:
    """Train the base on the answers alone."""
    feed = Feed(reader, size.base_steps, size.batch, seed)

    def loss_of_step(step: int) -> torch.Tensor:
        given, labels = batch_of(feed.rows(step))
        with torch.autocast("cpu", torch.bfloat16):
            logits = base(**given).logits
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())

    base.train()
    fit("base", base, size.base_steps, 3e-3, loss_of_step, size.base_minutes)
    base.eval()


# ---- files


def save_base(base: VLModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """The base as a Hugging Face directory, in bfloat16."""
    base.to(torch.bfloat16)
    base.generation_config.eos_token_id = [END, PAD]
    base.generation_config.pad_token_id = PAD
    base.save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor().save_pretrained(path)


def save_chats(asked: Sequence[Question], path: Path) -> None:
    """Conversations as JSONL, and their pictures beside it."""
    (path / "pictures").mkdir()
    lines = []
    for number, question in enumerate(asked):
        content: list[dict[str, str]] = [dict(part) for part in question.message]
        if question.picture:
            content[0]["image"] = f"pictures/{number}.png"
            question.scene.picture().save(path / content[0]["image"])
        turns = {"user": content, "assistant": question.answer}
        lines.append({"messages": [{"role": r, "content": c} for r, c in turns.items()]})
    (path / "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def main() -> None:
    """Trains the base."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="one that is there is replaced")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to test the script itself")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    torch.manual_seed(args.seed)
    with replaced(args.out) as out:
        tokenizer = train_tokenizer(size)
        base = make_base(size)
        train_base(base, Reader(tokenizer, processor()), size, args.seed)
        save_base(base, tokenizer, out / "base")
        save_chats(questions(size.chats, args.seed + 1), out)
    console.print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
