"""Programs in processes of their own that import nothing anew: each is forked from one that has
imported what commands import.

Knows how a program is started, watched and ended. Knows no command. A program finds what one of
`python -c` finds: arguments, environment, streams, signals, and an interpreter that ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 1 << 17  # bytes of a request: a program, its arguments and its environment
# Without ONNX Runtime: it has a thread, which would not be forked
IMPORTED = (
    "edgespec.backends.ort.backend",
    "edgespec.runtime.engine",
    "edgespec.runtime.measuring.cost_measure",
    "edgespec.runtime.requests.file_runner",
    "jinja2.sandbox",
    "numpy.random",
    "onnx_ir.passes.common",
    "prompt_toolkit.shortcuts",
    "tokenizers",
)
COMMAND = "import sys; from edgespec.cli.main import main; main(sys.argv[1:])"


class Forked:
    """A running program, as subprocess.Popen has one, but one at a time: killed on leaving. Streams
    that are given are descriptors; else stdin is empty, and the others are read as text."""

    def __init__(
        self,
        program: str,
        *args: object,
        env: dict[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        new_session: bool = False,
    ) -> None:
        self.server, self.returncode = server(), None
        nothing = os.open(os.devnull, os.O_RDONLY)
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        streams = [nothing if stdin is None else stdin, its_out if stdout is None else stdout]
        streams.append(its_err if stderr is None else stderr)
        argv = ["-c", *map(str, args)]
        request = [program, argv, env or dict(os.environ), str(Path.cwd()), new_session]
        socket.send_fds(self.server, [json.dumps(request).encode()], streams)
        for fd in (nothing, its_out, its_err):
            os.close(fd)
        self.pid = int(self.server.recv(LARGEST))

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()
        self.stdout.close()
        self.stderr.close()

    def send_signal(self, number: int) -> None:
        if not self.has_ended(0):
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60) -> int:
        """Its exit code, negative for a signal."""
        if self.returncode is None:
            if not self.has_ended(timeout_s):
                raise subprocess.TimeoutExpired("a forked program", timeout_s)
            self.returncode = int(self.server.recv(LARGEST))
        return self.returncode

    def has_ended(self, within_s: float) -> bool:
        return self.returncode is not None or bool(
            select.select([self.server], [], [], within_s)[0]
        )

    def communicate(self, timeout_s: float = 60) -> tuple[str, str]:
        """All that it still says, once it has ended."""
        with ThreadPoolExecutor() as pool:
            out, err = pool.submit(self.stdout.read), pool.submit(self.stderr.read)
            self.wait(timeout_s)
            return out.result(), err.result()


@functools.cache
def server() -> socket.socket:
    """The connection to the process that forks, of which this process has one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = [sys.executable, "-m", __name__, str(theirs.fileno())]
    process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# ---- in the process that forks


def serve(requests: socket.socket) -> str | None:
    """Fork for each request, say which process it is, and how it ended. Returns the program in
    the forked process, and None in the other at the end."""
    while True:
        raw, fds, _, _ = socket.recv_fds(requests, LARGEST, 3)
        if not raw:
            return None
        pid = os.fork()
        if not pid:
            requests.close()
            return adopt(fds, *json.loads(raw))
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def adopt(
    fds: list[int], program: str, argv: list[str], env: dict[str, str], cwd: str, session: bool
) -> str:
    """Make this process the one that was asked for."""
    for stream, fd in enumerate(fds):
        os.dup2(fd, stream)
        os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = argv
    if session:
        os.setsid()
    return program


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        commands = (module for module, _ in import_module("edgespec.cli.main").COMMANDS.values())
        sys.modules["onnxruntime"] = None  # type: ignore[assignment]
        for module in (*IMPORTED, *commands):
            with suppress(ImportError):  # a program imports for itself what needs ONNX Runtime
                import_module(module)
        del sys.modules["onnxruntime"]
        gc.freeze()  # else each of them would write on what it shares
        program = serve(opened)
    if program is not None:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
