"""Train the demo pair: a small Qwen3 base and an EAGLE-3 draft for it, on the Python standard
library.

Knows how the two committed checkpoints under `recipes/demo/` were made, from text that every
machine with Python has. Knows nothing of engines: what it writes are ordinary Hugging Face
directories.

    python scripts/train_demo_model.py --out recipes/demo            # about an hour on two cores
    python scripts/train_demo_model.py --out /tmp/tiny --smoke       # a minute, to see that it runs

The draft is trained by EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): the head is
unrolled over its own outputs, and every unrolled step is scored against the base's distribution
over the draft vocabulary.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import sysconfig
import time
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_base import note_base
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
MAX_PROMPT = 192  # tokens; longer ones are left out where answers are drafted
STEP_DECAY = 0.8  # weight of unrolled step k is STEP_DECAY ** k, as the paper's trainer has it
console = Console(stderr=True)

Pair = tuple[list[int], list[int]]  # prompt, answer


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run; tokens per step = batch * seq_len."""

    vocab: int = 4096
    draft_vocab: int = 2048
    hidden: int = 256
    intermediate: int = 704
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    seq_len: int = 512
    batch: int = 8
    base_steps: int = 1400
    chat_steps: int = 700
    draft_steps: int = 550
    generated: int = 1536
    unroll: int = 5


SMOKE = Size(
    vocab=512,
    draft_vocab=256,
    hidden=64,
    intermediate=128,
    heads=2,
    kv_heads=1,
    head_dim=32,
    seq_len=128,
    batch=4,
    base_steps=4,
    chat_steps=2,
    draft_steps=3,
    generated=4,
    unroll=3,
)


# ---- text


@cache
def stdlib_files() -> tuple[list[Path], list[Path]]:
    """Returns training and held-out modules of the standard library, split by their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "__pycache__",
    }
    train, held = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped & set(name.parts):
            continue
        bucket = hashlib.sha256(name.as_posix().encode()).digest()[0]
        (held if bucket % 24 == 0 else train).append(path)
    return train, held


def read_source(path: Path) -> str:
    """Returns the text of a module; empty if it cannot be decoded."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""  # a handful of stdlib files declare another encoding; they are no loss


def functions(source: str) -> list[tuple[str, str]]:
    """Returns the functions of a module as (signature with docstring, body)."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    lines = source.splitlines()
    pairs = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        code = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not code or code[0].lineno <= node.lineno or node.end_lineno is None:
            continue
        cut = lambda a, b: "\n".join(x[node.col_offset :] for x in lines[a:b])  # noqa: B023, E731
        head, body = (
            cut(node.lineno - 1, code[0].lineno - 1),
            cut(code[0].lineno - 1, node.end_lineno),
        )
        if 24 <= len(head) <= 1200 and 24 <= len(body) <= 2400:
            pairs.append((head.rstrip(), body.rstrip()))
    return pairs


@cache
def functions_in(path: Path) -> list[tuple[str, str]]:
    """Returns the functions of a file, which is read once."""
    return functions(read_source(path))


def functions_of(files: list[Path]) -> list[tuple[str, str]]:
    """Returns the functions of several files, in their order."""
    return [pair for path in files for pair in functions_in(path)]


def as_chat(head: str, body: str | None = None) -> str:
    """Returns a chat prompt, with the response if `body` is given."""
    prompt = f"<|im_start|>user\n{head}<|im_end|>\n<|im_start|>assistant\n"
    return prompt if body is None else f"{prompt}{body}<|im_end|>\n"


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with Qwen's chat tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> np.ndarray:
    """Returns the concatenated ids of the documents."""
    encoded = tokenizer.backend_tokenizer.encode_batch(documents)
    return np.concatenate([np.array(e.ids, np.int64) for e in encoded])


def conversations(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> list[list[int]]:
    """Returns the ids of prompt and response, tokenized separately as in generation.

    Tokenized together, the prompt's last newline would merge with the response's indentation.
    """
    encode = tokenizer.backend_tokenizer.encode_batch
    prompts, answers = (
        encode([as_chat(h) for h, _ in pairs]),
        encode([f"{b}<|im_end|>\n" for _, b in pairs]),
    )
    return [p.ids + a.ids for p, a in zip(prompts, answers, strict=True)]


class Batches:
    """Random windows of one long token stream, deterministic in the seed."""

    def __init__(self, stream: np.ndarray, size: Size, seed: int) -> None:
        self.stream, self.size, self.rng = stream, size, np.random.default_rng(seed)

    def next(self, extra: int = 1) -> torch.Tensor:  # [batch, seq_len + extra]
        """Returns ids [batch, seq_len + extra]."""
        width = self.size.seq_len + extra
        starts = self.rng.integers(0, len(self.stream) - width, self.size.batch)
        return torch.from_numpy(np.stack([self.stream[s : s + width] for s in starts]))


class ChatBatches:
    """Rows of complete conversations; each row begins with one, like a request."""

    def __init__(self, chats: list[list[int]], size: Size, seed: int) -> None:
        self.chats, self.size, self.rng = chats, size, np.random.default_rng(seed)

    def next(self, extra: int = 1) -> torch.Tensor:  # [batch, seq_len + extra]
        """Returns ids [batch, seq_len + extra]."""
        return torch.tensor([self.row(self.size.seq_len + extra) for _ in range(self.size.batch)])

    def row(self, width: int) -> list[int]:
        """Returns the ids of one row, truncated to `width`."""
        out: list[int] = []
        while len(out) < width:
            out += self.chats[self.rng.integers(len(self.chats))]
        return out[:width]


# ---- the base


def make_base(size: Size, eos: int) -> Qwen3ForCausalLM:
    """Returns an untrained Qwen3 base."""
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def optimizers(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Returns Muon for the inner matrices, and AdamW for embeddings, heads and norms."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    inner = [p for n, p in named if p.ndim == 2 and "embed" not in n and "head" not in n]
    outer = [p for n, p in named if not any(p is q for q in inner)]
    return [
        torch.optim.Muon(
            inner, lr=lr, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: float, steps: int) -> float:
    """Returns the learning-rate factor: 3 % warm-up, constant, linear decay over the last 40 %."""
    return min(1.0, (step + 1) / max(1, 0.03 * steps), (steps - step) / max(1, 0.4 * steps))


def fit(
    what: str, module: nn.Module, steps: int, lr: float, loss_of_step, minutes: float = math.inf
) -> int:
    """Runs `steps` optimizer steps of `loss_of_step(step)` with a progress bar.

    Where `minutes` would run out first, the learning rate goes down with the time instead.
    Returns the number of steps.
    """
    opts, shown, step = optimizers(module, lr), None, 0
    began = last = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=steps)
        while (at := max(step, steps * (time.monotonic() - began) / 60 / minutes)) < steps:
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = lr * schedule(at, steps)
            loss = loss_of_step(step)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            shown = loss.item() if shown is None else 0.97 * shown + 0.03 * loss.item()
            step += 1
            bar.update(task, completed=max(step, at), description=f"{what} loss {shown:.3f}")
            if not console.is_terminal and step % 50 == 0:
                rate = 50 / (time.monotonic() - last)
                last = time.monotonic()
                console.print(f"{what}: step {step}/{steps}, loss {shown:.3f}, {rate:.2f} steps/s")
    return step


def train_base(
    what: str, model: PreTrainedModel, batches: Batches | ChatBatches, steps: int, lr: float
) -> None:
    """Trains a base on next-token prediction."""

    def loss_of_step(step: int) -> torch.Tensor:
        ids = batches.next()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    model.train()
    fit(what, model, steps, lr, loss_of_step)
    model.eval()


@torch.no_grad()
def continue_prompts(
    base: PreTrainedModel,
    prompts: list[list[int]],
    new: int,
    eos: int,
    temperature: float,
    batch: int = 96,
) -> list[list[int]]:
    """Returns the base's own responses, the distribution that the draft must predict."""
    out = []
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 50}
            if temperature
            else {"do_sample": False}
        )
        full = base.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            eos_token_id=eos,
            pad_token_id=0,
            **sampling,
        )
        for row, prompt in zip(full.tolist(), rows, strict=True):
            answer = row[width:]
            out.append(prompt + (answer[: answer.index(eos) + 1] if eos in answer else answer))
        console.print(f"generated {len(out)}/{len(prompts)} answers")
    return out


def prompts_of(
    files: list[Path], tokenizer: PreTrainedTokenizerFast, seed: int, count: int
) -> list[list[int]]:
    """Returns `count` chat prompts from functions of the modules, in random order.

    Overlong ones are skipped.
    """
    heads = [head for head, _ in functions_of(files)]
    order = np.random.default_rng(seed).permutation(len(heads))
    short = (ids for i in order if len(ids := tokenizer(as_chat(heads[i])).input_ids) <= MAX_PROMPT)
    return list(islice(short, count))


def own_answers(base: PreTrainedModel, prompts: list[list[int]], new: int) -> list[Pair]:
    """Returns each prompt with the base's greedy response; very short ones are skipped."""
    rows = sorted(prompts, key=len)
    whole = continue_prompts(base, rows, new, base.config.eos_token_id, 0.0)
    pairs = [(row, full[len(row) :]) for row, full in zip(rows, whole, strict=True)]
    return [(prompt, answer) for prompt, answer in pairs if len(answer) > 2]


# ---- the draft


class RMSNorm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalized x."""
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


def rotate(
    x: torch.Tensor, positions: torch.Tensor, theta: float
) -> torch.Tensor:  # [B, heads, T, D], [B, T]
    """Returns x [B, heads, T, D] with RoPE for positions [B, T]."""
    half = x.shape[-1] // 2
    inv = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None, :, None] * inv
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(
        x.dtype
    )


class Attention(nn.Module):
    """Attention of the EAGLE-3 layer, which reads 2H inputs."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide = 2 * size.hidden
        self.size = size
        self.q_proj = nn.Linear(wide, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)


class MLP(nn.Module):
    """SwiGLU MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The decoder layer of the EAGLE-3 draft."""

    def __init__(self, size: Size, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(size.hidden, eps)
        self.hidden_norm = RMSNorm(size.hidden, eps)
        self.post_attention_layernorm = RMSNorm(size.hidden, eps)
        self.self_attn, self.mlp = Attention(size), MLP(size)


class Eagle3(nn.Module):
    """The published EAGLE-3 draft. Parameter names are those of the checkpoint."""

    def __init__(self, size: Size, eps: float = 1e-6, theta: float = 10000.0) -> None:
        super().__init__()
        self.size, self.theta = size, theta
        self.fc = nn.Linear(3 * size.hidden, size.hidden, bias=False)
        self.midlayer = MidLayer(size, eps)
        self.norm = RMSNorm(size.hidden, eps)
        self.lm_head = nn.Linear(size.hidden, size.draft_vocab, bias=False)

    def project(
        self, embeds: torch.Tensor, hidden: torch.Tensor, offset: int
    ) -> tuple[torch.Tensor, ...]:
        """Returns query, key and value [B, heads, T, D] of an unrolled step."""
        layer, size = self.midlayer, self.size
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], -1)
        split = lambda y, n: y.unflatten(-1, (n, size.head_dim)).transpose(1, 2)  # noqa: E731
        attn, repeats = layer.self_attn, size.heads // size.kv_heads
        q, k = split(attn.q_proj(x), size.heads), split(attn.k_proj(x), size.kv_heads)
        v = split(attn.v_proj(x), size.kv_heads).repeat_interleave(repeats, 1)
        at = torch.arange(x.shape[1])[None] + offset
        return rotate(q, at, self.theta), rotate(k, at, self.theta).repeat_interleave(repeats, 1), v

    def unroll(self, features: torch.Tensor, embeds: list[torch.Tensor]) -> list[torch.Tensor]:
        """Logits [B, T, draft_vocab] of each unrolled step.

        Chain i starts at the true feature of position i; its step k reads embeds[k][:, i] (token
        i+1+k) at rotary position i+k and sees the true slots 0..i and its own earlier steps.
        """
        hidden, logits, keys, values = self.fc(features), [], [], []
        width = features.shape[1]
        hide = torch.full((width, width), float("-inf")).triu(1)
        for step, embed in enumerate(embeds):
            q, k, v = self.project(embed, hidden, step)
            keys.append(k)
            values.append(v)
            scale = 1 / math.sqrt(self.size.head_dim)
            scores = [(q @ keys[0].transpose(-1, -2)).float() * scale + hide]
            scores += [((q * own).sum(-1, keepdim=True)).float() * scale for own in keys[1:]]
            weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
            mixed = weights[..., :width] @ values[0]
            for i, own in enumerate(values[1:]):
                mixed = mixed + weights[..., width + i : width + i + 1] * own
            hidden = hidden + self.midlayer.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2))
            hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def aux_layer_ids(layers: int) -> tuple[int, int, int]:
    """Returns EAGLE-3's default aux layers as hidden_states indices."""
    return 2, layers // 2, layers - 3


def new_draft(base: Qwen3ForCausalLM, draft_ids: torch.Tensor, size: Size) -> Eagle3:
    """Returns an untrained draft, with the base's lm_head."""
    draft = Eagle3(size)
    with torch.no_grad():
        draft.lm_head.weight.copy_(base.lm_head.weight[draft_ids])
    return draft


def train_draft(
    draft: Eagle3,
    base: Qwen3ForCausalLM,
    batches: ChatBatches,
    draft_ids: torch.Tensor,
    lr: float = 3e-3,
    minutes: float = math.inf,
) -> int:
    """Trains the draft. Returns the number of steps."""
    size, table = draft.size, base.get_input_embeddings().weight.detach()
    aux_layers = aux_layer_ids(base.config.num_hidden_layers)
    in_draft = torch.zeros(size.vocab, dtype=torch.bool)
    in_draft[draft_ids] = True

    def loss_of_step(step: int) -> torch.Tensor:
        ids = batches.next(size.unroll)
        width = size.seq_len
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = base(ids, output_hidden_states=True)
        features = torch.cat([out.hidden_states[i] for i in aux_layers], -1)[:, : width - 1]
        embeds = [table[ids[:, 1 + k : width + k]] for k in range(size.unroll)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = draft.unroll(features, embeds)
        total = torch.zeros(())
        for k, mine in enumerate(logits):
            theirs = out.logits[:, 1 + k : width + k].float()
            keep = in_draft[theirs.argmax(-1)]
            target = theirs[..., draft_ids].softmax(-1)
            nll = -(target * mine.float().log_softmax(-1)).sum(-1)
            total = total + STEP_DECAY**k * (nll * keep).sum() / keep.sum()
        return total

    steps = fit("draft", draft, size.draft_steps, lr, loss_of_step, minutes)
    draft.eval()
    return steps


# ---- files


def save_base(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path, eos: list[int]
) -> None:
    """Writes the base as a Hugging Face directory."""
    model.to(torch.bfloat16)
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    model.float()


def save_draft(draft: Eagle3, draft_ids: torch.Tensor, size: Size, path: Path) -> None:
    """Writes the draft in the common layout.

    It has `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t` (offsets) and `t2d` (membership).
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in draft.state_dict().items()}
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(size.vocab, dtype=torch.bool).index_fill_(0, draft_ids, True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "draft_vocab_size": size.draft_vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def draft_vocabulary(stream: np.ndarray, size: Size, always: list[int]) -> torch.Tensor:
    """Returns the most frequent ids, sorted; the ids `always` are included."""
    counts = np.bincount(stream, minlength=size.vocab)
    counts[always] = counts.max() + 1
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: size.draft_vocab]))


def main() -> None:
    """Trains the demo pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="writes OUT/base and OUT/draft")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to test the script itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start-at",
        choices=("base", "chat", "draft"),
        default="base",
        help="take the base found in OUT/base and go on from this stage",
    )
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    torch.manual_seed(args.seed)

    train, held = stdlib_files()
    if args.smoke:
        train = train[:20]
    sources = [s for s in map(read_source, train) if s]
    pairs = [pair for s in sources for pair in functions(s)]
    console.print(
        f"{len(train)} modules for training, {len(held)} held out, {len(pairs)} functions"
    )
    base_dir = args.out / "base"
    if args.start_at == "base":
        tokenizer = train_tokenizer(sources, size.vocab)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(base_dir)
    end, eos = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    chats = [as_chat(h, b) for h, b in pairs]
    rng = np.random.default_rng(args.seed)
    documents = [s + "<|endoftext|>" for s in sources] + [
        chats[i] for i in rng.permutation(len(chats))
    ]
    stream = token_stream(tokenizer, documents)
    chat_ids = conversations(tokenizer, pairs)
    console.print(
        f"{len(stream) / 1e6:.2f} M tokens, {size.batch * size.seq_len * size.base_steps / 1e6:.1f}"
        " M to see"
    )

    if args.start_at == "base":
        base = make_base(size, eos)
        train_base("base", base, Batches(stream, size, args.seed), size.base_steps, 3e-3)
    else:
        base = Qwen3ForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    if args.start_at != "draft":
        train_base("chat", base, ChatBatches(chat_ids, size, args.seed), size.chat_steps, 1e-3)
        save_base(base, tokenizer, base_dir, [eos, end])
    # What is stored is bfloat16; the draft learns from what is stored.
    base.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in base.state_dict().items()})
    base.eval()

    picked = [pairs[i][0] for i in rng.permutation(len(pairs))[: size.generated]]
    heads = sorted((tokenizer(as_chat(h)).input_ids[-192:] for h in picked), key=len)
    new = 16 if args.smoke else 160
    answers = continue_prompts(base, heads[::2], new, eos, 0.0) + continue_prompts(
        base, heads[1::2], new, eos, 0.8
    )
    own = np.concatenate([np.array(answer, np.int64) for answer in answers])
    draft_ids = draft_vocabulary(np.concatenate([stream, own, own]), size, [end, eos])
    # Half of what the draft sees are the base's own answers, half the library's.
    some = [chat_ids[i] for i in rng.permutation(len(chat_ids))[: len(answers)]]
    draft = new_draft(base, draft_ids, size)
    train_draft(draft, base, ChatBatches(answers + some, size, args.seed + 1), draft_ids)
    save_draft(draft, draft_ids, size, args.out / "draft")
    note_base(args.out / "draft", base_dir)
    console.print(f"wrote {base_dir} and {args.out / 'draft'}")


if __name__ == "__main__":
    main()
