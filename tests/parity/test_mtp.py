"""Qwen3.5's head for multi-token prediction, as exported, against transformers' own decoder layer.

One row of `ROWS` is a checkpoint as someone publishes it. The exported graphs run as they are, and
the engines made of them must draft the same.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from edgespec.artifacts import file_names, json_files
from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.contract import Limits, memory_inputs
from edgespec.export.components import ExportOptions, export
from edgespec.rope import RopeTable
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.tree import DraftPlan
from tests import toys
from tests.one_lane import OneLane
from tests.reference_mtp import READINGS, MtpReference

Floats = NDArray[np.float32]

TOLERANCE = 2e-4  # float32 in another order; logits are of size 1 to 10
SEEN = 1e-2  # what a wrong reading moves logits by, at the least
CAPACITY = 32
TOKENS = torch.tensor([7, 101, 33, 250, 18, 64, 199, 3, 90, 141, 222, 57])  # t_0 .. t_n
DRAFTS = [12, 77, 200]

ROWS: dict[str, dict[str, Any]] = {
    "text": {},
    "beside-an-encoder": {"images": True, "tied": True, "dtype": "bfloat16", "shards": 3},
    "experts": {"experts": 6},
    "wide-heads": {
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "rope": {"partial_rotary_factor": 0.5},
    },
}


@dataclass
class Exported:
    """An exported graph on ONNX Runtime, with a cache that starts empty."""

    path: Path
    length: int = 0
    memory: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = ComponentConfig.read(self.path / file_names.CONFIG)
        self.shape, self.rope = self.config.graph, RopeTable.of(self.config.rope, CAPACITY)
        self.session = ort.InferenceSession(
            str(self.path / file_names.MODEL), providers=["CPUExecutionProvider"]
        )
        sizes = {"B": 1, "C": CAPACITY, "P": 1}
        for layer in range(self.shape.num_layers):
            for spec in memory_inputs(self.shape, layer):
                self.memory[spec.name] = np.zeros(
                    [sizes.get(str(dim), dim) for dim in spec.shape], np.float32
                )

    def run(self, embeds: torch.Tensor, **hidden: NDArray[Any]) -> tuple[Floats, Floats]:
        """The next rows, all of one path: logits [S, V] and hidden_states [S, H]."""
        count = len(embeds)
        slots = np.arange(self.length, self.length + count)
        mask = np.arange(CAPACITY) <= slots[:, None]
        cos, sin = self.rope.rows(slots[None])
        feeds = {
            "inputs_embeds": embeds.detach().numpy()[None],
            "rope_cos": cos,
            "rope_sin": sin,
            "attention_mask": mask[None, None],
            "write_indices": np.array([self.length]),
            "gather_idx": np.arange(count)[None],
            "tree_mask": np.tri(count, dtype=bool)[None],
            **hidden,
            **self.memory,
        }
        wanted = {value.name for value in self.session.get_inputs()}
        names = [value.name for value in self.session.get_outputs()]
        out = dict(
            zip(
                names,
                self.session.run(None, {k: v for k, v in feeds.items() if k in wanted}),
                strict=True,
            )
        )
        self.length += count
        self.memory |= {
            name: out[name.replace("past", "present")] for name in self.memory if "past" in name
        }
        return out["logits"][0], out["hidden_states"][0]


class Head(Exported):
    def base(self, embeds: torch.Tensor, states: torch.Tensor) -> tuple[Floats, Floats]:
        own = np.zeros((1, 0, states.shape[1]), np.float32)
        return self.run(
            embeds,
            base_hidden=states.numpy()[None],
            draft_hidden=own,
            use_base_hidden=np.array(True),
        )

    def own(self, embeds: torch.Tensor, states: Floats) -> tuple[Floats, Floats]:
        base = np.zeros((1, 0, states.shape[1]), np.float32)
        return self.run(
            embeds, base_hidden=base, draft_hidden=states[None], use_base_hidden=np.array(False)
        )


@dataclass(frozen=True)
class Pair:
    """A checkpoint as transformers reads it, and what export made of it."""

    checkpoint: Path
    out: Path
    model: Any

    @property
    def head(self) -> Head:
        return Head(self.out / "mtp_draft")

    @functools.cache  # noqa: B019
    def reference(self, mistake: str | None = None) -> MtpReference:
        return MtpReference(self.checkpoint, self.model, mistake)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(tokens)


@pytest.fixture(scope="module", params=ROWS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    work = tmp_path_factory.mktemp(request.param)
    path = toys.make_qwen3_5(work / "checkpoint", **ROWS[request.param])
    export(str(path), work / "onnx", ExportOptions(base_for="mtp"))
    import transformers

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    family: Any = getattr(transformers, name)
    return Pair(path, work / "onnx", family.from_pretrained(path, dtype=torch.float32).eval())


def close(found: Floats, wanted: torch.Tensor) -> None:
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=TOLERANCE, atol=TOLERANCE)


def test_base_emits_its_state_after_the_last_norm(pair: Pair) -> None:
    logits, states = Exported(pair.out / "llm").run(pair.embed(TOKENS))
    close(states, pair.reference().base_states(TOKENS))
    close(logits, pair.model(TOKENS[None]).logits[0])


def test_pairs_of_a_state_and_the_next_token(pair: Pair) -> None:
    ref = pair.reference()
    states = ref.base_states(TOKENS[:-1])
    logits, own = pair.head.base(pair.embed(TOKENS[1:]), states)
    wanted, wanted_own = ref.forward(TOKENS[1:], states)
    close(logits, wanted)
    close(own, wanted_own)


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 7), (10,)])
def test_pairs_in_parts_are_those_at_once(pair: Pair, cuts: tuple[int, ...]) -> None:
    ref, head = pair.reference(), pair.head
    states = ref.base_states(TOKENS[:-1])
    parts = zip(torch.tensor_split(TOKENS[1:], cuts), torch.tensor_split(states, cuts), strict=True)
    got = [head.base(pair.embed(tokens), part) for tokens, part in parts]
    wanted, wanted_own = ref.forward(TOKENS[1:], states)
    close(np.concatenate([logits for logits, _ in got]), wanted)
    close(np.concatenate([own for _, own in got]), wanted_own)


def test_chain_of_recycled_states(pair: Pair) -> None:
    wanted, wanted_own = in_reference(pair)
    logits, own = in_chain(pair)
    close(logits, wanted)
    close(own, wanted_own)


@pytest.mark.parametrize("mistake", READINGS)
def test_another_reading_would_be_seen(pair: Pair, mistake: str) -> None:
    """What the tests above compare moves when the head is read in another way, so that they tell
    the readings apart."""
    logits, _ = in_chain(pair)
    wrong, _ = in_reference(pair, mistake)
    assert np.abs(logits - wrong.numpy()).max() > SEEN


def in_reference(pair: Pair, mistake: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    ref = pair.reference(mistake)
    return ref.chain(TOKENS[1:], ref.base_states(TOKENS[:-1]), DRAFTS)


def in_chain(pair: Pair) -> tuple[Floats, Floats]:
    """The last pair and the drafts behind it, each on the head's own state of the one before."""
    head: Head = pair.head
    logits, own = head.base(pair.embed(TOKENS[1:]), pair.reference().base_states(TOKENS[:-1]))
    rows, states = [logits[-1:]], [own[-1:]]
    for token in DRAFTS:
        logits, own = head.own(pair.embed(torch.tensor([token])), states[-1])
        rows.append(logits)
        states.append(own)
    return np.concatenate(rows), np.concatenate(states)


def test_configurations_say_what_they_are(pair: Pair) -> None:
    base, draft = (
        json_files.read_json(pair.out / part / file_names.CONFIG) for part in ("llm", "mtp_draft")
    )
    hidden = base["hidden_size"]
    assert (base["spec_decode_type"], base["engine_role"]) == ("mtp", "base")
    assert (draft["spec_decode_type"], draft["engine_role"]) == ("mtp", "draft")
    assert (draft["draft_vocab_size"], draft["base_model_hidden_size"]) == (
        base["vocab_size"],
        hidden,
    )
    assert draft["num_hidden_layers"] == 1
    assert (base["layer_types"], base["num_linear_attn_layers"]) == (
        ["mamba"] * 3 + ["attention"],
        3,
    )
    assert [kept is None for kept in base["kv_layer_configs"]] == [True, True, True, False]
    assert base["partial_rotary_factor"] == draft["partial_rotary_factor"] < 1
    assert not (pair.out / "mtp_draft" / file_names.EMBEDDING).exists()


@pytest.fixture(scope="module")
def engine_dir(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    limits = Limits(max_input_len=CAPACITY, max_kv_cache_capacity=CAPACITY, max_verify_tree_size=8)
    for part in ("llm", "mtp_draft"):
        build(pair.out / part, path, limits)
    return path


@pytest.mark.parametrize("cuts", [(), (4, 9), (10,)])
def test_engine_drafts_the_chain_of_the_reference(
    pair: Pair, engine_dir: Path, cuts: tuple[int, ...]
) -> None:
    """From the engine's own states, observed at once and in parts with a draft after each."""
    with Engine(engine_dir, spec_decode=True) as engine:
        assert engine.drafter is not None
        found = (
            OneLane(engine.base)
            .causal(TOKENS[:-1].numpy(), np.arange(len(TOKENS) - 1))
            .hidden_states
        )
        assert found is not None
        for states, tokens in zip(
            np.split(found[0].copy(), cuts), np.split(TOKENS[1:].numpy(), cuts), strict=True
        ):
            engine.drafter.observe([Observation(0, HostStates(states), tokens)])
            (tree,) = engine.drafter.propose([DraftRequest(0, int(tokens[-1]), DraftPlan(1, 4, 5))])
        last = engine.drafter.lanes[0].last_logits
    drafts = tree.tokens.tolist()[1:]
    logits, _ = (ref := pair.reference()).chain(TOKENS[1:], ref.base_states(TOKENS[:-1]), drafts)
    close(last.row(0), logits[0])
    assert drafts == logits[:-1].argmax(-1).tolist()
