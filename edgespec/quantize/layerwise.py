"""ModelOpt's calibration of one decoder layer after the other: the memory of one, and no finished
one is lost.

A part is a layer, and at the end the head where it is quantised: calibrated on what the unquantised
layers before it make of the windows, packed, and kept in the work directory. Knows the order of the
work; formats are ModelOpt's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.names import STACK
from edgespec.progress import Progress
from edgespec.quantize import modelopt
from edgespec.quantize.base import HEAD, left_alone
from edgespec.quantize.decoder import Decoder
from edgespec.quantize.plan import Plan
from edgespec.quantize.tensors import Piece, copied, stored_pieces, to_torch
from edgespec.quantize.work import Work

BATCH_TOKENS = 4096  # AWQ's search rounds every weight anew for each batch
HEAD_TOKENS = 256  # the logits of a batch are wide


def batches(windows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Windows, all of one length, in batches of about equal size."""
    most = max(1, BATCH_TOKENS // len(windows[0]))
    count = -(-len(windows) // most)
    cuts = [len(windows) * i // count for i in range(count + 1)]
    return [list(windows[low:high]) for low, high in pairwise(cuts)]


class Calibration:
    """A decoder with quantizers, and the states on their way through it."""

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        ids: Sequence[Sequence[Sequence[int]]],
        work: Work,
        progress: Progress,
        log: modelopt.Log,
    ) -> None:
        self.decoder, self.plan, self.ids, self.work, self.progress, self.log = (
            decoder,
            plan,
            ids,
            work,
            progress,
            log,
        )
        self.at = 0  # the layer whose inputs `states` are
        self.states: list[Any] | None = None

    def read(self, name: str) -> Any:
        return to_torch(self.decoder.base.checkpoint.read(name))

    def steps(self, number: int) -> int:
        tokens = len(self.ids[0][0]) * sum(map(len, self.ids))
        return modelopt.steps(
            self.plan, len(self.ids) if number < self.num_layers else -(-tokens // HEAD_TOKENS)
        )

    @property
    def num_layers(self) -> int:
        return self.decoder.base.num_layers

    @property
    def num_parts(self) -> int:
        return self.num_layers + (self.plan.head is not None)

    def run(self) -> None:
        numbers = range(self.num_parts)
        missing = [number for number in numbers if number not in self.work.parts]
        if self.work.parts:
            self.work.resumed_at = missing[0] if missing else self.num_parts
        where = (
            f" (resumed at {place(missing[0], self.num_layers)})"
            if self.work.parts and missing
            else ""
        )
        self.progress.start(f"calibrate{where}", sum(map(self.steps, numbers)))
        if self.work.parts:
            self.progress.advance(sum(map(self.steps, self.work.parts)))
        for number in missing:
            self.go_to(number)
            tensors, states = self.layer(number) if number < self.num_layers else self.head()
            self.work.keep_part(number, tensors)
            if number + 1 < self.num_parts:
                self.at, self.states = number + 1, states
                self.work.keep_states(self.at, states)

    def go_to(self, number: int) -> None:
        """Have the states that a part begins with: kept ones, or the embeddings and the layers
        before."""
        if self.states is not None and self.at == number:
            return
        if (found := self.work.states(number)) is not None:
            self.at, self.states = found
        elif self.states is None or self.at > number:
            self.at, self.states = 0, [self.decoder.embed(one) for one in self.ids]
        while self.at < number:
            self.states = self.plain(self.at, self.states)
            self.at += 1

    def plain(self, number: int, states: Sequence[Any]) -> list[Any]:
        import torch

        with (
            modelopt.captured(self.log),
            torch.no_grad(),
            self.decoder.loaded(number, self.read) as layer,
            modelopt.quantizers_off(layer),
        ):
            return [self.decoder.run(number, layer, state) for state in states]

    def layer(self, number: int) -> tuple[dict[str, Any], list[Any]]:
        """Its packed tensors by their names on disk, and what it makes of the states
        unquantised."""
        assert self.states is not None
        outputs: dict[int, Any] = {}
        decoder, states = self.decoder, self.states

        def call(i: int) -> None:
            output = decoder.run(number, layer, states[i])
            outputs.setdefault(
                i, output
            )  # of the first pass: a quantised cache is on in later ones

        with decoder.loaded(number, self.read) as layer:
            modelopt.calibrate(
                layer, self.plan, range(len(states)), call, self.progress.advance, self.log
            )
            few = states[0][:1, :2]
            packed = modelopt.pack(
                layer, lambda: decoder.run(number, layer, few), decoder.dtype, self.log
            )
        tensors = self.kept(packed, f"{STACK}.layers.{number}.")
        decoder.forget(number)
        return tensors, [outputs[i] for i in range(len(states))]

    def head(self) -> tuple[dict[str, Any], list[Any]]:
        import torch

        assert self.states is not None
        decoder = self.decoder
        name = f"{decoder.base.source_of(HEAD)}.weight"
        with torch.no_grad():
            rows: Any = torch.cat(
                [decoder.finish(state, self.read).flatten(0, 1) for state in self.states]
            )
            holder = decoder.holder_of_head(self.read(name))
        chunks = list(rows.split(HEAD_TOKENS))

        def call(chunk: Any) -> None:
            holder[HEAD](chunk[None].to(decoder.device))

        modelopt.calibrate(holder, self.plan, chunks, call, self.progress.advance, self.log)
        packed = modelopt.pack(holder, lambda: call(chunks[0][:2]), decoder.dtype, self.log)
        return self.kept(packed, ""), []

    def kept(self, packed: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Weights of the plan, and every scale; norms and biases are copied from the source at the
        end."""
        base = self.decoder.base
        named = {base.stored(f"{prefix}{name}"): tensor for name, tensor in packed.items()}
        unchanged = base.checkpoint.tensors.keys() - {
            f"{module}.weight" for module in self.plan.layers
        }
        return {name: tensor for name, tensor in named.items() if name not in unchanged}


def place(number: int, num_layers: int) -> str:
    return f"layer {number + 1} of {num_layers}" if number < num_layers else "the last step"


def settings_on_disk(decoder: Decoder, plan: Plan, log: modelopt.Log) -> modelopt.Settings:
    """Give the decoder its quantizers; the settings name modules as they stand on disk."""
    base = decoder.base
    stack = f"{base.stack}."
    own = [
        f"{STACK}.{name.removeprefix(stack)}" if name.startswith(stack) else name
        for name in plan.left_out
    ]
    settings = modelopt.insert_quantizers(decoder.model, plan, own, log)
    beside, inside = (modelopt.renamed(one, base.stored) for one in settings)
    more = left_alone(base.checkpoint)
    for holder, key in ((beside["quantization"], "exclude_modules"), (inside, "ignore")):
        if key in holder:
            holder[key] += [glob for glob in more if glob not in holder[key]]
    return beside, inside


def merged(paths: Sequence[Path], checkpoint: Checkpoint) -> list[Piece]:
    """The checkpoint's tensors byte for byte and in its order, what a quantised Linear became in
    its place."""
    parts: dict[str, dict[str, Piece]] = {}
    for path in paths:
        for piece in stored_pieces(path):
            module, _, last = piece.name.rpartition(".")
            parts.setdefault(module, {})[last] = piece
    pieces: list[Piece] = []
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        own = parts.pop(module, {}) if last == "weight" else {}
        if "weight" not in own:
            pieces.append(copied(checkpoint, name))
        pieces += [own[key] for key in sorted(own)]
    return pieces + [piece for own in parts.values() for _, piece in sorted(own.items())]
