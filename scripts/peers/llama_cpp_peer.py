"""llama.cpp: Q4_0 (blocks of 32), plain, and with an EAGLE-3 draft at synthetic acceptance.

    python llama_cpp_peer.py SERVER MODEL.gguf [--draft DRAFT.gguf --spec-rate 0.7 --chain 3]
    python llama_cpp_peer.py llama_cpp_pass MODEL.gguf --rows 4 8 16

Measures llama-server, the program of llama.cpp that knows synthetic acceptance, as a child process:
prompts go in as ids, tokens come back one event each. The source is that of llama-cpp-python's
source distribution, built for the machine at hand. With --spec-rate drafts are chains, and each token
is right with that probability: the draft runs, and its answer is replaced. With --rows the program is
llama_cpp_pass.cpp instead, which has no server around the library, and verifies so many rows at once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from environment import HERE, Place, Prepared, run
from measuring import Event, Moment, Stream, arguments, measure, memory_of, moment_of, report

RELEASE, COMMIT = "llama-cpp-python==0.3.36", "0c1e57098"  # and of llama.cpp in it
GGUF = ("gguf==0.19.0", "numpy==2.4.6", "ml_dtypes==0.6.0")
SWITCHES = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
PASS = "llama_cpp_pass"
LIBRARIES = ("src/libllama.a", *(f"ggml/src/libggml{part}.a" for part in ("", "-cpu", "-base")))
CAPACITY = 2304
SECONDS_TO_LOAD, SECONDS_TO_ANSWER, SECONDS_OF_HEALTH = 600, 1800, 5


def prepare(place: Place, rate: float | None = None, chain: int = 0) -> Prepared:
    """Builds and converts once."""
    server, model = server_of(place), place.models / "q4_0.gguf"
    if not model.is_file():
        write_gguf(place, [str(place.models / "base"), str(model)])
    command = [sys.executable, str(Path(__file__).resolve()), str(server), str(model)]
    if rate is None:
        return Prepared(command, [model], (model,))
    draft = place.models / "draft.gguf"
    if not draft.is_file():
        base = str(place.models / "base")
        write_gguf(place, [str(place.models / "draft"), str(draft), "--base", base])
    drafts = ["--draft", str(draft), "--spec-rate", str(rate), "--chain", str(chain)]
    return Prepared([*command, *drafts], [model, draft])


def source_of(place: Place) -> Path:
    """Returns llama.cpp's source tree; downloads it once."""
    if "llama.cpp-source" in place.given:
        return place.given["llama.cpp-source"]
    room = place.work / "environments" / "llama.cpp-source"
    if not room.is_dir():
        part = room.with_name(room.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        flags = ["--no-binary", ":all:", "--no-deps", "-d", str(part)]
        run([sys.executable, "-m", "pip", "download", "-q", *flags, RELEASE])
        with tarfile.open(next(part.glob("*.tar.gz"))) as archive:
            archive.extractall(part, filter="data")
        part.rename(room)
    return next(room.glob("llama_cpp_python-*")) / "vendor" / "llama.cpp"


def prepare_file(place: Place, file: Path) -> Prepared:
    """Builds llama_cpp_pass once; the file is opened as it is."""
    command = [sys.executable, str(Path(__file__).resolve()), str(pass_of(place)), str(file)]
    return Prepared(command, [file])


def build_of(place: Place, target: str) -> Path:
    """Returns llama.cpp's build with a target; builds it once, which takes many minutes."""
    build = place.given.get("llama.cpp", place.work / "environments" / "llama.cpp")
    if not (build / "bin" / target).is_file() and not (build / "src" / f"lib{target}.a").is_file():
        run(["cmake", "-S", source_of(place), "-B", build, *SWITCHES])
        jobs = str(os.cpu_count() or 1)
        run(["cmake", "--build", build, "--target", target, "--parallel", jobs])
    return build


def server_of(place: Place) -> Path:
    """Returns llama-server."""
    return build_of(place, "llama-server") / "bin" / "llama-server"


def pass_of(place: Place) -> Path:
    """Returns llama_cpp_pass, compiled once."""
    build, source = build_of(place, "llama"), source_of(place)
    program = place.work / "environments" / PASS
    if not program.is_file():
        program.parent.mkdir(parents=True, exist_ok=True)
        files = [HERE / f"{PASS}.cpp", *(build / library for library in LIBRARIES)]
        includes = [f"-I{source / folder}" for folder in ("include", "ggml/include")]
        run(["c++", "-O2", "-fopenmp", *includes, *files, "-o", program])
    return program


def write_gguf(place: Place, words: list[str]) -> None:
    """Runs gguf_file.py where `gguf` is."""
    run([place.python("gguf", *GGUF), HERE / "gguf_file.py", *words])


def speculation(draft: Path, rate: float, chain: int) -> list[str]:
    """Returns the flags of a chain; its rates are unconditional, one for each position."""
    rates = ",".join(f"{rate ** (i + 1):.6f}" for i in range(chain))
    kind = ["--spec-type", "draft-eagle3", "--spec-draft-model", str(draft)]
    bounds = ["--spec-draft-n-max", str(chain), "--spec-draft-n-min", "0"]
    bounds += ["--spec-draft-p-min", "0"]
    return [*kind, *bounds, "--spec-synth-rates", rates]


def free_port() -> int:
    """Returns a port of this machine that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def request(
    port: int, method: str, path: str, seconds: int, body: Any = None
) -> Iterator[http.client.HTTPResponse]:
    """Sends one request to the server and gives its response, whose body is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    with closing(connection):
        kind = {"Content-Type": "application/json"}
        connection.request(method, path, body and json.dumps(body), kind)
        yield connection.getresponse()


def wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Returns as soon as the server has loaded its model."""
    ends = time.monotonic() + SECONDS_TO_LOAD
    while time.monotonic() < ends:
        if server.poll() is not None:
            raise SystemExit(f"llama-server ended with exit status {server.returncode}.")
        try:
            with request(port, "GET", "/health", SECONDS_OF_HEALTH) as response:
                if response.status == 200:
                    return
        except (ConnectionError, TimeoutError):
            pass  # it does not listen yet, or is too busy with loading to answer
        time.sleep(0.01)
    raise SystemExit(f"llama-server was not ready after {SECONDS_TO_LOAD} s.")


def events_of(lines: Iterator[bytes]) -> Iterator[Event]:
    """Yields the tokens of each event of a streamed completion, and at its end the passes that made
    them: all tokens but the first, less the accepted drafts. Raises on an error event."""
    for line in lines:
        if line.startswith(b"error:"):
            raise SystemExit(f"llama-server: {line.decode().strip()}")
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(f"llama-server: {event['error']}")
            if event.get("tokens"):
                yield len(event["tokens"]), 0
            if event.get("stop"):
                times = event["timings"]
                yield 0, times["predicted_n"] - 1 - times.get("draft_n_accepted", 0)


def version_of(server: Path) -> str:
    """Returns llama.cpp's version and commit; a build without git knows the version alone."""
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (\S+) \(build \d+, commit (\w+)\)", done.stdout + done.stderr)
    if not found:
        raise SystemExit(f"llama-server says another version than it did: {done.stdout}")
    commit = COMMIT if found[2] == "unknown" else found[2]
    return f"{found[1]} (commit {commit})"


@contextmanager
def running(server: subprocess.Popen[bytes], port: int) -> Iterator[Stream]:
    """Waits for a started server; a stream asks it for greedy tokens."""

    def stream(prompt: list[int], tokens: int) -> Iterator[Event]:
        body = {
            "prompt": prompt,
            "n_predict": tokens,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
            "ignore_eos": True,
            "samplers": ["top_k"],
            "top_k": 1,
        }
        with request(port, "POST", "/completion", SECONDS_TO_ANSWER, body) as response:
            yield from events_of(iter(response.readline, b""))

    wait_for(server, port)
    yield stream


def start_pass(program: Path, model: Path, threads: int) -> subprocess.Popen[str]:
    """Starts llama_cpp_pass, which says a line as soon as the model is loaded."""
    command = [str(program), str(model), str(threads), str(CAPACITY)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe)


def ask(
    program: subprocess.Popen[str], kept: int, rows: int, ids: list[int], file: str = "-"
) -> int:
    """Returns the most likely token after the first of the last `rows` of some ids behind `kept`
    ones; their logits go into a file."""
    assert program.stdin
    assert program.stdout
    program.stdin.write(f"{kept} {rows} {file} {' '.join(map(str, ids))}\n")
    program.stdin.flush()
    return int(program.stdout.readline())


@contextmanager
def passing(program: subprocess.Popen[str]) -> Iterator[Stream]:
    """Waits for a started llama_cpp_pass; a stream asks it for passes."""

    def stream(prompt: list[int], tokens: int, rows: int = 1) -> Iterator[Event]:
        token = ask(program, 0, 1, prompt)
        yield 1, 1
        for kept in range(len(prompt), len(prompt) + tokens - 1):
            token = ask(program, kept, rows, [token, *prompt[: rows - 1]])
            yield 1, 1

    assert program.stdout
    program.stdout.readline()
    yield stream


def measure_passes(args: argparse.Namespace) -> None:
    """Prints one measurement of llama_cpp_pass."""
    birth = Moment(time.perf_counter(), 0.0)
    with start_pass(args.server, args.model, args.threads) as program:
        now, memory = partial(moment_of, program.pid), partial(memory_of, program.pid)
        opened = partial(passing, program)
        found = measure(opened, args.contexts, args.tokens, birth, now, memory, args.rows)
        assert program.stdin
        program.stdin.close()
    report(found, **{"llama.cpp": f"commit {COMMIT}"})


def main() -> None:
    """Prints one measurement."""
    parser = arguments(__doc__)
    parser.add_argument("server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--spec-rate", type=float)
    parser.add_argument("--chain", type=int, default=3)
    args = parser.parse_args()
    if args.server.name == PASS:
        return measure_passes(args)
    port, threads = free_port(), str(args.threads)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--model", str(args.model), "--offline"]
    flags += ["--threads", threads, "--threads-batch", threads, "--parallel", "1", "--no-warmup"]
    flags += ["--ctx-size", str(CAPACITY), "--flash-attn", "on", "--cache-ram", "0", "--no-ui"]
    if args.draft:
        flags += [
            *speculation(args.draft, args.spec_rate, args.chain),
            "--spec-draft-threads",
            threads,
        ]
    version, birth = version_of(args.server), Moment(time.perf_counter(), 0.0)
    with subprocess.Popen([args.server, *flags], stdout=sys.stderr) as server:
        now, memory = partial(moment_of, server.pid), partial(memory_of, server.pid)
        try:
            opened = partial(running, server, port)
            found = measure(opened, args.contexts, args.tokens, birth, now, memory)
        finally:
            server.terminate()
    report(found, **{"llama.cpp": version})


if __name__ == "__main__":
    main()
