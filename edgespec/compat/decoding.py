"""TensorRT-LLM's `speculative_config` as an object: the keys of a decoding type, and what they ask
for in our words.

Knows keys that all decoding types share. A type's own keys stand in `decoding_types`; those of its
drafter are its options.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar, NamedTuple

from edgespec.errors import OptionError, Spellings
from edgespec.runtime.acceptance.relaxed import MAX_TOKENS, is_token
from edgespec.runtime.acceptance.verify import AcceptOptions, acceptance_of
from edgespec.runtime.drafters.options import (
    DrafterOptions,
    fields_of,
    option,
    refuse,
    shown,
    types_of,
)
from edgespec.runtime.opening.speculation import Speculation
from edgespec.runtime.plans.plan import Sizes, TreeSpec, sizes_as
from edgespec.runtime.plans.schedules import Schedule

TYPE_KEY = "decoding_type"
MAX_DRAFT_LEN = 1024
MAX_SEQUENCES = 2**16
MAX_LAYERS = 1000
DIGITS = re.compile("[0-9]{1,9}")


# An accept rule -> its keys: first the one that asks for it
ACCEPT = {
    "rejection": ("use_rejection_sampling",),
    "typical": ("posterior_threshold", "posterior_alpha"),
    "relaxed": (
        "use_relaxed_acceptance_for_thinking",
        "relaxed_topk",
        "relaxed_delta",
        "begin_thinking_phase_token",
        "end_thinking_phase_token",
    ),
}
SWITCHES = ("use_rejection_sampling", "use_relaxed_acceptance_for_thinking")


def read_schedule(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    """A mapping from batch sizes to draft lengths as pairs in ascending order."""
    if isinstance(value, tuple):  # as it is kept
        with suppress(TypeError, ValueError):
            value = dict(value)
    remedy = "Map batch sizes to draft lengths, such as {1: 4, 4: 2}."
    if not isinstance(value, Mapping) or not value:
        refuse(name, value, remedy)
    pairs: dict[int, int] = {}
    for key, length in value.items():
        batch = int(key) if isinstance(key, str) and DIGITS.fullmatch(key) else key  # as in JSON
        sound = type(batch) is int and 1 <= batch <= MAX_SEQUENCES and batch not in pairs
        if not sound or type(length) is not int or not 0 <= length <= MAX_DRAFT_LEN:
            refuse(name, length, remedy, f"[{shown(key)}]")
        pairs[batch] = length
    return tuple(sorted(pairs.items()))


SCHEDULE_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "integer", "minimum": 0, "maximum": MAX_DRAFT_LEN},
    "minProperties": 1,
}


def read_layers(name: str, value: Any) -> tuple[int, ...]:
    """A list of layers, ascending and each once."""
    if not isinstance(value, list | tuple) or not value or len(value) > MAX_LAYERS:
        refuse(name, value, "Give a list of layers, such as [1, 13, 24].")
    for item in value:
        if type(item) is not int or not 0 <= item < MAX_LAYERS:
            refuse(name, item, f"Give layers from 0 to {MAX_LAYERS - 1}.")
    if len(set(value)) != len(value):
        refuse(name, value, "Name each layer once.")
    return tuple(sorted(value))


LAYERS_SCHEMA = {
    "type": ["array", "null"],
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
    "uniqueItems": True,
}


def read_token(name: str, value: Any) -> int | str:
    """The id of a token, or a token."""
    if not is_token(value):
        refuse(name, value, "Give the id of a token, or the token itself.")
    return value  # type: ignore[no-any-return]


TOKEN_SCHEMA = {
    "type": ["integer", "string", "null"],
    "minimum": 0,
    "maximum": MAX_TOKENS - 1,
    "minLength": 1,
}


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(DrafterOptions):
    """The keys that all decoding types share. Raises OptionError for a value that cannot be."""

    decoding_type: ClassVar[str] = "AUTO"
    method: ClassVar[str | None] = None  # a row of DRAFTERS; None: what the engine was opened with
    options_class: ClassVar[type[DrafterOptions] | None] = None
    needs_engine: ClassVar[bool] = True
    len_keys: ClassVar[tuple[str, ...]] = ("max_draft_len",)  # the keys that say `given_len`
    layers_key: ClassVar[str | None] = None  # the key that names the layers that the draft reads

    max_draft_len: int | None = option(
        None, "Drafts in a row that a step verifies, at most.", low=1, high=MAX_DRAFT_LEN
    )
    max_total_draft_tokens: int | None = option(
        None,
        "Drafts that a step verifies in all: the nodes of a tree without its root. For a chain"
        " max_draft_len.",
        low=1,
        high=2**16,
    )
    speculative_model: str | None = option(
        None,
        "The draft's checkpoint: a directory or a name on the Hugging Face hub. run makes engines"
        " of it; infer, chat and edgespec.load refuse one that the draft engine was not made from.",
    )
    max_concurrency: int | None = option(
        None, "While more sequences run than this, nothing is drafted.", low=1, high=MAX_SEQUENCES
    )
    draft_len_schedule: Mapping[int, int] | None = option(
        None,
        "Draft lengths by the number of sequences that run: {4: 4, 8: 2} drafts 4 while up to 4"
        " run, 2 while up to 8 run, and nothing while more do.",
        read=read_schedule,
        schema=SCHEDULE_SCHEMA,
    )
    acceptance_window: int | None = option(
        None,
        "Answers over which acceptance_length_threshold is averaged; 0 is off.",
        low=0,
        high=2**20,
    )
    acceptance_length_threshold: float | None = option(
        None,
        "Drafting stops for good once the last acceptance_window answers accepted fewer drafts a"
        " step than this, on average.",
        low=0.0,
    )
    use_rejection_sampling: bool = option(
        False,
        "Accept drafts by rejection sampling: the distribution of plain decoding, and other tokens"
        " at a temperature above 0. For chains.",
    )
    posterior_threshold: float | None = option(
        None,
        "Typical acceptance, which is LOSSY: the least probability of a draft, such as 0.09.",
        high=1.0,
    )
    posterior_alpha: float | None = option(
        None,
        "Typical acceptance: a draft below the threshold needs this times exp(-entropy). Without"
        " it: the root of the threshold.",
        high=1.0,
    )
    use_relaxed_acceptance_for_thinking: bool = option(
        False, "Relaxed acceptance within thoughts, which is LOSSY."
    )
    relaxed_topk: int | None = option(
        None, "Relaxed acceptance: a draft is among so many best tokens. Without it: 10.", low=1
    )
    relaxed_delta: float | None = option(
        None,
        "Relaxed acceptance: a draft's log-probability is at most this much below the best one's."
        " Without it: 0.6.",
        low=0.0,
    )
    begin_thinking_phase_token: int | str | None = option(
        None,
        "The token that begins thoughts: its id, or the token itself. Without it: the model's own.",
        read=read_token,
        schema=TOKEN_SCHEMA,
    )
    end_thinking_phase_token: int | str | None = option(
        None,
        "The token that ends thoughts: its id, or the token itself. Without it: the model's own.",
        read=read_token,
        schema=TOKEN_SCHEMA,
    )
    load_format: str | None = option(
        None, "How a draft's weights are loaded.", unused="engines have their weights in them"
    )
    allow_advanced_sampling: bool = option(
        False,
        "Deprecated by TensorRT-LLM.",
        unused="every request is sampled as it asks, with drafts too",
    )

    def __post_init__(self) -> None:
        DrafterOptions.__post_init__(self)
        lengths = {key: getattr(self, key) for key in self.len_keys}
        if len({length for length in lengths.values() if length is not None}) > 1:
            said = ", and ".join(f"`{key}` is {length}" for key, length in lengths.items())
            raise OptionError(said, "They mean the same: leave one out.")
        self.check_schedule()
        if self.speculative_model == "":
            message = "`speculative_model` is empty"
            raise OptionError(message, "Give a directory or a name on the hub, or leave it out.")
        if self.speculative_model is not None and self.drafts_by is not None:
            message = (
                f"`speculative_model` is given, and {self.decoding_type} drafts without a model"
            )
            raise OptionError(message, "Leave it out.")
        if bool(self.acceptance_window) != (self.acceptance_length_threshold is not None):
            missing, other = "acceptance_window", "acceptance_length_threshold"
            missing, other = (other, missing) if self.acceptance_window else (missing, other)
            raise OptionError(f"`{other}` is given, and `{missing}` is not", "Give both.")
        _ = self.sizes, self.acceptance  # raise OptionError where keys contradict each other

    def check_schedule(self) -> None:
        """Raises OptionError for a schedule that contradicts other keys."""
        if self.draft_len_schedule is None:
            return
        if self.max_concurrency is not None:
            message = "`max_concurrency` and `draft_len_schedule` exclude each other"
            raise OptionError(message, "The schedule drafts nothing above its last batch size.")
        pairs = self.schedule_pairs
        (first, length), most = pairs[0], max(length for _, length in pairs)
        if self.given_len is not None and length != self.given_len:
            key = self.len_key
            message = f"`draft_len_schedule`[{first}] is {length}, and `{key}` {self.given_len}"
            raise OptionError(message, f"The smallest batch size has `{key}`.")
        if most > length:
            message = f"`draft_len_schedule` goes up to {most}, above the {length} of the first"
            raise OptionError(message, "Draft less where more sequences run.")

    @property
    def schedule_pairs(self) -> tuple[tuple[int, int], ...]:
        """The schedule as it is kept: pairs in ascending order; empty where there is none."""
        return self.draft_len_schedule or ()  # type: ignore[return-value]

    @property
    def drafts_by(self) -> object | None:
        """The method that drafts without an engine, by its name, or a drafter; None for the draft
        engine, or whatever the engine was opened with."""
        return None if self.needs_engine else self.method

    @property
    def options(self) -> DrafterOptions | None:
        """The options of the drafter; None where it has none."""
        if self.options_class is None:
            return None
        values = {name: getattr(self, name) for name in fields_of(self.options_class)}
        if "max_draft_len" in values:  # of a pool, which a schedule says too
            values["max_draft_len"] = self.draft_len
        shared = fields_of(DecodingConfig)  # None where they are not given
        given = {k: v for k, v in values.items() if v is not None or k not in shared}
        return self.options_class(**given)

    @property
    def sizes(self) -> Sizes:
        """How much to draft: a chain of max_draft_len. Raises OptionError where keys contradict
        each other."""
        length = self.draft_len
        self.check_chain()
        return Sizes() if length is None else Sizes(1, length, 1 + length)

    def check_chain(self) -> None:
        """Raises OptionError for a number of nodes that no chain of max_draft_len has."""
        total = self.max_total_draft_tokens
        if total is not None and total != self.draft_len:
            message = f"`max_total_draft_tokens` is {total}, and `{self.len_key}` {self.draft_len}"
            raise OptionError(message, "They are equal for a chain of drafts: leave one out.")

    @property
    def given_len(self) -> int | None:
        """Drafts in a row, by whatever key says so."""
        given: int | None = getattr(self, self.len_key, None)
        return given

    @property
    def draft_len(self) -> int | None:
        """Drafts in a row: as given, or what the schedule begins with."""
        pairs = self.schedule_pairs
        return self.given_len or (pairs[0][1] or None if pairs else None)

    @property
    def len_key(self) -> str:
        """The key that says `draft_len`; the first of its names where none does."""
        given = (name for name in self.len_keys if getattr(self, name) is not None)
        pairs = self.schedule_pairs
        return next(given, f"draft_len_schedule[{pairs[0][0]}]" if pairs else self.len_keys[0])

    @property
    def num_nodes(self) -> int | None:
        """Nodes that a step verifies, the root included, where a key says so."""
        return None if self.max_total_draft_tokens is None else 1 + self.max_total_draft_tokens

    @property
    def spellings(self) -> Spellings:
        """The keys that say the sizes of a plan; a chain has as many nodes as its length."""
        nodes = self.len_key if self.num_nodes is None else "max_total_draft_tokens"
        return sizes_as("dynamic_tree_max_topK", self.len_key, nodes)

    @property
    def schedule(self) -> Schedule | None:
        """What may be drafted by the number of sequences; None without such a limit."""
        if self.max_concurrency is not None:
            return Schedule(((self.max_concurrency, self.draft_len or MAX_DRAFT_LEN),))
        return Schedule(self.schedule_pairs) if self.schedule_pairs else None

    def says(self, name: str) -> bool:
        """Whether a key is given, and is not false."""
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def acceptance(self) -> AcceptOptions | None:
        """The accept rule; None is the engine's. Raises OptionError where keys ask for two."""
        given = {
            rule: [name for name in names if self.says(name)] for rule, names in ACCEPT.items()
        }
        asked = [rule for rule, names in given.items() if names]
        if len(asked) > 1:
            message = f"{given[asked[0]][0]} and {given[asked[1]][0]} ask for two accept rules"
            raise OptionError(message, "Leave one of the two out.")
        if not asked:
            return None
        switch = ACCEPT[asked[0]][0]
        if not self.says(switch):
            raise OptionError(f"{given[asked[0]][0]} is given without {switch}", "Give it too.")
        options = {n: getattr(self, n) for n in given[asked[0]] if n not in SWITCHES}
        return acceptance_of(asked[0], **options)

    @property
    def tree(self) -> TreeSpec | None:
        """A tree that is asked for otherwise than by sizes; None: `sizes` say how much to draft."""
        return None

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        """The hidden_states indices that the draft reads of the base, where its keys name them;
        they count the embedding as 0."""
        layers = None if self.layers_key is None else getattr(self, self.layers_key)
        return None if layers is None else tuple(layer + 1 for layer in layers)

    @property
    def speculation(self) -> Speculation:
        """What the keys ask for. Raises OptionError."""
        window, threshold = self.acceptance_window, self.acceptance_length_threshold
        return Speculation(
            label=f"{TYPE_KEY} {self.decoding_type}",
            drafter=self.drafts_by,
            options=self.options,
            sizes=self.sizes,
            tree=self.tree,
            spellings=self.spellings,
            schedule=self.schedule,
            gate=None if not window or threshold is None else (window, threshold),
            acceptance=self.acceptance,
            draft=self.speculative_model,
            aux_layers=self.aux_layers,
        )

    def notes(self) -> Iterator[str]:
        """What a user should know of the keys given: those without a meaning here."""
        for name, field in fields_of(type(self)).items():
            why = field.metadata.get("unused")
            if why and getattr(self, name) != field.default:
                yield f"{name} means nothing here: {why}"


@dataclass(frozen=True, kw_only=True)
class TreeDecoding(DecodingConfig):
    """The keys of types whose drafters make chains and, level by level, trees."""

    dynamic_tree_max_topK: int | None = option(  # noqa: N815
        None,
        "Children of a node: above 1 a tree of the most probable max_total_draft_tokens nodes is"
        " drafted, max_draft_len levels deep.",
        low=1,
        high=1024,
    )

    @property
    def sizes(self) -> Sizes:
        """How much to draft: a chain, or a tree. Raises OptionError."""
        if self.dynamic_tree_max_topK in (None, 1):
            return super().sizes
        return Sizes(self.dynamic_tree_max_topK, self.draft_len, self.num_nodes)


class Alias(NamedTuple):
    """Another name of a decoding type, with a note for whoever uses it, and values of keys that it
    stands for where they are not given."""

    name: str
    note: str = ""
    presets: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingType:
    """How `speculative_config` names a method.

    `name` is its decoding_type, `aliases` are other names. `keys` has the keys of the type; those
    of the drafter's options join them.
    """

    name: str
    aliases: tuple[Alias, ...] = ()
    keys: type[DecodingConfig] = DecodingConfig


@functools.cache
def config_class(
    decoding: DecodingType,
    method: str | None,
    options: type[DrafterOptions] | None,
    needs_engine: bool,
) -> type[DecodingConfig]:
    """The class of a decoding type, as users call it (type X: XDecodingConfig). Its fields are
    the type's keys and those of the drafter's options."""
    own = fields_of(decoding.keys)
    added: list[tuple[str, Any, Any]] = []
    for name, field in fields_of(options).items() if options is not None else ():
        if name not in own:
            assert options is not None
            metadata = dict(field.metadata)
            kinds: list[Any] = [*types_of(options)[name]]
            added.append(
                (name, functools.reduce(operator.or_, kinds), option(field.default, **metadata))
            )
    name = f"{decoding.name.replace('_', '')}DecodingConfig"
    made = make_dataclass(
        name,
        added,
        bases=(decoding.keys,),
        namespace={
            "decoding_type": decoding.name,
            "method": method,
            "options_class": options,
            "needs_engine": needs_engine,
            "__doc__": f"`decoding_type: {decoding.name}` of a speculative_config block.",
        },
        frozen=True,
        kw_only=True,
    )
    made.__module__ = "edgespec"
    return made
