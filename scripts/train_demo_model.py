"""Train the demo base: a small Qwen3, on the Python standard library.

Knows how the base under `recipes/demo/` began, from text that every machine with Python has; its
drafts are trained by `edgespec train recipes/training/demo_*.yaml`. Knows nothing of engines: what
it writes is an ordinary Hugging Face directory.

    python scripts/train_demo_model.py --out recipes/demo            # about an hour on two cores
    python scripts/train_demo_model.py --out /tmp/tiny --smoke       # a minute, to see that it runs
"""

from __future__ import annotations

import argparse
import ast
import hashlib
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
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from edgespec.training.optimizer import muon, schedule_of

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
MAX_PROMPT = 192  # tokens; longer ones are left out where answers are drafted
DECAY, WARMUP = 0.05, 0.03  # of weights; the share of a run in which the learning rate rises
STEP_DECAY = 0.8  # weight of unrolled step k is STEP_DECAY ** k, as the paper's trainer has it
console = Console(stderr=True)

Pair = tuple[list[int], list[int]]  # prompt, answer


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run; tokens per step = batch * seq_len."""

    vocab: int = 4096
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


SMOKE = Size(
    vocab=512,
    hidden=64,
    intermediate=128,
    heads=2,
    kv_heads=1,
    head_dim=32,
    seq_len=128,
    batch=4,
    base_steps=4,
    chat_steps=2,
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


def fit(
    what: str, module: nn.Module, steps: int, lr: float, loss_of_step, minutes: float = math.inf
) -> int:
    """Runs `steps` optimizer steps of `loss_of_step(step)` with a progress bar.

    Where `minutes` would run out first, the learning rate goes down with the time instead.
    Returns the number of steps.
    """
    shown, step, began = None, 0, time.monotonic()
    last = began

    def done(step: int) -> float:
        return min(1.0, max(step / steps, (time.monotonic() - began) / 60 / minutes))

    opt = muon(module, lr, DECAY)
    rates = schedule_of(opt, "warmup_stable_decay", WARMUP, done, 1 / steps)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=steps)
        while (share := done(step)) < 1:
            loss = loss_of_step(step)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            shown = loss.item() if shown is None else 0.97 * shown + 0.03 * loss.item()
            step += 1
            rates.step()
            bar.update(task, completed=steps * share, description=f"{what} loss {shown:.3f}")
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


def main() -> None:
    """Trains the demo pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="writes OUT/base")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to test the script itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start-at",
        choices=("base", "chat"),
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
    train_base("chat", base, ChatBatches(chat_ids, size, args.seed), size.chat_steps, 1e-3)
    save_base(base, tokenizer, base_dir, [eos, end])
    console.print(f"wrote {base_dir}")


if __name__ == "__main__":
    main()
