"""From a base and conversations to a draft's directory.

Knows the order of the work behind `job`, and no method: those stand in `table`. The work directory
.NAME.train beside the output keeps checkpoints: the same command goes on from the last one.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from edgespec.artifacts import atomic, json_files
from edgespec.artifacts.work_lock import LOCK, locked
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.errors import BuildError, EnvironmentProblem, OutputError, UnsupportedModel
from edgespec.methods.specdec_bench import acceptance_rate
from edgespec.modules.base_model import load_base, load_ends
from edgespec.training import doctor, files
from edgespec.training.acceptance import (
    Acceptance,
    Answer,
    answers_of,
    greedy,
    measure,
    surprise,
)
from edgespec.training.data import Batches
from edgespec.training.job import Job, aux_layers_of
from edgespec.training.ranks import ALONE, Ranks
from edgespec.training.recipe import REPORT
from edgespec.training.row import Task
from edgespec.training.trainer import (
    UNLIMITED,
    Objective,
    Run,
    last_checkpoint,
    timed_steps,
    trained,
)

RUN, LOGS = "run.json", "runs"
USUAL_EPOCHS, DRY_STEPS = 3, 10
MEMORY_PER_WEIGHT = 16  # bytes: weight, gradient and two states
STATES_PER_WEIGHT = 12  # bytes in a checkpoint: the weight and at most two states, in float32
DISK_FACTOR = 1.2
Stopping = Callable[[], AbstractContextManager[Callable[[], bool]]]


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training came to. Without `acceptance` it was stopped, and goes on another time."""

    directory: Path
    steps: int
    seconds: float
    acceptance: Acceptance | None = None
    images: bool = False  # whether the data had some


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a training needs, measured over a few real steps."""

    draft_weights: int
    num_conversations: int
    num_tokens: int  # of an epoch
    steps: int | None  # None: time ends it
    seconds_per_step: float
    tokens_per_second: float
    seconds: float | None
    memory_bytes: int  # at most, so far
    disk_bytes: int


def train(job: Job, stopping: Stopping, ranks: Ranks = ALONE) -> Trained:
    """Trains, measures and writes the draft to `job.out`; where it is stopped, checkpoints stay.
    Of several processes the first writes."""
    made = not job.work_dir.parent.exists()
    with ExitStack() as held:
        ranks.agreed(lambda: begin(job, held, ranks) if ranks.first else None)
        try:
            objective, run, batches = prepared(job, ranks)
            with stopping() as stop:
                run.stop = stop
                steps = trained(objective, run, batches)
            if run.stopped:
                return Trained(job.work_dir, steps, run.seconds())
            found = finish(job, objective, run, steps)
        finally:
            if ranks.first and last_checkpoint(job.work_dir) is None:
                forget(job.work_dir)
                if made:
                    atomic.remove_if_empty(job.work_dir.parent)
        if ranks.first:
            forget(job.work_dir)
    return Trained(job.out, steps, run.seconds(), found, job.pictures is not None)


def begin(job: Job, held: ExitStack, ranks: Ranks) -> None:
    """Takes the work directory, as long as `held` is open. Raises OutputError."""
    refuse_full_disk(job.out, disk_bytes(job))
    refuse_full_memory(job)
    held.enter_context(locked(job.work_dir))
    refuse_other_run(job, ranks)


def measured_steps(job: Job) -> Sizes:
    """What the training would take, from a few real steps."""
    objective, run, batches = prepared(job, ALONE, answers=False)
    seconds = timed_steps(objective, run, batches, min(DRY_STEPS, len(batches)))
    each, recipe = median(seconds), job.recipe
    tokens = job.rows.num_tokens / batches.per_epoch
    each *= recipe["training.gradient_accumulation_steps"]
    timed = run.max_steps == UNLIMITED
    limit = None if run.minutes is None else run.minutes * 60
    total = None if timed else each * run.max_steps
    return Sizes(
        draft_weights=job.num_weights,
        num_conversations=len(job.rows.rows),
        num_tokens=job.rows.num_tokens,
        steps=None if timed else run.max_steps,
        seconds_per_step=each,
        tokens_per_second=tokens * recipe["training.gradient_accumulation_steps"] / each,
        seconds=min(s for s in (total, limit) if s is not None),
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        disk_bytes=disk_bytes(job),
    )


def disk_bytes(job: Job) -> int:
    """What checkpoints and the draft take."""
    return job.num_weights * (2 * STATES_PER_WEIGHT + 8) + job.files.extra_bytes(job.out)


def prepared(job: Job, ranks: Ranks, *, answers: bool = True) -> tuple[Objective, Run, Batches]:
    """Base, draft and data, ready to train."""
    recipe = job.recipe
    device = f"cuda:{ranks.local}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(recipe["training.seed"])
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    job.progress.start("load the base", 0)
    if ranks.world > 1 and job.pictures is not None:
        raise ranks.raised(
            UnsupportedModel("the data has images, which one process trains on.", "Start one.")
        )
    dtype: Any = torch.float32 if device == "cpu" else "auto"
    if job.dump is None:
        base = load_base(job.base.path, device, dtype, images=job.pictures is not None)
    else:
        base = load_ends(job.base.path, device, dtype)
    base = base.requires_grad_(False)
    table = base.get_input_embeddings().weight.detach()
    ids = None if job.draft_ids is None else job.draft_ids.to(device)
    aux_layers = aux_layers_of(job.config, job.model)
    draft = new_module(job, base, table, ids).to(device)
    if "embed_tokens.weight" in job.files.names:
        table = job.files.beside[job.files.names["embed_tokens.weight"]].to(device)
    num_top = 0 if job.dump is None else job.dump.num_top
    task = Task(recipe, job.config, base, table.float(), aux_layers, ids, device, ranks, num_top)
    batches, max_steps = batches_of(job, ranks)
    held = held_out(job, base, device, ranks) if answers else ()
    facts = job.facts
    if answers and ranks.first:
        found = doctor.Facts(surprise=surprise(task, job.answered))
        facts = replace(facts, surprise=found.surprise)
        for finding in doctor.findings(found):
            job.note(str(finding))
    row = job.row
    if recipe["training.engine"] == "modelopt":
        assert row.modelopt is not None
        row = replace(row, loss=row.modelopt(draft, task))
    run = Run(
        row, task, job.files, held, job.work_dir, getattr(torch, job.model.dtype), max_steps,
        recipe["training.minutes"], job.progress, job.note, facts, job.pictures,
    )  # fmt: skip
    return Objective(draft, row, task), run, batches


def held_out(job: Job, base: Any, device: str, ranks: Ranks) -> Sequence[Answer]:
    """What acceptance is measured with: the base's answers, or those of a dump."""
    if job.dump is not None:
        held: Sequence[Answer] = job.dump.answers
    else:
        job.progress.start("answers of the base", 0)
        new = job.recipe["validation.max_new_tokens"]
        answering = greedy(base, new, job.stops, device, job.pictures, ranks)
        held = answers_of(job.questions, job.template, answering)
    if not held:
        raise ranks.raised(
            BuildError(
                "the base answers none of the prompts to measure with by two tokens.",
                "Give prompts that it answers as validation.data_path.",
            )
        )
    return held


def new_module(job: Job, base: Any, table: torch.Tensor, ids: torch.Tensor | None) -> Any:
    """The draft, with weights of `init` or new ones."""
    draft = job.row.module(job.config)
    if not job.config.own_head:
        draft.lm_head = base.lm_head
    if job.init is not None:
        named, names = job.row.names(job.init, job.config)
        own = draft.state_dict().keys()
        found = {key: files.tensor_of(named, n) for key, n in names.items() if key in own}
        files.load(draft, found)
        return draft
    with torch.no_grad():
        if job.row.begin is not None:
            job.row.begin(draft, base, job.base, job.model)
        elif job.config.own_head:
            head = base.lm_head.weight
            draft.lm_head.weight.copy_(head if ids is None else head[ids])
        else:
            stack = getattr(base.model, "language_model", base.model)
            draft.norm.weight.copy_(stack.norm.weight + job.model.decoder.norm.unit_offset)
    return draft


def batches_of(job: Job, ranks: Ranks) -> tuple[Batches, int]:
    """The data in batches of all processes, and how many steps are made of it."""
    recipe, sample = job.recipe, job.row.sample
    size, seed = recipe["training.per_device_train_batch_size"], recipe["training.seed"]
    each = recipe["training.gradient_accumulation_steps"]
    more = None if sample is None else lambda rng, rows: sample(recipe, rng, rows)
    states, world = None if job.dump is None else job.dump.batch, ranks.world
    batches = Batches(
        job.rows.rows, size * world, seed, 0, more, world, job.pictures, states
    )  # fmt: skip
    epochs, steps = recipe["training.num_train_epochs"], recipe["training.max_steps"]
    if steps <= 0:
        steps = UNLIMITED
        if epochs is not None or recipe["training.minutes"] is None:
            steps = max(1, round((epochs or USUAL_EPOCHS) * batches.per_epoch / each))
    batches.count = steps * each
    return batches, steps


def finish(job: Job, objective: Objective, run: Run, steps: int) -> Acceptance:
    """Measures the best draft as it is written, reads it back and moves it to its place."""
    best = run.best_dir(run.best_step)
    job.files.read(best, objective.draft)
    job.progress.start("measure", 0)
    found = measure(run.row, objective.draft, run.task, run.answers, run.pictures)
    if not run.task.ranks.first:
        return found
    behind = doctor.Facts(lengths=[point["acceptance_length"] for point in run.curve])
    for finding in doctor.findings(behind):
        job.note(str(finding))
    report = {
        "method": job.recipe.method,
        "base": {"name": job.base.path.resolve().name, "identity": job.base.identity()},
        "data": dict(zip(("name", "sha256"), job.data, strict=True)),
        "recipe": job.recipe.shaping(),
        "steps": steps,
        "best_step": run.best_step,
        "seconds": round(run.seconds(), 1),
        "acceptance": {
            "length": round(found.length, 4),
            "per_position": [round(share, 4) for share in found.per_position],
            "num_tokens": found.num_tokens,
            "num_steps": found.num_steps,
            "num_prompts": len(run.answers),
            "draft_len": found.draft_len,
        },
        "acceptance_rate": acceptance_rate(found.emitted),
        "curve": run.curve,
        "findings": [
            asdict(found) for found in doctor.findings(replace(run.facts, lengths=behind.lengths))
        ],
    }
    with atomic.writing(job.out), atomic.staged_directory(job.out) as staging:
        job.files.complete(best, staging)
        json_files.write_json(staging / REPORT, report)
        assert detect(Checkpoint(staging)) is not None
        if (logs := job.work_dir / LOGS).is_dir():  # of TensorBoard
            shutil.copytree(logs, staging / LOGS)
        atomic.sync_directory(staging)
    return found


# The work directory


def refuse_other_run(job: Job, ranks: Ranks) -> None:
    """Raises OutputError where checkpoints are of another base, data or recipe, with the key."""
    wanted = {
        "method": job.recipe.method,
        "base": job.base.identity(job.progress),
        "data": job.data[1],
        "init": job.init.identity() if job.init else None,
        "number of processes": ranks.world,
        **job.recipe.shaping(),
    }
    path = job.work_dir / RUN
    if last_checkpoint(job.work_dir) is not None:
        theirs = json_files.read_json(path)
        for key, value in wanted.items():
            if theirs.get(key) != value:
                raise OutputError(
                    f"an unfinished training of {job.out} has another {key}:"
                    f" {theirs.get(key)!r}, not {value!r}.",
                    "Repeat its command to finish it, choose another `output_dir`, or start over:"
                    f" rm -r {job.work_dir}",
                )
    with atomic.writing(job.work_dir):
        json_files.write_json(path, wanted)


def forget(work_dir: Path) -> None:
    """Removes a work directory. The lock goes last: from then on the next run may take it."""
    for path in work_dir.iterdir():
        if path.name != LOCK:
            atomic.remove_whole(path)
    (work_dir / LOCK).unlink(missing_ok=True)
    work_dir.rmdir()


def refuse_full_disk(target: Path, needed_bytes: int) -> None:
    """Raises OutputError where a training's files would not fit."""
    directory = next(parent for parent in target.absolute().parents if parent.exists())
    free, wanted = shutil.disk_usage(directory).free, round(DISK_FACTOR * needed_bytes)
    if free < wanted:
        raise OutputError(
            f"{directory} has {free / 1e9:.1f} GB free; checkpoints need {wanted / 1e9:.1f} GB.",
            "Free some space, or choose another `output_dir`.",
        )


def refuse_full_memory(job: Job) -> None:
    """Raises EnvironmentProblem where base, draft and a batch's logits alone would not fit. What
    else a step takes is measured by a dry run."""
    recipe, cuda = job.recipe, torch.cuda.is_available()
    weights = sum(int(np.prod(tensor.shape)) for tensor in job.base.tensors.values())
    if job.dump is not None:  # its ends alone
        weights = job.model.vocab_size * job.model.decoder.hidden_size
    tokens = recipe["training.per_device_train_batch_size"] * max(
        len(row.ids) for row in job.rows.rows
    )
    base = weights * (getattr(torch, job.model.dtype).itemsize if cuda else 4)
    draft, logits = job.num_weights * MEMORY_PER_WEIGHT, tokens * job.model.vocab_size * 8
    here = 1 if cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = here * (base + draft + logits)
    free = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
    if free < needed:
        parts = f"base {base / 1e9:.1f}, draft {draft / 1e9:.1f}, logits {logits / 1e9:.1f}"
        raise EnvironmentProblem(
            f"training needs at least {needed / 1e9:.1f} GB of memory ({parts}"
            f"{f', for each of {here} processes' if here > 1 else ''}); {free / 1e9:.1f} GB are"
            " free.",
            "Lower training.per_device_train_batch_size or training.training_seq_len, or train on a"
            " machine with more.",
        )
