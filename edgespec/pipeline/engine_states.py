"""An engine's own hidden states and logits as a dump's: what a draft learns then is the base as it
serves, quantized. Knows an engine directory and `training.dumping`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.backends import engine_dir as engines
from edgespec.backends.registry import open_runner
from edgespec.contract import Role
from edgespec.errors import LimitError, PairingError
from edgespec.methods import METHODS
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.lanes.embedding import EmbeddingTable
from edgespec.training.data import Question
from edgespec.training.dumps import AUX, TOP, TOP_IDS
from edgespec.training.job import Job, aux_layers_of

USUAL_TOP = 128  # logits of a token, where the graph has no last state beside the aux layers


class EngineSource:
    """The base engine of a directory. Raises PairingError for one of another base or of other aux
    layers, LimitError for conversations beyond its KV cache."""

    def __init__(self, engine_dir: Path, job: Job) -> None:
        config, _ = engines.open_engine(engine_dir, Role.BASE)
        component = config.component
        wanted = aux_layers_of(job.config, job.model)
        if component.origin != job.base.identity(job.progress):
            raise PairingError(
                f"the engine in {engine_dir} was made of another base than {job.base.place}.",
                "Give the checkpoint that was exported, or the original of a quantized one.",
            )
        if component.spec.aux_layer_ids != wanted or not component.graph.features:
            emitted = [*component.spec.aux_layer_ids] or "no aux layers"
            layers = f" `aux_layers` {','.join(map(str, wanted))}" if wanted else ""
            remedy = METHODS[job.recipe.method].export_param
            raise PairingError(
                f"the engine in {engine_dir} emits {emitted}, the draft reads"
                f" {[*wanted] or 'its last state'}.",
                f"Export the base again with `{remedy}`{layers}.",
            )
        new = job.recipe["validation.max_new_tokens"]
        self.engine_dir, self.capacity = engine_dir, config.limits.max_kv_cache_capacity
        for row in job.rows.rows:
            self.refuse_length(len(row.ids))
        for question in job.questions:
            self.refuse_length(len(question.ids) + new)
        self.runner, _ = open_runner(engine_dir, Role.BASE)
        table = self.runner.table or EmbeddingTable(engine_dir / file_names.EMBEDDING, component)
        self.decoder = CachedDecoder.of(self.runner, table, component)
        self.new, self.stops = new, frozenset(job.stops)
        self.made_of: Mapping[str, Any] = {
            "kind": "engine", "weights": config.weights.scheme, "identity": component.identity,
        }  # fmt: skip

    def answering(self, prompts: Sequence[Question]) -> Sequence[Sequence[int]]:
        """Greedy answers, one after the other."""
        return [[*self.answer(prompt.ids)] for prompt in prompts]

    def answer(self, prompt: Sequence[int]) -> Iterator[int]:
        """The ids of one, up to a stop token."""
        self.begin(len(prompt) + self.new)
        result = self.decoder.read(0, [*prompt])
        for number in range(self.new):
            token, _ = result.logits.best(0)
            yield token
            if token in self.stops or number == self.new - 1:
                return
            result = self.decoder.read(0, [token])

    def read(self, ids: Sequence[int], num_top: int) -> Mapping[str, Any]:
        """The states of a text, in calls of bounded size."""
        self.begin(len(ids))
        tokens = np.array(ids, np.int64)
        named: dict[str, list[NDArray[Any]]] = {AUX: [], TOP: [], TOP_IDS: []}
        step = min(self.decoder.prefill_chunk, self.runner.max_rows)
        for low in range(0, len(tokens), step):
            part = tokens[low : low + step]
            (result,) = self.decoder.extend([self.decoder.causal(0, part, np.arange(len(part)))])
            assert result.hidden_states is not None
            best = result.logits.top(num_top)
            named[AUX].append(result.hidden_states.numpy().astype(np.float32))
            named[TOP].append(np.array(best.values, np.float32))
            named[TOP_IDS].append(np.array(best.ids, np.int32))
        return {name: np.concatenate(each) for name, each in named.items()}

    def refuse_length(self, length: int) -> None:
        """Raises LimitError for a text that the KV cache cannot hold."""
        if length > self.capacity:
            raise LimitError(
                f"the engine in {self.engine_dir} holds {self.capacity} tokens, a conversation and"
                f" its answer have {length}.",
                f"Write training.training_seq_len={self.capacity}, a smaller"
                " validation.max_new_tokens, or build with a larger `max_kv_cache_capacity`.",
            )

    def begin(self, length: int) -> None:
        """A new text of so many tokens. Raises LimitError: later turns are known this late."""
        self.refuse_length(length)
        self.decoder.reset(0)
        self.decoder.reserve(0, length)

    def close(self) -> None:
        """Frees the engine."""
        self.runner.close()
