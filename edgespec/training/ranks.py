"""Several processes that train one draft: who they are, what they agree on, and which has died.

torchrun starts them, and says by the environment who each is. Knows torch.distributed, and no
drafts. A process says each second through the common store that it lives. One that has said
nothing for a while has died, also where it only hangs: then the others end and name it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from edgespec.errors import EdgeSpecError, EnvironmentProblem

T = TypeVar("T")
C10D: Any = dist  # whose types do not say that it has stores
BEAT_S, SOON_S, GRACE_S = 1.0, 10.0, 3.0
SILENT_S = 45.0  # and a process has died
START_S = 60.0  # for all to be there
LONGEST = timedelta(days=1)  # of waiting for others that live: one may hash a base
AGAIN = "Its own output says why. The same command goes on from the last checkpoint."


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `world` processes; `local` counts those of this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and speaks."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """A value of each."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def most(self, *values: float) -> list[float]:
        """The largest of each value over all."""
        if self.world == 1:
            return [*values]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def mean(self, counts: torch.Tensor) -> torch.Tensor:
        """The mean of counts over all, in their type: what a loss is divided by, so that gradients
        are those of one process with the whole batch."""
        if self.world == 1:
            return counts
        total = counts.detach().to("cpu", torch.float64)
        dist.all_reduce(total)
        return (total / self.world).to(counts.device, counts.dtype)

    def agreed(self, call: Callable[[], T]) -> T:
        """What a call returns here, once it has returned in all; its error in all where one has
        one."""
        error: EdgeSpecError | None = None
        result: Any = None
        try:
            result = call()
        except EdgeSpecError as caught:
            if self.world == 1:
                raise
            error = caught
        for rank, theirs in enumerate(self.gathered(error)):
            if theirs is not None:
                where = f"process {rank} of {self.world}: " if rank else ""
                raise self.raised(type(theirs)(where + theirs.what, theirs.remedy, theirs.param))
        return result  # type: ignore[no-any-return]

    def raised(self, error: EdgeSpecError) -> BaseException:
        """An error that all have, as each raises it: one of them says it."""
        return error if self.first else SystemExit(error.exit_code)


ALONE = Ranks()


@contextmanager
def joined(silent_s: float = SILENT_S) -> Iterator[Ranks]:
    """This process among those that torchrun started; alone where it did not.

    Raises EnvironmentProblem where they do not find each other, and that names one which has died.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    ranks, store = meet()
    watch = Watch(ranks, store, silent_s)
    watch.start()
    reason = "ended"
    try:
        yield ranks
        ranks.gathered(None)  # the store stands in one of them
        dist.destroy_process_group()
    except BaseException as error:
        reason = error.what if isinstance(error, EdgeSpecError) else repr(error)
        if isinstance(error, RuntimeError) and (dead := watch.soon_dead()):  # a collective's
            raise dead from error
        raise
    finally:
        watch.leave(reason)


def meet() -> tuple[Ranks, Any]:
    """The group of processes, and a connection of its own to their store."""
    try:
        rank, world, local, port = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        address = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise EnvironmentProblem(
            f"WORLD_SIZE is set, and of what torchrun sets beside it {error} is not.",
            "Start several processes with torchrun.",
        ) from error
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    run = f"run{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    start = timedelta(seconds=START_S)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local)
    try:
        store = C10D.TCPStore(address, port, world, hosts, start)
        group = C10D.PrefixStore(f"{run}/group", store)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=LONGEST)
        own = C10D.TCPStore(address, port, world, False, start)  # the other's calls may block
    except dist.DistError as error:
        raise EnvironmentProblem(
            f"process {rank} of {world} does not reach the others at {address}:{port} within"
            f" {START_S:.0f} s: {str(error).partition(chr(10))[0]}",
            "Start all of them, and open the port.",
        ) from error
    return Ranks(rank, world, local), C10D.PrefixStore(f"{run}/alive", own)


class Watch(threading.Thread):
    """Says that this process lives, and ends it where another no longer does."""

    def __init__(self, ranks: Ranks, store: Any, silent_s: float) -> None:
        super().__init__(name="ranks", daemon=True)
        self.ranks, self.store, self.silent_s = ranks, store, silent_s
        self.names = [str(rank) for rank in range(ranks.world)]
        self.over, self.beats = threading.Event(), 0
        here = f"process {os.getpid()} of {socket.gethostname()}"
        self.store.set(f"who{ranks.rank}", here)
        self.beat()
        self.who = ranks.gathered(here)
        self.seen = {rank: (b"", time.monotonic()) for rank in range(ranks.world)}

    def beat(self) -> None:
        """Says that it lives."""
        self.beats += 1
        self.store.set(self.names[self.ranks.rank], f"beat {self.beats}")

    def run(self) -> None:
        """Until the process leaves."""
        while not self.over.wait(BEAT_S):
            dead = self.dead(self.silent_s)
            if dead is not None and not self.over.wait(GRACE_S):  # it may say so itself
                with_remedy = f"error: {dead.what}\n{dead.remedy}\n"
                sys.stderr.write(with_remedy)
                sys.stderr.flush()
                os._exit(dead.exit_code)

    def dead(self, silent_s: float) -> EnvironmentProblem | None:
        """The first process that failed, or has been silent for so long."""
        now = time.monotonic()
        try:
            self.beat()
            said = self.store.multi_get(self.names)
        except (RuntimeError, OSError):
            return self.problem(0, "is gone, and the store with it")
        for rank, word in enumerate(said):
            if word != self.seen[rank][0]:
                self.seen[rank] = word, now
            if word.startswith(b"failed"):
                return self.problem(rank, word.decode(errors="replace"))
            if word.startswith(b"beat") and now - self.seen[rank][1] > silent_s:
                return self.problem(rank, f"gave no sign of life for {silent_s:.0f} s")
        return None

    def problem(self, rank: int, what: str) -> EnvironmentProblem:
        """One process has died."""
        named = f"rank {rank} of {self.ranks.world} ({self.who[rank]})"
        return EnvironmentProblem(f"{named} {what}.", AGAIN)

    def soon_dead(self) -> EnvironmentProblem | None:
        """The process for which a collective may have failed: it has a few seconds to live."""
        self.over.set()
        end = time.monotonic() + 2 * SOON_S
        while time.monotonic() < end:
            if (dead := self.dead(SOON_S)) is not None:
                return dead
            time.sleep(BEAT_S / 2)
        return None

    def leave(self, reason: str) -> None:
        """Says that this process ends, and how."""
        self.over.set()
        word = reason if reason == "ended" else f"failed: {reason[:300]}"
        try:
            self.store.set(self.names[self.ranks.rank], word)
        except (RuntimeError, OSError):
            return  # nobody is left to read it
