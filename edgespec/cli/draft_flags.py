"""The flags that say what drafts, and how much, the same for `infer`, `chat` and `run`.

Knows flags; which methods there are, and which draft chains or blocks, stands in the table of
methods. Those that describe a tree as TensorRT-LLM does are no arguments of the command: `tree_of`
gives what they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgespec.cli import environment
from edgespec.cli.paths import Text
from edgespec.contract import MAX_BLOCK_NODES
from edgespec.errors import OptionError
from edgespec.methods import METHODS, find_method

if TYPE_CHECKING:
    from edgespec.methods.names import SpecPolicy
    from edgespec.runtime.acceptance.verify import AcceptOptions
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.plans.plan import TreeSpec
    from edgespec.runtime.trees.tree import DraftPlan

# TensorRT Edge-LLM's other names
ALIASES = {
    "--eagle": "--spec-decode",
    "--spec-verify-tree-size": "--spec-verify-size",
    "--eagle-verify-tree-size": "--spec-verify-size",
}
KEYS = f"{__name__}.keys"  # in a context's meta: keys of a speculative_config that were given
GIVEN = f"{__name__}.tree"  # in a context's meta: the keys of trees that were given
CHOICES = ("eagle_choices", "medusa_choices")  # what a file may hold


def titles(*proposes: str) -> str:
    """The methods that make chains, trees or blocks, for a sentence."""
    return ", ".join(row.title for row in METHODS.values() if row.proposes in proposes)


LENGTH = "max_draft_len"  # an option of methods
DRAFTER = (
    "Draft with a method that needs no engine, also where there is a draft:"
    f" {', '.join(row.name for row in METHODS.values() if not row.needs_engine)}. Or with a class of"
    " your own (docs/own_drafter.md)."
)
BUDGET = "Milliseconds of each call of a drafter of your own; one that takes more pauses.  [default: 100]"
NGRAM_SIZE = "Tokens that n-gram lookup and suffix decoding match, at most."
OPTION = (
    "An option of what drafts, by its key in docs/config.md, such as is_keep_all=false; may be given"
    " repeatedly."
)
OWN = ":"  # in a name: that of a class in a module
TOP_K = (
    f"Candidates per node. 1 drafts a chain ({titles('chain', 'block chain')}: 1 only);"
    f" {titles('block')}: at most 8."
)
BLOCKS = titles("block", "block chain")
STEP = f"Levels of the tree; {BLOCKS}: 1."
VERIFY_SIZE = f"Nodes per base pass, the root included; {BLOCKS}: at most {MAX_BLOCK_NODES}."
SIZE = click.IntRange(1)
POLICY = (
    "adaptive: each step drafts as far as that pays, by what a step costs here and by how well the"
    " drafts of this answer were accepted; sizes are the most. fixed: each step drafts the plan."
    "  [default: adaptive where no sizes are given and build measured the costs]"
)
# Flag -> key of EagleOptions or MedusaOptions, type (None: a switch), help
TREE_FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    (
        "--eagle-choices",
        "eagle_choices",
        str,
        (
            "A static tree instead: paths of ranks such as [[0],[1],[0,0]], a JSON or YAML file of"
            " them, mc_sim_7b_63 (TensorRT-LLM's default, 63 nodes) or mc_sim_7b_25 (EAGLE's own)."
        ),
    ),
    (
        "--eagle-use-dynamic-tree",
        "use_dynamic_tree",
        None,
        "EAGLE-2's tree, sized as in TensorRT-LLM: of N + N*N*(L-1) drafts the best --max-draft-len.",
    ),
    (
        "--eagle-dynamic-tree-max-top-k",
        "dynamic_tree_max_topK",
        SIZE,
        "N: children of each node of a dynamic tree.",
    ),
    (
        "--num-eagle-layers",
        "num_eagle_layers",
        SIZE,
        "L: levels of the tree; choices must be as deep.  [default: 4, or the choices' depth]",
    ),
    (
        "--max-draft-len",
        "max_draft_len",
        SIZE,
        (
            "Drafts in a row, as speculative_config has it (Medusa: the tree's nodes). Beside choices"
            " or a dynamic tree: its nodes at most, without the root.  [default there: 63]"
        ),
    ),
    (
        "--max-non-leaves-per-layer",
        "max_non_leaves_per_layer",
        SIZE,
        "Nodes with children at one depth, at most; more are refused.",
    ),
    (
        "--medusa-choices",
        "medusa_choices",
        str,
        "The Cartesian tree of Medusa heads, as --eagle-choices has it.",
    ),
    (
        "--num-medusa-heads",
        "num_medusa_heads",
        SIZE,
        "Medusa heads that draft: levels of the tree.  [default: the choices' depth]",
    ),
)
MEDUSA_KEYS = ("medusa_choices", "num_medusa_heads")  # those of MedusaOptions alone
TREE_NAMES = tuple(flag.removeprefix("--").replace("-", "_") for flag, *_ in TREE_FLAGS)
KEY_NAMES = ("max_matching_ngram_size", "drafter_option")


def engineless() -> list[str]:
    """The names of the methods that draft without an engine."""
    return [row.name for row in METHODS.values() if not row.needs_engine]


def drafter_named(text: str) -> str:
    """What --drafter names: a method that needs no engine, by its name or an alias, or a drafter of
    the user's, package.module:Class. Raises click.BadParameter for anything else."""
    if OWN in text:
        return text
    row, known = find_method(text), ", ".join(engineless())
    if row is None:
        raise click.BadParameter(f"there is no drafting method {text!r}. Known: {known}.")
    if row.needs_engine:
        raise click.BadParameter(
            f"{row.title} drafts with an engine of its own: build it beside the base, and give"
            f" --spec-decode. Without an engine: {known}."
        )
    return row.name


class DrafterName(Text):
    """What `drafter_named` reads."""

    name = "drafter"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The method's name."""
        return drafter_named(value)


def keep_key(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keeps a flag's value as the key of a speculative_config."""
    if value is not None:
        assert param.name is not None
        ctx.meta.setdefault(KEYS, {})[param.name] = value


def keep_options(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> None:
    """Keeps the values of --drafter-option. Raises click.BadParameter for one without a key, or with
    a key that was given before."""
    from edgespec.pipeline.recipe import value_of

    for text in values:
        key, equals, written = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r:.60} is not KEY=VALUE", ctx, param)
        given = ctx.meta.setdefault(KEYS, {})
        if key in given:
            raise click.BadParameter(f"{key:.60} is given twice", ctx, param)
        given[key] = value_of(written, f"--drafter-option {key:.60}")


def keys_of(ctx: click.Context) -> dict[str, object]:
    """The keys of a speculative_config that flags give: options of the drafter, and --max-draft-len
    where it is not the size of a tree."""
    tree = ctx.meta.get(GIVEN, {})
    length = {LENGTH: tree[LENGTH]} if tree.keys() == {LENGTH} else {}
    return {**ctx.meta.get(KEYS, {}), **length}


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether a flag was given on the command line: an environment variable is for all commands."""
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def draft_options_of(
    size: Any, policy: Any, command: Callable[..., Any], metavar: str | None = None
) -> Callable[..., Any]:
    """--drafter, its options and its time budget, --spec-draft-top-k, --spec-draft-step and
    --spec-verify-size, --spec-policy, and the flags of trees, for types of sizes and policies."""
    sized = {"type": size, "metavar": metavar}
    rows: dict[str, dict[str, Any]] = {
        "--drafter": {"type": DrafterName(), "metavar": "NAME|MODULE:CLASS", "help": DRAFTER},
        "--max-matching-ngram-size": {
            "type": int,
            "expose_value": False,
            "callback": keep_key,
            "help": NGRAM_SIZE,
        },
        "--drafter-option": {
            "multiple": True,
            "metavar": "KEY=VALUE",
            "expose_value": False,
            "callback": keep_options,
            "help": OPTION,
        },
        "--drafter-time-budget-ms": {"type": click.FloatRange(0.1), "help": BUDGET},
        "--spec-draft-top-k": {**sized, "help": TOP_K},
        "--spec-draft-step": {**sized, "help": STEP},
        "--spec-verify-size": {**sized, "help": VERIFY_SIZE},
        "--spec-policy": {
            "type": policy,
            "metavar": metavar,
            "envvar": environment.SPEC_POLICY,
            "show_envvar": True,
            "help": POLICY,
        },
    }
    options = [click.option(flag, **row) for flag, row in rows.items()]
    for option in reversed([*options, *(tree_option(*row) for row in TREE_FLAGS)]):
        command = option(command)
    return command


def tree_option(flag: str, key: str, kind: Any, text: str) -> Callable[..., Any]:
    """A flag of TREE_FLAGS, whose value goes into the context's meta."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        del param
        if value is not None and value is not False:
            ctx.meta.setdefault(GIVEN, {})[key] = value

    return click.option(
        flag,
        expose_value=False,
        callback=keep,
        help=text,
        is_flag=kind is None,
        type=kind,
        metavar="TREE" if kind is str else None,
    )


def tree_of(ctx: click.Context, sizes: Iterable[object]) -> TreeSpec | None:
    """What the flags of trees ask for; None where none was given. Raises OptionError where they
    exclude each other, click.UsageError beside one of `sizes`."""
    given = ctx.meta.get(GIVEN)
    if not given:
        return None
    if given.keys() == {LENGTH} and not any(sizes):
        return None  # see keys_of
    if any(sizes):
        flags = " and ".join(flag for flag, key, *_ in TREE_FLAGS if key in given)
        raise click.UsageError(
            f"{flags}: how much to draft is said by --spec-draft-top-k, --spec-draft-step and"
            " --spec-verify-size too; give one or the other",
            ctx,
        )
    from edgespec.runtime.trees.static_tree import read_choices

    for flag, key, *_ in TREE_FLAGS:
        if key in CHOICES and key in given:
            given = given | {key: read_choices(given[key], flag)}
    if not any(key in given for key in MEDUSA_KEYS):
        from edgespec.runtime.drafters.eagle_options import EagleOptions

        return EagleOptions(**given)
    from edgespec.runtime.drafters.medusa import MedusaOptions

    others = given.keys() - {*MEDUSA_KEYS, "max_draft_len"}
    if others:
        flags = " and ".join(flag for flag, key, *_ in TREE_FLAGS if key in others)
        message = f"{flags}: for the trees of EAGLE drafts, and those of Medusa heads are asked for"
        raise click.UsageError(f"{message}; leave one of the two out", ctx)
    return MedusaOptions(**given)


def plan_of(
    engine: Engine,
    sizes: Iterable[int | None],
    tree: TreeSpec | None,
    acceptance: AcceptOptions | None = None,
    spec_policy: SpecPolicy | None = None,
) -> DraftPlan:
    """That of `engine_request`, for a tree that what drafts can make."""
    from edgespec.runtime import engine_request
    from edgespec.runtime.plans.plan import Sizes

    if tree is not None:
        check_tree(engine.method, tree)
    return engine_request.plan_of(engine, Sizes(*sizes), tree, acceptance, spec_policy)


def check_tree(method: str | None, tree: TreeSpec) -> None:
    """Raises OptionError for a tree that is asked for by flags of another method: those of Medusa
    heads are for them alone, and heads take no others."""
    from edgespec.compat.speculative_config import class_of_method
    from edgespec.runtime.drafters.options import fields_of

    keys = fields_of(type(tree))  # type: ignore[arg-type]
    of_heads = any(key in keys for key in MEDUSA_KEYS)
    drafts_with_heads = all(key in fields_of(class_of_method(method)) for key in MEDUSA_KEYS)
    if of_heads == drafts_with_heads:
        return
    given = [flag for flag, key, *_ in TREE_FLAGS if key in keys and getattr(tree, key)]
    whose = "Medusa heads" if of_heads else "drafts that grow a tree level by level"
    row = None if method is None else METHODS[method]
    message = f"{' and '.join(given)}: for {whose}, and what drafts is"
    remedy = "Leave it out; --spec-draft-step and --spec-verify-size say how much to draft."
    if drafts_with_heads:
        remedy = "Give --medusa-choices instead, or leave it out."
    raise OptionError(f"{message} {row.title if row else 'a drafter of your own'}", remedy)
