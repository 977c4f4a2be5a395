"""What the scripts that train a block draft for the demo base have in common: the draft's layers, its
batches, its measurement and its files.

Knows text, base and tokenizer of `train_demo_model.py`. What tells a kind of block draft from the
others stands in the script of each: a subclass of `BlockDraft`.

A draft reads hidden states of the base for all tokens before an anchor, and fills a block
[anchor, MASK, MASK, ...] in one pass.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from demo_base import DEMO_BASE, note_base
from draft_cycle import measure
from draft_training import first_and_last, flags, library, mixed_prompts, open_base
from safetensors.torch import load_file, save_file
from train_demo_model import (
    Pair,
    console,
    fit,
    own_answers,
    prompts_of,
)
from transformers import Qwen3ForCausalLM

from edgespec.config import DecoderConfig, RopeConfig
from edgespec.config.values import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.modules.block_draft import BlockDraftModule

MASK_TOKEN = "ÿ"  # byte 0xFF as byte-level BPE writes it: no UTF-8 text has it
GAMMA = 4.0  # draft k weighs exp(-k / GAMMA) where near ones weigh more: published for blocks of 8
FURTHER = 2e-3  # learning rate of a draft that was trained before
SHARED = ("embed_tokens.weight", "lm_head.weight")  # of the base


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run; widths shared with the base come from the base."""

    layers: int = 4
    intermediate: int = 384
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    aux_layers: tuple[int, ...] = (3, 7, 11, 13)  # target_layer_ids: outputs of these base layers
    block: int = 8
    hidden: int = 256
    batch: int = 8
    anchors: int = 32
    steps: int = 1300
    answers: int = 4096
    new_tokens: int = 160


SMOKE = Size(
    layers=2,
    intermediate=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    aux_layers=(1, 5),
    batch=2,
    anchors=4,
    steps=3,
    answers=4,
    new_tokens=16,
)


# ---- the draft


@dataclass(frozen=True)
class Blocks:
    """What a loss is made of: A blocks in each of B rows, and the D slots of each that draft.

    `states` [B, A, D, H] are what the lm_head reads, `logits` [B, A, D, V] what it says; `before`
    and `wanted` [B, A, D] are the token before each drafted one and the one that stands there,
    `inside` [B, A, D] whether the answer is so long. `base_states` [B, T, H] are the base's own,
    and `places` [B, A, D] the ones among them that say `wanted`.
    """

    states: torch.Tensor
    logits: torch.Tensor
    before: torch.Tensor
    wanted: torch.Tensor
    inside: torch.Tensor
    base_states: torch.Tensor
    places: torch.Tensor
    table: torch.Tensor  # [V, H]

    def probabilities(self) -> torch.Tensor:
        """The base's own distribution [B, A, D, V] of each drafted token."""
        rows = torch.arange(len(self.places))[:, None, None]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = self.base_states[rows, self.places] @ self.table.T
        return logits.float().softmax(-1)

    def mean(self, each: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The mean of `each` [B, A, D] inside of answers; slot k weighs weight[k]."""
        keep = self.inside * weight
        return (each.view_as(keep) * keep).sum() / keep.sum()


class BlockDraft(BlockDraftModule, ABC):
    """A block draft that shares embedding and lm_head with its base."""

    is_causal: ClassVar[bool] = False  # whether a row of a block sees the later ones
    first_slot: ClassVar[int] = 1  # the first slot that drafts; 0: the anchor's own
    architecture: ClassVar[str]
    stores_shared: ClassVar[bool] = False  # whether its files have embedding and lm_head too

    def __init__(self, size: Size, base: Qwen3ForCausalLM) -> None:
        eps, theta = base.config.rms_norm_eps, base.config.rope_parameters["rope_theta"]
        rope = RopeConfig(theta, size.head_dim)
        attention = AttentionSpec(
            size.heads, size.kv_heads, size.head_dim, rope, size.head_dim**-0.5, qk_norm=True
        )
        layer = LayerSpec(attention, MlpSpec(size.intermediate), NormSpec(eps))
        super().__init__(
            BlockDraftConfig(
                method="dflash",
                layout="z-lab",
                decoder=DecoderConfig(size.hidden, (layer,) * size.layers, layer.norm),
                vocab_size=base.config.vocab_size,
                draft_vocab_size=base.config.vocab_size,
                target_hidden_size=size.hidden,
                num_aux_layers=len(size.aux_layers),
                aux_layer_ids=tuple(i + 1 for i in size.aux_layers),
                own_embedding=False,
                own_head=False,
                block_size=size.block,
                mask_token_id=0,
                windows=(None,) * size.layers,
                causal=(self.is_causal,) * size.layers,
            )
        )
        del self.lm_head
        self.size, self.eps, self.theta = size, eps, theta

    @abstractmethod
    def loss(self, blocks: Blocks) -> torch.Tensor:
        """What training minimizes."""

    @abstractmethod
    def keys(self, mask_id: int) -> dict[str, Any]:
        """The keys of config.json that only this kind of draft has."""

    def chain(self, states: torch.Tensor, logits: torch.Tensor, anchor: int) -> list[int]:
        """The best drafts behind the token `anchor`, from `states` [D, H] and `logits` [D, V]."""
        del states, anchor
        return logits.argmax(-1).tolist()


Draft = TypeVar("Draft", bound=BlockDraft)


def features_of(hidden_states: tuple[torch.Tensor, ...], size: Size) -> torch.Tensor:
    """Returns the aux hidden states; layer i's output is hidden_states[i + 1]."""
    return torch.cat([hidden_states[i + 1] for i in size.aux_layers], -1)


def answers_of(
    base: Qwen3ForCausalLM, prompts: list[list[int]], kept: Path | None, size: Size
) -> list[Pair]:
    """Returns the base's responses, from the file `kept` or generated now."""
    if kept is not None and kept.exists():
        return [(prompt, answer) for prompt, answer in json.loads(kept.read_text())]
    pairs = own_answers(base, prompts, size.new_tokens)
    if kept is not None:
        kept.write_text(json.dumps(pairs))
    return pairs


# ---- training


def batches(pairs: list[Pair], size: Size, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields (ids, lengths, anchors [B, A]).

    Rows have about equal lengths and are padded on the right; anchors are random positions in the
    response.
    """
    rng = np.random.default_rng(seed)
    rows = sorted(pairs, key=lambda p: len(p[0]) + len(p[1]))
    groups = [rows[i : i + size.batch] for i in range(0, len(rows), size.batch)]
    while True:
        for g in rng.permutation(len(groups)):
            whole = [prompt + answer for prompt, answer in groups[g]]
            width = max(map(len, whole))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in whole])
            anchors = [
                rng.integers(len(p), len(p) + len(a) - 1, size.anchors) for p, a in groups[g]
            ]
            yield (
                ids,
                torch.tensor([len(row) for row in whole]),
                torch.from_numpy(np.stack(anchors)),
            )


def new_draft(kind: type[Draft], base: Qwen3ForCausalLM, size: Size) -> Draft:
    """Returns an untrained draft of this kind."""
    draft = kind(size, base)
    draft.norm.weight.data.copy_(base.model.norm.weight)  # the head that reads it is the base's
    return draft


def train(
    draft: BlockDraft,
    base: Qwen3ForCausalLM,
    pairs: list[Pair],
    mask_id: int,
    lr: float = 3e-3,
    minutes: float = math.inf,
) -> list[float]:
    """Trains a draft; returns the loss of each step."""
    size, losses = draft.size, list[float]()
    table = base.get_input_embeddings().weight.detach().bfloat16()  # as it is stored
    feed, slots = batches(pairs, size, 1), torch.arange(size.block)
    first = draft.first_slot

    def loss_of_step(step: int) -> torch.Tensor:
        ids, lengths, anchors = next(feed)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = base.model(ids, output_hidden_states=True)
        at = anchors[..., None] + slots  # [B, A, block]
        block = torch.full_like(at, mask_id)
        block[..., 0] = ids.gather(1, anchors)
        features = features_of(out.hidden_states, size)
        with torch.autocast("cpu", torch.bfloat16):
            states = draft.blocks(features, table[block], anchors)[:, :, first:]
            logits = states @ table.T
        drafted = at[..., first:] + 1 - first  # where the drafted tokens stand
        last = ids.shape[1] - 1
        tokens, before = (
            ids.gather(1, places.clamp(max=last).flatten(1)).view_as(places)
            for places in (drafted, drafted - 1)
        )
        blocks = Blocks(
            states=states,
            logits=logits,
            before=before,
            wanted=tokens,
            inside=drafted < lengths[:, None, None],
            base_states=out.last_hidden_state,
            places=(drafted - 1).clamp(max=last),
            table=table,
        )
        total = draft.loss(blocks)
        losses.append(total.item())
        return total

    fit("draft", draft, size.steps, lr, loss_of_step, minutes)
    draft.eval()
    return losses


# ---- measuring


def measure_draft(
    base: Qwen3ForCausalLM, draft: BlockDraft, mask_id: int, prompts: list[list[int]], new: int
) -> dict[str, Any]:
    """Returns the acceptance statistics of greedy blocks."""
    size, table = draft.size, base.get_input_embeddings().weight

    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        out = base(torch.tensor([ids]), output_hidden_states=True)
        return features_of(out.hidden_states, size), out.logits[0]

    def drafts(features: torch.Tensor, ids: list[int], pending: int) -> list[int]:
        block = torch.tensor([[[pending] + [mask_id] * (size.block - 1)]])
        found = draft.blocks(features, table[block], torch.tensor([[len(ids)]]))
        found = found[0, 0, draft.first_slot :]
        return draft.chain(found, found @ table.T, pending)

    return measure(base, states, drafts, prompts, new)


# ---- files


def save_draft(draft: BlockDraft, base: Qwen3ForCausalLM, mask_id: int, path: Path) -> None:
    """Writes the draft in the layout of its authors."""
    path.mkdir(parents=True, exist_ok=True)
    size = draft.size
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in draft.state_dict().items()}
    if draft.stores_shared:
        table = base.get_input_embeddings().weight.detach().to(torch.bfloat16)
        tensors |= {name: table.clone() for name in SHARED}
    weights, text = path / "model.safetensors", path / "config.json"
    save_file(tensors, beside(weights), metadata={"format": "pt"})
    config = {
        "architectures": [draft.architecture],
        "model_type": "qwen3",
        "block_size": size.block,
        **draft.keys(mask_id),
        "num_target_layers": base.config.num_hidden_layers,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": base.config.vocab_size,
        "rms_norm_eps": draft.eps,
        "rope_theta": draft.theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * size.layers,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": size.layers,
        "tie_word_embeddings": not draft.stores_shared,
        "dtype": "bfloat16",
    }
    beside(text).write_text(json.dumps(config, indent=2) + "\n")
    for file in (weights, text):
        beside(file).replace(file)


def beside(file: Path) -> Path:
    """Returns the path at which a file is written before it replaces an older one."""
    return file.with_name(f"{file.name}.part")


def load_draft(kind: type[Draft], path: Path, base: Qwen3ForCausalLM) -> tuple[Draft, int]:
    """Returns the draft and its mask id."""
    raw = json.loads((path / "config.json").read_text())
    inner = raw.get("dflash_config", raw)
    size = Size(
        layers=raw["num_hidden_layers"],
        intermediate=raw["intermediate_size"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        aux_layers=tuple(inner["target_layer_ids"]),
        block=raw["block_size"],
        hidden=raw["hidden_size"],
    )
    return load_weights(kind(size, base), path).eval(), inner["mask_token_id"]


def load_weights(draft: Draft, path: Path) -> Draft:
    """Gives a draft the weights of a directory, and returns it."""
    tensors = load_file(path / "model.safetensors")
    draft.load_state_dict({n: tensor for n, tensor in tensors.items() if n not in SHARED})
    return draft


def run(kind: type[BlockDraft], description: str | None, size: Size, smoke: Size) -> None:
    """What a script does: trains a draft of this kind, or only measures the one that is there."""
    parser = flags(description, "draft", prompts=64, tokens=128)
    parser.add_argument("--base", type=Path, default=DEMO_BASE)
    parser.add_argument("--steps", type=int, help=f"(default: {size.steps})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest it may train")
    parser.add_argument("--init", type=Path, help="a draft of the same shape to go on from")
    parser.add_argument(
        "--answers",
        type=Path,
        help="JSON of [prompt, answer] ids: read, or written for another run",
    )
    args = parser.parse_args()
    size = smoke if args.smoke else size
    size = size if args.steps is None else replace(size, steps=args.steps)
    torch.manual_seed(args.seed)

    base, tokenizer = open_base(args.base)
    training, held = library(smoke=args.smoke)
    report: dict[str, object] = {}
    if not args.measure:
        pairs = answers_of(
            base, mixed_prompts(training, tokenizer, args.seed, size.answers), args.answers, size
        )
        mask_id = tokenizer.convert_tokens_to_ids(MASK_TOKEN)
        draft, lr = new_draft(kind, base, size), 3e-3
        if args.init is not None:
            draft, lr = load_weights(draft, args.init), FURTHER
        losses = train(draft, base, pairs, mask_id, lr, args.minutes)
        save_draft(draft, base, mask_id, args.out)
        note_base(args.out, args.base)
        console.print(f"wrote {args.out}: {len(losses)} steps")
        report["loss"] = first_and_last(losses)
    if args.prompts:
        draft, mask_id = load_draft(kind, args.out, base)
        prompts = prompts_of(held, tokenizer, 0, args.prompts)
        report |= measure_draft(base, draft, mask_id, prompts, args.tokens)
    print(json.dumps(report))
