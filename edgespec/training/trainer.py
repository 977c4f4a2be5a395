"""transformers' Trainer around a draft: loop, checkpoints and resuming are its own.

A checkpoint is a draft's directory in float32 with the states of optimizer, schedule and random
numbers; the base is not in it. `state.json` is written last, once all else is on the disk: a
checkpoint without it is not whole. Of several processes the first writes, and says when it is over.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from edgespec.artifacts import atomic, json_files
from edgespec.errors import BuildError, BundleError
from edgespec.progress import Progress
from edgespec.training.acceptance import Answer, measure
from edgespec.training.data import Batches
from edgespec.training.doctor import Facts
from edgespec.training.files import DraftFiles
from edgespec.training.optimizer import optimizer_of, schedule_of
from edgespec.training.pictures import Pictures
from edgespec.training.row import Batch, Task, TrainRow

STATE, MILESTONES, PARTS = "state.json", 10, 1000
MAX_WARMUP = 0.5  # of a run


class Objective(nn.Module):
    """A draft whose forward is its loss."""

    accepts_loss_kwargs = False  # else the loss of several processes would be multiplied

    def __init__(self, draft: nn.Module, row: TrainRow, task: Task) -> None:
        super().__init__()
        self.draft, self.row, self.task = draft, row, task
        self.sum, self.count = 0.0, 0  # of losses since they were last shown

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        """The loss of a batch."""
        task, rest = self.task.of(batch)
        with task.cast():
            loss = self.row.loss(self.draft, task, rest)
        self.sum, self.count = self.sum + float(loss.detach()), self.count + 1
        return {"loss": loss}

    def shown(self) -> float:
        """The mean loss since the last call."""
        mean = self.sum / max(1, self.count)
        self.sum, self.count = 0.0, 0
        return mean


@dataclass(slots=True)
class Run:
    """What one training needs beside draft and data, and what has become of it."""

    row: TrainRow
    task: Task
    files: DraftFiles
    answers: Sequence[Answer]
    work_dir: Path
    dtype: torch.dtype  # of the files that are kept
    max_steps: int
    minutes: float | None
    progress: Progress
    note: Callable[[str], None]
    facts: Facts
    pictures: Pictures | None = None
    stop: Callable[[], bool] = lambda: False
    elapsed_s: float = 0.0  # in earlier runs
    began_s: float = field(default_factory=time.monotonic)
    agreed_s: float = 0.0  # that it has trained before the step, as all processes have it
    best: float = 0.0  # acceptance length
    best_step: int | None = None
    stopped: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)  # what was measured, and when
    shown: int = 0  # parts of the progress bar

    def seconds(self) -> float:
        """How long it has trained, this run and earlier ones."""
        return self.elapsed_s + time.monotonic() - self.began_s

    def done(self, step: int) -> float:
        """The share of the run that is over: by steps or by time, whichever is further."""
        timed = self.agreed_s / 60 / self.minutes if self.minutes else 0.0
        return min(1.0, max(step / self.max_steps, timed))

    def best_dir(self, step: int | None) -> Path:
        """Where the draft of a step is kept."""
        return self.work_dir / f"best-{step}"

    def warmup(self) -> float:
        """The share of the run in which the learning rate rises."""
        recipe = self.task.recipe
        steps: float | None = recipe["training.warmup_steps"]
        if steps is None or (self.minutes and self.max_steps == UNLIMITED):
            return float(recipe["training.warmup_ratio"])
        share = steps / self.max_steps if steps >= 1 else steps
        if share > MAX_WARMUP:
            self.note(f"training.warmup_steps {steps} of {self.max_steps} are cut to half of them")
        return min(MAX_WARMUP, share)


UNLIMITED = 10**7  # steps of a run that time ends


class Keeper(TrainerCallback):
    """Says when to measure, to save and to stop."""

    def __init__(self, run: Run) -> None:
        self.run, self.milestone = run, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begins the clock."""
        self.run.began_s = time.monotonic()
        self.milestone = int(MILESTONES * self.run.done(state.global_step))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Agrees on the time and on stopping. Raises BuildError for gradients that are not
        numbers, before they reach the weights."""
        run, ranks = self.run, self.run.task.ranks
        grads = [p.grad.sum() for p in more["model"].parameters() if p.grad is not None]
        broken = not torch.isfinite(torch.stack(grads)).all()
        seconds = run.seconds() if ranks.first else 0.0
        run.agreed_s, stopped, anywhere = ranks.most(seconds, run.stop(), broken)
        run.stopped = bool(stopped)
        if anywhere:
            kept = last_checkpoint(run.work_dir)
            error = BuildError(
                f"the gradient of step {state.global_step + 1} is not a number.",
                "Begin anew with a smaller training.learning_rate"
                + (f", from the last good checkpoint: `init` {kept}" if kept else "."),
            )
            raise ranks.raised(error)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Sets what comes next."""
        run, step = self.run, state.global_step
        done = run.done(step)
        parts = int(PARTS * done)
        run.progress.advance(parts - run.shown)
        run.shown = parts
        every = run.task.recipe["training.save_steps"]
        due = int(MILESTONES * done) > self.milestone or (every and step % every == 0)
        self.milestone = int(MILESTONES * done)
        control.should_evaluate = (due or done >= 1) and not run.stopped
        control.should_save = control.should_evaluate or run.stopped
        control.should_training_stop = done >= 1 or run.stopped


class DraftTrainer(Trainer):
    """The Trainer of a draft."""

    def __init__(self, objective: Objective, run: Run, batches: Batches) -> None:
        recipe = run.task.recipe
        args = TrainingArguments(
            output_dir=str(run.work_dir),
            max_steps=run.max_steps,
            per_device_train_batch_size=1,  # an item of the data is a batch
            gradient_accumulation_steps=recipe["training.gradient_accumulation_steps"],
            max_grad_norm=recipe["training.max_grad_norm"],
            seed=recipe["training.seed"],
            use_cpu=torch.device(run.task.device).type == "cpu",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            logging_strategy="no",
            save_strategy="no",  # Keeper says when
            report_to=recipe["training.report_to"],
            disable_tqdm=True,
        )
        super().__init__(
            model=objective,
            args=args,
            train_dataset=batches,
            data_collator=lambda items: items[0],
            callbacks=[Keeper(run)],
        )
        self.remove_callback(PrinterCallback)
        self.objective: Objective = objective
        self.run: Run = run
        self.batches: Batches = batches

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.batches)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """That of the recipe."""
        self.optimizer = optimizer_of(self.objective.draft, self.run.task.recipe)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """That of the recipe, by steps or by time."""
        kind, run = self.run.task.recipe["training.lr_scheduler_type"], self.run
        assert self.optimizer is not None
        self.lr_scheduler = schedule_of(
            self.optimizer, kind, run.warmup(), run.done, 1 / run.max_steps
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def evaluate(self, *args: Any, **more: Any) -> dict[str, float]:
        """Measures acceptance, and keeps the draft that has the most."""
        run, step = self.run, self.state.global_step
        found = measure(run.row, self.objective.draft, run.task, run.answers, run.pictures)
        losses = run.task.ranks.gathered(self.objective.shown())
        loss, minutes = sum(losses) / len(losses), run.seconds() / 60
        run.note(
            f"step {step}, {minutes:.1f} min: loss {loss:.3f}, acceptance length {found.length:.3f}"
        )
        self.log({"loss": loss, "eval_acceptance_length": found.length})
        run.curve.append(
            {"step": step, "minutes": minutes, "loss": loss, "acceptance_length": found.length}
        )
        if found.length > run.best or run.best_step is None:
            run.best, run.best_step = found.length, step
            run.task.ranks.agreed(self.keep_best)
        self.control.should_evaluate = False
        return {"eval_acceptance_length": found.length}

    def keep_best(self) -> None:
        """Writes the draft as it is, which has the most acceptance so far."""
        run = self.run
        directory = run.best_dir(run.best_step)
        if run.task.ranks.first:
            shutil.rmtree(directory, ignore_errors=True)
            with atomic.writing(directory):
                run.files.write(directory, self.objective.draft.state_dict(), run.dtype)
                atomic.sync_directory(directory)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.run.task.ranks.world == 1:  # batches draw theirs; several would write several
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.run.task.ranks.world == 1:
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # transformers 5.14 loads to cpu:0 where several processes have CPUs, which torch refuses
        for part, name in ((self.optimizer, "optimizer"), (self.lr_scheduler, "scheduler")):
            if checkpoint is not None and part is not None:
                path, device = Path(checkpoint) / f"{name}.pt", self.run.task.device
                part.load_state_dict(torch.load(path, map_location=device, weights_only=True))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if not self.run.task.ranks.first:
            return
        run, step = self.run, self.state.global_step
        directory = run.work_dir / f"checkpoint-{step}"
        state: dict[str, Any] = {
            "elapsed_s": run.seconds(),
            "best": run.best,
            "best_step": run.best_step,
            "curve": run.curve,
        }
        atomic.sync_directory(directory)
        json_files.write_json(directory / STATE, state)
        atomic.sync_directory(directory)
        atomic.sync_directory(run.work_dir)
        remove_others(run.work_dir, {directory.name, run.best_dir(run.best_step).name})

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        self.run.files.write(Path(output_dir), self.objective.draft.state_dict(), torch.float32)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.run.files.read(Path(resume_from_checkpoint), self.objective.draft)


def last_checkpoint(work_dir: Path) -> Path | None:
    """The newest checkpoint that is whole."""
    whole = [path.parent for path in work_dir.glob(f"checkpoint-*/{STATE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def remove_others(work_dir: Path, kept: set[str]) -> None:
    """Removes checkpoints and kept drafts but those that are named."""
    for path in (*work_dir.glob("checkpoint-*"), *work_dir.glob("best-*")):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def trained(objective: Objective, run: Run, batches: Batches) -> int:
    """Trains, from the last checkpoint where there is one; the number of steps that are done. The
    best draft stands in `run.best_dir`."""
    checkpoint = last_checkpoint(run.work_dir)
    if checkpoint is not None:
        state = json_files.read_json(checkpoint / STATE)
        try:
            run.elapsed_s, run.best = float(state["elapsed_s"]), float(state["best"])
            run.best_step, run.curve = state["best_step"], [*state["curve"]]
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(
                f"{checkpoint / STATE} is damaged.", f"Start over: rm -r {run.work_dir}"
            ) from error
        run.note(f"goes on from step {checkpoint.name.rpartition('-')[2]}")
    run.agreed_s = run.elapsed_s
    kept = {run.best_dir(run.best_step).name, checkpoint.name if checkpoint else ""}
    if run.task.ranks.first:
        remove_others(run.work_dir, kept)
    run.task.ranks.agreed(lambda: None)
    trainer = DraftTrainer(objective, run, batches)
    run.progress.start("train", PARTS)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return int(trainer.state.global_step)


def timed_steps(objective: Objective, run: Run, batches: Batches, count: int) -> list[float]:
    """Seconds of so many real steps, whose weights nobody keeps."""
    optimizer, seconds = optimizer_of(objective.draft, run.task.recipe), []
    run.progress.start("steps", count)
    for number in range(count):
        began = time.perf_counter()
        batch: Batch = {k: v.to(run.task.device) for k, v in batches[number].items()}
        objective(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        run.progress.advance(1)
    return seconds
