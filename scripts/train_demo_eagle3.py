"""Train the demo base's EAGLE-3 draft further, on what the base itself answers to all kinds of text.

Knows how the draft committed under `recipes/demo/draft` was made out of the one that
`train_demo_model.py` trains, whose losses and files it shares. Knows nothing of engines.

    python scripts/train_demo_eagle3.py --out recipes/demo/draft --init OLD/draft --answers FILE
    python scripts/train_demo_eagle3.py --out recipes/demo/draft --measure  # only measure what is there
    python scripts/train_demo_eagle3.py --out /tmp/tiny --smoke             # a minute, to see that it runs

Half of the rows are the base's greedy answers, half the library's own. FILE has the pairs that `train_demo_dflash.py --answers FILE` writes. Without --init the draft
is a new one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from block_training import FURTHER, answers_of
from demo_base import DEMO_BASE, note_base
from demo_text import KINDS
from draft_cycle import measure
from draft_training import SHARES, flags, library, mixed_prompts, open_base
from safetensors.torch import load_file
from train_demo_model import (
    ChatBatches,
    Eagle3,
    Size,
    aux_layer_ids,
    console,
    conversations,
    draft_vocabulary,
    new_draft,
    prompts_of,
    save_draft,
    train_draft,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


@dataclass(frozen=True)
class Counts:
    """How many answers of the base a run trains on, and how long they are."""

    answers: int = 1400
    new_tokens: int = 160


SIZE = Size(seq_len=320, batch=4, draft_steps=600, draft_vocab=3072, unroll=4)
SMOKE = Size(seq_len=96, batch=2, draft_steps=3, draft_vocab=256, unroll=3)


def rows_of(
    base: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    training: Sequence[Path],
    kept: Path | None,
    counts: Counts,
    seed: int,
) -> tuple[list[list[int]], np.ndarray]:
    """Returns the conversations to train on, and the tokens of the base's own answers."""
    prompts = mixed_prompts(training, tokenizer, seed, counts.answers)
    own = [p + a for p, a in answers_of(base, prompts, kept, counts)]
    texts, rng = [], np.random.default_rng(seed)
    for kind in SHARES.keys() - {"random"}:
        pairs = [pair for path in training for pair in KINDS[kind](path)]
        some = rng.permutation(len(pairs))[: round(SHARES[kind] * len(own))]
        texts += conversations(tokenizer, [pairs[i] for i in some])
    return own + texts, np.concatenate([np.array(row, np.int64) for row in own + own + texts])


def start(base: Qwen3ForCausalLM, draft_ids: torch.Tensor, size: Size, init: Path | None) -> Eagle3:
    """Returns a draft to train: new, or with the weights of `init`.

    Its vocabulary may differ from that one's: rows of the lm_head that are new are the base's.
    """
    draft = new_draft(base, draft_ids, size)
    if init is not None:
        tensors = load_file(init / "model.safetensors")
        tensors.pop("t2d")
        theirs = tensors.pop("d2t")
        place = {int(token): row for row, token in enumerate(theirs + torch.arange(len(theirs)))}
        head = draft.lm_head.weight.detach().clone()
        for row, token in enumerate(draft_ids.tolist()):
            if token in place:
                head[row] = tensors["lm_head.weight"][place[token]].float()
        draft.load_state_dict({**tensors, "lm_head.weight": head})
    return draft


def load_draft(path: Path) -> tuple[Eagle3, torch.Tensor]:
    """Returns the draft of a directory, and the tokens of its vocabulary."""
    raw = json.loads((path / "config.json").read_text())
    size = Size(
        vocab=raw["vocab_size"],
        draft_vocab=raw["draft_vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
    )
    tensors = load_file(path / "model.safetensors")
    tensors.pop("t2d")
    draft_ids = tensors.pop("d2t") + torch.arange(size.draft_vocab)
    draft = Eagle3(size)
    draft.load_state_dict(tensors)
    return draft.eval(), draft_ids


def measure_draft(
    base: Qwen3ForCausalLM,
    draft: Eagle3,
    draft_ids: torch.Tensor,
    prompts: list[list[int]],
    new: int,
    steps: int,
) -> dict[str, Any]:
    """Returns the acceptance statistics of greedy chains of `steps` drafts."""
    table = base.get_input_embeddings().weight
    aux_layers = aux_layer_ids(base.config.num_hidden_layers)

    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        out = base(torch.tensor([ids]), output_hidden_states=True)
        return torch.cat([out.hidden_states[i] for i in aux_layers], -1), out.logits[0]

    def drafts(features: torch.Tensor, ids: list[int], pending: int) -> list[int]:
        embeds, found = [table[torch.tensor([[*ids[1:], pending]])]], list[int]()
        for _ in range(steps):
            said = draft.unroll(features, embeds)[-1][0, -1]
            found.append(int(draft_ids[said.argmax()]))
            embeds.append(table[found[-1]].expand_as(embeds[0]))
        return found

    return measure(base, states, drafts, prompts, new)


def main() -> None:
    """Trains or measures the draft."""
    parser = flags(__doc__, "draft", prompts=64, tokens=128)
    parser.add_argument("--base", type=Path, default=DEMO_BASE)
    parser.add_argument("--init", type=Path, help="a draft of the same shape to go on from")
    parser.add_argument(
        "--answers", type=Path, help="JSON of [prompt, answer] ids: read or written"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest it may train")
    parser.add_argument(
        "--draft-steps", type=int, default=3, help="drafts a chain, to measure with"
    )
    args = parser.parse_args()
    size = SMOKE if args.smoke else SIZE
    counts = Counts(4, 16) if args.smoke else Counts()
    torch.manual_seed(args.seed)
    base, tokenizer = open_base(args.base)
    training, held = library(smoke=args.smoke)
    report: dict[str, Any] = {}
    if not args.measure:
        rows, tokens = rows_of(base, tokenizer, training, args.answers, counts, args.seed)
        ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
        draft_ids = draft_vocabulary(tokens, size, ends)
        covered = float(np.isin(tokens, draft_ids.numpy()).mean())
        console.print(f"{len(rows)} conversations; the draft vocabulary has {covered:.1%} of them")
        draft = start(base, draft_ids, size, args.init)
        lr = 3e-3 if args.init is None else FURTHER
        feed = ChatBatches(rows, size, args.seed + 1)
        report["training_steps"] = train_draft(draft, base, feed, draft_ids, lr, args.minutes)
        save_draft(draft, draft_ids, size, args.out)
        note_base(args.out, args.base)
        console.print(f"wrote {args.out}")
    if args.prompts:
        draft, draft_ids = load_draft(args.out)
        prompts = prompts_of(held, tokenizer, 0, args.prompts)
        report |= measure_draft(base, draft, draft_ids, prompts, args.tokens, args.draft_steps)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
