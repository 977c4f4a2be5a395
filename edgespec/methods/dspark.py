"""DSpark block drafts (arXiv 2607.05147): DFlash's layers, whose first slot drafts too, and two
small heads behind them.

The Markov head adds to each slot's logits what the token before it makes likely, so the block is
walked from left to right. The confidence head says of each slot how probably its token will be
accepted. Both are arrays beside the graph: the drafter computes them.

Read as DeepSpec (deepseek-ai), speculators, ModelOpt and SpecForge write it; the drafts of other
families than Qwen3's layers are refused by their classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from edgespec.config.fields import Fields, is_int, shortened
from edgespec.config.values import DraftConfig, Shapes
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.base import HeadSizes, SpecConfig
from edgespec.methods.block_draft import (
    KEYS,
    BlockDraftConfig,
    block_values,
    layout_of,
    own_shapes,
    refuse_unknown,
)
from edgespec.methods.block_method import (
    BlockSpec,
    block_method,
    config_rows,
    read_values,
    spec_keys,
    spec_rows,
    spec_values,
)
from edgespec.methods.block_variants import DSPARK, SHIFTED, is_variant, refuse_variants

NAME, TITLE = "dspark", "DSpark"
SECTION = "dspark_config"
PUBLISHED_SECTION = "dflash_config"  # of ModelOpt and SpecForge; DeepSpec has no section
DEEPSPEC = "deepspec"  # the layout of its authors
MarkovKind = Literal["vanilla", "gated", "rnn"]
MAX_MARKOV_RANK = 4096  # published drafts have 256
CLASSES = ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator", "DFlashDraftModel")
HEAD_KEYS = (
    *("markov_rank", "markov_head_type", "sample_from_anchor", "shift_label"),
    *("enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"),
)
SECTION_KEYS = (*KEYS, *HEAD_KEYS, "confidence_head_alpha", "attention_mode", "num_anchors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The small heads of a draft. `markov_rank` 0: no Markov head. `first_slot` is the first that
    drafts: 0, the anchor's own, or 1."""

    markov_rank: int
    markov_kind: MarkovKind
    confidence: bool
    confidence_reads_markov: bool
    first_slot: int

    def shapes(self, sizes: HeadSizes) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the arrays that the heads are made of."""
        shapes: dict[str, tuple[int, ...]] = {}
        rank, hidden = self.markov_rank, sizes.hidden_size
        if rank:
            shapes["markov_head.markov_w1.weight"] = (sizes.vocab_size, rank)
            shapes["markov_head.markov_w2.weight"] = (sizes.draft_vocab_size, rank)
        if rank and self.markov_kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if rank and self.markov_kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.confidence:
            width = hidden + (rank if self.confidence_reads_markov else 0)
            shapes["confidence_head.proj.weight"] = (1, width)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(BlockDraftConfig):
    """A DSpark draft: a block draft and its heads."""

    heads: Heads

    @property
    def first_slot(self) -> int:
        """The first slot of a block that drafts."""
        return self.heads.first_slot

    @property
    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the arrays of the heads."""
        width = self.decoder.hidden_size
        return self.heads.shapes(HeadSizes(self.vocab_size, self.draft_vocab_size, width))


def parse_dspark_config(
    raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json"
) -> DSparkConfig:
    """A DSpark draft of any layout from its config.json and the shapes of its tensors, under stored
    names or ours.

    Raises CheckpointError for contradictions, UnsupportedModel for drafts of other families.
    """
    top, shapes = Fields(raw, source), own_shapes(shapes)
    _refuse_classes(raw, source)
    refuse_variants(raw, shapes, source, read=(DSPARK, SHIFTED))
    inner = top.optional_section(PUBLISHED_SECTION)
    refuse_unknown(inner, SECTION_KEYS)
    layout = _layout(raw, inner)
    values = block_values(NAME, TITLE, raw, shapes, source, inner=inner, layout=layout)
    place = inner if layout in ("modelopt", "specforge") else top
    draft = DSparkConfig(**values, heads=read_heads(place, layout))
    _check_heads(draft, shapes, source)
    return draft


def _refuse_classes(raw: Mapping[str, Any], source: str) -> None:
    """A class that is called DSpark and is none of those that have Qwen3's layers."""
    names = raw.get("architectures")
    classes = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    other = next((n for n in classes if "dspark" in n.lower() and n not in CLASSES), None)
    if other is not None:
        message = f"{source}: a DSpark draft of the class {shortened(other)} is refused"
        raise UnsupportedModel(
            f"{message}: its layers are not Qwen3's.", f"This version reads {', '.join(CLASSES)}."
        )


def _layout(raw: Mapping[str, Any], inner: Fields) -> str:
    """Who wrote it. ModelOpt says `use_confidence_head`, SpecForge `enable_confidence_head`."""
    if layout_of(raw, PUBLISHED_SECTION) == "speculators":
        return "speculators"
    if not inner.raw or inner.get("markov_rank") is None:
        return DEEPSPEC
    return "modelopt" if inner.get("use_confidence_head") is not None else "specforge"


def read_heads(place: Fields, layout: str) -> Heads:
    """The heads as their layout declares them at a place; a missing key has the default of its
    library. Raises CheckpointError."""
    speculators, modelopt = layout == "speculators", layout == "modelopt"
    rank = place.get("markov_rank")
    if rank is None:
        if not speculators:
            raise place.missing("markov_rank")
        rank = 256
    if not is_int(rank) or not 0 <= rank <= MAX_MARKOV_RANK:
        raise place.wrong("markov_rank", f"a whole number from 0 to {MAX_MARKOV_RANK}")
    kind = place.text("markov_head_type")
    if kind is None:
        if layout == DEEPSPEC and rank:
            raise place.missing("markov_head_type")
        kind = "vanilla"
    if kind.lower() not in get_args(MarkovKind):
        raise place.wrong("markov_head_type", "vanilla, gated or rnn")
    if modelopt:
        confidence = reads = place.flag("use_confidence_head", False)
    else:
        if layout == DEEPSPEC and place.get("enable_confidence_head") is None:
            raise place.missing("enable_confidence_head")
        trained = place.get("confidence_head_alpha")
        default = speculators or (isinstance(trained, int | float) and trained > 0)
        confidence = place.flag("enable_confidence_head", bool(default))
        reads = place.flag("confidence_head_with_markov", speculators)
    if confidence and reads and not rank:
        raise place.wrong("markov_rank", "positive: the confidence head reads the Markov head")
    # slot j drafts the token behind it, but where a library says that the anchor's does not
    anchor = place.flag("shift_label" if modelopt else "sample_from_anchor", True)
    return Heads(
        markov_rank=cast(int, rank),
        markov_kind=cast(MarkovKind, kind.lower()),
        confidence=confidence,
        confidence_reads_markov=confidence and reads,
        first_slot=0 if anchor else 1,
    )


def _check_heads(draft: DSparkConfig, shapes: Shapes, source: str) -> None:
    """The arrays of the heads must have the shapes that config.json declares."""
    for name, shape in draft.head_shapes.items():
        if shapes.get(name) != shape:
            problem = f"has the shape {list(shapes[name])}" if name in shapes else "is missing"
            raise CheckpointError(
                f"the draft of {source}: {name} {problem}; declared is {list(shape)}.",
                "Check that config.json and weights belong together, or download the draft again.",
            )


# The method's row


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkSpec(BlockSpec):
    """What config.json keeps of a DSpark draft: its block and its heads."""

    heads: Heads

    @property
    def first_slot(self) -> int:
        """The first slot of a block that drafts."""
        return self.heads.first_slot


def spec_of(config: BlockDraftConfig, *, draft: bool) -> DSparkSpec:
    """What config.json keeps of a draft: of itself, or of the base that is exported for it."""
    assert isinstance(config, DSparkConfig)
    return DSparkSpec(**spec_values(config, draft=draft), heads=config.heads)


def read_spec(fields: Fields) -> DSparkSpec:
    """The `dspark_config` of an export's config.json, by TensorRT Edge-LLM's keys. Raises what
    `fields` raises, with the key."""
    inner = fields.section(SECTION)
    return DSparkSpec(**read_values(fields, inner), heads=read_heads(inner, DEEPSPEC))


def write_spec(spec: SpecConfig) -> dict[str, Any]:
    """The `dspark_config` that `read_spec` reads."""
    assert isinstance(spec, DSparkSpec)
    heads = spec.heads
    return {
        SECTION: spec_keys(spec)
        | {
            "markov_rank": heads.markov_rank,
            "markov_head_type": heads.markov_kind,
            "enable_confidence_head": heads.confidence,
            "confidence_head_with_markov": heads.confidence_reads_markov,
            "sample_from_anchor": heads.first_slot == 0,
        }
    }


def head_shapes(spec: SpecConfig, sizes: HeadSizes) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of the arrays that stand beside the graph of a draft."""
    assert isinstance(spec, DSparkSpec)
    return spec.heads.shapes(sizes)


def matches_config(config: Mapping[str, Any]) -> bool:
    """By a word of its class or kind, or by a key that only it has; speculators names its kinds."""
    return is_variant(DSPARK, NAME, config)


def dspark_config_rows(config: DraftConfig) -> Iterator[tuple[str, str]]:
    """Of a draft's checkpoint: its block, its attention and its heads."""
    assert isinstance(config, DSparkConfig)
    yield from config_rows(config)
    yield "heads", head_words(config.heads)


def dspark_spec_rows(spec: SpecConfig) -> Iterator[tuple[str, str]]:
    """Of an exported base or draft: the block, and the heads behind it."""
    assert isinstance(spec, DSparkSpec)
    yield from spec_rows(spec)
    yield "heads", head_words(spec.heads)


def head_words(heads: Heads) -> str:
    """The heads in words, and which slots draft."""
    markov = f"Markov ({heads.markov_kind}, rank {heads.markov_rank})" if heads.markov_rank else ""
    there = " and ".join(filter(None, [markov, "confidence" if heads.confidence else ""]))
    first = "the anchor's slot drafts" if heads.first_slot == 0 else "the anchor's slot does not"
    return f"{there or 'none'}; {first}"


METHOD = replace(
    block_method(NAME, TITLE, parse_dspark_config, matches_config),
    proposes="block chain",
    read_spec=read_spec,
    write_spec=write_spec,
    head_shapes=head_shapes,
    config_rows=dspark_config_rows,
    spec_rows=dspark_spec_rows,
)
