"""The config.json of an exported component (a base, a draft, a plain model) as one frozen value.

Knows the keys on disk, which are TensorRT Edge-LLM's where it has them, and writes what it reads.
What repeats another key must agree with it. Knows no graph and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from edgespec.artifacts import json_files
from edgespec.artifacts.graph_quantization import GraphQuantization
from edgespec.config import DecoderConfig, RopeConfig
from edgespec.config.fields import token_ids
from edgespec.contract import DECODERS, INPUTS, GraphShape, RecurrentShape, Role
from edgespec.errors import BundleError
from edgespec.methods import METHODS, PLAIN_METHOD, BaseSide, DraftSide, SpecConfig
from edgespec.methods.base import HeadSizes
from edgespec.rope import read_rope, rope_dict
from edgespec.safe_read.fields import BundleFields
from edgespec.safe_read.records import Count, Record

NO_SPEC = SpecConfig()
MAX_HEADS = 64  # side by side over one hidden state


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig(Record):
    """What a draft asks of its base. None: the draft does not say.

    `base_identity` is the identity of the base that it was exported for, `base_quantized_from` that
    of the base's original. On disk `aux_layer_ids` is "tap_ids", `num_aux_layers` "num_taps".
    """

    KEYS: ClassVar = {"aux_layer_ids": "tap_ids", "num_aux_layers": "num_taps"}
    IF_ANY = ("base_quantized_from", "num_target_layers", "enable_thinking")

    base_identity: str | None
    base_quantized_from: str | None = None
    base_name: str | None
    aux_layer_ids: tuple[int, ...] | None  # hidden_states indices
    num_aux_layers: Count
    target_hidden_size: int
    num_target_layers: int | None = None
    own_embedding: bool
    enable_thinking: bool | None = None  # the mode that the draft was trained in

    @classmethod
    def read(cls, keys: BundleFields) -> Self:
        """From the `pair` of config.json. BundleError names a wrong key."""
        pair = super(PairConfig, cls).read(keys)
        layers = pair.aux_layer_ids
        if layers is not None and len(layers) != pair.num_aux_layers:
            raise keys.wrong("num_taps", f"{len(layers)}, as many as tap_ids names")
        return pair


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentConfig:
    """An exported component. Sizes are in elements, `eos_token_ids` end an answer.

    `method` is a key of METHODS, None for a plain model; `spec` is what that method keeps.
    `graph` are the sizes of the graph's inputs and outputs, `quantization` its quantized weights.
    A component without layers has no attention: its sizes are 0, its `rope` None.
    """

    model: str  # the architecture, or the draft's name
    method: str | None
    role: Role
    vocab_size: int  # of the base
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    identity: str
    graph: GraphShape
    sliding_window: int | None = None  # of the layers that have one
    local_rope: RopeConfig | None = None  # of the layers that rotate otherwise than `rope` says
    max_position: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantized_from: str | None = None
    draft_vocab_size: int | None = None
    spec: SpecConfig = NO_SPEC
    pair: PairConfig | None = None
    quantization: GraphQuantization | None = None

    @classmethod
    def of_decoder(
        cls,
        layers: DecoderConfig,
        graph: GraphShape,
        *,
        model: str,
        method: str | None,
        vocab_size: int,
        identity: str,
    ) -> ComponentConfig:
        """A component of these layers and this graph; `vocab_size` is that of the base. What only
        a base or only a draft has is left out."""
        has_layers = bool(layers.layers)
        return cls(
            model=model,
            method=method,
            role=graph.role,
            vocab_size=vocab_size,
            hidden_size=layers.hidden_size,
            intermediate_size=layers.intermediate_size if has_layers else 0,
            num_layers=layers.num_layers,
            num_heads=layers.num_heads if has_layers else 0,
            num_kv_heads=layers.num_kv_heads if has_layers else 0,
            head_dim=layers.head_dim if has_layers else 0,
            rope=layers.rope if has_layers else None,
            identity=identity,
            graph=graph,
            sliding_window=layers.sliding_window,
            local_rope=layers.ropes[1] if len(layers.ropes) > 1 else None,
        )

    @classmethod
    def read(cls, path: Path) -> ComponentConfig:
        """From a config.json; BundleError where it is no component's, naming the key."""
        return cls.from_dict(json_files.read_json(path), str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> ComponentConfig:
        """From the keys of a config.json that export wrote; `source` names the file in errors."""
        return cls.from_fields(BundleFields(raw, source))

    @classmethod
    def from_fields(cls, fields: BundleFields) -> ComponentConfig:
        """From the keys of a config.json. BundleError names a wrong key, and its remedy is that of
        the fields."""
        method, role = read_method(fields)
        draft, graph = role is Role.DRAFT, read_graph(fields.section("graph"), role)
        layers = not graph.heads
        head_dim = fields.size("head_dim") if layers else 0
        if not draft and "eos_token_id" not in fields.raw:  # an empty list is an answer
            raise fields.missing("eos_token_id")
        eos = () if draft else token_ids(fields, "eos_token_id")
        bos = token_ids(fields, "bos_token_id")
        quantization, local_rope = fields.optional_section("quantization"), None
        if graph.local_rotary_dim:
            local_rope = read_rope(fields.section("local_rope"), head_dim)
        config = cls(
            model=fields.required_text("model"),
            method=method,
            role=role,
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size") if layers else 0,
            num_layers=fields.size("num_hidden_layers") if layers else 0,
            num_heads=fields.size("num_attention_heads") if layers else 0,
            num_kv_heads=fields.size("num_key_value_heads") if layers else 0,
            head_dim=head_dim,
            rope=read_rope(fields.section("rope"), head_dim) if layers else None,
            identity=fields.required_text("identity"),
            graph=graph,
            sliding_window=fields.optional_size("sliding_window"),
            local_rope=local_rope,
            max_position=None if draft else fields.size("max_position_embeddings"),
            eos_token_ids=eos,
            bos_token_id=bos[0] if bos else None,
            quantized_from=fields.text("quantized_from"),
            draft_vocab_size=fields.size("draft_vocab_size") if draft else None,
            spec=METHODS[method].read_spec(fields) if method else NO_SPEC,
            pair=PairConfig.read(fields.section("pair")) if draft else None,
            quantization=GraphQuantization.read(quantization) if quantization.raw else None,
        )
        if config.pair is not None and config.reads_base != bool(config.pair.num_aux_layers):
            wanted = "positive" if config.reads_base else "0"
            raise fields.section("pair").wrong("num_taps", f"{wanted} for this kind of draft")
        refuse_contradictions(config, fields)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json, in the order in which they are written."""
        keys: dict[str, Any] = {
            "model": self.model,
            "spec_decode_type": self.method or PLAIN_METHOD,
            "engine_role": self.role.value,
            "vocab_size": self.vocab_size,
        }
        if self.draft_vocab_size is not None:
            keys["draft_vocab_size"] = self.draft_vocab_size
        keys |= self.decoder_keys()
        if self.role is Role.DRAFT:
            keys["base_model_hidden_size"] = self.graph.base_features
        else:
            keys |= {
                "max_position_embeddings": self.max_position,
                "eos_token_id": list(self.eos_token_ids),
                "bos_token_id": self.bos_token_id,
            }
        keys["identity"] = self.identity
        spec = METHODS[self.method].write_spec(self.spec) if self.method else {}
        if self.pair is not None:
            keys |= {**spec, "pair": self.pair.to_dict()}
            spec = {}
        keys["graph"] = self.graph.as_dict()
        if self.quantized_from:
            keys["quantized_from"] = self.quantized_from
        keys |= {**recurrent_keys(self.graph), **spec}
        return keys | ({"quantization": self.quantization.to_dict()} if self.quantization else {})

    def decoder_keys(self) -> dict[str, Any]:
        """What config.json says of the layers."""
        if self.rope is None:
            return {"hidden_size": self.hidden_size, "num_hidden_layers": 0}
        local = {"local_rope": rope_dict(self.local_rope)} if self.local_rope else {}
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "sliding_window": self.sliding_window,
            "rope_theta": self.rope.theta,
            "partial_rotary_factor": self.rope.rotary_dim / self.head_dim,
            "rope": rope_dict(self.rope),
            **local,
            "kv_cache_dtype": "fp32",
        }

    @property
    def reads_base(self) -> bool:
        """Whether it is a draft that reads what the base's graph emits."""
        draft = self.role is Role.DRAFT and self.method is not None
        return draft and METHODS[self.method or ""].reads_base

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of the graph's tables: one or two, none without layers."""
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None)

    @property
    def origin(self) -> str:
        """The identity of the weights that these stem from: their own unless quantized."""
        return self.quantized_from or self.identity

    def as_base(self, name: str = "the base") -> BaseSide:
        """The base side of a pairing."""
        return BaseSide(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            name=name,
            method=self.method or PLAIN_METHOD,
            aux_layer_ids=self.spec.aux_layer_ids,
            hidden_states_width=self.graph.features,
            identity=self.identity,
            origin=self.origin,
        )

    def as_draft(self) -> DraftSide:
        """The draft side of a pairing. Only for a component with a `pair`."""
        assert self.pair is not None
        assert self.method is not None
        assert self.draft_vocab_size is not None
        return DraftSide(
            method=self.method,
            vocab_size=self.vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            hidden_size=self.hidden_size,
            target_hidden_size=self.pair.target_hidden_size,
            num_aux_layers=self.pair.num_aux_layers,
            aux_layer_ids=self.pair.aux_layer_ids,
            own_embedding=self.pair.own_embedding,
            num_target_layers=self.pair.num_target_layers,
            hidden_states_width=self.graph.base_features,
            base_identity=self.pair.base_identity,
            base_origin=self.pair.base_quantized_from or self.pair.base_identity,
        )


def read_method(fields: BundleFields) -> tuple[str | None, Role]:
    """(method, role) of a config.json; BundleError for those that this version does not know."""
    kind, role = fields.get("spec_decode_type"), fields.get("engine_role")
    known = (PLAIN_METHOD, *METHODS)
    if kind not in known or role not in DECODERS:
        message = f"{fields.source}: spec_decode_type {kind!r:.80} with engine_role {role!r:.80}"
        raise BundleError(message, f"This version builds: {', '.join(known)}. {fields.remedy}")
    if (kind == PLAIN_METHOD) != (role == Role.LLM.value):
        raise fields.refused(f"engine_role {role} contradicts spec_decode_type {kind}")
    return (None if kind == PLAIN_METHOD else kind), Role(role)


def read_graph(graph: BundleFields, role: Role) -> GraphShape:
    """The sizes of a graph as config.json keeps them."""
    if graph.get("role") != role.value:
        raise graph.wrong("role", repr(role.value))
    if heads := graph.count("heads"):
        return read_heads(graph, role, heads)
    recurrent, num_layers = graph.optional_section("recurrent"), graph.size("num_layers")
    return GraphShape(
        role,
        hidden_size=graph.size("hidden_size"),
        num_layers=num_layers,
        num_kv_heads=graph.size("num_kv_heads"),
        head_dim=graph.size("head_dim"),
        rotary_dim=graph.size("rotary_dim"),
        vocab_size=graph.size("vocab_size"),
        features=graph.count("features"),
        base_features=graph.count("base_features"),
        block=graph.flag("block", False),
        sliding=graph.flag("sliding", False),
        recurrent=read_recurrent(recurrent, num_layers) if recurrent.raw else None,
        local_rotary_dim=graph.count("local_rotary_dim"),
        sizes=read_sizes(graph, role, num_layers),
    )


def read_sizes(graph: BundleFields, role: Role, num_layers: int) -> dict[str, int]:
    """The sizes of optional inputs. Raises BundleError for more than such a graph can have."""
    sizes = {}
    for row in INPUTS.values():
        if row.size and (size := graph.count(row.size)):
            if size > (most := row.max_size(role, num_layers)):
                raise graph.wrong(row.size, f"at most {most}")
            sizes[row.size] = size
    return sizes


def read_heads(graph: BundleFields, role: Role, heads: int) -> GraphShape:
    """The sizes of heads over a hidden state, which have neither layers nor memory."""
    if role is not Role.DRAFT or heads > MAX_HEADS:
        raise graph.wrong("heads", f"1 to {MAX_HEADS}, of a draft")
    for key in ("num_layers", "num_kv_heads", "head_dim", "rotary_dim", "features"):
        if graph.count(key):
            raise graph.wrong(key, "0: heads have no layers")
    read_sizes(graph, role, num_layers=0)
    if any(graph.flag(key, False) for key in ("block", "sliding")) or graph.get("recurrent"):
        raise graph.refused("heads beside layers")
    return GraphShape(
        role,
        hidden_size=graph.size("hidden_size"),
        num_layers=0,
        num_kv_heads=0,
        head_dim=0,
        rotary_dim=0,
        vocab_size=graph.size("vocab_size"),
        base_features=graph.size("base_features"),
        heads=heads,
    )


def read_recurrent(sizes: BundleFields, num_layers: int) -> RecurrentShape:
    """The sizes of the recurrent layers in config.json. Raises BundleError with the key."""
    layers = sizes.counts("layers")
    others = set(range(num_layers)).difference(layers)
    if list(layers) != sorted(set(layers)) or not layers or len(others) + len(layers) != num_layers:
        raise sizes.wrong("layers", f"ascending layer numbers below {num_layers}")
    if not others:
        raise sizes.wrong("layers", "some of the layers: one at least has attention")
    return RecurrentShape(
        layers,
        num_key_heads=sizes.size("num_key_heads"),
        num_value_heads=sizes.size("num_value_heads"),
        key_head_dim=sizes.size("key_head_dim"),
        value_head_dim=sizes.size("value_head_dim"),
        conv_kernel=sizes.size("conv_kernel"),
    )


def refuse_contradictions(config: ComponentConfig, fields: BundleFields) -> None:
    """BundleError with the first key that says other than the keys that it repeats."""
    graph = fields.section("graph")
    for key, stated, wanted in (*graph_repeats(config), *draft_repeats(config)):
        if stated != wanted:
            raise graph.wrong(key, f"{wanted}, as the rest of the file says")
    if config.rope is not None and config.num_heads % config.num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of {config.num_heads} heads")
    hidden, layers = config.hidden_size, config.spec.aux_layer_ids
    if config.role is Role.BASE:
        wide = (len(layers) * hidden,) if layers else tuple(range(hidden, hidden * 65, hidden))
        if config.graph.features not in wide:
            raise graph.wrong("features", f"{wide[0]}: what drafts read of a base this wide")
        if not all(0 <= layer <= config.num_layers for layer in layers):
            raise fields.refused(
                f"aux layers {list(layers)} of a base with {config.num_layers} layers"
            )
    written = config.to_dict()
    for key in sorted(REPEATED.intersection(fields.raw, written)):
        if fields.get(key) != written[key]:
            raise fields.wrong(key, f"{written[key]!r:.80}, as the rest of the file says")


# Keys that are written for the tools that read them, and repeat others
REPEATED = frozenset(
    (
        "rope_theta",
        "partial_rotary_factor",
        "kv_cache_dtype",
        "base_model_hidden_size",
        "num_linear_attn_layers",
        "num_attention_layers",
        "recurrent_state_num_heads",
        "recurrent_state_head_dim",
        "recurrent_state_size",
        "conv_dim",
        "conv_kernel",
        "recurrent_state_dtype",
        "conv_state_dtype",
        "layer_types",
        "kv_layer_configs",
    )
)

Repeat = tuple[str, int, int]  # a key of `graph`, its value, and the one that it must have


def graph_repeats(config: ComponentConfig) -> Iterator[Repeat]:
    """The sizes of the graph that follow from the others."""
    graph = config.graph
    rotary_dim = config.rope.rotary_dim if config.rope is not None else 0
    yield "hidden_size", graph.hidden_size, config.hidden_size
    yield "num_layers", graph.num_layers, config.num_layers
    yield "num_kv_heads", graph.num_kv_heads, config.num_kv_heads
    yield "head_dim", graph.head_dim, config.head_dim
    yield "rotary_dim", graph.rotary_dim, rotary_dim
    yield "vocab_size", graph.vocab_size, config.draft_vocab_size or config.vocab_size
    if config.local_rope is not None:
        yield "local_rotary_dim", graph.local_rotary_dim, config.local_rope.rotary_dim
    if config.role is Role.LLM:
        yield "features", graph.features, 0


def draft_repeats(config: ComponentConfig) -> Iterator[Repeat]:
    """The widths of a draft's graph that follow from what it asks of its base."""
    graph, pair = config.graph, config.pair
    if pair is None:
        yield "base_features", graph.base_features, 0
        return
    yield "base_features", graph.base_features, pair.num_aux_layers * pair.target_hidden_size
    yield "features", graph.features, config.hidden_size if gives_states(config) else 0


def gives_states(config: ComponentConfig) -> bool:
    """Whether a draft's graph gives its states: to be read again, or by the heads beside it."""
    if not config.graph.block:
        return config.reads_base and not config.graph.heads
    assert config.method is not None
    assert config.draft_vocab_size is not None
    sizes = HeadSizes(config.vocab_size, config.draft_vocab_size, config.hidden_size)
    return bool(METHODS[config.method].head_shapes(config.spec, sizes))


def recurrent_keys(shape: GraphShape) -> dict[str, Any]:
    """What a base with recurrent layers says of them, by TensorRT Edge-LLM's keys; else nothing."""
    sizes = shape.recurrent
    if sizes is None:
        return {}
    kinds = ["mamba" if i in sizes.layers else "attention" for i in range(shape.num_layers)]
    cache = {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    return {
        "num_linear_attn_layers": len(sizes.layers),
        "num_attention_layers": len(shape.attention_layers),
        "recurrent_state_num_heads": sizes.num_value_heads,
        "recurrent_state_head_dim": sizes.key_head_dim,
        "recurrent_state_size": sizes.value_head_dim,
        "conv_dim": sizes.conv_width,
        "conv_kernel": sizes.conv_kernel,
        "recurrent_state_dtype": "fp32",
        "conv_state_dtype": "fp32",
        "layer_types": kinds,
        "kv_layer_configs": [None if kind == "mamba" else cache for kind in kinds],
    }
