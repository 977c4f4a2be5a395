"""Medusa heads (arXiv 2401.10774) of each published layout, from config.json and the shapes of the
tensors: a file of their own, or beside the weights of their base. Knows no bases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.config.fields import Fields, is_int, shortened
from edgespec.config.values import NOT_STATED, DecoderConfig, DraftConfig, NormSpec, Shapes
from edgespec.contract import Role
from edgespec.errors import CheckpointError, UnsupportedModel, counted
from edgespec.methods.base import DraftFormat, Method, SpecConfig

NAME = "medusa"
SECTION = "medusa"
MAX_HEADS = 5
MAX_BLOCKS = 16  # of one head
# How the tensors of head i begin, in a file of their own and in a merged checkpoint
PREFIXES = {"": "medusa", "medusa_head.": "merged", "medusa_heads.": "modelopt"}
ROOTS = tuple(prefix for prefix in PREFIXES if prefix)
BLOCK = re.compile(r"(medusa_heads?\.|)(\d{1,4})\.(\d{1,4})\.linear\.(weight|bias)")
OUTPUT = re.compile(r"(medusa_heads?\.|)(\d{1,4})\.(\d{1,4})\.weight")
BASE_TENSOR = "embed_tokens.weight"  # where it is, the heads stand beside their base


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(DraftConfig):
    """`num_heads` heads of `num_blocks` residual blocks each. Head i drafts the token i + 2
    positions behind the hidden state that all of them read. `declared_heads` is what config.json
    says, None where it does not."""

    num_heads: int
    num_blocks: int
    prefix: str  # of the tensors on disk
    declared_heads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec(SpecConfig):
    """What config.json of exported heads keeps, by ModelOpt's keys."""

    num_heads: int
    num_blocks: int


def is_head_tensor(name: str) -> bool:
    """Whether a tensor, without a leading `model.`, is one of a head."""
    return bool(BLOCK.fullmatch(name) or OUTPUT.fullmatch(name))


def parse_medusa_config(
    raw: Mapping[str, Any], shapes: Shapes, source: str = "config.json"
) -> MedusaConfig:
    """The heads of a file of their own, or of a merged checkpoint.

    The tensors decide how many heads there are, and of how many blocks; published configs say
    other. Raises CheckpointError for heads that are not all of one form, UnsupportedModel for more
    than MAX_HEADS.
    """
    shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    top = Fields(raw, source)
    prefix = prefix_of(shapes, source)
    num_heads, num_blocks, own_head = counts(shapes, prefix, source)
    hidden_size = square(shapes, f"{prefix}0.0.linear.weight", source)
    if own_head:
        vocab_size = rows_of(shapes, f"{prefix}0.{num_blocks}.weight", hidden_size, source)
    else:
        given = top.get("vocab_size") is not None
        vocab_size = top.size("vocab_size") if given else NOT_STATED
    name = top.get("base_model_name_or_path")
    return MedusaConfig(
        method=NAME,
        layout=PREFIXES[prefix],
        decoder=DecoderConfig(hidden_size, (), NormSpec(0.0)),  # no layers, and no norm
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        target_hidden_size=hidden_size,
        num_aux_layers=1,
        aux_layer_ids=None,
        own_embedding=False,
        own_head=own_head,
        base_name=name if isinstance(name, str) and name else None,
        num_heads=num_heads,
        num_blocks=num_blocks,
        prefix=prefix,
        declared_heads=declared(top),
    )


def prefix_of(shapes: Shapes, source: str) -> str:
    """How the tensors of the heads begin. CheckpointError where there are none, or two kinds."""
    prefixes = {match[1] for name in shapes if (match := BLOCK.fullmatch(name))}
    if len(prefixes) != 1:
        message = f"the heads of {source} are named in {counted(len(prefixes), 'way')}"
        raise CheckpointError(
            f"{message}: one of 0.0.linear.weight, medusa_head.0.0.linear.weight and"
            " medusa_heads.0.0.linear.weight is needed.",
            "Download the checkpoint again.",
        )
    return prefixes.pop()


def counts(shapes: Shapes, prefix: str, source: str) -> tuple[int, int, bool]:
    """Heads, residual blocks a head, and whether each has a matrix of logits of its own. Raises
    CheckpointError for heads that differ, UnsupportedModel for too many."""
    blocks: dict[int, set[int]] = {}
    outputs: dict[int, set[int]] = {}
    for name in shapes:
        if (match := BLOCK.fullmatch(name)) and match[1] == prefix:
            blocks.setdefault(int(match[2]), set()).add(int(match[3]))
        elif (match := OUTPUT.fullmatch(name)) and match[1] == prefix:
            outputs.setdefault(int(match[2]), set()).add(int(match[3]))
    count, depth = len(blocks), len(blocks.get(0, ()))
    whole = all(blocks.get(i) == set(range(depth)) for i in range(count)) and depth
    wanted: dict[int, set[int]] = {i: {depth} for i in range(count)}
    if not whole or outputs not in (wanted, {}):
        raise CheckpointError(
            f"the heads of {source} are not all of one form: residual blocks"
            f" {shown(blocks)}, matrices of logits {shown(outputs)}.",
            "Heads are numbered from 0, with blocks 0, 1, ... and the matrix behind them in each,"
            " or in none. Download the checkpoint again.",
        )
    if count > MAX_HEADS or depth > MAX_BLOCKS:
        message = f"{source}: {count} Medusa heads of {counted(depth, 'residual block')}"
        raise UnsupportedModel(
            f"{message}; this version takes {MAX_HEADS} of {MAX_BLOCKS} at most."
        )
    return count, depth, bool(outputs)


def shown(numbers: Mapping[int, set[int]]) -> str:
    """Numbers by head, for a message."""
    return shortened({i: sorted(blocks) for i, blocks in sorted(numbers.items())})


def square(shapes: Shapes, name: str, source: str) -> int:
    """The width of a block's matrix. CheckpointError where it is missing or not square."""
    shape = shapes.get(name, ())
    if len(shape) != 2 or shape[0] != shape[1]:
        raise CheckpointError(
            f"{name} of {source} has the shape {list(shape)}; a residual block's is square.",
            "Download the checkpoint again.",
        )
    return shape[0]


def rows_of(shapes: Shapes, name: str, width: int, source: str) -> int:
    """The rows of a matrix of logits, which are tokens. CheckpointError for another width."""
    shape = shapes[name]
    if len(shape) != 2 or shape[1] != width:
        raise CheckpointError(
            f"{name} of {source} has the shape {list(shape)}; the residual blocks are {width}"
            " wide.",
            "Download the checkpoint again.",
        )
    return shape[0]


def declared(top: Fields) -> int | None:
    """The heads that config.json counts, by either of its keys; no more than a note for users."""
    section = top.get(SECTION)
    places = (section, top.raw) if isinstance(section, Mapping) else (top.raw,)
    keys = ("num_medusa_heads", "medusa_num_heads")
    counts = (place.get(key) for place in places for key in keys)
    return next((value for value in counts if is_int(value)), None)


def has_head_tensors(config: Mapping[str, Any], shapes: Callable[[], Shapes]) -> bool:
    """Whether a checkpoint holds heads, and no base beside them."""
    del config
    tensors = shapes()
    return BASE_TENSOR not in tensors and any(BLOCK.fullmatch(name) for name in tensors)


# ---- what config.json of an exported component keeps


def read_spec(fields: Fields) -> SpecConfig:
    """The heads of an exported draft; of a base nothing. Raises what its Fields raise."""
    if fields.get("engine_role") != Role.DRAFT.value:
        return SpecConfig()
    section, heads = fields.section(SECTION), fields.section("graph").get("heads")
    spec = MedusaSpec(
        num_heads=section.size("num_medusa_heads"), num_blocks=section.size("num_medusa_layers")
    )
    if spec.num_heads != heads:
        raise section.wrong("num_medusa_heads", f"{shortened(heads)}, as the graph says")
    return spec


def write_spec(spec: SpecConfig) -> dict[str, Any]:
    """The keys of config.json, as ModelOpt names them; a base has none."""
    if not isinstance(spec, MedusaSpec):
        return {}
    return {SECTION: {"num_medusa_heads": spec.num_heads, "num_medusa_layers": spec.num_blocks}}


def spec_of(config: MedusaConfig) -> MedusaSpec:
    """What the config.json of exported heads keeps."""
    return MedusaSpec(num_heads=config.num_heads, num_blocks=config.num_blocks)


# ---- what users see


def heads_in_words(config: MedusaConfig) -> str:
    """How many heads there are, and what config.json says where that is another number."""
    blocks = counted(config.num_blocks, "residual block")
    text = f"{counted(config.num_heads, 'head')} of {blocks}"
    if config.declared_heads not in (None, config.num_heads):
        text += f" by the file; its config.json says {config.declared_heads}"
    return text


def config_rows(config: DraftConfig) -> Iterator[tuple[str, str]]:
    """The heads of a checkpoint."""
    assert isinstance(config, MedusaConfig)
    yield "heads", heads_in_words(config)


def spec_rows(spec: SpecConfig) -> Iterator[tuple[str, str]]:
    """The heads of an exported component."""
    if isinstance(spec, MedusaSpec):
        blocks = counted(spec.num_blocks, "residual block")
        yield "heads", f"{counted(spec.num_heads, 'head')} of {blocks}"


METHOD = Method(
    name=NAME,
    title="Medusa",
    draft_title="a set of Medusa heads",
    base_output="final_hidden_state",
    export_params={"medusa_base": True},
    component="medusa_draft",
    proposes="tree",
    format=DraftFormat(
        matches_config=lambda config: False,
        matches_tensors=has_head_tensors,
        parse=parse_medusa_config,
    ),
    tensors_in_base=ROOTS,
    read_spec=read_spec,
    write_spec=write_spec,
    default_layers="the state after the last norm",
    config_rows=config_rows,
    spec_rows=spec_rows,
)
