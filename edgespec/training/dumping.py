"""The hidden states that a training would read of its base, written to disk once.

Knows a job, and the order of the work: sizes, then what all ranks agree on, then shards, each whole
or not at all. What computes the states is an argument: the base in torch, or an engine
(`pipeline.engine_states`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save

from edgespec.artifacts import atomic, json_files
from edgespec.errors import BuildError, LimitError, OptionError, OutputError, UnsupportedModel
from edgespec.modules.base_model import hidden_states, load_base, logits_of
from edgespec.training import dumps
from edgespec.training.acceptance import Answering, answers_of, greedy
from edgespec.training.data import Row
from edgespec.training.dumps import ANSWERS, AUX, DUMP, FINAL, ROWS, TOP, TOP_IDS, Widths
from edgespec.training.job import Job, aux_layers_of
from edgespec.training.offline import made_of, widths_of

Tensor = torch.Tensor
SHARD_BYTES = 128 << 20
SPARE = 1.02  # of the disk, for headers and what the file system adds


class Source(Protocol):
    """What computes the states of texts. `made_of` names it in dump.json."""

    @property
    def made_of(self) -> Mapping[str, Any]:
        """What it is."""

    @property
    def answering(self) -> Answering:
        """Its greedy answers."""

    def read(self, ids: Sequence[int], num_top: int) -> Mapping[str, Any]:
        """The states of a text as tensors or arrays, by the names of `dumps`: with `num_top`,
        logits and not the last state."""

    def close(self) -> None:
        """Frees it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one process of several writes: shards whose number is its rank, modulo their number."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise OptionError(
                f"`rank` {self.rank}: with `world_size` {self.world_size} ranks are"
                f" 0..{self.world_size - 1}.",
                "Start one process for each of them.",
            )

    def has(self, shard: int) -> bool:
        """Whether it writes a shard."""
        return shard % self.world_size == self.rank


@dataclass(frozen=True, slots=True)
class DumpSizes:
    """What a dump takes, in bytes: of this rank, and of it what is not there yet."""

    num_conversations: int
    num_tokens: int
    token_bytes: int
    total_bytes: int  # of all ranks
    own_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is written of a job, and how it is cut into shards."""

    job: Job
    part: Part
    widths: Widths
    shards: tuple[int, ...]  # the first conversation of each, and the end

    @classmethod
    def of(cls, job: Job, num_top: int, part: Part) -> Plan:
        """The plan of a job; `num_top` logits take the place of the last state."""
        if job.pictures is not None:
            raise UnsupportedModel(
                "the data has images, whose hidden states are not dumped.", "Train without a dump."
            )
        widths = widths_of(job.config, job.model, num_top)
        firsts, size = [0], 0
        for number, row in enumerate(job.rows.rows):
            size += len(row.ids) * widths.token_bytes
            if size >= SHARD_BYTES or number == len(job.rows.rows) - 1:
                firsts.append(number + 1)
                size = 0
        return cls(job, part, widths, tuple(firsts))

    def sizes(self) -> DumpSizes:
        """What it takes, with answers of full length."""
        rows, each = self.job.rows.rows, self.widths.token_bytes
        per_shard = [
            sum(len(row.ids) for row in rows[low:high]) * each
            for low, high in pairwise(self.shards)
        ]
        new = self.job.recipe["validation.max_new_tokens"]
        answered = sum(
            (len(q.ids) + new) * (1 + len(q.later)) for q in self.job.questions
        ) * self.answer_bytes  # fmt: skip
        own = [size for n, size in enumerate(per_shard) if self.part.has(n)]
        left = [per_shard[n] for n in self.left()]
        first = answered if self.part.rank == 0 else 0
        there = (self.job.out / ANSWERS).exists()
        return DumpSizes(
            num_conversations=len(rows),
            num_tokens=self.job.rows.num_tokens,
            token_bytes=each,
            total_bytes=sum(per_shard) + answered,
            own_bytes=sum(own) + first,
            left_bytes=sum(left) + (0 if there else first),
        )

    @property
    def answer_bytes(self) -> int:
        """Of a token of an answer: its aux hidden states alone."""
        return Widths(self.widths.aux, 0, 0, self.widths.dtype).token_bytes

    def left(self) -> list[int]:
        """This rank's shards that are not there."""
        missing = dumps.missing_shards(self.job.out, len(self.shards) - 1)
        return [number for number in missing if self.part.has(number)]


def refuse_size(plan: Plan, sizes: DumpSizes, max_bytes: int | None) -> None:
    """Raises LimitError for a dump beyond `max_bytes`, of all ranks, and OutputError where the disk
    has no room for what this rank has left to write."""
    if max_bytes is not None and sizes.total_bytes > max_bytes:
        fit = max(1, int(sizes.num_conversations * max_bytes / sizes.total_bytes))
        raise LimitError(
            f"the dump takes {sizes.total_bytes / 1e9:.3g} GB, `max_disk` is"
            f" {max_bytes / 1e9:.3g} GB.",
            f"Raise it, or write data.sample_size={fit}, which about fits; fewer states are kept"
            " with `topk_logits`.",
        )
    out = plan.job.out.absolute()
    directory = next(path for path in (out, *out.parents) if path.exists())
    free, wanted = shutil.disk_usage(directory).free, round(SPARE * sizes.left_bytes)
    if free < wanted:
        raise OutputError(
            f"{directory} has {free / 1e9:.3g} GB free; the dump needs {wanted / 1e9:.3g} GB.",
            "Free some space, choose another `output_dir`, or write a smaller data.sample_size.",
        )


def dump(plan: Plan, source: Source) -> int:
    """Writes what is missing of a rank's part; the number of shards that were written. Raises
    OutputError for a directory of something else."""
    job, out = plan.job, plan.job.out
    with atomic.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with atomic.locked(out):
            agree(plan, source)
        if plan.part.rank == 0 and not (out / ANSWERS).exists():
            write_answers(plan, source)  # first, so that what is wrong with a prompt comes first
        written = 0
        left = plan.left()
        job.progress.start(
            "hidden states", sum(len(r.ids) for n in left for r in plan_rows(plan, n))
        )
        for number in left:
            tensors: dict[str, Tensor] = {}
            for index, row in enumerate(plan_rows(plan, number), plan.shards[number]):
                read = source.read(row.ids.tolist(), plan.widths.top)
                for name, tensor in stored(read, plan.widths, f"conversation {index + 1}"):
                    tensors[f"{index}.{name}"] = tensor
                job.progress.advance(len(row.ids))
            atomic.replace_file(out / dumps.shard_name(number), save(tensors))
            written += 1
    return written


def plan_rows(plan: Plan, number: int) -> tuple[Row, ...]:
    """The conversations of a shard."""
    return plan.job.rows.rows[plan.shards[number] : plan.shards[number + 1]]


def agree(plan: Plan, source: Source) -> None:
    """Writes what all ranks have in common, or compares it. Raises OutputError where the directory
    has another dump."""
    job, out = plan.job, plan.job.out
    layers = aux_layers_of(job.config, job.model)
    made = made_of(job.base, job.template, job.progress)
    data = dict(zip(("name", "sha256"), job.data, strict=True))
    facts = dumps.facts(
        job.recipe, {**made, "data": data, "source": dict(source.made_of)}, plan.widths, layers,
        plan.shards,
    )  # fmt: skip
    path = out / DUMP
    if path.exists():
        theirs = flat(json_files.read_json(path))
        for key, value in flat(facts).items():
            if theirs.get(key) != value:
                raise OutputError(
                    f"{out} has a dump with another {key}: {theirs.get(key)!r}, not {value!r}.",
                    "Repeat its command to finish it, or choose another `output_dir`.",
                )
        return
    rows = job.rows.rows
    tensors = {
        "ids": torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int32)),
        "predicts": torch.from_numpy(np.concatenate([row.predicts for row in rows])),
        "lengths": torch.tensor([len(row.ids) for row in rows]),
    }
    atomic.replace_file(out / ROWS, save(tensors))
    json_files.write_json(path, facts)


def flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What dump.json says, with the recipe's keys among the others."""
    recipe = facts.get("recipe")
    return {**facts, "recipe": None, **(recipe if isinstance(recipe, dict) else {})}


def write_answers(plan: Plan, source: Source) -> None:
    """The answers to the held-out prompts. Raises BuildError where there are none."""
    job = plan.job
    job.progress.start("answers of the base", 0)
    answers = answers_of(job.questions, job.template, source.answering)
    if not answers:
        raise BuildError(
            "the base answers none of the prompts to measure with by two tokens.",
            "Give prompts that it answers as validation.data_path.",
        )
    tensors = {
        "prompt_lens": torch.tensor([answer.prompt_len for answer in answers]),
        "places": torch.tensor([answer.place for answer in answers]),
    }
    for number, answer in enumerate(answers):
        read = source.read(answer.ids, plan.widths.top)
        found = dict(stored(read, plan.widths, f"answer {number + 1}"))
        tensors[f"{number}.{AUX}"] = found[AUX]
        tensors[f"{number}.ids"] = torch.tensor(answer.ids)
    atomic.replace_file(job.out / ANSWERS, save(tensors))


def stored(read: Mapping[str, Any], widths: Widths, what: str) -> Iterator[tuple[str, Tensor]]:
    """States as they are written. Raises BuildError where they are no numbers."""
    for name, (width, dtype) in widths.tensors().items():
        tensor = torch.as_tensor(read[name]).to("cpu", getattr(torch, dtype))
        assert tensor.shape[1] == width, (name, tensor.shape, width)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise BuildError(
                f"{name} of {what} has numbers that are none (NaN or Inf).",
                "Check the base: edgespec check, or leave the conversation out.",
            )
        yield name, tensor.contiguous()


class TorchSource:
    """The base in torch."""

    def __init__(self, job: Job) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype: Any = "auto" if device == "cuda" else torch.float32
        job.progress.start("load the base", 0)
        self.base = load_base(job.base.path, device, dtype).requires_grad_(False)
        self.device = device
        self.aux_layers = aux_layers_of(job.config, job.model)
        self.answering = greedy(
            self.base, job.recipe["validation.max_new_tokens"], job.stops, device
        )
        self.made_of: Mapping[str, Any] = {"kind": "torch"}

    @torch.no_grad()
    def read(self, ids: Sequence[int], num_top: int) -> Mapping[str, Tensor]:
        """One pass over a text."""
        row = torch.tensor([[*ids]], device=self.device)
        aux, final = (states[0] for states in hidden_states(self.base, self.aux_layers, row))
        if not num_top:
            return {AUX: aux, FINAL: final}
        top = logits_of(self.base, final).float().topk(num_top, dim=-1)
        return {AUX: aux, TOP: top.values, TOP_IDS: top.indices}

    def close(self) -> None:
        """Nothing is open."""
