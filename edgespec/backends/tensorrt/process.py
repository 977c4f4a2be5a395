"""Runs a build in a process of its own: starts it, listens to it, ends it.

Knows processes and the two sides' words (`build_job`). Knows no engine library.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from edgespec.backends.tensorrt.build_job import BuildJob, BuildReport
from edgespec.errors import BuildError, EdgeSpecError, EnvironmentProblem, InternalError, command

logger = logging.getLogger(__name__)
Message = dict[str, Any]

# -P: a module in the working directory must not be taken for the library
COMMAND = (sys.executable, "-P", "-m", "edgespec.backends.tensorrt.build_process")
STOP_S = 6.0  # that a cancelled process has to end by itself
TAIL_BYTES = 4000
SHOWN = ("INTERNAL_ERROR", "ERROR", "WARNING")  # of the library's log, with --verbose
# What the library says where memory does not do
NO_MEMORY = ("outofmemory", "out of memory", "bad_alloc", "failed_allocation", "memory allocation")
NO_KERNEL = "not supported by a dedicated kernel"


class BuildRefused(BuildError):
    """The library refused a graph, in the words that follow."""

    @property
    def lacks_kernel(self) -> bool:
        """Whether attention has no fused kernel, so that it may be built of basic operators."""
        return NO_KERNEL in self.what


def run(
    job: BuildJob,
    advance: Callable[[float], None],
    environment: Mapping[str, str],
    command: Sequence[str] = COMMAND,
) -> BuildReport:
    """Build the engine of a job; `advance` gets the share that is done.

    The process ends with this call, however the call ends. BuildError with the library's words
    where it refuses, EnvironmentProblem where this machine cannot.
    """
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env=dict(environment),
            text=True,
            encoding="utf-8",
            errors="replace",
        ) as child:
            try:
                last = listen(child, job, advance)
                child.wait()
            finally:
                stop(child)
        return outcome(last, child.returncode, tail_of(printed))


def listen(
    child: subprocess.Popen[str], job: BuildJob, advance: Callable[[float], None]
) -> Message | None:
    """Give the job, and read until the process closes its stdout; the last message that is neither
    progress nor log."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(f"{job.to_json()}\n")
        child.stdin.flush()
    except BrokenPipeError:
        logger.info("the process of the build ended before it was given its job")
    last = None
    for line in child.stdout:
        message = message_of(line)
        if message is None:
            logger.info("%s", line.rstrip())
        elif message["kind"] == "progress":
            advance(float(message["share"]))
        elif message["kind"] == "log":
            level = logging.INFO if message["severity"] in SHOWN else logging.DEBUG
            logger.log(level, "%s", message["text"])
        else:
            last = message
    return last


def message_of(line: str) -> Message | None:
    """The JSON object of a line, which says its "kind"; None for a line of another."""
    try:
        raw = json.loads(line)
    except ValueError:
        return None
    return raw if isinstance(raw, dict) and "kind" in raw else None


def stop(child: subprocess.Popen[str]) -> None:
    """End a process that still runs: by its own means, and where it does not, at once."""
    if child.poll() is not None:
        return
    assert child.stdin is not None
    try:
        child.stdin.close()  # which cancels the build
        child.wait(STOP_S)
    except (subprocess.TimeoutExpired, OSError):
        logger.info("the process of the build does not stop, and is killed")
    finally:
        child.kill()


def tail_of(printed: IO[bytes]) -> str:
    """The end of what a process printed to stderr."""
    printed.seek(0, 2)
    printed.seek(max(0, printed.tell() - TAIL_BYTES))
    return printed.read().decode(errors="replace").strip()


def outcome(last: Message | None, code: int, printed: str) -> BuildReport:
    """The report of the last message; raises what it says otherwise."""
    if last is None:
        raise ended(code, printed)
    kind = last.pop("kind")
    if kind == "built":
        return BuildReport(**last)
    if kind == "refused":
        raise refused(**last)
    if kind == "cancelled":
        raise BuildError("the build was cancelled", "Run it again.")
    if last["code"] == EnvironmentProblem.exit_code:
        raise EnvironmentProblem(last["message"], last["remedy"])
    raise InternalError(f"the build's process failed:\n{last['message']}", last["remedy"])


def out_of_memory(text: str) -> bool:
    """Whether the library's words are those of memory that does not do."""
    return any(words in text.lower() for words in NO_MEMORY)


def refused(message: str, lines: list[str], node: str) -> EdgeSpecError:
    """The error for what a library refused, with its words."""
    text = "\n  ".join([f"{message} at {node}" if node else message, *lines])
    if out_of_memory(text):
        remedy = (
            "The memory does not do: close other programs, lower `workspace_mib` or the sizes"
            " (`max_input_len`, `max_kv_cache_capacity`), or quantize the checkpoint."
        )
        return EnvironmentProblem(text, remedy)
    check = command("check", tensorrt="VERSION ONNX_DIR")
    remedy = (
        f"{check} says which rules of the parser a graph breaks. If it finds none, please report"
        " this."
    )
    return BuildRefused(text, remedy)


def ended(code: int, printed: str) -> EdgeSpecError:
    """The error for a process that ended without a word: it was killed, or it crashed."""
    tail = f"\n{printed}" if printed else ""
    if code == -signal.SIGKILL:
        message = "the process of the build was killed, as Linux does where memory runs out"
        return EnvironmentProblem(
            message, "Close other programs, lower `workspace_mib`, or quantize the checkpoint."
        )
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    message = f"the compiler ended {how} in the middle of the build{tail}"
    return BuildError(
        message, "Try another `opt_level` or another version of the library, and report this."
    )
