"""The entry point of the command line: loads one command, and maps errors to exit codes.

Knows the list of commands. Knows nothing of their options.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from edgespec import __version__
from edgespec.cli import environment, logs
from edgespec.cli.exit_codes import BROKEN_PIPE, INTERRUPTED
from edgespec.cli.flags import EdgeGroup, rest, until_separator
from edgespec.cli.signals import Raising, Terminated, exit_code
from edgespec.cli.streams import flush_stdout, occupy_closed_streams
from edgespec.cli.terminal import report, say
from edgespec.errors import BundleError, EdgeSpecError, EnvironmentProblem

# Name -> (module, one line for the list). Modules load when their command is called.
COMMANDS = {
    "run": (
        "edgespec.cli.run",
        "Chat with a model by its name: download, check, export and build as needed.",
    ),
    "quantize": (
        "edgespec.cli.quantize",
        "Quantize a checkpoint with NVIDIA ModelOpt: a base or a draft.",
    ),
    "train": (
        "edgespec.cli.train_group",
        "Train a draft for a base, from conversations.",
    ),
    "export-draft": (
        "edgespec.cli.export_draft",
        "Write a draft in the layout of vLLM, SGLang, ModelOpt or its authors.",
    ),
    "export": (
        "edgespec.cli.export",
        "Write the ONNX graph of a checkpoint: a base, a plain decoder or a draft.",
    ),
    "build": ("edgespec.cli.build", "Build the engine of an exported directory for this machine."),
    "import": (
        "edgespec.cli.import_engine",
        "Take over engines that NVIDIA's tool built from what build --emit-onnx wrote.",
    ),
    "infer": ("edgespec.cli.infer", "Answer the requests of input.json, with drafts or without."),
    "inspect": (
        "edgespec.cli.inspect",
        "Show what a checkpoint, an export or an engine directory is, and if it is complete.",
    ),
    "check": (
        "edgespec.cli.check",
        "Check whether a base and a draft belong together, without running them.",
    ),
    "verify": (
        "edgespec.cli.verify",
        "Check built engines on this device, and write what a bug report needs.",
    ),
    "chat": ("edgespec.cli.chat.command", "Chat with a model in the terminal."),
    "serve": ("edgespec.cli.serve", "Serve a model over HTTP, to clients of OpenAI's API."),
    "eval": ("edgespec.cli.eval", "Measure how good answers are: summaries of articles by ROUGE."),
    "bench": (
        "edgespec.cli.bench.command",
        "Measure how fast engines are here, plain and with drafts, and compare two runs.",
    ),
    "tune": (
        "edgespec.cli.tune",
        "Find the drafts that are fastest on your prompts here, and keep that plan.",
    ),
    "data": (
        "edgespec.cli.data.command",
        "Make data that drafts learn from; convert prompt sets for other benchmarks.",
    ),
    "cache": ("edgespec.cli.cache", "List or remove the engines that run keeps."),
    "completion": ("edgespec.cli.completion", "Print the completion script of a shell."),
    "help": ("edgespec.cli.help", "Show the help of a command."),
}


# Raised where something is read: what is written has errors of its own (atomic.writing)
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
# click's names of what a flag takes, and ours
NUMBERS = {
    "integer range": "whole number",
    "integer": "whole number",
    "float range": "number",
    "float": "number",
}
PROGRAM = "edgespec"
ANYWHERE = ("-v", "--verbose", "--debug")  # flags that work before and after the command


class LazyGroup(EdgeGroup):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the commands in the order of --help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns a command, or returns None."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, "-V", "--version", prog_name="edgespec")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    envvar=environment.VERBOSE,
    show_envvar=True,
    help="Show on stderr what is done, with times.",
)
@click.option(
    "--debug",
    is_flag=True,
    envvar=environment.DEBUG,
    show_envvar=True,
    help="Show the traceback of an error; with --verbose, all of the log.",
)
@click.pass_context
def cli(ctx: click.Context, verbose: bool, debug: bool) -> None:
    """Lossless speculative decoding for edge devices.

    From a Hugging Face checkpoint and its draft to running engines: export, build, infer, chat.
    Flags may be spelled --kebab-case, --snake_case or --camelCase; --verbose and --debug may also
    follow the command.

    Exit codes: 0 success, 1 internal error, 2 usage, 3 invalid input, 4 unsupported environment,
    5 some requests failed, 130 interrupted (143 by SIGTERM).
    """
    ctx.obj = {"debug": debug, "verbose": verbose}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    occupy_closed_streams()
    args = sys.argv[1:] if argv is None else argv
    sys.exit(flushed(run(args)))


def run(args: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    signals, line = Raising(), hoisted(args)
    try:
        with signals, logs.shown(log_level(line)):
            warn_of_variables()
            code: Any = cli.main(args=line, prog_name=PROGRAM, standalone_mode=False)
            return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        return helped(error)
    except click.ClickException as error:
        show(error)
        return error.exit_code
    except SystemExit as stop:  # by click: completions are printed, or nobody reads stdout
        return int(stop.code or 0) if environment.COMPLETING in os.environ else BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort, Terminated) as stop:
        return stopped(stop)
    except Exception as error:
        if signals.raised is not None and isinstance(error, ImportError | SystemError):
            return stopped(signals.raised)  # extension modules replace what interrupts their import
        if wants(line, "--debug", environment.DEBUG):
            traceback.print_exc()
        shown = presentable(error)
        report(shown)
        return shown.exit_code


def flushed(code: int) -> int:
    """The exit code once stdout has taken all that was printed, and that of stdout where it does
    not."""
    try:
        flush_stdout()
    except BrokenPipeError:
        return code or BROKEN_PIPE
    except OSError as error:
        if not code:  # else it is what was reported
            shown = presentable(error)
            report(shown)
            return shown.exit_code
    return code


def show(error: click.ClickException) -> None:
    """Prints wrong usage on stderr in click's form, with control characters escaped."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is not None:
        say(f"{ctx.get_usage()}\nTry '{ctx.command_path} --help' for help.\n", err=True)
    text = error.format_message()
    for kind, name in NUMBERS.items():
        text = text.replace(f"is not a valid {kind}.", f"is not a {name}.")
    say(f"Error: {text}", err=True)


def helped(error: click.exceptions.NoArgsIsHelpError) -> int:
    """Prints the help of a group that was called alone: the program's own is what was asked for, a
    command that lacks the one below it is wrong usage."""
    assert error.ctx is not None
    alone = error.ctx.parent is None
    say(error.ctx.get_help(), err=not alone)
    return 0 if alone else error.exit_code


def stopped(stop: BaseException) -> int:
    """Reports a signal on stderr, with what is left as a note of it says, and returns its exit
    code."""
    by_sigterm = isinstance(stop, Terminated)
    reason = "stopped by SIGTERM" if by_sigterm else "interrupted"
    first = stop.__context__ or stop  # click's Abort comes of Ctrl-C
    notes: list[str] = getattr(first, "__notes__", [])
    say(f"{reason}: {notes[0] if notes else 'no partial output is left'}", err=True)
    return exit_code(signal.SIGTERM) if by_sigterm else INTERRUPTED


def presentable(error: Exception) -> EdgeSpecError:
    """Returns any error as one with a remedy and an exit code."""
    if isinstance(error, EdgeSpecError):
        return error
    if isinstance(error, OSError) and error.errno in UNREADABLE:
        return BundleError(
            f"{error.filename or 'a file'} cannot be read: {error.strerror}",
            "Check the path and its permissions.",
        )
    if isinstance(error, OSError):
        full = "stdout" if error.errno == errno.ENOSPC else None  # files that are full are named
        place = f"{name}: " if (name := error.filename or full) else ""
        remedy = "Check the path, its permissions and the disk."
        return EnvironmentProblem(f"{place}{error.strerror or error}", remedy)
    if isinstance(error, MemoryError):
        remedy = "Close other programs, or use a smaller model."
        return EnvironmentProblem("not enough memory", remedy)
    remedy = "This is a bug in edgespec: please report it with the output of --debug."
    return EdgeSpecError(f"{type(error).__name__}: {error}", remedy)


def hoisted(args: list[str]) -> list[str]:
    """Returns the arguments with --verbose and --debug first: they work before and after the
    command's name, up to `--`."""
    words = until_separator(args)
    first = [word for word in words if word in ANYWHERE]
    return [*first, *(word for word in words if word not in ANYWHERE), *rest(args)]


def wants(line: list[str], flag: str, variable: str) -> bool:
    """Whether a switch is on, by a flag among the first of the line or by its variable."""
    return flag in until_separator(line) or environment.is_on(os.environ, variable)


def log_level(line: list[str]) -> int | None:
    """The least level of the records to show: with --debug as well, all of them."""
    if not ("-v" in until_separator(line) or wants(line, "--verbose", environment.VERBOSE)):
        return None
    return logging.DEBUG if wants(line, "--debug", environment.DEBUG) else logging.INFO


def warn_of_variables() -> None:
    """Prints a warning for each mistyped variable, unless a shell asks for completions."""
    if environment.COMPLETING not in os.environ:
        for warning in environment.mistyped(os.environ):
            say(warning, err=True)


if __name__ == "__main__":
    main()
