"""Draft trees of a fixed shape: which children, by rank, each node has, whatever their
probabilities (arXiv 2401.10774, 2401.15077).

A node is the path of ranks that leads to it from the root: (0, 2) is the third best child of the
root's best child. Knows how such trees are written, the published ones by name, and what makes a
list of paths a tree. Knows no drafter and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from edgespec.config.fields import is_int, shortened
from edgespec.errors import OptionError, counted
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from edgespec.safe_read.regular import read_regular

Ids = NDArray[np.int64]
Ranks = tuple[int, ...]  # of a node: the rank of each node on its path, the root's children first
Choices = tuple[Ranks, ...]  # all nodes but the root, level by level, the better ranks first

MAX_NODES = 1023  # without the root
MAX_DEPTH = 64
MAX_RANK = 255
MAX_FILE_BYTES = 2**20
YAML = (".yaml", ".yml")
CHOICES_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_NODES,
            "items": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_DEPTH,
                "items": {"type": "integer", "minimum": 0, "maximum": MAX_RANK},
            },
        },
    ]
}
FORM = "a list of lists of ranks, such as [[0], [1], [0, 0]]"


def choices_of(paths: object, source: str = "choices") -> Choices:
    """The choices of a list of lists of ranks, in level order.

    OptionError, which begins with `source`, for anything else: a rank or a depth out of bounds, a
    path that is there twice, a node whose parent is not there.
    """
    if not isinstance(paths, Sequence) or isinstance(paths, str | bytes) or not paths:
        raise OptionError(f"{source}: {shortened(paths)} is not a tree", f"Give {FORM}.")
    if len(paths) > MAX_NODES:
        message = f"{source}: {len(paths)} nodes, and a tree may have {MAX_NODES}"
        raise OptionError(message, "Leave the least probable ones out.")
    nodes = [ranks_of(path, source) for path in paths]
    known = {(), *nodes}
    if len(known) <= len(nodes):
        twice = next(node for i, node in enumerate(nodes) if node in nodes[:i])
        raise OptionError(f"{source}: {[*twice]} is there twice", "Name each node once.")
    for node in nodes:
        if node[:-1] not in known:
            message = (
                f"{source}: the node {[*node]} has no parent: {[*node[:-1]]} is not in the tree"
            )
            raise OptionError(message, f"Add {[*node[:-1]]}, or leave {[*node]} out.")
    return tuple(sorted(nodes, key=lambda node: (len(node), node)))


def ranks_of(path: object, source: str) -> Ranks:
    """One node of a list. OptionError for what is no list of ranks within the bounds."""
    if not isinstance(path, Sequence) or isinstance(path, str | bytes) or not path:
        raise OptionError(f"{source}: {shortened(path)} is not a node", f"Give {FORM}.")
    if len(path) > MAX_DEPTH:
        message = f"{source}: a node at depth {len(path)}, and a tree may have {MAX_DEPTH} levels"
        raise OptionError(message, "Leave the deepest ones out.")
    for rank in path:
        if not is_int(rank) or not 0 <= rank <= MAX_RANK:
            message = f"{source}: the node {shortened(path)} has the rank {shortened(rank)}"
            raise OptionError(message, f"Ranks are whole numbers from 0, the best, to {MAX_RANK}.")
    return tuple(path)


# ---- trees by name, from a text, from a file


def _tree(text: str) -> Choices:
    """The choices of a published list in short: each digit is a rank."""
    return choices_of([[int(digit) for digit in word] for word in text.split()])


# TensorRT-LLM's default: 63 nodes, published for Vicuna 7B
DEFAULT = "mc_sim_7b_63"
NAMED: Mapping[str, Choices] = MappingProxyType(
    {
        DEFAULT: _tree(
            """
            0 1 2 3 4 5 6 7 8 9
            00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90
            000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070
            100 101 200
            0000 0001
            """
        ),
        # SafeAILab's repository calls its 25 nodes mc_sim_7b_63 too
        "mc_sim_7b_25": _tree(
            """
            0 1 2 3
            00 01 02 10 11 20 21 30
            000 001 002 010 011 020 021 100
            0000 0001 0002
            00000 00001
            """
        ),
    }
)


def parse_choices(text: str, source: str = "choices") -> Choices:
    """The choices of a text: a name of NAMED, or a list as JSON.

    Raises OptionError as `choices_of` does, and for a text that is neither.
    """
    if text in NAMED:
        return NAMED[text]
    if text.lstrip().startswith("["):
        return choices_of(_json(text, source), source)
    message = f"{source}: {shortened(text)} is neither a list nor the name of a tree"
    raise OptionError(message, f"Give {FORM}, or one of {', '.join(NAMED)}.")


def checked_choices(name: str, value: object) -> Choices:
    """The choices of an option: a list, its text, or a published tree's name. Raises
    OptionError."""
    source = f"`{name}`"
    return parse_choices(value, source) if isinstance(value, str) else choices_of(value, source)


def read_choices(text: str, source: str = "choices") -> Choices:
    """The same of a command line, where the text may also name a JSON or YAML file. Raises
    OptionError."""
    path = Path(text)
    if text in NAMED or text.lstrip().startswith("["):
        return parse_choices(text, source)
    if path.suffix not in (".json", *YAML) and not path.is_file():
        message = f"{source}: {shortened(text)} is neither a list, nor a tree's name, nor a file"
        raise OptionError(
            message, f"Give {FORM}; one of {', '.join(NAMED)}; or a JSON or YAML file."
        )
    try:
        content = read_regular(path, MAX_FILE_BYTES).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OptionError(f"{path} cannot be read: {why}", f"Give a file with {FORM}.") from None
    choices = _yaml(content, str(path)) if path.suffix in YAML else _json(content, str(path))
    return choices_of(choices, str(path))


def _json(text: str, source: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{source} is not JSON: {error}", f"Give {FORM}.") from None


def _yaml(text: str, source: str) -> object:
    """Of a file alone: aliases of a short text may stand for one of any length."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise OptionError(f"{source}: no YAML: {first}", f"Give {FORM}.") from None


# ---- what follows from the paths


@lru_cache(maxsize=64)
def children_of(choices: Choices) -> Mapping[Ranks, Ranks]:
    """Of each node that has children, the root () included, their ranks in ascending order."""
    children: dict[Ranks, Ranks] = {}
    for node in choices:
        children[node[:-1]] = (*children.get(node[:-1], ()), node[-1])
    return MappingProxyType(children)


@lru_cache(maxsize=64)
def parents_of(choices: Choices) -> tuple[int, ...]:
    """The index of each node's parent, the root's -1 first; node i + 1 is `choices[i]`."""
    place = {(): 0} | {node: i for i, node in enumerate(choices, start=1)}
    return (-1, *(place[node[:-1]] for node in choices))


def depth_of(choices: Choices) -> int:
    """Levels below the root."""
    return len(choices[-1]) if choices else 0


@lru_cache(maxsize=64)
def num_non_leaves(choices: Choices) -> tuple[int, ...]:
    """How many nodes have children, by depth, the root at 0."""
    depths = [len(node) for node in children_of(choices)]
    return tuple(depths.count(depth) for depth in range(depth_of(choices)))


@dataclass(frozen=True, slots=True)
class StaticPlan(DraftPlan):
    """A draft whose tree is always the same: its nodes, and the sizes that follow from them. Make
    it with `StaticPlan.of`.

    `top_k` is the number of ranks that are looked at, `steps` the depth, `verify_size` all nodes
    with the root. Drafters that make such trees make exactly this one, in this order.
    """

    choices: Choices = ()

    def __post_init__(self) -> None:
        if self.verify_size != 1 + len(self.choices):
            message = f"a static tree of {counted(len(self.choices), 'node')} and its root has"
            raise OptionError(
                f"{message} no verify size of {self.verify_size}", "Make it with StaticPlan.of."
            )

    @classmethod
    def of(cls, choices: str | Iterable[Sequence[int]]) -> StaticPlan:
        """The plan of choices, which are checked and put in level order.

        Choices are paths of ranks such as [[0], [1], [0, 0]], where [0, 0] is the best child of the
        root's best child; or the name of a published tree: mc_sim_7b_63 or mc_sim_7b_25. Raises
        OptionError.
        """
        if isinstance(choices, str):
            return cls._of(parse_choices(choices))
        return cls._of(choices_of(tuple(choices) if isinstance(choices, Iterable) else choices))

    @classmethod
    def _of(cls, nodes: Choices) -> StaticPlan:
        top_k = 1 + max((node[-1] for node in nodes), default=0)
        return cls(top_k, depth_of(nodes), 1 + len(nodes), nodes)

    @property
    def depth_words(self) -> str:
        """How deep it drafts, as a user gives it."""
        return f"a static tree of {counted(self.steps, 'level')}"

    def levels_within(self, rows: int) -> int:
        """Levels that a drafter can make with that many KV rows: only nodes with children run."""
        total = accumulate(num_non_leaves(self.choices)[1:])
        return min(self.steps, 1 + sum(needed <= rows for needed in total))

    def within(self, levels: int, nodes: int) -> StaticPlan:
        """The plan without what is deeper than `levels`, and of the rest the first `nodes` nodes,
        the root included: with a node its ancestors stay."""
        kept = tuple(node for node in self.choices if len(node) <= levels)[: max(0, nodes - 1)]
        if len(kept) == len(self.choices):
            return self
        return replace(StaticPlan._of(kept), adaptive=self.adaptive)

    def tree(self, pending: int, tokens: Sequence[int]) -> DraftTree:
        """The tree with `tokens[i]` at the node `choices[i]`."""
        assert len(tokens) == len(self.choices)
        parents = np.array(parents_of(self.choices), np.int64)
        return DraftTree(np.array([pending, *tokens], np.int64), parents)
