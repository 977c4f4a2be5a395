"""Train a tiny vision-language pair of Qwen2.5-VL's layout, with an EAGLE-3 draft: what
`make demo METHOD=vlm` asks about drawn pictures.

Knows how such a pair lies on disk: transformers' `Qwen2_5_VLForConditionalGeneration` with its
processor's settings, and a draft whose config has the base's M-RoPE sections, as published ones do.
Pictures and questions are those of `drawn_pictures.py`. Knows nothing of engines.

    python scripts/train_demo_vlm.py --out build/demo-vlm            # under ten minutes on two cores
    python scripts/train_demo_vlm.py --out build/demo-vlm --measure  # only measure what is there
    python scripts/train_demo_vlm.py --out /tmp/tiny --smoke         # a minute, to see that it runs

Half of the conversations have a picture, half tell the same scene in words. The draft learns what
the base says of new scenes, at the base's positions: behind a picture they are not the places of
the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_base import note_base
from draft_cycle import decode
from draft_training import flags, replaced
from drawn_pictures import Scene, scenes, told
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from train_demo_model import STEP_DECAY, console, fit
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from edgespec.methods.aux_layers import default_aux_layers
from edgespec.methods.eagle3 import parse_eagle3_config
from edgespec.modules.eagle3 import Eagle3
from edgespec.modules.unrolled import Unrolled
from edgespec.training.eagle3 import AUX_KEY, new_shapes

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
    draft_vocab: int = 384
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
    draft_batch: int = 16
    draft_steps: int = 200
    draft_minutes: float = 2.0
    unroll: int = 4

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
    draft_batch=2,
    draft_steps=2,
    unroll=2,
)


# ---- conversations


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


# ---- the draft


def unrolled(draft: Eagle3, features: torch.Tensor, at: torch.Tensor) -> Unrolled:
    """A draft over features [B, T, 3H], at the base's positions [3, B, T]."""
    rope = draft.draft_config.decoder.rope
    axis = torch.tensor([axis for axis, n in enumerate(rope.mrope_section) for _ in range(n)])
    inverse = rope.theta ** (-torch.arange(len(axis), dtype=torch.float32) / len(axis))

    def rows(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = ((at[..., :count] + step)[axis].permute(1, 2, 0) * inverse)[:, None]
        return angle.cos(), angle.sin()

    return Unrolled(draft, features, rows)


def vocabulary_of(feed: Feed, tokenizer: PreTrainedTokenizerFast, size: Size) -> torch.Tensor:
    """The most frequent ids of the answers, sorted."""
    answers = [tokenizer(f"{question.answer}<|im_end|>").input_ids for question in feed.questions]
    counts = np.bincount(np.concatenate(answers), minlength=size.vocab)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: size.draft_vocab]))


def new_draft(base: VLModel, draft_ids: torch.Tensor, size: Size) -> Eagle3:
    """An untrained draft, with the base's lm_head."""
    raw = config_of(len(draft_ids), size)
    shapes = new_shapes({**raw, "eagle_config": {AUX_KEY: [0] * 3}, "fc_norm": False})
    draft = Eagle3(parse_eagle3_config(raw, shapes))
    with torch.no_grad():
        draft.lm_head.weight.copy_(base.lm_head.weight[draft_ids])
    return draft


@torch.no_grad()
def states_of(
    base: VLModel, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a draft reads of the base: features [B, S, 3H], logits [B, S, V], positions
    [3, B, S]."""
    positions, _ = base.model.get_rope_index(
        given["input_ids"],
        mm_token_type_ids=given["mm_token_type_ids"],
        image_grid_thw=given.get("image_grid_thw"),
        attention_mask=given["attention_mask"],
    )
    out = base(**given, output_hidden_states=True)
    layers = default_aux_layers(base.config.text_config.num_hidden_layers)
    return torch.cat([out.hidden_states[i] for i in layers], -1), out.logits, positions


def train_draft(
    draft: Eagle3, base: VLModel, feed: Feed, draft_ids: torch.Tensor, size: Size
) -> None:
    """Train the draft by EAGLE-3's training-time test, on what the base says of each token."""
    table = base.get_input_embeddings().weight.detach()
    in_draft = torch.zeros(size.vocab, dtype=torch.bool)
    in_draft[draft_ids] = True

    def loss_of_step(step: int) -> torch.Tensor:
        given, labels = batch_of(feed.rows(step))
        with torch.autocast("cpu", torch.bfloat16):
            features, logits, positions = states_of(base, given)
        ids, width = given["input_ids"], given["input_ids"].shape[1] - size.unroll
        embeds = [table[ids[:, 1 + k : width + k]] for k in range(size.unroll)]
        with torch.autocast("cpu", torch.bfloat16):
            chains = unrolled(draft, features[:, : width - 1], positions[..., : width - 1])
            mine = [draft.lm_head(chains.step(embed)) for embed in embeds]
        total = torch.zeros(())
        for k, said in enumerate(mine):
            theirs = logits[:, 1 + k : width + k].float()
            asked = labels[:, 2 + k : width + k + 1] != IGNORED
            keep = asked & in_draft[theirs.argmax(-1)]
            target = theirs[..., draft_ids].softmax(-1)
            loss = -(target * said.float().log_softmax(-1)).sum(-1)
            total = total + STEP_DECAY**k * (loss * keep).sum() / keep.sum().clamp(min=1)
        return total

    fit("draft", draft, size.draft_steps, 3e-3, loss_of_step, size.draft_minutes)
    draft.eval()


# ---- files


def save_base(base: VLModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """The base as a Hugging Face directory, in bfloat16."""
    base.to(torch.bfloat16)
    base.generation_config.eos_token_id = [END, PAD]
    base.generation_config.pad_token_id = PAD
    base.save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor().save_pretrained(path)
    base.float()


def config_of(draft_vocab: int, size: Size) -> dict[str, Any]:
    """The draft's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_model_type": "qwen2_5_vl",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "draft_vocab_size": draft_vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": size.mrope_section},
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def on_disk(name: str) -> str:
    """A tensor's name in the layout of published drafts for Qwen2.5-VL."""
    return name.replace("layers.0.", "midlayer.")


def save_draft(draft: Eagle3, draft_ids: torch.Tensor, size: Size, path: Path) -> None:
    """The draft in that layout."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        on_disk(n): p.detach().to(torch.bfloat16).contiguous()
        for n, p in draft.state_dict().items()
    }
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(size.vocab, dtype=torch.bool).index_fill_(0, draft_ids, True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = config_of(len(draft_ids), size)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_draft(base: VLModel, path: Path) -> tuple[Eagle3, torch.Tensor]:
    """The draft of a directory, and the tokens of its vocabulary."""
    raw = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    tensors.pop("t2d")
    draft_ids = tensors.pop("d2t") + torch.arange(raw["draft_vocab_size"])
    size = Size(
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
    )
    draft = new_draft(base, draft_ids, size)
    draft.load_state_dict({name: tensors[on_disk(name)] for name in draft.state_dict()})
    return draft.eval(), draft_ids


# ---- what it came to


def measured(
    base: VLModel,
    draft: Eagle3,
    draft_ids: torch.Tensor,
    reader: Reader,
    asked: Sequence[Question],
    *,
    steps: int,
    tokens: int,
) -> dict[str, Any]:
    """Right answers, of up to `tokens`, and the acceptance of greedy chains of `steps` drafts,
    pooled over some questions."""
    table, right, verified, counts = base.get_input_embeddings().weight, 0, 0, list[int]()
    places: list[torch.Tensor] = []  # of the text at hand
    for question in asked:
        prompt = reader.prompt(question)

        def states(ids: list[int], prompt: Row = prompt) -> tuple[torch.Tensor, torch.Tensor]:
            given, _ = batch_of([replace(prompt, ids=ids)])
            features, logits, at = states_of(base, given)
            places[:] = [at]
            return features, logits[0]

        def drafts(features: torch.Tensor, ids: list[int], pending: int) -> list[int]:
            chains, found = unrolled(draft, features, places[0][..., : len(ids)]), list[int]()
            said = torch.tensor([[*ids[1:], pending]])
            for _ in range(steps):
                said = draft_ids[draft.lm_head(chains.step(table[said])).argmax(-1)]
                found.append(int(said[0, -1]))
            return found

        answer, accepted = decode(states, drafts, prompt.ids, [END], tokens)
        counts += accepted
        verified += len(answer) - 1
        text = reader.tokenizer.decode(answer, skip_special_tokens=True)
        right += text == question.answer
    return {
        "questions": len(asked),
        "right": right,
        "tokens": verified,
        "acceptance_length": round(verified / len(counts), 3) if counts else None,
    }


def halves(asked: Sequence[Question]) -> Iterator[tuple[str, list[Question]]]:
    """The questions with a picture, and those without."""
    yield "with_picture", [question for question in asked if question.picture]
    yield "in_words", [question for question in asked if not question.picture]


def main() -> None:
    """Trains or measures the pair."""
    parser = flags(__doc__, "pair", prompts=60, tokens=64)
    parser.add_argument(
        "--draft-steps", type=int, default=3, help="drafts a chain, to measure with"
    )
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    torch.manual_seed(args.seed)
    if not args.measure:
        with replaced(args.out) as out:
            tokenizer = train_tokenizer(size)
            reader = Reader(tokenizer, processor())
            base = make_base(size)
            train_base(base, reader, size, args.seed)
            save_base(base, tokenizer, out / "base")
            # What is stored is bfloat16; the draft learns from what is stored
            base.load_state_dict({k: v.bfloat16().float() for k, v in base.state_dict().items()})
            feed = Feed(reader, size.draft_steps, size.draft_batch, args.seed + 1)
            draft_ids = vocabulary_of(feed, tokenizer, size)
            draft = new_draft(base, draft_ids, size)
            train_draft(draft, base, feed, draft_ids, size)
            save_draft(draft, draft_ids, size, out / "draft")
            note_base(out / "draft", out / "base")
        console.print(f"wrote {args.out}")
    report: dict[str, Any] = {}
    if args.prompts:
        base = VLModel.from_pretrained(args.out / "base", dtype=torch.float32).eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "base")
        draft, draft_ids = load_draft(base, args.out / "draft")
        reader = Reader(tokenizer, processor())
        for name, asked in halves(questions(args.prompts, args.seed + 77)):
            with torch.no_grad():
                report[name] = measured(
                    base,
                    draft,
                    draft_ids,
                    reader,
                    asked,
                    steps=args.draft_steps,
                    tokens=args.tokens,
                )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
