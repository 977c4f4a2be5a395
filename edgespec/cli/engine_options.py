"""The options with which an engine is opened, the same for every command that opens one, and the
`EngineRequest` that they make.

Knows flags, and which of them contradict each other. Knows nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import environment
from edgespec.cli.accept_flags import ACCEPTING, take_acceptance
from edgespec.cli.config_file import config_options, configured
from edgespec.cli.draft_flags import (
    LENGTH,
    SIZE,
    draft_options_of,
    is_given,
    keys_of,
    plan_of,
    tree_of,
)
from edgespec.cli.flags import refuse
from edgespec.cli.image_flags import take_images
from edgespec.cli.paths import DIRECTORY
from edgespec.methods.names import POLICIES

if TYPE_CHECKING:
    from edgespec.runtime.engine_request import EngineRequest, Opened
    from edgespec.runtime.opening.open_engine import SpecDecode
    from edgespec.runtime.trees.tree import DraftPlan

MIB = 2**20
SIZES = ("spec_draft_top_k", "spec_draft_step", "spec_verify_size")
WITHOUT = "without --spec-decode"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

engine_dir_option = click.option(
    "--engine-dir",
    required=True,
    type=DIRECTORY,
    envvar=environment.ENGINE_DIR,
    show_envvar=True,
    help="What edgespec build made.",
)
SPEC_DECODE = click.option(
    "--spec-decode",
    is_flag=True,
    help=(
        "Decode speculatively, with the draft of the engine directory; where there is none, with the"
        " first method that needs none (see --drafter)."
    ),
)
BOTH_WAYS = click.option(
    "--spec-decode/--no-spec-decode",
    default=None,
    help=(
        "Draft and verify (the default: with the draft engine, or else the first method that needs"
        " none), or decode plainly."
    ),
)
EXACT = click.option(
    "--exact",
    is_flag=True,
    help=(
        "Drafts leave every bit as it is. Engines on edgespec's own kernels do so anyway. On ONNX"
        " Runtime's: fp32, int4 in blocks of 32, or int8 GEMM (int8_sq, int8_token, --weight-block"
        " 0); chains only, one request at a time. Not for bases with recurrent layers (Qwen3.5)."
    ),
)


def prefix_cache(default: int | None, shown: str) -> Decorator:
    """--prefix-cache-mb with its default."""
    return click.option(
        "--prefix-cache-mb",
        type=click.IntRange(0),
        default=default,
        envvar=environment.PREFIX_CACHE_MB,
        show_envvar=True,
        help=(
            "Memory for KV rows of system prompts and turns, reused by prompts that begin alike; 0"
            f" is off.{shown}"
        ),
    )


PREFIX_CACHE = prefix_cache(256, "")
PREFIX_CACHE_OF_CONTEXT = prefix_cache(
    None, "  [default: prompts of the whole context in all lanes, at most an eighth of the memory]"
)


def draft_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of drafts."""
    return draft_options_of(SIZE, click.Choice(POLICIES), command)


def engine_options(*blocks: Decorator) -> Decorator:
    """--config, key=value and blocks of options. The command gets an EngineRequest in their place,
    whose rules of images know no input file yet, and lists of sizes and policies as they are."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def called(*args: Any, **values: Any) -> Any:
            ctx = click.get_current_context()
            return command(*args, engine_request=request_of(ctx, values), **values)

        with_options: Callable[..., Any] = called
        for block in reversed((config_options, *blocks)):
            with_options = block(with_options)
        return with_options

    return decorated


def request_of(ctx: click.Context, values: dict[str, Any]) -> EngineRequest:
    """What the options ask of an engine; they are taken out of `values`. Raises click.UsageError
    where they contradict each other."""
    from edgespec.runtime.engine_request import EngineRequest
    from edgespec.runtime.plans.plan import Sizes

    sizes = Sizes(*(one_of(values, name) for name in SIZES))
    tree, options = tree_of(ctx, sizes), keys_of(ctx)
    acceptance = take_acceptance(ctx, values) if ACCEPTING[0] in values else None
    config, notes = configured(ctx)
    request = EngineRequest(
        drafter=values.pop("drafter"),
        options=options,
        time_budget_ms=values.pop("drafter_time_budget_ms"),
        speculative_config=config,
        notes=notes,
        sizes=sizes,
        tree=tree,
        acceptance=acceptance,
        spec_policy=one_of(values, "spec_policy"),
        exact=values.pop("exact", False),
        prefix_cache_bytes=None
        if (size := values.pop("prefix_cache_mb", 0)) is None
        else size * MIB,
        prefix_cache_dir=values.pop("prefix_cache_dir", None),
        **(take_images(values, None) if "allow_image_root" in values else {}),
    )
    is_lost = request.time_budget_ms is not None and not request.has_own_drafter
    refuse(
        {"`drafter_time_budget_ms` is for a drafter of your own: `drafter` MODULE:CLASS": is_lost}
    )
    if "spec_decode" not in values:
        return request
    return replace(request, spec_decode=drafts_of(ctx, request, values.pop("spec_decode")))


def one_of(values: dict[str, Any], name: str) -> Any:
    """A value, which is taken out of `values`; of a list, which stays there, the first."""
    value = values[name]
    if isinstance(value, tuple):
        return value[0]
    return values.pop(name)


def drafts_of(ctx: click.Context, request: EngineRequest, given: bool | None) -> SpecDecode:
    """Whether to draft, by --spec-decode and what is asked for. Raises click.UsageError for what
    means nothing without drafts."""
    (option,) = (param for param in ctx.command.params if param.name == "spec_decode")
    if both_ways := bool(option.secondary_opts):
        asks = request.is_sized or request.acceptance is not None
        drafts: SpecDecode = given if given is not None else True if asks else "auto"
    else:
        drafts = given or request.names_drafter
    if drafts is False:
        asked = {
            "the sizes of drafts mean": request.is_sized or LENGTH in request.options,
            "options of the drafter mean": bool(request.options),
            "an accept rule means": request.acceptance is not None,
            "`spec_policy` means": is_given(ctx, "spec_policy"),
            "`drafter` means": request.drafter is not None,
        }
        refuse_without_drafts(asked, "with --no-spec-decode" if both_ways else WITHOUT)
    return drafts


def refuse_without_drafts(asked: Mapping[str, bool], why: str = WITHOUT) -> None:
    """Raises click.UsageError for the first that is asked for and needs drafts."""
    refuse({f"{flags} nothing {why}": is_asked for flags, is_asked in asked.items()})


def opened(request: EngineRequest, engine_dir: Path) -> Opened:
    """The engine of a directory, open. Raises PairingError where speculative_config names another
    draft, and what EngineRequest.open raises."""
    from edgespec.pairing.named import check_named

    return request.open(engine_dir, check_named)


def planned(engine: Opened) -> DraftPlan | None:
    """How much is drafted, with errors that name flags; None decodes plainly."""
    if not engine.engine.spec_decode:
        return None
    return plan_of(engine.engine, engine.request.sizes, engine.request.tree)
