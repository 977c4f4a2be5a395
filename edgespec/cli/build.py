"""`edgespec build`: strings into values, then `edgespec.backends.build` does the work.

Knows the flags that every backend has. The others are asked of the backend that --backend names;
knows no engine library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
from click.core import ParameterSource

from edgespec.backends.base import BuildOption, Listeners, OptionValue
from edgespec.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from edgespec.cli import environment
from edgespec.cli.costs_flag import MEASURING, costs_line, loss_report
from edgespec.cli.flags import EdgeCommand, either, refuse, until_separator
from edgespec.cli.paths import DIRECTORY
from edgespec.cli.terminal import json_text, ours, say
from edgespec.compat import trtllm
from edgespec.compat.edgellm import FLAGS
from edgespec.contract import DECODERS, MAX_BLOCK_NODES, Limits, Role
from edgespec.errors import OptionError, flag_of
from edgespec.methods import METHODS

if TYPE_CHECKING:
    from edgespec.backends.build import Built, Planned
    from edgespec.runtime.measuring.quantization_loss import LossReport

    Numbers = click.ParamType[int | tuple[int, ...]]
else:
    Numbers = click.ParamType  # not generic in all versions

DEFAULTS = Limits()
CAPACITY = "max_kv_cache_capacity"
ALIASES = {"--eagle-base": "--spec-base", "--eagle-draft": "--spec-draft"}
BLOCKS = ", ".join(row.title for row in METHODS.values() if row.proposes.startswith("block"))
FLAG = "--backend"
CHOSEN = f"{__name__}.backend"  # in a context's meta


class Capacities(Numbers):
    """One capacity or several, in ascending order."""

    name = "integer"
    schema = ("integer", "string")  # of a value in a configuration file

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, ...]:
        """The number of a text, or those of one such as "1024,4096"; click.BadParameter for
        anything else."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = sorted(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a number of tokens: write 4096, or 1024,4096", param, ctx)
        return numbers[0] if len(numbers) == 1 else tuple(numbers)


class Limit(NamedTuple):
    """A limit of an engine: whose it is, and its flag's help."""

    owner: str
    roles: tuple[Role, ...]
    help: str
    more: Mapping[str, Any] = {}


MODEL, IMAGES = ("a language model", DECODERS), ("the image encoder", (Role.VISUAL,))
LIMITS: dict[str, Limit] = {
    "max_batch_size": Limit(*MODEL, "Sequences at a time, at most."),
    "max_input_len": Limit(*MODEL, "Tokens of a prompt, at most."),
    CAPACITY: Limit(
        *MODEL,
        "Tokens of prompt and answer together, at most. Several, such as 1024,4096: an engine for"
        " each; a request runs in the smallest that holds it (TensorRT, where a step costs by the"
        " capacity).",
        {"type": Capacities(), "metavar": "INTEGER[,INTEGER...]"},
    ),
    "max_verify_tree_size": Limit(
        "the base",
        (Role.LLM, Role.BASE),
        "Nodes per base pass, the root included. The default has room for TensorRT-LLM's static"
        f" trees (mc_sim_7b_63); {BLOCKS} use at most {MAX_BLOCK_NODES}.",
    ),
    "max_draft_tree_size": Limit(
        "the draft",
        (Role.DRAFT,),
        f"Nodes that a draft makes: top-k times step, or its block ({BLOCKS}).",
    ),
    "min_image_tokens": Limit(*IMAGES, "Image encoder: tokens of an image, at least."),
    "max_image_tokens": Limit(
        *IMAGES, "Image encoder: tokens of all images of a request, at most."
    ),
    "max_image_tokens_per_image": Limit(*IMAGES, "Image encoder: tokens of an image, at most."),
}


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of LIMITS."""
    for name, row in reversed(LIMITS.items()):
        default = getattr(DEFAULTS, name)
        command = click.option(flag_of(name), default=default, help=row.help, **row.more)(command)
    return command


class BuildCommand(EdgeCommand):
    """A command with --backend, and the options of the backend that it names."""

    before = "as_json"  # the parameter before which those of the backend stand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Notes the backend that --backend names before click asks for the parameters."""
        flags = [self.canonical(arg) for arg in until_separator(args)]
        ctx.meta[CHOSEN] = named_backend(flags)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = error.option_name
            if owners := backends_with(flag):
                message = f"No such option: {flag}. It is an option of --backend {either(owners)}."
                raise click.NoSuchOption(flag, message=message, ctx=ctx) from None
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with those of the named backend among them."""
        params = super().get_params(ctx)
        place = next(i for i, param in enumerate(params) if param.name == self.before)
        return params[:place] + backend_params(ctx.meta.get(CHOSEN)) + params[place:]


def named_backend(flags: list[str]) -> str | None:
    """What follows --backend on a command line, if it is there."""
    for flag, following in pairwise([*flags, ""]):
        name, equals, value = flag.partition("=")
        if name == FLAG:
            return value if equals else following
    return None


def backend_params(name: str | None) -> list[click.Parameter]:
    """--backend, and the options of the backend; the default's where the name is unknown."""
    backend = find_backend(name or DEFAULT_BACKEND) or find_backend(DEFAULT_BACKEND)
    assert backend is not None
    titles = ", ".join(f"{row.name} is {row.title}" for row in map(find_backend, BACKENDS) if row)
    choice = click.Option(
        [FLAG],
        type=click.Choice(list(BACKENDS)),
        default=DEFAULT_BACKEND,
        help=f"What builds and runs the engine: {titles}. The options below are its own.",
    )
    return [choice, *map(click_option, backend.options)]


def backends_with(text: str) -> list[str]:
    """The backends that have an option."""
    known = {name: find_backend(name) for name in BACKENDS}
    return [
        name
        for name, backend in known.items()
        if backend is not None
        and any(text.replace("--no-", "--") == flag_of(option.name) for option in backend.options)
    ]


def click_option(option: BuildOption) -> click.Option:
    """A backend's option as click has it."""
    is_switch = isinstance(option.default, bool)
    off = f"/{flag_of(f'no_{option.name}')}" if is_switch else ""
    return click.Option(
        [flag_of(option.name) + off],
        type=click.Choice(option.choices) if option.choices else None,
        default=option.default,
        metavar=option.metavar,
        help=ours(option.help),
    )


@click.command(
    "build",
    cls=BuildCommand,
    aliases={**ALIASES, **trtllm.ALIASES["build"]},
    missing={**FLAGS["build"], **trtllm.FLAGS["build"]},
)
@click.option(
    "--onnx-dir",
    required=True,
    type=DIRECTORY,
    help="A component that edgespec export wrote, such as OUT/llm or OUT/visual.",
)
@click.option(
    "--engine-dir",
    required=True,
    type=DIRECTORY,
    envvar=environment.ENGINE_DIR,
    show_envvar=True,
    help="Where the engine goes; base and draft share one, an image encoder is in its visual/.",
)
@click.option(
    "--spec-base", is_flag=True, help="State that this is a base; checked against its config.json."
)
@click.option(
    "--spec-draft",
    is_flag=True,
    help="State that this is a draft; checked against its config.json.",
)
@limit_options
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything that can be checked without building, say what would be built, and stop.",
)
@MEASURING
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    onnx_dir: Path,
    engine_dir: Path,
    spec_base: bool,
    spec_draft: bool,
    backend: str,
    dry_run: bool,
    measure_costs: bool,
    as_json: bool,
    **values: OptionValue | int,
) -> None:
    """Build the engine of an exported directory for this machine.

    The finished engine is run on the golden inputs that the export stored; one that does not
    reproduce their outputs is not kept. With quantized weights the outputs must point the same way
    (cosine). On edgespec's own kernels (--kernels native) a row has the same bits in every pass,
    which is proven here, and speculation is lossless bitwise; on others it is so up to what kernels
    for one row and for many round differently: a margin that is measured and reported. An engine is bound to the machine and to
    the version of the engine library that built it. One that is built for another machine cannot be
    run here: it is kept without that comparison, which is said.

    \b
    edgespec build --onnx-dir onnx/base/llm  --engine-dir engines --spec-base
    edgespec build --onnx-dir onnx/draft/llm --engine-dir engines --spec-draft
    edgespec build --onnx-dir onnx/base/visual --engine-dir engines --max-image-tokens-per-image 1024
    """
    refuse({"`spec_base` and `spec_draft` exclude each other": spec_base and spec_draft})
    limits = limits_of(LIMITS, cast(dict[str, Any], values))
    chosen = find_backend(backend)
    assert chosen is not None  # one of the choices
    try:
        options = chosen.parse_options(cast(dict[str, OptionValue], values))
    except OptionError as error:
        raise click.UsageError(f"{error.what}. {error.remedy}", ctx) from None
    from edgespec.backends.build import build, plan
    from edgespec.backends.onnx_dir import exported_role
    from edgespec.cli.progress import Bars
    from edgespec.pipeline.calibration import with_windows

    target = chosen.emit_dir(options)
    if dry_run or target is not None:
        planned = plan(
            onnx_dir,
            engine_dir,
            limits,
            emit_to=None if dry_run else target,
            backend=backend,
            options=options,
            spec_base=spec_base,
            spec_draft=spec_draft,
        )
        show_planned(planned, as_json=as_json)
        return
    options = with_windows(options, onnx_dir, exported_role(onnx_dir), limits)
    with Bars() as bars:
        built = build(
            onnx_dir,
            engine_dir,
            limits,
            backend=backend,
            options=options,
            spec_base=spec_base,
            spec_draft=spec_draft,
            progress=Listeners(
                start=lambda total: bars.start("engine", total),
                advance=bars.advance,
                prove=lambda passes: bars.start("golden outputs", passes),
                warn=lambda text: say(f"warning: {text}", err=True),
            ),
        )
    costs = loss = None
    if built.role in DECODERS:
        loss = loss_report(
            onnx_dir, engine_dir, built.role, measure=measure_costs, unproven=built.unproven
        )
        costs = costs_line(engine_dir, measure=measure_costs, unproven=built.unproven)
    if as_json:
        click.echo(json_text(to_dict(built, costs, loss)))
    else:
        for line in lines_of(built, costs, loss):
            say(line)
    for warning in loss.warnings if loss is not None else ():
        say(f"warning: {warning}", err=True)


def limits_of(names: Iterable[str], values: dict[str, Any]) -> Limits:
    """The limits of the flags of these names, which are taken out of `values`."""
    sizes = {name: values.pop(name) for name in names}
    given = sizes[CAPACITY]
    *smaller, sizes[CAPACITY] = given if isinstance(given, tuple) else (given,)
    return Limits(**sizes, smaller_kv_cache_capacities=tuple(smaller))


def show_planned(planned: Planned, *, as_json: bool) -> None:
    """Print what would be built, or what was written instead."""
    lines = [*planned.lines, *unused(planned.role)]
    if as_json:
        click.echo(json_text({"role": planned.role.value, "lines": lines}))
        return
    say(f"{planned.role.value}: no engine built")
    for line in lines:
        say(f"  {line}" if "\n" not in line else line)


def to_dict(built: Built, costs: str | None, loss: LossReport | None = None) -> dict[str, Any]:
    """What --json prints of an engine."""
    divergence = None if loss is None else loss.divergence
    return {
        "role": built.role.value,
        "engine": str(built.engine),
        "bytes": built.size_bytes,
        "golden_difference": built.golden_difference,
        "golden_cosine": built.golden_cosine,
        "divergence": None if divergence is None else divergence.to_dict(),
        "unproven": built.unproven,
        "weights": built.weights.to_dict(),
        "seconds": built.seconds,
        "notes": [*built.notes, *unused(built.role), *other_device()],
        "costs": costs,
    }


def lines_of(built: Built, costs: str | None, loss: LossReport | None = None) -> Iterator[str]:
    """An engine, and below it how it was checked and what a user should know of it."""
    size = f"{built.size_bytes / 1e6:.1f} MB, {built.seconds:.1f} s"
    yield f"{built.role.value}: {built.engine} ({size})"
    notes = *built.notes, *unused(built.role), *other_device(), *([costs] if costs else [])
    measured = [] if loss is None else [loss.line]
    for note in (checked(built), *measured, *notes):
        yield f"  {note}"


def checked(built: Built) -> str:
    """How the engine agrees with the golden outputs."""
    if built.unproven is not None:
        return f"not compared with the golden outputs: {built.unproven}"
    if built.golden_difference is None:
        return "no golden outputs to check with"
    if built.golden_cosine is not None:
        return f"golden outputs approached (cosine {built.golden_cosine:.4f})"
    return f"golden outputs reproduced (largest difference {built.golden_difference:.1e})"


def other_device() -> Iterator[str]:
    """That the engine is for the CPU, where --backend was left out and there is a CUDA device."""
    from edgespec.backends.tensorrt.devices import device_here
    from edgespec.backends.tensorrt.versions import LIBRARIES, TENSORRT

    source = click.get_current_context().get_parameter_source("backend")
    device = device_here() if source is ParameterSource.DEFAULT else None
    if device is not None:
        there = [row for row in LIBRARIES.values() if find_spec(row.module) is not None]
        library = (there or [TENSORRT])[0]
        why = "" if there else f", which is not installed. {library.remedy}"
        yield (
            f"built for the CPU, as --backend was left out: for the {device.name} here, --backend"
            f" {library.backend} ({library.title}){why}"
        )


def unused(role: Role) -> list[str]:
    """Limits that were given and belong to another role: all may be passed to every build."""
    given = click.get_current_context().get_parameter_source
    return [
        f"{flag_of(name)} is for {row.owner} and not used here"
        for name, row in LIMITS.items()
        if role not in row.roles and given(name) is ParameterSource.COMMANDLINE
    ]
