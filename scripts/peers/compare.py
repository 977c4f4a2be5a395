"""Compares edgespec with other engines on the same random weights: plain, with EAGLE-3 and DFlash.

    python scripts/peers/compare.py --work DIR                       # every peer, 5 runs, one thread
    python scripts/peers/compare.py --work DIR --only edgespec-32 llama.cpp --threads 2 --runs 9
    python scripts/peers/compare.py --work DIR --json docs/performance.json --page docs/performance.md
    python scripts/peers/compare.py --work DIR --gguf FILE.gguf [FILE.gguf ...]    # edgespec and llama.cpp

Makes what is missing on the way: the checkpoint (scripts/benchmark.py), an environment or a build
for each peer with pinned versions (DIR/environments), and each peer's own form of the weights
(DIR/SHAPE). That takes network, a C++ compiler with CMake for llama.cpp, 12 GB of disk, and most of
an hour the first time; --prepare stops there. --environment NAME=PATH takes what is there already:
a Python of `onnxruntime-genai`, `openvino-genai`, `transformers` or `gguf`, llama.cpp's tree
(`llama.cpp-source`), or its build (`llama.cpp`). Which index pip takes torch from is said to pip.
With --gguf each file is opened by both engines as it is, with a float16 cache; --rows are passes that
verify so many tokens at once. edgespec is measured with its whole loop, llama.cpp without its server.

Every run is a process of its own, bound to as many cores as it has threads. Engines take turns, and
every second round goes backwards. Prints one JSON object: every run, medians, ratios run by run,
the machine, versions and commands. --json keeps it in a file, by shape; --page writes its tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import edgespec_peer
import genai_peer
import llama_cpp_peer
import openvino_peer
import transformers_peer
from environment import Place, Prepared, size_mb
from shapes import BLOCK, SIZES, position_numbers, write_checkpoints
from table import Runs, summary, write_page

RATE, CHAIN = 0.7, 3
BANDWIDTH = Path(__file__).with_name("bandwidth.py")


@dataclass(frozen=True)
class Row:
    """One engine: what the table calls it, and what makes its command and its files."""

    label: str
    prepare: Callable[[Place], Prepared]
    # The row of edgespec with equal blocks and an equal cache, to which its ratios are
    beside: str
    # Bytes of a number in the cache
    cache_bytes: int = 4
    # Of a row with drafts: the plain row of the same weights, and how many are drafted a step
    plain: str | None = None
    chain: int = 0


PEERS = {
    "edgespec-32-fp16": Row(
        "edgespec int4/32, cache float16",
        partial(edgespec_peer.prepare, block=32, cache="fp16"),
        "edgespec-32-fp16",
        2,
    ),
    "llama.cpp": Row(
        "llama.cpp Q4_0, cache float16", llama_cpp_peer.prepare, "edgespec-32-fp16", 2
    ),
    "edgespec-32": Row(
        "edgespec int4/32, cache float32",
        partial(edgespec_peer.prepare, block=32, cache="fp32"),
        "edgespec-32-fp16",
    ),
    "edgespec-128-int8": Row(
        "edgespec int4/128, cache INT8",
        partial(edgespec_peer.prepare, block=128, cache="int8"),
        "edgespec-128-int8",
        1,
    ),
    "openvino-genai": Row(
        "OpenVINO GenAI int4/128, cache INT8", openvino_peer.prepare, "edgespec-128-int8", 1
    ),
    "edgespec-128": Row(
        "edgespec int4/128, cache float32",
        partial(edgespec_peer.prepare, block=128, cache="fp32"),
        "edgespec-128",
    ),
    "onnxruntime-genai": Row(
        "onnxruntime-genai int4/128, cache float32", genai_peer.prepare, "edgespec-128"
    ),
    "transformers": Row(
        "transformers bfloat16, cache bfloat16", transformers_peer.prepare, "edgespec-128", 2
    ),
    "edgespec-32-eagle3": Row(
        "edgespec int4/32, cache float16: EAGLE-3",
        partial(edgespec_peer.prepare, block=32, cache="fp16", rate=RATE, chain=CHAIN),
        "edgespec-32-eagle3",
        plain="edgespec-32-fp16",
        chain=CHAIN,
    ),
    "llama.cpp-eagle3": Row(
        "llama.cpp Q4_0, cache float16: EAGLE-3",
        partial(llama_cpp_peer.prepare, rate=RATE, chain=CHAIN),
        "edgespec-32-eagle3",
        plain="llama.cpp",
        chain=CHAIN,
    ),
    "edgespec-128-eagle3": Row(
        "edgespec int4/128, cache INT8: EAGLE-3",
        partial(edgespec_peer.prepare, block=128, cache="int8", rate=RATE, chain=CHAIN),
        "edgespec-128-eagle3",
        plain="edgespec-128-int8",
        chain=CHAIN,
    ),
    "openvino-genai-eagle3": Row(
        "OpenVINO GenAI int4/128, cache INT8: EAGLE-3",
        partial(openvino_peer.prepare, draft="eagle3", chain=CHAIN),
        "edgespec-128-eagle3",
        plain="openvino-genai",
        chain=CHAIN,
    ),
    "edgespec-128-dflash": Row(
        "edgespec int4/128, cache INT8: DFlash",
        partial(
            edgespec_peer.prepare,
            block=128,
            cache="int8",
            draft="dflash",
            rate=RATE,
            chain=BLOCK - 1,
        ),
        "edgespec-128-dflash",
        plain="edgespec-128-int8",
        chain=BLOCK - 1,
    ),
    "openvino-genai-dflash": Row(
        "OpenVINO GenAI int4/128, cache INT8: DFlash",
        partial(openvino_peer.prepare, draft="dflash", chain=BLOCK - 1),
        "edgespec-128-dflash",
        plain="openvino-genai",
        chain=BLOCK - 1,
    ),
}


def rows_of(files: Sequence[Path]) -> dict[str, Row]:
    """Returns the rows of GGUF files: both engines of each."""
    found = {}
    for file in files:
        ours = f"edgespec {file.stem}"
        found[ours] = Row(
            f"{file.stem}: edgespec", partial(edgespec_peer.prepare_file, file=file), ours, 2
        )
        prepare = partial(llama_cpp_peer.prepare_file, file=file)
        found[f"llama.cpp {file.stem}"] = Row(f"{file.stem}: llama.cpp", prepare, ours, 2)
    return found


def turns(names: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """Yields (round, engine): each engine once a round, and every second round backwards, so that
    a machine that grows slower or faster favors none."""
    for turn in range(runs):
        yield from ((turn, name) for name in (names if turn % 2 == 0 else reversed(names)))


def bound(command: list[str], threads: int) -> str:
    """Runs a command on the first `threads` cores and returns what it printed."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    if len(cores) < threads:
        raise SystemExit(f"--threads {threads}: this process may use {len(cores)} cores.")
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} failed with exit status {done.returncode}.")
    return done.stdout


def parsed(output: str) -> dict[str, Any]:
    """Returns the measurement in what a process printed: its last line; engines print as well."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1])
        missing = {"load", "start", "contexts", "memory", "versions"} - found.keys()
    except (IndexError, ValueError, AttributeError):
        missing = {"a JSON object"}
    if missing:
        raise SystemExit(f"No measurement on the last line of this output:\n{output}")
    return dict(found)


def cpu_name() -> str:
    """Returns what the machine calls its CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def environments(words: list[str]) -> dict[str, Path]:
    """Returns the paths of NAME=PATH words."""
    found = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not Path(path).exists():
            raise SystemExit(f"--environment {word}: give NAME=PATH with a path that exists.")
        found[name] = Path(path).absolute()
    return found


def arguments() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shape", choices=SIZES, default="0.6B")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="instead of a shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16], help="with --gguf")
    parser.add_argument("--name", default="GGUF", help="with --gguf: the key in --json")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--tokens", type=int, default=48, help="tokens after each prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--environment", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--prepare", action="store_true", help="make what is missing, and stop")
    parser.add_argument("--json", type=Path, help="keep the object in this file, by shape")
    parser.add_argument("--page", type=Path, help="write the tables of --json into this page")
    args = parser.parse_args()
    if args.page and not args.json:
        parser.error("--page needs --json: a page shows what is in that file")
    return args


def command_of(args: argparse.Namespace) -> str:
    """Returns the command line of this comparison, without paths of this machine."""
    parts = ["python scripts/peers/compare.py --work DIR"]
    if args.gguf:
        parts.append(f"--gguf {' '.join(file.name for file in args.gguf)}")
        parts.append(f"--rows {' '.join(map(str, args.rows))}")
    else:
        parts.append(f"--shape {args.shape}")
        parts += [f"--only {' '.join(args.only)}"] if args.only != list(PEERS) else []
    parts += [f"--contexts {' '.join(map(str, args.contexts))}", f"--tokens {args.tokens}"]
    return " ".join([*parts, f"--threads {args.threads}", f"--runs {args.runs}"])


def compare(
    args: argparse.Namespace, peers: dict[str, Row], prepared: dict[str, Prepared]
) -> dict[str, Any]:
    """Measures in alternation and returns the object that is printed."""
    flags = ["--threads", str(args.threads), "--tokens", str(args.tokens)]
    flags += ["--contexts", *map(str, args.contexts)]
    flags += ["--rows", *map(str, args.rows)] if args.gguf else []
    runs: Runs = {name: [] for name in peers}
    read_speed: list[float] = []
    load = [os.getloadavg()[0]]
    for turn, name in turns(list(peers), args.runs):
        if len(read_speed) == turn:
            read_speed.append(float(json.loads(bound([sys.executable, str(BANDWIDTH)], 1))))
        print(f"round {turn + 1} of {args.runs}: {name}", file=sys.stderr, flush=True)
        runs[name].append(parsed(bound([*prepared[name].command, *flags], args.threads)))
        load.append(os.getloadavg()[0])
    versions = {k: v for found in runs.values() for k, v in found[0].pop("versions").items()}
    for found in runs.values():
        for run in found[1:]:
            del run["versions"]
    rows = {}
    for name, peer in peers.items():
        row, files = asdict(peer), prepared[name]
        del row["prepare"]
        row["disk_mb"] = round(sum(map(size_mb, files.files)), 1)
        row["read_mb"] = round(sum(map(size_mb, files.read)), 1) if files.read else None
        row["divergence"] = files.divergence
        rows[name] = row
    return {
        "shape": args.name if args.gguf else args.shape,
        "contexts": args.contexts,
        "tokens": args.tokens,
        "threads": args.threads,
        "runs_each": args.runs,
        "rate": RATE,
        "position_numbers": 0 if args.gguf else position_numbers(args.shape),
        "machine": {
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "load": [round(min(load), 1), round(max(load), 1)],
            "system": platform.system() + " " + platform.release(),
            "read_gb_s": read_speed,
        },
        "versions": versions,
        "command": command_of(args),
        "rows": rows,
        "runs": runs,
    }


def main() -> None:
    """Prepares, measures, and prints one JSON object."""
    args = arguments()
    place = Place(args.work.absolute(), args.shape, environments(args.environment))
    if not args.gguf:
        write_checkpoints(place.models, place.shape)
    peers = rows_of(args.gguf) if args.gguf else {name: PEERS[name] for name in args.only}
    prepared = {name: peer.prepare(place) for name, peer in peers.items()}
    if args.prepare:
        return
    result = compare(args, peers, prepared)
    result["summary"] = summary(result)
    if args.json:
        kept = json.loads(args.json.read_text()) if args.json.is_file() else {}
        args.json.write_text(json.dumps(kept | {result["shape"]: result}, indent=1) + "\n")
    if args.page:
        write_page(args.json, args.page)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
