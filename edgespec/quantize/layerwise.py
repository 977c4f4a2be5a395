"""ModelOpt's calibration, one decoder layer at a time, with a resumable record of finished layers.

A part is a layer or, last, a quantized lm_head. It is calibrated on the outputs of the unquantized
layers before it, packed, and saved in the work directory. Knows the order of the work; formats are
ModelOpt's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.names import STACK
from edgespec.checkpoint.writing import TensorChunk, copied, stored_pieces, to_torch
from edgespec.progress import Progress
from edgespec.quantize import modelopt
from edgespec.quantize.base import HEAD, unquantized_globs
from edgespec.quantize.decoder import TorchDecoder
from edgespec.quantize.plan import QuantizationPlan
from edgespec.quantize.work import CalibrationWork

logger = logging.getLogger(__name__)
BATCH_TOKENS = 4096  # AWQ's search quantizes every weight once per batch
HEAD_TOKENS = 256  # per call of lm_head: its logits are wide


def batches(windows: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Returns the windows, all of one length, in batches of about equal size.

    A batch has at most BATCH_TOKENS tokens, or one window.
    """
    max_windows = max(1, BATCH_TOKENS // len(windows[0]))
    count = -(-len(windows) // max_windows)
    cuts = [len(windows) * i // count for i in range(count + 1)]
    return [list(windows[low:high]) for low, high in pairwise(cuts)]


class Calibration:
    """The calibration of a decoder with quantizers over batches of token ids.

    Holds the hidden states of one layer's input.
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        plan: QuantizationPlan,
        ids: Sequence[Sequence[Sequence[int]]],
        work: CalibrationWork,
        progress: Progress,
        log: modelopt.Log,
    ) -> None:
        self.decoder, self.plan, self.ids = decoder, plan, ids
        self.work, self.progress, self.log = work, progress, log
        self.at = 0  # `states` are the inputs of this layer
        self.states: list[Any] | None = None

    def read(self, name: str) -> Any:
        """Returns a tensor of the base by its name on disk."""
        return to_torch(self.decoder.base.checkpoint.read(name))

    def steps(self, number: int) -> int:
        """Returns the number of progress steps of part `number`."""
        if number < self.num_layers:
            return modelopt.steps(self.plan, len(self.ids))
        tokens = len(self.ids[0][0]) * sum(map(len, self.ids))
        return modelopt.steps(self.plan, -(-tokens // HEAD_TOKENS))

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return self.decoder.base.num_layers

    @property
    def num_parts(self) -> int:
        """The number of layers, plus one for a quantized lm_head."""
        return self.num_layers + (self.plan.head is not None)

    def run(self) -> None:
        """Calibrates and packs the parts that the work directory does not have."""
        numbers = range(self.num_parts)
        missing = [number for number in numbers if number not in self.work.parts]
        if self.work.parts:
            self.work.resumed_at = missing[0] if missing else self.num_parts
        where = ""
        if self.work.parts and missing:
            where = f" (resumed at {part_label(missing[0], self.num_layers)})"
        self.progress.start(f"calibrate{where}", sum(map(self.steps, numbers)))
        if self.work.parts:
            self.progress.advance(sum(map(self.steps, self.work.parts)))
        for number in missing:
            began = time.monotonic()
            self.go_to(number)
            tensors, states = self.layer(number) if number < self.num_layers else self.head()
            self.work.keep_part(number, tensors)
            seconds = time.monotonic() - began
            logger.info("%s: calibrated in %.1f s", part_label(number, self.num_layers), seconds)
            if number + 1 < self.num_parts:
                self.at, self.states = number + 1, states
                self.work.keep_states(self.at, states)

    def go_to(self, number: int) -> None:
        """Sets `states` to the inputs of part `number`.

        Starts from saved states if there are any, otherwise from the embeddings.
        """
        if self.states is not None and self.at == number:
            return
        if (saved := self.work.states(number)) is not None:
            self.at, self.states = saved
        elif self.states is None or self.at > number:
            self.at, self.states = 0, [self.decoder.embed(batch) for batch in self.ids]
        while self.at < number:
            self.states = self.unquantized(self.at, self.states)
            self.at += 1

    def unquantized(self, number: int, states: Sequence[Any]) -> list[Any]:
        """Returns the outputs [B, S, H] of a layer without quantizers, one per batch."""
        import torch

        with (
            modelopt.captured(self.log),
            torch.no_grad(),
            self.decoder.loaded(number, self.read) as layer,
            modelopt.quantizers_off(layer),
        ):
            return [self.decoder.run(number, layer, state) for state in states]

    def layer(self, number: int) -> tuple[dict[str, Any], list[Any]]:
        """Calibrates and packs a layer.

        Returns its packed tensors by their names on disk, and its unquantized outputs [B, S, H] for
        each batch.
        """
        assert self.states is not None
        outputs: dict[int, Any] = {}
        decoder, states = self.decoder, self.states

        def call(i: int) -> None:
            output = decoder.run(number, layer, states[i])
            # keep the output of the first pass: later passes quantize the KV cache
            outputs.setdefault(i, output)

        with decoder.loaded(number, self.read) as layer:
            modelopt.calibrate(
                layer, self.plan, range(len(states)), call, self.progress.advance, self.log
            )
            few = states[0][:1, :2]
            packed = modelopt.pack(
                layer, lambda: decoder.run(number, layer, few), decoder.dtype, self.log
            )
        tensors = self.planned(packed, f"{STACK}.layers.{number}.")
        decoder.free(number)
        return tensors, [outputs[i] for i in range(len(states))]

    def head(self) -> tuple[dict[str, Any], list[Any]]:
        """Calibrates and packs lm_head. Returns its packed tensors, and no states."""
        import torch

        assert self.states is not None
        decoder = self.decoder
        name = f"{decoder.base.source_of(HEAD)}.weight"
        with torch.no_grad():
            rows: Any = torch.cat(
                [decoder.finish(state, self.read).flatten(0, 1) for state in self.states]
            )
            module = decoder.head_module(self.read(name))
        chunks = list(rows.split(HEAD_TOKENS))

        def call(chunk: Any) -> None:
            module[HEAD](chunk[None].to(decoder.device))

        modelopt.calibrate(module, self.plan, chunks, call, self.progress.advance, self.log)
        packed = modelopt.pack(module, lambda: call(chunks[0][:2]), decoder.dtype, self.log)
        return self.planned(packed, ""), []

    def planned(self, packed: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Returns the plan's weights and all scales by their names on disk.

        Norms and biases are left out: `merged` copies them from the source.
        """
        base = self.decoder.base
        named = {base.stored(f"{prefix}{name}"): tensor for name, tensor in packed.items()}
        unchanged = base.checkpoint.tensors.keys() - {
            f"{module}.weight" for module in self.plan.layers
        }
        return {name: tensor for name, tensor in named.items() if name not in unchanged}


def part_label(number: int, num_layers: int) -> str:
    """Returns the words for part `number` in messages."""
    return f"layer {number + 1} of {num_layers}" if number < num_layers else "the last step"


def settings_on_disk(
    decoder: TorchDecoder, plan: QuantizationPlan, log: modelopt.Log
) -> modelopt.Settings:
    """Inserts quantizers into the decoder. Returns ModelOpt's settings with the names on disk."""
    base = decoder.base
    stack = f"{base.stack}."
    own = [
        f"{STACK}.{name.removeprefix(stack)}" if name.startswith(stack) else name
        for name in plan.left_out
    ]
    settings = modelopt.insert_quantizers(decoder.model, plan, own, log)
    beside, inside = (modelopt.renamed(section, base.stored) for section in settings)
    modelopt.leave_out((beside, inside), unquantized_globs(base.checkpoint))
    return beside, inside


def merged(paths: Sequence[Path], checkpoint: Checkpoint) -> list[TensorChunk]:
    """Returns the checkpoint's tensors in its order, byte for byte.

    The packed tensors in the files `paths` replace the weights that they were made from.
    """
    parts: dict[str, dict[str, TensorChunk]] = {}
    for path in paths:
        for piece in stored_pieces(path):
            module, _, last = piece.name.rpartition(".")
            parts.setdefault(module, {})[last] = piece
    pieces: list[TensorChunk] = []
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        own = parts.pop(module, {}) if last == "weight" else {}
        if "weight" not in own:
            pieces.append(copied(checkpoint, name))
        pieces += [own[key] for key in sorted(own)]
    return pieces + [piece for own in parts.values() for _, piece in sorted(own.items())]
