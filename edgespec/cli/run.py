"""`edgespec run`: strings into values, then `edgespec.pipeline.prepare` prepares the engines, and `chat` or
`infer` answer with them.

Knows flags. Those of a step are taken from the command of that step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from edgespec.backends.base import OptionValue
from edgespec.backends.registry import find_backend
from edgespec.cli import build, export, infer
from edgespec.cli.accept_flags import accept_options
from edgespec.cli.chat import command as chat
from edgespec.cli.draft_flags import ALIASES
from edgespec.cli.engine_options import BOTH_WAYS, PREFIX_CACHE, draft_options, engine_options
from edgespec.cli.flags import refuse
from edgespec.cli.help_pages import PAGES, PagedCommand
from edgespec.cli.image_flags import IMAGE, beside, image_flags
from edgespec.cli.paths import MODEL
from edgespec.cli.streams import require_stream
from edgespec.compat import trtllm
from edgespec.errors import OptionError, RequestError

if TYPE_CHECKING:
    from edgespec.compat.decoding import DecodingConfig
    from edgespec.contract import Limits
    from edgespec.pipeline.prepare import RunRequest
    from edgespec.runtime.engine_request import EngineRequest

T = TypeVar("T")
LIMITS = ("max_input_len", "max_kv_cache_capacity", "max_verify_tree_size", "max_draft_tree_size")
COSTS = ("measure_costs",)
EXPORTS = ("aux_layers", "allow_pickle", "no_golden", "skip_visual")
GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
OF_TERMINALS = ("history_file", "no_history")
MAKING = (
    "weights",
    "weight_block",
    "size",
    "share_embedding",
    "backend",
    "draft",
    "update",
    *LIMITS,
    *COSTS,
    *EXPORTS,
)


def taken(command: click.Command, names: Iterable[str]) -> list[click.Parameter]:
    """The options of another command, in the order of `names`; KeyError where it lacks one."""
    params = {param.name: param for param in command.params}
    return [params[name] for name in names]


class RunCommand(PagedCommand, build.BuildCommand):
    """A command with the options of the backend that it builds for."""

    before = "system"


PARAMS = [
    click.Argument(["target"], metavar="TARGET", type=MODEL),
    click.Option(
        ["--draft"],
        type=MODEL,
        metavar="DRAFT",
        help="The draft of the model: a directory or a hub name.",
    ),
    click.Option(
        ["--prompt", "prompts"],
        multiple=True,
        metavar="TEXT",
        help=(
            "Answer this on stdout instead of chatting; may be given repeatedly. Where stdin is no"
            " terminal, it is the prompt."
        ),
    ),
    click.Option(["--image", "named_images"], **IMAGE),
    click.Option(
        ["--update"],
        is_flag=True,
        help="Ask the hub for a newer version of names that were prepared before.",
    ),
    *taken(build.command, (*LIMITS, *COSTS)),
    *taken(export.command, EXPORTS),
]


@click.command(
    "run",
    cls=RunCommand,
    page=PAGES["run"],
    aliases={**ALIASES, **trtllm.ALIASES["run"]},
    missing=trtllm.FLAGS["run"],
    params=PARAMS,
)
@engine_options(image_flags, BOTH_WAYS, draft_options, accept_options, PREFIX_CACHE)
@chat.chat_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    target: str,
    engine_request: EngineRequest,
    prompts: tuple[str, ...],
    named_images: tuple[Path, ...],
    **values: Any,
) -> int:
    """Chat with TARGET, or answer --prompt: download, check, export and build as needed.

    TARGET is a model: a checkpoint directory, a GGUF file (of several the first) or a name on the
    Hugging Face hub, such as Qwen/Qwen3-8B, or Qwen/Qwen3-8B-GGUF:Q4_K_M for a GGUF file there; or
    an engine directory that edgespec build made. --draft names the draft that was trained for it,
    or a smaller model with the same tokenizer. Without one the model's own MTP head drafts, or the
    text itself where it repeats: the answer stays the same.

    \b
    edgespec run recipes/demo/base --draft recipes/demo/draft --prompt 'def area(radius):'
    edgespec run Qwen/Qwen3-8B --draft Tengyunw/qwen3_8b_eagle3 --weights int4
    edgespec run Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --weights int4
    echo 'Why is the sky blue?' | edgespec run Qwen/Qwen3-0.6B
    \f
    The engines are kept in EDGESPEC_CACHE, XDG_CACHE_HOME/edgespec or ~/.cache/edgespec, by the
    identity of the checkpoints, these options and this machine, so that a second start is
    immediate; edgespec cache lists and removes them. Downloads are kept in the hub's own cache.
    """
    for name in ("stdout",) if prompts else ("stdin", "stdout"):
        require_stream(name)
    names = [param.name for param in chat.command.params if param.name in values]
    settings = {name: values.pop(name) for name in names}
    limits = build.limits_of(LIMITS, values)
    two = settings["chat_template"] and settings["no_chat_template"]
    prompts = prompts or (() if two else piped_prompt(ctx))
    source = ctx.get_parameter_source
    refuse(
        {
            chat.TWO_TEMPLATES: two,
            **{
                f"`{name}` is for a chat, and a prompt was given": (
                    prompts and source(name) is ParameterSource.COMMANDLINE
                )
                for name in OF_TERMINALS
            },
            "`image` goes with `prompt`; in a chat type /image FILE": named_images and not prompts,
        }
    )
    request = run_request(ctx, target, engine_request, limits, values)
    with prepared_with_steps(request) as engine_dir:
        if prompts:
            return answer(engine_dir, engine_request, prompts, named_images, settings)
        return chat.talk(engine_dir, engine_request, **settings)


def run_request(
    ctx: click.Context,
    target: str,
    engine_request: EngineRequest,
    limits: Limits,
    values: dict[str, Any],
) -> RunRequest:
    """What is to be prepared, by the options of PARAMS and of a backend; they are taken out of
    `values`. Raises click.UsageError for those that mean nothing for a finished engine."""
    from edgespec.pipeline.prepare import RunRequest, is_engine_dir

    config, source = engine_request.speculative_config, ctx.get_parameter_source
    draft, aux_layers = values.pop("draft"), values.pop("aux_layers")
    backend, no_golden = values.pop("backend"), values.pop("no_golden")
    same = ("allow_pickle", "skip_visual", "update", "measure_costs")
    settings = {name: values.pop(name) for name in same}
    if is_engine_dir(target):
        why = "means nothing here: TARGET is a finished engine directory"
        refuse({f"`{name}` {why}": source(name) in GIVEN for name in MAKING})
    elif config is not None:
        draft = said_once("`draft`", draft, config.speculative_model)
        aux_layers = said_once("`aux_layers`", aux_layers, config.aux_layers)
    return RunRequest(
        target=target,
        draft=draft,
        limits=limits,
        backend=backend,
        options=parsed_options(ctx, backend, values),
        aux_layers=aux_layers,
        golden=not no_golden,
        check_method=partial(check_method, config),
        has_drafter=engine_request.drafter is not None
        or (config is not None and not config.needs_engine),
        **settings,
    )


@contextmanager
def prepared_with_steps(request: RunRequest) -> Iterator[Path]:
    """The engine directory of a request in the block; what is done until then is shown."""
    from edgespec.artifacts import atomic
    from edgespec.cli.progress import Steps
    from edgespec.pipeline.cache import Cache
    from edgespec.pipeline.prepare import prepared

    with ExitStack() as stack:
        with Steps() as steps:
            engine_dir = stack.enter_context(prepared(request, Cache(atomic.user_cache()), steps))
        yield engine_dir


def check_method(config: DecodingConfig | None, method: str | None) -> None:
    """Raises OptionError where speculative_config names another method than the pair's; before
    anything is made of it."""
    if config is not None:
        from edgespec.compat.speculative_config import of_engine

        of_engine(config, method, "the pair")


def said_once(param: str, given: T | None, configured: T | None) -> T | None:
    """A value of a parameter, or of speculative_config. Raises OptionError where they differ."""
    if given is not None and configured not in (None, given):
        message = f"{param} is {given}, and speculative_config says {configured}"
        raise OptionError(message, "Leave one of the two out.")
    return configured if given is None else given


def answer(
    engine_dir: Path,
    engine_request: EngineRequest,
    prompts: Sequence[str],
    named_images: Sequence[Path],
    settings: dict[str, Any],
) -> int:
    """Answers each prompt, with the images, on stdout and returns the exit code."""
    from edgespec.cli.answer_stream import AnswerStream
    from edgespec.cli.report import show_end
    from edgespec.prompts import text_requests

    settings = {name: value for name, value in settings.items() if name not in OF_TERMINALS}
    template, raw = settings.pop("chat_template"), settings.pop("no_chat_template")
    show_speculation, images = settings.pop("show_speculation"), [*map(str, named_images)]
    rules = beside(engine_request.image_rules, None, named_images)
    return infer.respond(
        text_requests(prompts, apply_chat_template=not raw, images=images, **settings),
        engine_dir,
        replace(engine_request, image_rules=rules),
        output_file=None,
        chat_template=template,
        stream=AnswerStream(len(prompts), live=True, show_speculation=show_speculation),
        finish=lambda stats: show_end(stats, show_speculation=show_speculation),
    )


def piped_prompt(ctx: click.Context) -> tuple[str, ...]:
    """What stdin holds, where it is no terminal. Raises click.UsageError where that is nothing,
    RequestError for bytes that are no text."""
    if sys.stdin.isatty():
        return ()
    try:
        text = sys.stdin.buffer.read().decode("utf-8").strip("\r\n")
    except UnicodeDecodeError:
        raise RequestError("stdin is not UTF-8", "Encode the prompt as UTF-8.") from None
    if not text.strip():
        raise click.UsageError("stdin is not a terminal, and empty: give --prompt", ctx)
    return (text,)


def parsed_options(ctx: click.Context, backend: str, values: dict[str, OptionValue]) -> Any:
    """The backend's options. Raises click.UsageError where they contradict each other."""
    chosen = find_backend(backend)
    assert chosen is not None  # one of the choices
    try:
        return chosen.parse_options(values)
    except OptionError as error:
        raise click.UsageError(f"{error.what}. {error.remedy}", ctx) from None
