"""Compares a quantized base with the original over held-out text.

Runs both through transformers in float32, with one layer and HEAD_ROWS rows of lm_head in memory at
a time. Quantized weights are read back from the written files with edgespec's own readers.
Activations and the KV cache are not quantized here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgespec.artifacts.manifest import QuantizeCheck
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.checkpoint.source import some_of
from edgespec.checkpoint.writing import as_bytes, to_torch
from edgespec.errors import BuildError, CheckpointError
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize_stored
from edgespec.quantize.base import EMBEDDING, HEAD, Base
from edgespec.quantize.decoder import TorchDecoder
from edgespec.quantize.plan import QuantizationPlan

HEAD_ROWS = 8192  # vocabulary rows of lm_head in memory at a time


class LogitStats:
    """Softmax statistics of one model's logits, accumulated over slices of the vocabulary."""

    def __init__(self, targets: Any) -> None:
        import torch

        count = len(targets)
        self.targets = targets  # [rows], -1 where the next token is unknown
        self.top = torch.full((count,), -math.inf)  # running maximum of the logits
        self.total = torch.zeros(count, dtype=torch.float64)  # sum of exp(logit - top)
        self.squares = torch.zeros(count, dtype=torch.float64)  # sum of logit ** 2
        self.choice = torch.zeros(count, dtype=torch.long)  # argmax so far
        self.picked = torch.zeros(count)  # logit of the target

    def add(self, low: int, logits: Any) -> tuple[Any, Any]:
        """Adds logits [rows, columns] of the vocabulary from `low` on (online softmax).

        Returns exp(logits - top) [rows, columns], and the factor [rows] by which sums relative to
        the previous maximum must be rescaled.
        """
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
        """logsumexp of the logits, [rows]."""
        return self.top.double() + self.total.log()

    def loss(self) -> float:
        """Returns the summed negative log likelihood of the targets, in nats."""
        known = self.targets >= 0
        return float((self.log_total - self.picked.double())[known].sum())


class LogitComparison:
    """Compares both models' logits of the same rows, one slice of the vocabulary at a time."""

    def __init__(self, targets: Any) -> None:
        import torch

        self.before, self.after = LogitStats(targets), LogitStats(targets)
        self.products, self.weighted = torch.zeros(2, len(targets), dtype=torch.float64)

    def add(self, low: int, before: Any, after: Any) -> None:
        """Adds logits [rows, columns] of both models for the vocabulary from `low` on."""
        import torch

        weights, shrunk = self.before.add(low, before)
        self.after.add(low, after)
        weighted = (weights * (before - after)).sum(-1, dtype=torch.float64)
        self.weighted = self.weighted * shrunk + weighted
        self.products += (before * after).sum(-1, dtype=torch.float64)


class Sums:
    """Sums of comparisons over all rows."""

    def __init__(self) -> None:
        self.cosine = self.kl = self.loss_before = self.loss_after = 0.0
        self.agreed = self.rows = self.scored = 0

    def add(self, before: Any, after: Any) -> None:
        """Adds complete logits [rows, vocab] of rows without targets."""
        import torch

        rows = LogitComparison(torch.full((len(before),), -1))
        rows.add(0, before, after)
        self.add_rows(rows)

    def add_rows(self, rows: LogitComparison) -> None:
        """Adds a comparison that has received the complete vocabulary."""
        before, after = rows.before, rows.after
        self.cosine += float((rows.products / (before.squares * after.squares).sqrt()).sum())
        # KL = sum of p (b - a) - log Zb + log Za, with p = exp(b) / Zb
        self.kl += float((rows.weighted / before.total - before.log_total + after.log_total).sum())
        self.loss_before += before.loss()
        self.loss_after += after.loss()
        self.agreed += int((before.choice == after.choice).sum())
        self.rows += len(before.targets)
        self.scored += int((before.targets >= 0).sum())

    def report(self, errors: dict[str, float]) -> QuantizeCheck:
        """Returns the means over all rows, with the relative errors of the weights."""
        before, after = (
            math.exp(min(loss / self.scored, 700.0)) if self.scored else None
            for loss in (self.loss_before, self.loss_after)
        )
        return QuantizeCheck(
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
    plan: QuantizationPlan,
    windows: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> QuantizeCheck:
    """Compares the written checkpoint with the base over the held-out windows.

    Calls `advance(1)` after each layer of each model and each block of lm_head, `num_steps` times
    in all. Raises BuildError if the written files cannot be read back, differ from the plan, or
    changed an unquantized tensor.
    """
    import torch

    original = OriginalWeights(base)
    quantized = QuantizedWeights(original, written, plan)
    targets = [target for window in windows for target in (*window[1:], -1)]
    with torch.no_grad():
        # [tokens, H] of each model
        before_states, after_states = hidden_states(base, (original, quantized), windows, advance)
        rows = LogitComparison(torch.tensor(targets))
        for low in range(0, original.head_rows, HEAD_ROWS):
            before = original.head(low)
            after = before if quantized.same_head else quantized.head(low)
            rows.add(low, before_states @ before.T, after_states @ after.T)
            advance(1)
    quantized.finish()
    if unseen := plan.layers.keys() - quantized.errors.keys():
        raise BuildError(
            f"Linears that were not checked: {some_of(sorted(unseen))}.", "Please report this."
        )
    sums = Sums()
    sums.add_rows(rows)
    return sums.report(quantized.errors)


def num_steps(base: Base) -> int:
    """Returns how many steps `compare` will report."""
    return 2 * base.num_layers - (-OriginalWeights(base).head_rows // HEAD_ROWS)


def refuse_broken(report: QuantizeCheck, plan: QuantizationPlan) -> None:
    """Raises BuildError if the report is worse than the limits of a scheme of the plan.

    The limits (see `Scheme`) hold even for random weights.
    """
    remedy = (
        "The result is broken and was removed. Run it again with more or other text (`calib_data`),"
        f" or use another scheme than {plan.body.name}; if it happens again, please report it."
    )
    stats = (report.logits_cosine, report.logits_kl, report.max_weight_error)
    if not all(map(math.isfinite, stats)):
        raise BuildError("the quantized model gives logits that are not finite.", remedy)
    for name, error in report.weight_errors.items():
        if error > plan.layers[name].max_weight_error:
            limit = plan.layers[name].max_weight_error
            raise BuildError(
                f"{name}: the relative error of the written weight is {error:.3f}; the limit is"
                f" {limit}.",
                remedy,
            )
    min_cosine = min(scheme.min_logits_cosine for scheme in plan.layers.values())
    if report.logits_cosine < min_cosine:
        message = (
            f"the quantized model's logits have a cosine of {report.logits_cosine:.4f} with the"
            " original's"
        )
        raise BuildError(f"{message}; {plan.body.name} gives at least {min_cosine}.", remedy)


# The weights of each model


class OriginalWeights:
    """float32 tensors of the original checkpoint. The source of a tied lm_head is the embedding."""

    def __init__(self, base: Base) -> None:
        self.base, self.checkpoint = base, base.checkpoint
        self.table = f"{base.source_of(HEAD)}.weight"
        self.head_rows = self.checkpoint.tensors[self.table].shape[0]
        self.cached: dict[str, Any] = {}  # of the current layer, to compare with what was written

    def tensor(self, name: str) -> Any:
        """Returns the tensor with the name `name` on disk as float32."""
        if name not in self.cached:
            self.cached[name] = to_torch(self.checkpoint.read(name)).float()
        return self.cached[name]

    def free(self) -> None:
        """Frees the tensors of the current layer."""
        self.cached.clear()

    def head(self, low: int) -> Any:
        """Returns rows `low` to `low + HEAD_ROWS` of lm_head, [rows, H]."""
        return to_torch(self.checkpoint.read_rows(self.table, low, low + HEAD_ROWS)).float()


class QuantizedWeights(OriginalWeights):
    """Dequantized tensors of the written checkpoint, and their relative errors."""

    def __init__(
        self, source: OriginalWeights, checkpoint: Checkpoint, plan: QuantizationPlan
    ) -> None:
        base = source.base
        super().__init__(base)
        self.source, self.checkpoint, self.plan = source, checkpoint, plan
        with read_back():
            quantization = read_quantization(checkpoint)
        if quantization is None:
            raise BuildError(
                f"{checkpoint.place} was written without quantization settings.",
                "Please report this.",
            )
        self.quantization = quantization
        self.errors: dict[str, float] = {}
        self.same_head = HEAD not in plan.layers
        self.need_unchanged(f"{base.stored(EMBEDDING)}.weight")
        if self.same_head and not base.tied_head:
            self.need_unchanged(f"{HEAD}.weight")
        self.own_head = None if self.same_head else self.weight(HEAD)
        self.head_error = np.zeros(2)  # squared norms: of the error, of the weight

    def tensor(self, name: str) -> Any:
        """Returns the effective weight of a quantized Linear, or an unchanged tensor as float32.

        Raises BuildError if the tensor is not quantized and differs from the original.
        """
        module = name.removesuffix(".weight")
        if module in self.plan.layers and name != module:
            original = self.source.tensor(name)
            value, self.errors[module] = effective_weight(self.weight(module), original)
            return value
        self.need_unchanged(name)
        return super().tensor(name)

    def need_unchanged(self, name: str) -> None:
        """Raises BuildError if a tensor outside the plan differs from the original.

        Folding smoothing into norms would change them, often wrongly.
        """
        ours, theirs = self.checkpoint.tensors.get(name), self.source.checkpoint.tensors[name]
        same = ours is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if not same or not same_bytes(self.checkpoint, self.source.checkpoint, name):
            raise BuildError(
                f"{name} is not quantized but was changed nevertheless.", "Please report this."
            )

    def weight(self, module: str) -> QuantizedWeight:
        """Returns the weight of `module` as written. Raises BuildError for another scheme."""
        with read_back():
            weight = read_weight(self.checkpoint, self.quantization, module)
        wanted = self.plan.layers[module]
        if weight is None or weight.scheme is not wanted:
            stored = weight.scheme.name if weight else "unquantized"
            raise BuildError(
                f"{module} was written as {stored} instead of {wanted.name}.", "Please report this."
            )
        return weight

    def head(self, low: int) -> Any:
        """Returns effective rows `low` to `low + HEAD_ROWS` of a quantized lm_head, [rows, H]."""
        assert self.own_head is not None
        rows = slice(low, low + HEAD_ROWS)
        value, wanted = dequantized_and_expected(self.own_head, self.source.head(low), rows)
        self.head_error += [float((value - wanted).square().sum()), float(wanted.square().sum())]
        return smoothed(self.own_head, value)

    def finish(self) -> None:
        """Records the error of lm_head, which is known after the last call of `head`."""
        if not self.same_head:
            error, size = self.head_error
            self.errors[HEAD] = math.sqrt(error / max(size, 1e-60))


@contextmanager
def read_back() -> Iterator[None]:
    """Reports a CheckpointError about our own result as a BuildError."""
    try:
        yield
    except CheckpointError as error:
        raise BuildError(
            f"the written checkpoint cannot be read back: {error.what}", "Please report this."
        ) from error


def same_bytes(ours: Checkpoint, theirs: Checkpoint, name: str) -> bool:
    """Returns whether both tensors have the same bytes. Reads HEAD_ROWS rows at a time."""
    shape = ours.tensors[name].shape
    if len(shape) < 2:
        return bytes(as_bytes(ours.read(name))) == bytes(as_bytes(theirs.read(name)))
    return all(
        as_bytes(ours.read_rows(name, low, low + HEAD_ROWS))
        == as_bytes(theirs.read_rows(name, low, low + HEAD_ROWS))
        for low in range(0, shape[0], HEAD_ROWS)
    )


def effective_weight(weight: QuantizedWeight, original: Any) -> tuple[Any, float]:
    """Returns the weight [out, in] that multiplies raw activations, and its relative RMS error.

    The error is that of the dequantized weight against the original divided by pre_quant_scale,
    because that quotient is what was rounded.
    """
    value, wanted = dequantized_and_expected(weight, original)
    error = float((value - wanted).norm() / wanted.norm().clamp_min(1e-30))
    return smoothed(weight, value), error


def dequantized_and_expected(
    weight: QuantizedWeight, original: Any, rows: slice = slice(None)
) -> tuple[Any, Any]:
    """Returns the dequantized weight, and the original divided by pre_quant_scale: [rows, in]."""
    value = to_torch(dequantize_stored(weight, rows))
    if weight.pre_quant_scale is None:
        return value, original
    return value, original / to_torch(weight.pre_quant_scale)


def smoothed(weight: QuantizedWeight, value: Any) -> Any:
    """Returns a dequantized weight [rows, in] times pre_quant_scale, where there is one."""
    return value if weight.pre_quant_scale is None else value * to_torch(weight.pre_quant_scale)


def hidden_states(
    base: Base,
    models: Sequence[OriginalWeights],
    windows: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> list[Any]:
    """Returns each model's hidden states after the final norm, float32 [tokens, H].

    Each layer is read once and run on all windows before the next one is read.
    """
    import torch

    decoder = TorchDecoder(base, torch.float32)
    longest = max(map(len, windows))
    # padding on the right changes nothing: the model is causal
    padded = [[*window, *[0] * (longest - len(window))] for window in windows]
    states = [decoder.embed(padded)] * len(models)
    for i in range(base.num_layers):
        for k, weights in enumerate(models):
            with decoder.loaded(i, weights.tensor) as layer:
                states[k] = decoder.run(i, layer, states[k])
            advance(1)
        for weights in models:
            weights.free()
    final = [
        decoder.finish(state, weights.tensor) for state, weights in zip(states, models, strict=True)
    ]
    return [
        torch.cat([row[: len(window)] for row, window in zip(state, windows, strict=True)])
        for state in final
    ]
