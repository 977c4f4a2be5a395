"""The flags of `edgespec chat`, and what is opened for it.

Knows flags. Knows nothing of turns.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.artifacts.outputs import refuse_overwriting
from edgespec.cli.accept_flags import accept_options
from edgespec.cli.chat import slashes
from edgespec.cli.chat.conversation import Conversation
from edgespec.cli.chat.loop import Chat
from edgespec.cli.chat.reader import Read, read_pipe
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.settings import DRAFT_SIZES, Settings
from edgespec.cli.costs_flag import measure_busy_again
from edgespec.cli.draft_flags import ALIASES
from edgespec.cli.engine_options import (
    BOTH_WAYS,
    PREFIX_CACHE,
    draft_options,
    engine_dir_option,
    engine_options,
    opened,
)
from edgespec.cli.flags import refuse
from edgespec.cli.help_pages import PAGES, PagedCommand
from edgespec.cli.image_flags import image_flags
from edgespec.cli.paths import FILE
from edgespec.cli.prompt_options import CHAT_TEMPLATE, sampling_options
from edgespec.cli.streams import require_stream
from edgespec.compat import trtllm
from edgespec.errors import RequestError
from edgespec.prompts import SamplingParams
from edgespec.prompts.checks import SAMPLING
from edgespec.prompts.named_templates import NAMED_TEMPLATES
from edgespec.prompts.parse import message_text
from edgespec.prompts.places import JsonPlace

if TYPE_CHECKING:
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.engine_request import EngineRequest

TWO_TEMPLATES = "`chat_template` and `no_chat_template` exclude each other"
MARKERS = re.compile(r"<\|?\w+\|?>")


OPTIONS = (
    click.option("--system", default="", show_default=False, help="The system prompt."),
    click.option(
        "--show-speculation",
        is_flag=True,
        help=(
            "Accepted drafts in green (on a terminal, unless NO_COLOR is set); statistics after each"
            " answer, on stderr."
        ),
    ),
    sampling_options(SamplingParams()),
    click.option("--seed", type=int, help="For every answer; without it one is drawn for each."),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help="End an answer before this text; may be given repeatedly.",
    ),
    click.option(
        "--enable-thinking",
        is_flag=True,
        help="Passed to the chat template; the thoughts are shown as text.",
    ),
    CHAT_TEMPLATE,
    click.option(
        "--no-chat-template",
        is_flag=True,
        help="Send the messages as they are, joined by line breaks: for models that continue a text.",
    ),
    click.option(
        "--history-file",
        type=FILE,
        help=(
            "Where typed lines are kept between sessions.  [default:"
            " ~/.local/state/edgespec/chat_history]"
        ),
    ),
    click.option("--no-history", is_flag=True, help="Keep no typed lines."),
)


def chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a conversation."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command(
    "chat",
    cls=PagedCommand,
    page=PAGES["chat"],
    aliases={**ALIASES, **trtllm.ALIASES["chat"]},
    missing=trtllm.FLAGS["chat"],
)
@engine_dir_option
@chat_options
@engine_options(image_flags, BOTH_WAYS, draft_options, accept_options, PREFIX_CACHE)
def command(engine_dir: Path, engine_request: EngineRequest, **values: Any) -> int:
    """Talk with a model in the terminal.

    The answer streams while it is generated. With drafts it is the text of plain decoding, greedy and
    sampled (see infer --help). /help lists the commands, such as /set, /regenerate, /tree and
    /save; a turn that begins with a slash is written with two.

    \f
    In a terminal Enter sends, Alt+Enter begins a new line, a pasted text is one turn, Tab completes
    commands, and the arrow keys bring back what was typed before, in earlier sessions too. A line
    that ends with a backslash goes on in the next one; empty lines are skipped.

    Ctrl-C ends an answer after the current step and keeps what was generated; a second one leaves
    at once (exit 130). At the prompt the first clears the line and the second leaves; Ctrl-D leaves
    too.

    Where input is not a terminal, each line is a turn (or a command), answers go to stdout, each ended
    by a newline, and the exit code is 5 if a turn failed; Ctrl-C ends the run after the step.

    Control characters in an answer are escaped on a terminal: ESC is shown as \\x1b. A file or a
    pipe gets the text as it is.

    \b
    edgespec chat --engine-dir engines --show-speculation
    echo 'What is 12 + 30?' | edgespec chat --engine-dir engines --temperature 0
    """
    return talk(engine_dir, engine_request, **values)


def talk(
    engine_dir: Path,
    engine_request: EngineRequest,
    *,
    system: str,
    show_speculation: bool,
    enable_thinking: bool,
    chat_template: str | None,
    no_chat_template: bool,
    history_file: Path | None,
    no_history: bool,
    **sampling: Any,
) -> int:
    """Chat with the engines of a directory by the options of `chat_options`; the exit code."""
    for name in ("stdin", "stdout"):
        require_stream(name)
    refuse({TWO_TEMPLATES: chat_template and no_chat_template})
    if history_file is not None:
        refuse_overwriting(history_file, (engine_dir, chat_template))
    params = sampling_params(sampling)
    conversation = Conversation(message_text(system, JsonPlace("--system")))
    from edgespec.cli.report import opened_line

    measure_busy_again(engine_dir, engine_request.spec_decode, engine_request.spec_policy)
    with opened(engine_request, engine_dir) as open_engine:
        engine = open_engine.engine
        unfit = choose_template(
            engine, engine_dir, chat_template, raw=no_chat_template, thinking=enable_thinking
        )
        settings = Settings(
            params,
            drafts=engine.spec_decode,
            sizes=dict(zip(DRAFT_SIZES, engine_request.sizes, strict=True)),
            tree=engine_request.tree,
            spec_policy=engine_request.spec_policy,
            acceptance=engine.acceptance,
            enable_thinking=enable_thinking,
            show_speculation=show_speculation,
        )
        plan, screen = settings.plan(engine), Screen(sys.stdout)
        screen.note(opened_line(open_engine, plan) if plan else "decoding plainly, without drafts")
        thinking_note = engine.thinking_note([enable_thinking], by_flag=True) if plan else None
        for note in filter(None, (*open_engine.notes, thinking_note, unfit)):
            screen.note(note)
        interactive = sys.stdin.isatty()
        read = editor(screen, history_file, keep=not no_history) if interactive else read_pipe
        chat = Chat(engine, settings, screen, conversation, slashes.run, interactive=interactive)
        return chat.run(read)


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Returns the sampling of the flags. Raises RequestError that names the flag."""
    for name, value in values.items():
        SAMPLING[name](value, JsonPlace(f"--{name.replace('_', '-')}"))
    return SamplingParams(**values)


def choose_template(
    engine: Engine, engine_dir: Path, named: str | None, *, raw: bool, thinking: bool
) -> str | None:
    """Sets the chat template that the flags name; returns a note on one that hardly fits.

    Raises RequestError where there is none, for a name or file that is none, and where it has no
    thinking mode and one is asked for.
    """
    from edgespec.prompts.template import RawTemplate, named_template

    tokenizer, note = engine.tokenizer, None
    if raw:
        tokenizer.template = RawTemplate()
    elif named:
        tokenizer.template = named_template(named, engine_dir)
        note = unknown_markers(engine, NAMED_TEMPLATES.get(named, ""), named)
    if not tokenizer.has_template():
        raise RequestError(
            "This model has no chat template.",
            f"Name one with --chat-template ({', '.join(NAMED_TEMPLATES)}, or a file), or continue"
            " your text with --no-chat-template.",
        )
    if thinking and not tokenizer.knows_thinking():
        raise RequestError(
            "The model's chat template has no thinking mode.", "Leave --enable-thinking out."
        )
    return note


def unknown_markers(engine: Engine, source: str, name: str) -> str | None:
    """Returns a note where a template's markers are no tokens of the model, None where they are."""
    missing = [m for m in MARKERS.findall(source) if engine.tokenizer.token_id(m) is None]
    if not missing:
        return None
    return f"the model has no token {missing[0]}: it was hardly trained with the template {name}"


def editor(screen: Screen, history_file: Path | None, *, keep: bool) -> Read:
    """Returns the line editor of the terminal, with the history of earlier sessions."""
    from edgespec.cli.chat.editor import LineEditor, history_path, open_history

    path = history_file or history_path(os.environ)
    history, note = open_history(path if keep else None)
    if note:
        screen.note(note)
    words = {name: slash.words for name, slash in slashes.SLASHES.items()}
    return LineEditor(history, words, screen.out)
