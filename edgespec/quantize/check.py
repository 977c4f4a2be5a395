"""Whether a quantised base still is the model: the written bytes against the original, over text it has not seen.

Runs both through transformers' own code in float32 with one layer in memory at a time; quantised weights are read back
with edgespec's own readers. Activations are not quantised here, and neither is the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.errors import BuildError
from edgespec.quantize.plan import EMBEDDING, HEAD, Plan
from edgespec.quantize.tensors import to_torch
from edgespec.quantized import QuantizedWeight, dequantize_stored

NOT_SIMULATED = "weights only: rounding of activations and of the cache is not simulated"
_CHUNK = 64  # positions whose logits are in memory at once


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


class Sums:
    """Adds up comparisons of logits, some rows at a time."""

    def __init__(self) -> None:
        self.cosine = self.kl = self.loss_before = self.loss_after = 0.0
        self.agreed = self.rows = self.scored = 0

    def add(self, before: Any, after: Any, targets: Any | None = None) -> None:
        """Logits [rows, vocab]; targets [rows], -1 where nothing follows."""
        import torch

        p, q = before.log_softmax(-1), after.log_softmax(-1)
        self.cosine += float(torch.nn.functional.cosine_similarity(before, after, dim=-1).sum())
        self.kl += float((p.exp() * (p - q)).sum())
        self.agreed += int((before.argmax(-1) == after.argmax(-1)).sum())
        self.rows += before.shape[0]
        if targets is not None:
            known = targets >= 0
            picked = targets[known][:, None]
            self.loss_before -= float(p[known].gather(1, picked).sum())
            self.loss_after -= float(q[known].gather(1, picked).sum())
            self.scored += int(known.sum())

    def report(self, errors: dict[str, float]) -> Report:
        before, after = (
            math.exp(min(loss / self.scored, 700.0)) if self.scored else None
            for loss in (self.loss_before, self.loss_after)
        )
        return Report(
            self.cosine / self.rows, max(self.kl / self.rows, 0.0), before, after, self.agreed / self.rows, self.rows,
            errors,
        )  # fmt: skip


def compare(
    source: Checkpoint,
    written: Checkpoint,
    plan: Plan,
    windows: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> Report:
    """Two passes over the held-out windows, `advance` after each layer of each (see `num_steps`)."""
    import torch

    original, quantised = Source(source), Written(source, written, plan)
    with torch.no_grad():
        states = [hidden_states(source, weights, windows, advance) for weights in (original, quantised)]
        head = original.head()
        heads = (head, quantised.head() if HEAD in plan.layers else head)  # one table where it is the same
        if HEAD not in plan.layers and f"{HEAD}.weight" in written.tensors.keys() & source.tensors.keys():
            quantised.need_unchanged(f"{HEAD}.weight")
        sums = Sums()
        for i, window in enumerate(windows):
            targets = torch.tensor([*window[1:], -1])
            for low in range(0, len(window), _CHUNK):
                rows = slice(low, low + _CHUNK)
                before, after = (state[i][rows] @ head.T for state, head in zip(states, heads, strict=True))
                sums.add(before, after, targets[rows])
    return sums.report(quantised.errors)


def num_steps(num_layers: int) -> int:
    return 2 * num_layers


def refuse_broken(report: Report, plan: Plan) -> None:
    """Raises BuildError where the figures are below what the scheme gives even on random weights."""
    told = "The result is broken and was removed. Run it again with more or other text (--calib-data), or take "
    remedy = f"{told}another scheme than {plan.body.name}; if it happens again, please report it."
    figures = (report.logits_cosine, report.logits_kl, report.max_weight_error)
    if not all(math.isfinite(figure) for figure in figures):
        raise BuildError("the quantised model gives logits that are not finite.", remedy)
    for name, error in report.weight_errors.items():
        if error > plan.layers[name].max_weight_error:
            limit = plan.layers[name].max_weight_error
            raise BuildError(f"{name}: the written weight is off by {error:.3f} of its size; at most {limit}.", remedy)
    least = min(scheme.min_logits_cosine for scheme in plan.layers.values())
    if report.logits_cosine < least:
        what = f"the quantised model's logits have a cosine of {report.logits_cosine:.4f} with the original's"
        raise BuildError(f"{what}; {plan.body.name} gives at least {least}.", remedy)


# Where a model's weights come from


class Source:
    """The original checkpoint; a tied head is its embedding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def tensor(self, name: str) -> Any:
        return to_torch(self.checkpoint.read(name).astype(np.float32))

    def head(self) -> Any:
        name = f"{HEAD}.weight"
        return self.tensor(name if name in self.checkpoint.tensors else f"{EMBEDDING}.weight")


class Written(Source):
    """The quantised one, and how far its weights are from the original's."""

    def __init__(self, source: Checkpoint, checkpoint: Checkpoint, plan: Plan) -> None:
        super().__init__(checkpoint)
        self.source, self.plan = Source(source), plan
        quantization = read_quantization(checkpoint)
        if quantization is None:
            raise BuildError(f"{checkpoint.path} was written without quantisation settings.", "Please report this.")
        self.quantization = quantization
        self.errors: dict[str, float] = {}

    def tensor(self, name: str) -> Any:
        module = name.removesuffix(".weight")
        if module in self.plan.layers and name != module:
            return self.linear(module)
        self.need_unchanged(name)
        return super().tensor(name)

    def need_unchanged(self, name: str) -> None:
        """Folding smoothing into norms would change them, often wrongly. transformers may have cast to one type."""
        value = self.checkpoint.read(name)
        if not np.array_equal(value, self.source.checkpoint.read(name).astype(value.dtype)):
            raise BuildError(f"{name} is not quantised and was changed all the same.", "Please report this.")

    def head(self) -> Any:
        return self.linear(HEAD)

    def linear(self, module: str) -> Any:
        weight = read_weight(self.checkpoint, self.quantization, module)
        wanted = self.plan.layers[module]
        if weight is None or weight.scheme is not wanted:
            found = weight.scheme.name if weight else "unquantised"
            raise BuildError(f"{module} was written as {found} instead of {wanted.name}.", "Please report this.")
        original = self.source.head() if module == HEAD else self.source.tensor(f"{module}.weight")
        value, self.errors[module] = effective(weight, original)
        return value


def effective(weight: QuantizedWeight, original: Any) -> tuple[Any, float]:
    """The weight that raw activations meet, and its relative error.

    Smoothing makes some inputs small and others great on purpose: the error is that of the weight as stored, against
    the original divided by the smoothing, which is where its rounding was done.
    """
    value = to_torch(dequantize_stored(weight))
    scale = 1.0 if weight.pre_quant_scale is None else to_torch(weight.pre_quant_scale)
    wanted = original / scale
    return value * scale, float((value - wanted).norm() / wanted.norm().clamp_min(1e-30))


# transformers' own model, filled as it goes


def hidden_states(
    source: Checkpoint, weights: Source, windows: Sequence[Sequence[int]], advance: Callable[[int], None]
) -> list[Any]:
    """After the final norm, float32 [S, H] for each window. All windows go through a layer before the next is read."""
    import torch

    model = skeleton(source)
    lengths = [len(window) for window in windows]
    ids = torch.zeros(len(windows), max(lengths), dtype=torch.long)  # padded at the end: a causal model cannot see it
    for row, window in zip(ids, windows, strict=True):
        row[: len(window)] = torch.tensor(window)
    fill(model.embed_tokens, "model.embed_tokens", weights)
    fill(model.norm, "model.norm", weights)
    for i, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda layer, _, i=i: fill(layer, f"model.layers.{i}", weights))
        layer.register_forward_hook(lambda layer, *_: empty(layer, advance))
    state = model(input_ids=ids, use_cache=False).last_hidden_state
    return [row[:length] for row, length in zip(state, lengths, strict=True)]


def skeleton(source: Checkpoint) -> Any:
    """The decoder without weights; its buffers (RoPE's frequencies) are real."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    with parameters_on_meta():
        make = AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.float32, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return model.eval().model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield


def fill(module: Any, prefix: str, weights: Source) -> None:
    import torch

    for name, _ in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner) if owner else module
        setattr(holder, last, torch.nn.Parameter(weights.tensor(f"{prefix}.{name}"), requires_grad=False))


def empty(module: Any, advance: Callable[[int], None]) -> None:
    module.to("meta")
    advance(1)
