"""One measurement of one engine: load, start, prefill and decode, in wall and processor time.

Knows clocks, memory and the form of the result; knows no engine. It needs the standard library
alone, because it is imported by the Python of every peer's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# (tokens that came, passes of the base that made them); the first event ends the prefill
Event = tuple[int, int]
# (prompt, number of tokens) to events; of a peer that is asked for `--rows` also how many rows a pass
# has, all but the first of them wrong drafts. What is done before the iterator is returned is not
# measured
Stream = Callable[..., Iterator[Event]]
WARM_UP = 8  # tokens of the first prompt, whose answer ends the start of an engine
TICKS = os.sysconf("SC_CLK_TCK")
SCHEDULER = (
    2  # of the clocks of a process (clock_getcpuclockid): its processor time, in nanoseconds
)
MEMORY = {"Pss": "pss_mb", "Anonymous": "anonymous_mb"}


@dataclass(frozen=True)
class Moment:
    """A point in time: seconds of the wall clock, and of processor time of all threads."""

    wall: float
    cpu: float

    def since(self, earlier: Moment) -> dict[str, float]:
        """Returns the seconds that passed, by clock."""
        return {
            "wall_s": round(self.wall - earlier.wall, 4),
            "cpu_s": round(self.cpu - earlier.cpu, 4),
        }


def own_moment() -> Moment:
    """Returns now, with the processor time of this process."""
    return Moment(time.perf_counter(), time.process_time())


def own_birth() -> Moment:
    """Returns when this process began, before it imported anything."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = float(Path("/proc/uptime").read_text().split()[0]) - int(fields[19]) / TICKS
    return Moment(time.perf_counter() - age, 0.0)


def moment_of(pid: int) -> Moment:
    """Returns now, with the processor time of another process, threads that ended included."""
    return Moment(time.perf_counter(), time.clock_gettime(~pid << 3 | SCHEDULER))


def memory_of(pid: int | str = "self") -> dict[str, float]:
    """Returns a process's memory in MB: the most that was resident, which is its own count and not
    its parent's, and as of now its proportional share and what is no page of a file."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {"rss_mb": kilobytes(status, "VmHWM")}
    now = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return found | {name: kilobytes(now, key) for key, name in MEMORY.items()}


def kilobytes(text: str, key: str) -> float:
    """Returns the MB of a line `key: N kB` of a file of /proc."""
    line = next(line for line in text.splitlines() if line.startswith(f"{key}:"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


def prompt_of(length: int) -> list[int]:
    """Returns ids of a prompt for the byte-level tokenizer, the same for all engines."""
    state, ids = 1, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(state // 65536 % 256)
    return ids


def passage(
    stream: Stream, context: int, tokens: int, now: Callable[[], Moment]
) -> dict[str, dict[str, float]]:
    """Returns seconds, tokens and steps of the prefill of `context` tokens and of the decode after
    it."""
    events = stream(prompt_of(context), tokens)
    began, ended, came = now(), [], []
    for event in events:
        ended.append(now())
        came.append(event)
    made, steps = (sum(column) for column in zip(*came[1:], strict=True))
    if came[0][0] + made < tokens:
        raise SystemExit(f"{came[0][0] + made} of {tokens} tokens came behind {context} tokens.")
    return {
        "prefill": ended[0].since(began) | {"tokens": context},
        "decode": ended[-1].since(ended[0]) | {"tokens": made, "steps": steps},
    }


def measure(
    opened: Callable[[], AbstractContextManager[Stream]],
    contexts: list[int],
    tokens: int,
    birth: Moment,
    now: Callable[[], Moment] = own_moment,
    memory: Callable[[], dict[str, float]] = memory_of,
    rows: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns one measurement: `load` until the engine is open, `start` from the birth of its
    process until it has answered a short prompt, prefill and decode for each context, the decode
    behind the first context by passes of so many rows, and the most memory. Libraries are imported
    before, so `start` has them and `load` has not.
    """
    began, found, verify, held = now(), {}, {}, []
    with opened() as stream:
        load = now().since(began)
        for _ in stream(prompt_of(WARM_UP), 2):
            pass
        start = now().since(birth)
        for context in contexts:
            found[str(context)] = passage(stream, context, tokens, now)
            held.append(memory())
        for count in rows:
            passes = partial(stream, rows=count)
            verify[str(count)] = passage(passes, contexts[0], tokens, now)["decode"]
            held.append(memory())
    most = {key: max(each[key] for each in held) for key in held[0]}
    return {"load": load, "start": start, "contexts": found, "verify": verify, "memory": most}


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of what every measurement is given: files come from the peer's row."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048])
    parser.add_argument("--tokens", type=int, default=32, help="tokens after each prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="of passes that verify")
    return parser


def report(found: dict[str, Any], **versions: str) -> None:
    """Prints a measurement and the versions of what was measured as one line of JSON."""
    print(json.dumps(found | {"versions": {"python": platform.python_version()} | versions}))
