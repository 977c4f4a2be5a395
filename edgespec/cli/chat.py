"""`edgespec chat`: a conversation in the terminal, each token shown as soon as its text is certain.

Knows lines, commands that begin with a slash, the history, and what a terminal may be shown. Knows
nothing of how an answer comes about: that is the engine's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from edgespec.cli import environment
from edgespec.cli.draft_flags import ALIASES, draft_options
from edgespec.cli.flags import INTERRUPTED, EdgeCommand
from edgespec.cli.infer import MIB, SOME_FAILED
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import harmless, report
from edgespec.errors import EdgeSpecError, LimitError, RequestError
from edgespec.prompts import CANCELLED, MAX_LENGTH, Message, SamplingParams
from edgespec.prompts.parse import message_text
from edgespec.prompts.places import Place

if TYPE_CHECKING:
    from edgespec.runtime.engine import Engine, Stream
    from edgespec.runtime.generation import Response
    from edgespec.runtime.tree import DraftPlan

Read = Callable[[str], str]  # a prompt -> the line; EOFError at the end

DEFAULTS = SamplingParams()
PROMPT, CONTINUED = "> ", ". "
MAKE_ROOM = "/undo drops the last exchange, /reset all of them."


@click.command("chat", cls=EdgeCommand, aliases=ALIASES)
@click.option(
    "--engine-dir",
    required=True,
    type=click.Path(path_type=Path),
    envvar=environment.ENGINE_DIR,
    show_envvar=True,
    help="What edgespec build made.",
)
@click.option("--system", default="", metavar="TEXT", help="The system prompt.")
@click.option(
    "--spec-decode/--no-spec-decode",
    default=None,
    help=(
        "Draft and verify, or decode plainly. By default drafts are used where the directory holds"
        " a draft engine."
    ),
)
@draft_options
@click.option(
    "--show-speculation",
    is_flag=True,
    help=(
        "Accepted drafts in green (on a terminal, unless NO_COLOR is set); statistics after each"
        " answer, on stderr."
    ),
)
@click.option(
    "--max-generate-length",
    type=int,
    default=DEFAULTS.max_generate_length,
    show_default=True,
    help="Tokens per answer, at most.",
)
@click.option(
    "--temperature",
    type=float,
    default=DEFAULTS.temperature,
    show_default=True,
    help="0 is greedy.",
)
@click.option("--top-k", type=int, default=DEFAULTS.top_k, show_default=True, help="0 is off.")
@click.option("--top-p", type=float, default=DEFAULTS.top_p, show_default=True, help="1 is off.")
@click.option("--min-p", type=float, default=DEFAULTS.min_p, show_default=True, help="0 is off.")
@click.option(
    "--repetition-penalty",
    type=float,
    default=DEFAULTS.repetition_penalty,
    show_default=True,
    help="1 is off.",
)
@click.option("--seed", type=int, help="For every answer; without it one is drawn for each.")
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End an answer before this text; may be given repeatedly.",
)
@click.option(
    "--enable-thinking",
    is_flag=True,
    help="Passed to the chat template; the thoughts are shown as text.",
)
@click.option(
    "--prefix-cache-mb",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    envvar=environment.PREFIX_CACHE_MB,
    show_envvar=True,
    help="Memory for KV rows of earlier turns, so that a turn computes only what is new; 0 is off.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    engine_dir: Path,
    system: str,
    spec_decode: bool | None,
    spec_draft_top_k: int | None,
    spec_draft_step: int | None,
    spec_verify_size: int | None,
    show_speculation: bool,
    enable_thinking: bool,
    prefix_cache_mb: int,
    **sampling: Any,
) -> int:
    """Talk with a model in the terminal.

    The text streams as it becomes certain. With drafts it is the text of plain decoding, greedy and
    sampled (see infer --help). /help lists the commands (/system, /undo, /reset, /exit); a turn
    that begins with a slash is written with two. A line that ends with a backslash goes on in the
    next one; empty lines are skipped.

    Ctrl-C ends an answer after the step under way and keeps what there is; a second one leaves at
    once (exit 130). At the prompt the first clears the line and the second leaves; Ctrl-D leaves
    too.

    Where input is no terminal each line is a turn (or a command), answers go to stdout, each ended
    by a newline, and the exit code is 5 if a turn failed; Ctrl-C ends the run after the step.

    Control characters of the model's act on no terminal: ESC is shown as \\x1b. Into a file or a
    pipe the text goes as it is.

    \b
    edgespec chat --engine-dir engines --show-speculation
    echo 'What is 12 + 30?' | edgespec chat --engine-dir engines --temperature 0
    """
    sizes = (spec_draft_top_k, spec_draft_step, spec_verify_size)
    if spec_decode is False and any(sizes):
        raise click.UsageError("the sizes of drafts mean nothing with --no-spec-decode", ctx)
    params = SamplingParams(**sampling)
    conversation = Conversation(message_text(system, Place("--system")))
    from edgespec.cli.report import plan_line
    from edgespec.runtime.engine import Engine

    wanted = True if any(sizes) else spec_decode
    with Engine(engine_dir, spec_decode=wanted, prefix_cache_bytes=prefix_cache_mb * MIB) as engine:
        plan = engine.plan(*sizes) if engine.spec_decode else None
        screen = Screen(sys.stdout)
        screen.note(
            plan_line(plan, chosen=not any(sizes), words=engine.drafter_words)
            if plan
            else "decoding plainly, without drafts"
        )
        thinking_note = engine.thinking_note([enable_thinking], by_flag=True) if plan else None
        for note in (*engine.notes, *([thinking_note] if thinking_note else [])):
            screen.note(note)
        chat = Chat(
            engine,
            plan,
            params,
            screen,
            conversation,
            thinking=enable_thinking,
            show_speculation=show_speculation,
            interactive=sys.stdin.isatty(),
        )
        return chat.run(terminal_reader() if chat.interactive else read_pipe)


@dataclass
class Conversation:
    """What was said so far: the system prompt, and exchanges of a user's turn and its answer."""

    system: str = ""
    exchanges: list[tuple[Message, Message]] = field(default_factory=list)

    def and_then(self, turn: str) -> list[Message]:
        """All messages of the conversation, with the user's new turn last."""
        system = [Message("system", self.system)] if self.system else []
        return [*system, *chain.from_iterable(self.exchanges), Message("user", turn)]

    def add(self, turn: str, answer: str) -> None:
        """Keep an exchange: the user's turn and the answer's text."""
        self.exchanges.append((Message("user", turn), Message("assistant", answer)))


class Screen:
    """Where answers and notes go; knows what a terminal may be shown."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.is_terminal = self.out.isatty()
        self.has_colors = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def show(self, text: str, *, accepted: bool = False) -> None:
        """Text of an answer; with `accepted` in the color of accepted drafts. What the encoding
        lacks is escaped."""
        encoding = self.out.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        if self.is_terminal:
            text = harmless(text)
        if text and accepted and self.is_terminal and self.has_colors:
            text = click.style(text, fg="green")
        self.out.write(text)
        self.out.flush()

    def note(self, text: str) -> None:
        """What is not of the model, on stderr; click takes the style away where that is no
        terminal."""
        text = harmless(text)
        click.echo(click.style(text, dim=True) if self.has_colors else text, err=True)


class Chat:
    """One conversation with an open engine. A turn that fails leaves no trace in the history."""

    def __init__(
        self,
        engine: Engine,
        plan: DraftPlan | None,
        sampling: SamplingParams,
        screen: Screen,
        conversation: Conversation,
        *,
        thinking: bool = False,
        show_speculation: bool = False,
        interactive: bool = False,
    ) -> None:
        self.engine, self.plan, self.sampling = engine, plan, sampling
        self.screen, self.conversation = screen, conversation
        self.thinking, self.show_speculation, self.interactive = (
            thinking,
            show_speculation,
            interactive,
        )
        self.some_failed = False
        self.code: int | None = None  # the exit code, once the chat is over

    def run(self, read: Read) -> int:
        """Turn after turn until the input ends; returns the exit code."""
        warned = False
        if self.interactive:
            self.screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        while self.code is None:
            try:
                said = read_turn(read)
                warned = False
                self.take(said)
            except EOFError:
                self.at_the_end()
            except KeyboardInterrupt:
                if warned or not self.interactive:
                    return INTERRUPTED
                warned = True
                self.screen.note("\nonce more leaves, and so does Ctrl-D")
            except UnicodeDecodeError:
                self.failed(
                    RequestError("this turn is not UTF-8", "Send it again, encoded as UTF-8.")
                )
            except EdgeSpecError as error:
                self.failed(error)
        return self.code

    def failed(self, error: EdgeSpecError) -> None:
        """Shows the error and goes on."""
        self.some_failed = True
        report(error)

    def take(self, said: str) -> None:
        """Runs a command, or answers a turn. Raises RequestError."""
        if said.startswith("/") and not said.startswith("//"):
            self.obey(said)
        elif said.strip():
            self.turn(
                message_text(
                    said.removeprefix("/") if said.startswith("//") else said, Place("this turn")
                )
            )

    def at_the_end(self) -> None:
        """The input has ended: leave, on a terminal below the prompt's line."""
        if self.interactive:
            self.screen.note("")
        self.leave()

    # ---- a turn

    def turn(self, said: str) -> None:
        """Send what was said, show the answer as it comes, and keep both."""
        prompt = self.engine.render(self.conversation.and_then(said), enable_thinking=self.thinking)
        ids = self.engine.tokenizer.encode(prompt)
        with Stopper() as stopper:
            try:
                response = self.answer(
                    self.engine.stream(ids, self.sampling, self.plan, keep=True), stopper
                )
                self.conversation.add(said, response.text)
            except LimitError as error:
                raise self.with_a_way_out(error) from error
            finally:
                self.heed(stopper.number)
            for line in self.notes(response):
                self.screen.note(line)

    def heed(self, number: int | None) -> None:
        """A signal that stopped an answer ends the chat too, but for Ctrl-C in a terminal."""
        if number is not None and (not self.interactive or number == signal.SIGTERM):
            self.code = exit_code(number)

    def answer(self, stream: Stream, stopper: Stopper) -> Response:
        """The response, once all of it is shown. What is shown of an answer that fails ends with
        its line."""
        from edgespec.runtime.generation import Chunk, Response

        shown = 0
        try:
            for event in stream:
                if isinstance(event, Chunk):
                    drafted = event.accepted if self.show_speculation else 0
                    self.screen.show("".join(event.pieces[:drafted]), accepted=True)
                    self.screen.show("".join(event.pieces[drafted:]))
                    shown += len(event.text)
                    if stopper():
                        stream.cancel()
        except EdgeSpecError:
            self.screen.show("\n" if shown else "")
            raise
        assert isinstance(event, Response)
        self.screen.show(f"{event.text[shown:]}\n")  # what a cancelled answer still held back
        return event

    def with_a_way_out(self, error: LimitError) -> LimitError:
        """The error, with the commands that shorten the history where there is one to shorten."""
        if not self.conversation.exchanges:
            return error
        return LimitError(error.what, f"{error.remedy} Your turn was taken back. {MAKE_ROOM}")

    def notes(self, response: Response) -> list[str]:
        """What the user should know of an answer beside its text."""
        found = []
        if response.finish_reason == CANCELLED:
            found.append("[stopped]")
        if response.finish_reason == MAX_LENGTH:
            most = self.sampling.max_generate_length
            at_most = response.metrics.completion_tokens == most
            found.append(
                f"[cut at --max-generate-length {most}]"
                if at_most
                else f"[cut: no room left. {MAKE_ROOM}]"
            )
        return (
            [*found, stats(response, drafted=self.plan is not None)]
            if self.show_speculation
            else found
        )

    # ---- commands

    def obey(self, said: str) -> None:
        """Run a slash command. Raises RequestError where there is none of that name, or for text
        behind one that takes none."""
        name, text = [*said.split(maxsplit=1), ""][:2]
        if name not in SLASHES:
            what = f"there is no command {name}"
            raise RequestError(
                what,
                f"Commands: {', '.join(SLASHES)}. To send a turn that begins with /, write //.",
            )
        slash = SLASHES[name]
        if text and not slash.takes:
            raise RequestError(
                f"{name} takes no text", f"To send it as a turn, write /{name} with it."
            )
        slash.act(self, text.rstrip())

    def leave(self, _: str = "") -> None:
        """/exit: sets the exit code, 0, or 5 where input is no terminal and a turn failed."""
        self.code = SOME_FAILED if self.some_failed and not self.interactive else 0

    def list_commands(self, _: str) -> None:
        """/help: lists the commands on stderr."""
        names = {name: f"{name} {slash.takes}".strip() for name, slash in SLASHES.items()}
        self.screen.note(
            "\n".join(f"{names[name]:14} {slash.does}" for name, slash in SLASHES.items())
        )

    def reset(self, _: str) -> None:
        """/reset: drops all exchanges and keeps the system prompt."""
        self.conversation.exchanges.clear()
        self.screen.note(
            "[a new conversation; the system prompt stays]"
            if self.conversation.system
            else "[anew]"
        )

    def set_system(self, text: str) -> None:
        """/system: sets the system prompt, or removes it with an empty text. Raises RequestError for
        text that no message may hold."""
        self.conversation.system = message_text(text, Place("the system prompt"))
        self.screen.note("[the system prompt is set]" if text else "[no system prompt]")

    def undo(self, _: str) -> None:
        """/undo: drops the last exchange. Raises RequestError where there is none."""
        if not self.conversation.exchanges:
            raise RequestError("there is no exchange to take back", "Say something first.")
        self.conversation.exchanges.pop()
        self.screen.note("[the last exchange is taken back]")


class Slash(NamedTuple):
    """A command inside the chat; `takes` names the text behind it, where it takes one."""

    act: Callable[[Chat, str], None]
    does: str
    takes: str = ""


SLASHES = {
    "/help": Slash(Chat.list_commands, "This list."),
    "/system": Slash(
        Chat.set_system,
        "Set the system prompt; without text, remove it. The turns so far stay.",
        "TEXT",
    ),
    "/undo": Slash(Chat.undo, "Take back the last turn and its answer."),
    "/reset": Slash(Chat.reset, "Begin a new conversation, with the same system prompt."),
    "/exit": Slash(Chat.leave, "Leave."),
}


def stats(response: Response, *, drafted: bool) -> str:
    """The statistics of one answer in one line, without those that are undefined."""
    metrics = response.metrics
    shown = [
        (metrics.completion_tokens, "{} tokens"),
        (metrics.steps, "{} base passes after prefill"),
        (metrics.acceptance_length if drafted else None, "acceptance length {:.2f}"),
        (metrics.tokens_per_s, "{:.1f} tokens/s"),
        (metrics.time_to_first_token, "time to first token {:.3f} s"),
        (metrics.reused_tokens, f"{{}} of {metrics.prompt_tokens} prompt tokens reused"),
    ]
    return f"[{', '.join(form.format(value) for value, form in shown if value is not None)}]"


# ---- reading


def read_turn(read: Read) -> str:
    """One turn: a line, and the next one where it ends with a backslash."""
    lines = [read(PROMPT)]
    with suppress(EOFError):
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read(CONTINUED))
    return "\n".join(lines)


def read_pipe(prompt: str) -> str:
    """A line of stdin, read as bytes so that one that is not UTF-8 leaves the next intact. Raises
    EOFError, UnicodeDecodeError."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8").rstrip("\r\n")


def terminal_reader() -> Read:
    """A reader of lines, editable where Python has readline. The prompt is no part of the answers."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it once it is there
    return input if sys.stdout.isatty() else read_beside_the_prompt


def read_beside_the_prompt(prompt: str) -> str:
    """A line of stdin, with the prompt on stderr. Raises EOFError at the end."""
    click.echo(prompt, nl=False, err=True)
    return input()
