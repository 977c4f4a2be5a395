"""The decoding types of TensorRT-LLM's `speculative_config`: which method each of them names, and
the keys that it has beside those of all types.

Knows TensorRT-LLM's keys, their defaults and what it checks. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from edgespec.compat.decoding import (
    LAYERS_SCHEMA,
    MAX_DRAFT_LEN,
    Alias,
    DecodingConfig,
    DecodingType,
    TreeDecoding,
    read_layers,
)
from edgespec.errors import OptionError, Spellings, in_terms_of
from edgespec.runtime.drafters.block_drafter import MAX_BLOCK_TOP_K
from edgespec.runtime.drafters.dspark import DSparkOptions
from edgespec.runtime.drafters.eagle_options import NUM_EAGLE_LAYERS, EagleKeys, EagleOptions
from edgespec.runtime.drafters.loading import load_drafter
from edgespec.runtime.drafters.medusa import MedusaKeys, MedusaOptions
from edgespec.runtime.drafters.options import DrafterOptions, option, refuse
from edgespec.runtime.plans.plan import Sizes
from edgespec.runtime.trees.static_tree import MAX_NODES
from edgespec.runtime.trees.tree import DraftPlan

TWO_ENGINES = "base and draft are always two engines, side by side"


@dataclass(frozen=True, kw_only=True)
class EagleDecoding(DecodingConfig, EagleKeys):
    """The keys of EAGLE's decoding types, as TensorRT-LLM's LLM API has them: `max_draft_len` are
    the levels, `max_total_draft_tokens` the nodes without the root. A chain, unless choices or a
    dynamic tree are asked for."""

    len_keys = ("max_draft_len", "num_eagle_layers")

    greedy_sampling: bool | None = option(
        None, "TensorRT-LLM's switch of posterior_threshold: true excludes it."
    )

    def __post_init__(self) -> None:
        DecodingConfig.__post_init__(self)
        if self.greedy_sampling and self.posterior_threshold is not None:
            message = (
                "`posterior_threshold` is for typical acceptance, and `greedy_sampling` is true"
            )
            raise OptionError(message, "Leave one of the two out.")
        _ = self.tree  # raises OptionError where keys contradict each other

    def notes(self) -> Iterator[str]:
        """Those of all types, and what TensorRT-LLM does otherwise with the keys given."""
        yield from DecodingConfig.notes(self)
        if self.greedy_sampling is False and self.posterior_threshold is None:
            yield "greedy_sampling false means nothing without posterior_threshold"
        if self.dynamic_tree_max_topK is not None and not self.use_dynamic_tree:
            yield (
                "dynamic_tree_max_topK asks for a dynamic tree; newer versions of TensorRT-LLM want"
                " use_dynamic_tree: true beside it"
            )

    @property
    def is_dynamic(self) -> bool:
        """Whether a dynamic tree is asked for, if only by its width."""
        return self.use_dynamic_tree or self.dynamic_tree_max_topK is not None

    @property
    def sizes(self) -> Sizes:
        """How much to draft where `tree` is None: a chain."""
        if self.eagle_choices is None and not self.is_dynamic:
            self.check_chain()
        length = self.draft_len
        return Sizes() if length is None else Sizes(1, length, 1 + length)

    @property
    def tree(self) -> EagleTree | None:
        """The static or the dynamic tree; None for a chain. Raises OptionError."""
        if self.eagle_choices is None and not self.is_dynamic:
            if self.max_non_leaves_per_layer is not None:
                message = "`max_non_leaves_per_layer` is for trees, and a chain is drafted"
                raise OptionError(
                    message, "Give `eagle_choices` or `use_dynamic_tree`, or leave it out."
                )
            return None
        # The options' names on the left mean in a config what stands on the right
        names = {
            "max_draft_len": "`max_total_draft_tokens`",
            "num_eagle_layers": f"`{self.len_key}`",
        }
        with in_terms_of(names):
            options = EagleOptions(
                eagle_choices=self.eagle_choices,
                use_dynamic_tree=self.is_dynamic,
                dynamic_tree_max_topK=self.dynamic_tree_max_topK,
                num_eagle_layers=self.draft_len,
                max_non_leaves_per_layer=self.max_non_leaves_per_layer,
                max_draft_len=self.max_total_draft_tokens,
            )
        return EagleTree(options, {**names, **self.spellings})


@dataclass(frozen=True, slots=True)
class EagleTree:
    """The tree of a config. Without a number of nodes a dynamic one has TensorRT-LLM's: its width
    times its levels, as far as the base verifies so many."""

    options: EagleOptions
    spellings: Spellings  # the config's names for those of the options

    def plan(self, max_verify_tree_size: int, max_levels: int | None = None) -> DraftPlan:
        """The plan for a base that verifies so many nodes. Raises OptionError and LimitError."""
        options, width = self.options, self.options.dynamic_tree_max_topK
        if options.use_dynamic_tree and options.max_draft_len is None and width is not None:
            nodes = width * (options.num_eagle_layers or NUM_EAGLE_LAYERS)
            most = max(1, min(nodes, max_verify_tree_size - 1))
            options = replace(options, max_draft_len=most)
        return options.plan(max_verify_tree_size, max_levels)


@dataclass(frozen=True, kw_only=True)
class Eagle3Decoding(EagleDecoding):
    """The keys of its decoding type."""

    layers_key = "eagle3_layers_to_capture"

    eagle3_layers_to_capture: tuple[int, ...] | None = option(
        None,
        "The base's layers whose output the draft reads, counted from 0. run exports the base with"
        " them; infer and chat refuse others than the base was exported with.",
        read=read_layers,
        schema=LAYERS_SCHEMA,
    )
    eagle3_one_model: bool = option(True, "One program for base and draft.", unused=TWO_ENGINES)
    eagle3_model_arch: str | None = option(
        None, "The architecture of the draft.", unused="it is read from the draft's checkpoint"
    )


ONE_KIND = "a head drafts with its own hidden states; there is no other kind"


@dataclass(frozen=True, kw_only=True)
class MtpDecoding(DecodingConfig):
    """The keys of its decoding type: a chain."""

    len_keys = ("max_draft_len", "num_nextn_predict_layers")

    num_nextn_predict_layers: int | None = option(
        None, "TensorRT-LLM's older name of max_draft_len.", low=1, high=MAX_DRAFT_LEN
    )
    use_mtp_vanilla: bool = option(False, "One head for each draft; true is refused.")
    mtp_eagle_one_model: bool = option(True, "One program for base and head.", unused=ONE_KIND)

    def __post_init__(self) -> None:
        DecodingConfig.__post_init__(self)
        if self.use_mtp_vanilla:
            message = "use_mtp_vanilla is true, and a head drafts all tokens of a step"
            raise OptionError(message, "Set it to false, or leave it out.")


@dataclass(frozen=True, kw_only=True)
class BlockDecoding(DecodingConfig):
    """The keys of a method that drafts the chain of one block."""

    layers_key = "target_layer_ids"

    target_layer_ids: tuple[int, ...] | None = option(
        None,
        "The base's layers whose output the draft reads, counted from 0; others than the draft was"
        " exported with are refused.",
        read=read_layers,
        schema=LAYERS_SCHEMA,
    )
    mask_token_id: int | None = option(
        None, "The mask token.", low=0, unused="it is the one that the draft was exported with"
    )
    attention_backend: str | None = option(
        None, "Kernels of the draft.", unused="this is decided when the engine is built"
    )

    @property
    def sizes(self) -> Sizes:
        """How much to draft: a block of max_draft_len drafts. Raises OptionError."""
        self.check_chain()
        return Sizes(1, None, None if self.draft_len is None else 1 + self.draft_len)


@dataclass(frozen=True, kw_only=True)
class BlockTreeDecoding(BlockDecoding):
    """The keys of a method that drafts the chain of one block, or a tree made of it."""

    dynamic_tree_max_topK: int | None = option(  # noqa: N815
        None,
        "Candidates per slot of a block; above 1 a tree of max_total_draft_tokens nodes is made of"
        " it.",
        low=1,
        high=MAX_BLOCK_TOP_K,
    )

    @property
    def sizes(self) -> Sizes:
        """How much to draft: a block of max_draft_len drafts, or a tree. Raises OptionError."""
        top_k = self.dynamic_tree_max_topK
        if top_k is None or top_k == 1:
            return super().sizes
        if self.draft_len is not None:
            message = (
                f"a tree of candidates ({top_k}) is asked for, and max_draft_len {self.draft_len}"
            )
            raise OptionError(
                message, "A tree is as deep as the block: give max_total_draft_tokens."
            )
        return Sizes(top_k, None, self.num_nodes)


AS_EXPORTED = "it is as the draft was exported"


@dataclass(frozen=True, kw_only=True)
class DSparkDecoding(BlockDecoding):
    """The keys of its decoding type: the chain of one block, cut by its confidences."""

    enable_confidence_scheduling: bool = option(
        True,
        "Let the confidences set the length of a block; false verifies whole blocks, which is"
        " TensorRT-LLM's default.",
    )
    block_size: int | None = option(None, "Slots of a block.", low=1, unused=AS_EXPORTED)
    markov_rank: int | None = option(None, "Of the Markov head.", low=0, unused=AS_EXPORTED)
    markov_head_type: str | None = option(None, "Of the Markov head.", unused=AS_EXPORTED)
    enable_ragged_verify: bool = option(
        True, "A length for each sequence.", unused="each sequence has its own length"
    )
    confidence_sps_table_path: str | None = option(
        None, "What passes cost.", unused="what a further row costs is known of the backend"
    )
    confidence_sts_path: str | None = option(
        None, "Temperatures of slots.", unused="confidences are taken as the draft gives them"
    )
    confidence_verify_len_tiers: tuple[int, ...] | None = option(
        None,
        "Lengths that are verified.",
        unused="blocks of every length are verified",
        read=read_layers,
        schema=LAYERS_SCHEMA,
    )

    def __post_init__(self) -> None:
        BlockDecoding.__post_init__(self)
        _ = self.options  # raises OptionError where keys contradict each other

    @property
    def options(self) -> DrafterOptions | None:
        """The options of the drafter. Raises OptionError."""
        options = super().options
        if self.enable_confidence_scheduling or not isinstance(options, DSparkOptions):
            return options
        if options.confidence_threshold:
            message = (
                f"enable_confidence_scheduling is false, and confidence_threshold"
                f" {options.confidence_threshold}"
            )
            raise OptionError(message, "A threshold cuts blocks: leave one of the two out.")
        return DSparkOptions(confidence_threshold=0.0)


@dataclass(frozen=True, kw_only=True)
class MedusaDecoding(DecodingConfig, MedusaKeys):
    """The keys of `decoding_type: Medusa`, as TensorRT-LLM's LLM API has them: a static tree, whose
    nodes `max_draft_len` bounds, and whose levels are heads."""

    len_keys = ("num_medusa_heads",)

    max_draft_len: int | None = option(
        None, "Nodes of the tree at most, without the root.", low=1, high=MAX_NODES
    )

    @property
    def sizes(self) -> Sizes:
        """None: `tree` says how much is drafted."""
        nodes, total = self.max_draft_len, self.max_total_draft_tokens
        if None not in (nodes, total) and nodes != total:
            message = f"`max_total_draft_tokens` is {total}, and `max_draft_len` {nodes}"
            raise OptionError(message, "Both are the nodes of the tree: leave one out.")
        with in_terms_of(self.spellings):
            _ = self.tree.plan(0)  # raises OptionError where keys contradict each other
        return Sizes()

    @property
    def tree(self) -> MedusaOptions:
        """The static tree. Raises OptionError."""
        return MedusaOptions(
            medusa_choices=self.medusa_choices,
            num_medusa_heads=self.draft_len,
            max_draft_len=self.max_draft_len or self.max_total_draft_tokens,
        )

    @property
    def spellings(self) -> Spellings:
        """The keys that were given for what the tree's options name."""
        given = self.max_draft_len is not None or self.max_total_draft_tokens is None
        nodes = "max_draft_len" if given else "max_total_draft_tokens"
        names = {"num_medusa_heads": f"`{self.len_key}`", "max_draft_len": f"`{nodes}`"}
        return {**super().spellings, **names}


@dataclass(frozen=True, kw_only=True)
class SuffixDecoding(DecodingConfig):
    """The keys of its decoding type: trees up to max_draft_len deep, of up to
    max_total_draft_tokens nodes, as far as they pay."""

    @property
    def sizes(self) -> Sizes:
        """The bounds of a tree."""
        return Sizes(None, self.draft_len, self.num_nodes)


def any_object(name: str, value: object) -> object:
    """An object as it is: what it must have is found out when it is opened. Raises OptionError for
    numbers, lists and the like, which a file could hold."""
    if isinstance(value, bool | int | float | list | tuple | dict):
        refuse(name, value, "Give an object, in Python.")
    return value


IN_PYTHON: dict[str, Any] = {"type": "null"}


@dataclass(frozen=True, kw_only=True)
class OwnDecoding(DecodingConfig):
    """The keys of its decoding type. Files and requests run no code: there the drafter is named on
    the command line, by --drafter."""

    drafter: object | None = option(
        None,
        "The drafter: an object, or package.module:Class; only in Python. For a file the command"
        " line names it.",
        read=any_object,
        schema=IN_PYTHON,
    )
    resource_manager: object | None = option(
        None,
        "TensorRT-LLM's resource manager, an object; only in Python. The drafter gets it as its"
        " attribute resource_manager.",
        read=any_object,
        schema=IN_PYTHON,
    )

    def __post_init__(self) -> None:
        DecodingConfig.__post_init__(self)
        if isinstance(self.drafter, str):
            object.__setattr__(self, "drafter", load_drafter(self.drafter))
        if self.resource_manager is None:
            return
        if self.drafter is None:
            raise OptionError("resource_manager is given without a drafter", "Give both.")
        try:  # TensorRT-LLM's drafters have it as an attribute
            self.drafter.resource_manager = self.resource_manager  # type: ignore[attr-defined]
        except Exception as error:  # whatever its own code raises
            message = f"a {type(self.drafter).__name__} cannot have the attribute resource_manager"
            raise OptionError(message, "Give an object of a class of your own.") from error

    @property
    def drafts_by(self) -> object | None:
        """The drafter."""
        return self.drafter


OWN_TYPE = DecodingType(name="User_Provided", keys=OwnDecoding)

# Method -> how a speculative_config names it
DECODING_TYPES: dict[str, DecodingType] = {
    "eagle1": DecodingType(
        name="Eagle1",
        # EAGLE-2 is the same draft with a dynamic tree, of EAGLE's own width
        aliases=(
            Alias("Eagle2", presets=(("use_dynamic_tree", True), ("dynamic_tree_max_topK", 10))),
        ),
        keys=EagleDecoding,
    ),
    "eagle3": DecodingType(
        name="Eagle3",
        aliases=(
            Alias("Eagle", "decoding_type Eagle is Eagle3, as in TensorRT-LLM; write Eagle3"),
        ),
        keys=Eagle3Decoding,
    ),
    "mtp": DecodingType(name="MTP", keys=MtpDecoding),
    "dflash": DecodingType(
        name="DFlash",
        keys=BlockTreeDecoding,
    ),
    "jetspec": DecodingType(name="JetSpec", keys=BlockTreeDecoding),
    "dspark": DecodingType(name="DSpark", keys=DSparkDecoding),
    "medusa": DecodingType(name="Medusa", keys=MedusaDecoding),
    "draft_model": DecodingType(name="Draft_Target", keys=TreeDecoding),
    "suffix": DecodingType(name="Suffix", keys=SuffixDecoding),
    "ngram": DecodingType(name="NGram"),
}
