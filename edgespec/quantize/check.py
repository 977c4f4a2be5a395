"""Whether a quantised base still is the model: the written bytes against the original, over text it
has not seen.

Runs both through transformers' own code in float32 with one layer and some rows of the head in
memory at a time; quantised weights are read back with edgespec's own readers. Activations are not
quantised here, nor is the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgespec.checkpoint.files import Checkpoint, some_of
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.errors import BuildError, CheckpointError
from edgespec.quantize.base import EMBEDDING, HEAD, Base
from edgespec.quantize.decoder import Decoder
from edgespec.quantize.plan import Plan
from edgespec.quantize.tensors import as_bytes, to_torch
from edgespec.quantized import QuantizedWeight, dequantize_stored

NOT_SIMULATED = "weights only: rounding of activations and of the cache is not simulated"
HEAD_ROWS = 8192  # of the vocabulary that are in memory at once


@dataclass(frozen=True, slots=True)
class Report:
    """Quantised against original, weights dequantised from the written bytes."""

    logits_cosine: float  # mean over tokens
    logits_kl: float  # mean over tokens, in nats: KL(original || quantised)
    perplexity_before: float | None
    perplexity_after: float | None
    top1_agreement: float
    num_tokens: int
    weight_errors: dict[str, float]  # relative, root of mean squares; see `effective`
    simulated: str = NOT_SIMULATED

    @property
    def max_weight_error(self) -> float:
        return max(self.weight_errors.values())

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"max_weight_error": self.max_weight_error}


class Side:
    """One of two models' logits, some columns of the vocabulary at a time: what softmax and the
    choice need."""

    def __init__(self, targets: Any) -> None:
        import torch

        count = len(targets)
        self.targets = targets  # [rows], -1 where nothing follows
        self.top = torch.full((count,), -math.inf)
        self.total = torch.zeros(count, dtype=torch.float64)  # of exp(logit - top)
        self.squares = torch.zeros(count, dtype=torch.float64)
        self.choice = torch.zeros(count, dtype=torch.long)
        self.picked = torch.zeros(count)  # the target's logit

    def add(self, low: int, logits: Any) -> tuple[Any, Any]:
        """Logits [rows, columns] of the vocabulary from `low` on; returns exp(logit - top), and
        what top has shrunk."""
        import torch

        high, at = logits.max(-1)
        top = torch.maximum(self.top, high)
        shrunk = (self.top - top).exp().double()
        weights = (logits - top[:, None]).exp()
        self.total = self.total * shrunk + weights.sum(-1, dtype=torch.float64)
        self.squares += logits.square().sum(-1, dtype=torch.float64)
        self.choice = torch.where(high > self.top, at + low, self.choice)
        here = (self.targets >= low) & (self.targets < low + logits.shape[1])
        self.picked[here] = logits[here, self.targets[here] - low]
        self.top = top
        return weights, shrunk

    @property
    def log_total(self) -> Any:
        return self.top.double() + self.total.log()

    def loss(self) -> float:
        """Negative log likelihood of the targets, added up."""
        known = self.targets >= 0
        return float((self.log_total - self.picked.double())[known].sum())


class Rows:
    """Compares logits of the same rows, before and after, of a vocabulary that is never held
    whole."""

    def __init__(self, targets: Any) -> None:
        import torch

        self.before, self.after = Side(targets), Side(targets)
        self.products, self.weighted = torch.zeros(2, len(targets), dtype=torch.float64)

    def add(self, low: int, before: Any, after: Any) -> None:
        import torch

        weights, shrunk = self.before.add(low, before)
        self.after.add(low, after)
        self.weighted = self.weighted * shrunk + (weights * (before - after)).sum(
            -1, dtype=torch.float64
        )
        self.products += (before * after).sum(-1, dtype=torch.float64)


class Sums:
    """Adds up comparisons of rows."""

    def __init__(self) -> None:
        self.cosine = self.kl = self.loss_before = self.loss_after = 0.0
        self.agreed = self.rows = self.scored = 0

    def add(self, before: Any, after: Any) -> None:
        """Whole logits [rows, vocab] of a model whose next tokens are not known."""
        import torch

        rows = Rows(torch.full((len(before),), -1))
        rows.add(0, before, after)
        self.take(rows)

    def take(self, rows: Rows) -> None:
        before, after = rows.before, rows.after
        self.cosine += float((rows.products / (before.squares * after.squares).sqrt()).sum())
        # KL = sum of p (b - a) - log Zb + log Za, with p = exp(b) / Zb
        self.kl += float((rows.weighted / before.total - before.log_total + after.log_total).sum())
        self.loss_before += before.loss()
        self.loss_after += after.loss()
        self.agreed += int((before.choice == after.choice).sum())
        self.rows += len(before.targets)
        self.scored += int((before.targets >= 0).sum())

    def report(self, errors: dict[str, float]) -> Report:
        before, after = (
            math.exp(min(loss / self.scored, 700.0)) if self.scored else None
            for loss in (self.loss_before, self.loss_after)
        )
        return Report(
            self.cosine / self.rows,
            max(self.kl / self.rows, 0.0),
            before,
            after,
            self.agreed / self.rows,
            self.rows,
            errors,
        )


def compare(
    base: Base,
    written: Checkpoint,
    plan: Plan,
    windows: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> Report:
    """Both over the held-out windows, `advance` after each layer of each and each block of the
    head."""
    import torch

    original = Source(base)
    quantised = Written(original, written, plan)
    with torch.no_grad():
        states = hidden_states(base, (original, quantised), windows, advance)  # [tokens, H] of each
        rows = Rows(torch.tensor([target for window in windows for target in (*window[1:], -1)]))
        for low in range(0, original.head_rows, HEAD_ROWS):
            before = original.head(low)
            after = before if quantised.same_head else quantised.head(low)
            rows.add(
                low, *(state @ head.T for state, head in zip(states, (before, after), strict=True))
            )
            advance(1)
    quantised.finish()
    if unseen := plan.layers.keys() - quantised.errors.keys():
        raise BuildError(
            f"Linears that were not checked: {some_of(sorted(unseen))}.", "Please report this."
        )
    sums = Sums()
    sums.take(rows)
    return sums.report(quantised.errors)


def num_steps(base: Base) -> int:
    """What `compare` will advance by."""
    return 2 * base.num_layers - (-Source(base).head_rows // HEAD_ROWS)


def refuse_broken(report: Report, plan: Plan) -> None:
    """Raises BuildError where the figures are below what the scheme gives even on random
    weights."""
    told = (
        "The result is broken and was removed. Run it again with more or other text (--calib-data),"
        " or take "
    )
    remedy = f"{told}another scheme than {plan.body.name}; if it happens again, please report it."
    figures = (report.logits_cosine, report.logits_kl, report.max_weight_error)
    if not all(math.isfinite(figure) for figure in figures):
        raise BuildError("the quantised model gives logits that are not finite.", remedy)
    for name, error in report.weight_errors.items():
        if error > plan.layers[name].max_weight_error:
            limit = plan.layers[name].max_weight_error
            raise BuildError(
                f"{name}: the written weight is off by {error:.3f} of its size; at most {limit}.",
                remedy,
            )
    least = min(scheme.min_logits_cosine for scheme in plan.layers.values())
    if report.logits_cosine < least:
        what = (
            f"the quantised model's logits have a cosine of {report.logits_cosine:.4f} with the"
            " original's"
        )
        raise BuildError(f"{what}; {plan.body.name} gives at least {least}.", remedy)


# Where a model's weights come from


class Source:
    """The original checkpoint; a tied head is its embedding. Tensors are float32."""

    def __init__(self, base: Base) -> None:
        self.base, self.checkpoint = base, base.checkpoint
        self.table = f"{base.source_of(HEAD)}.weight"
        self.head_rows = self.checkpoint.tensors[self.table].shape[0]
        self.kept: dict[str, Any] = {}  # of this layer: what is written is compared with it

    def tensor(self, name: str) -> Any:
        if name not in self.kept:
            self.kept[name] = to_torch(self.checkpoint.read(name)).float()
        return self.kept[name]

    def forget(self) -> None:
        self.kept.clear()

    def head(self, low: int) -> Any:
        """HEAD_ROWS rows of the head from `low` on."""
        return to_torch(self.checkpoint.read_rows(self.table, low, low + HEAD_ROWS)).float()


class Written(Source):
    """The quantised one, and how far its weights are from the original's."""

    def __init__(self, source: Source, checkpoint: Checkpoint, plan: Plan) -> None:
        base = source.base
        super().__init__(base)
        self.source, self.checkpoint, self.plan = source, checkpoint, plan
        with read_back():
            quantization = read_quantization(checkpoint)
        if quantization is None:
            raise BuildError(
                f"{checkpoint.path} was written without quantisation settings.",
                "Please report this.",
            )
        self.quantization = quantization
        self.errors: dict[str, float] = {}
        self.same_head = HEAD not in plan.layers
        self.need_unchanged(f"{base.stored(EMBEDDING)}.weight")
        if self.same_head and not base.tied_head:
            self.need_unchanged(f"{HEAD}.weight")
        self.own_head = None if self.same_head else self.weight(HEAD)
        self.head_error = np.zeros(2)  # squares: of the error, of the weight

    def tensor(self, name: str) -> Any:
        module = name.removesuffix(".weight")
        if module in self.plan.layers and name != module:
            value, self.errors[module] = effective(self.weight(module), self.source.tensor(name))
            return value
        self.need_unchanged(name)
        return super().tensor(name)

    def need_unchanged(self, name: str) -> None:
        """Folding smoothing into norms would change them, often wrongly."""
        ours, theirs = self.checkpoint.tensors.get(name), self.source.checkpoint.tensors[name]
        same = ours is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if not same or not same_bytes(self.checkpoint, self.source.checkpoint, name):
            raise BuildError(
                f"{name} is not quantised and was changed all the same.", "Please report this."
            )

    def weight(self, module: str) -> QuantizedWeight:
        with read_back():
            weight = read_weight(self.checkpoint, self.quantization, module)
        wanted = self.plan.layers[module]
        if weight is None or weight.scheme is not wanted:
            found = weight.scheme.name if weight else "unquantised"
            raise BuildError(
                f"{module} was written as {found} instead of {wanted.name}.", "Please report this."
            )
        return weight

    def head(self, low: int) -> Any:
        assert self.own_head is not None
        rows = slice(low, low + HEAD_ROWS)
        value, wanted = stored_and_wanted(self.own_head, self.source.head(low), rows)
        self.head_error += [float((value - wanted).square().sum()), float(wanted.square().sum())]
        return (
            value
            if self.own_head.pre_quant_scale is None
            else value * to_torch(self.own_head.pre_quant_scale)
        )

    def finish(self) -> None:
        """The head's error is known once all its rows were asked for."""
        if not self.same_head:
            error, size = self.head_error
            self.errors[HEAD] = math.sqrt(error / max(size, 1e-60))


@contextmanager
def read_back() -> Iterator[None]:
    """What cannot be read of our own result is no fault of the checkpoint that was given."""
    try:
        yield
    except CheckpointError as error:
        raise BuildError(
            f"what was written cannot be read back: {error.what}", "Please report this."
        ) from error


def same_bytes(ours: Checkpoint, theirs: Checkpoint, name: str) -> bool:
    """Compared some rows at a time: an embedding is large."""
    shape = ours.tensors[name].shape
    if len(shape) < 2:
        return bytes(as_bytes(ours.read(name))) == bytes(as_bytes(theirs.read(name)))
    return all(
        as_bytes(ours.read_rows(name, low, low + HEAD_ROWS))
        == as_bytes(theirs.read_rows(name, low, low + HEAD_ROWS))
        for low in range(0, shape[0], HEAD_ROWS)
    )


def effective(weight: QuantizedWeight, original: Any) -> tuple[Any, float]:
    """The weight that raw activations meet, and its relative error.

    Smoothing makes some inputs small and others great on purpose: the error is that of the weight
    as stored, against the original divided by the smoothing, which is where its rounding was done.
    """
    value, wanted = stored_and_wanted(weight, original)
    error = float((value - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return (
        value if weight.pre_quant_scale is None else value * to_torch(weight.pre_quant_scale)
    ), error


def stored_and_wanted(
    weight: QuantizedWeight, original: Any, rows: slice = slice(None)
) -> tuple[Any, Any]:
    value = to_torch(dequantize_stored(weight, rows))
    return value, (
        original if weight.pre_quant_scale is None else original / to_torch(weight.pre_quant_scale)
    )


def hidden_states(
    base: Base,
    models: Sequence[Source],
    windows: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> list[Any]:
    """After the final norm of each model, float32 [tokens, H]. All goes through a layer before the
    next is read."""
    import torch

    decoder = Decoder(base, torch.float32)
    longest = max(map(len, windows))
    padded = [
        [*window, *[0] * (longest - len(window))] for window in windows
    ]  # a causal model does not look ahead
    states = [decoder.embed(padded)] * len(models)
    for i in range(base.num_layers):
        for k, weights in enumerate(models):
            with decoder.loaded(i, weights.tensor) as layer:
                states[k] = decoder.run(i, layer, states[k])
            advance(1)
        for weights in models:
            weights.forget()
    final = [
        decoder.finish(state, weights.tensor) for state, weights in zip(states, models, strict=True)
    ]
    return [
        torch.cat([row[: len(window)] for row, window in zip(state, windows, strict=True)])
        for state in final
    ]
