"""The entry point of the command line: loads one command, and maps errors to exit codes.

Knows the list of commands. Knows nothing of their options.
"""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from edgespec import __version__
from edgespec.cli.flags import INTERRUPTED
from edgespec.cli.limits import (
    import_problem,
    leave,
    occupy_closed_streams,
    refuse_too_little_memory,
)
from edgespec.cli.signals import Raising, Terminated, exit_code
from edgespec.cli.terminal import report
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
    "export": (
        "edgespec.cli.export",
        "Write the ONNX graph of a checkpoint: a base, a plain decoder or a draft.",
    ),
    "build": ("edgespec.cli.build", "Build the engine of an exported directory for this machine."),
    "infer": ("edgespec.cli.infer", "Answer the requests of input.json, with drafts or without."),
    "inspect": (
        "edgespec.cli.inspect",
        "Show what a checkpoint, an export or an engine directory is, and if it is complete.",
    ),
    "check": (
        "edgespec.cli.check",
        "Check whether a base and a draft belong together, without running them.",
    ),
    "chat": ("edgespec.cli.chat.command", "Chat with a model in the terminal."),
    "cache": ("edgespec.cli.cache", "List or remove the engines that run keeps."),
}


# Raised where something is read: what is written has errors of its own (bundle.writing)
UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
BROKEN_PIPE = 141  # 128 + SIGPIPE, the exit code of a shell


class LazyGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the commands in the order of --help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports and returns a command, or returns None."""
        if cmd_name not in COMMANDS:
            return None
        refuse_too_little_memory()
        command: click.Command = import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="edgespec")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Lossless speculative decoding for edge devices.

    From a Hugging Face checkpoint and its draft to running engines: export, build, infer, chat.
    Flags may be spelled --kebab-case, --snake_case or --camelCase.

    Exit codes: 0 success, 1 internal error, 2 usage, 3 invalid input, 4 unsupported environment,
    5 some requests failed, 130 interrupted (143 by SIGTERM).
    """
    ctx.obj = {"debug": debug}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    occupy_closed_streams()
    args = sys.argv[1:] if argv is None else argv
    leave(run(args))


def run(args: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    signals = Raising()
    try:
        with signals:
            code: Any = cli.main(args=hoisted(args), prog_name="edgespec", standalone_mode=False)
            return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SystemExit:  # raised by click if the reader of stdout is closed
        return BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort, Terminated) as stop:
        return stopped(stop)
    except Exception as error:
        if signals.raised is not None and isinstance(error, ImportError):
            return stopped(signals.raised)  # extension modules replace what interrupts their import
        if "--debug" in args:
            traceback.print_exc()
        shown = presentable(error)
        report(shown)
        return shown.exit_code


def stopped(stop: BaseException) -> int:
    """Reports a signal on stderr and returns its exit code."""
    by_sigterm = isinstance(stop, Terminated)
    reason = "stopped by SIGTERM" if by_sigterm else "interrupted"
    click.echo(f"{reason}: no partial output is left", err=True)
    return exit_code(signal.SIGTERM) if by_sigterm else INTERRUPTED


def presentable(error: Exception) -> EdgeSpecError:
    """Returns any error as one with a remedy and an exit code."""
    if isinstance(error, EdgeSpecError):
        return error
    if isinstance(error, ImportError) and (problem := import_problem(error)) is not None:
        return problem
    if isinstance(error, OSError) and error.errno in UNREADABLE:
        return BundleError(
            f"{error.filename or 'a file'} cannot be read: {error.strerror}",
            "Check the path and its permissions.",
        )
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return EnvironmentProblem(
            f"{place}{error.strerror or error}", "Check the path, its permissions and the disk."
        )
    if isinstance(error, MemoryError):
        return EnvironmentProblem(
            "not enough memory", "Close other programs, or use a smaller model."
        )
    what = f"{type(error).__name__}: {error}"
    return EdgeSpecError(
        what, "This is a bug in edgespec: please report it with the output of --debug."
    )


def hoisted(args: list[str]) -> list[str]:
    """Returns the arguments with `--debug` first: it works before and after the command's name."""
    return (["--debug"] if "--debug" in args else []) + [arg for arg in args if arg != "--debug"]


if __name__ == "__main__":
    main()
