"""A load: so many clients at once, each of which asks again as soon as it is answered.

Knows threads and conversations. Each turn of a conversation is a request of its own, behind the
answers to those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from edgespec.benchmark.serving.client import Answer, ChatClient, RequestFailed

Turns = Sequence[str]  # what the user says, in turn
POLL_S = 0.05


@dataclass
class Run:
    """The answers of one run by conversation and turn, and why others failed. Turns behind one that
    failed are not asked."""

    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """From the first request to the last piece of text."""
        times = [at for a in self.answers.values() for at in (a.started_s, *a.pieces_s[-1:])]
        return max(times, default=0.0) - min(times, default=0.0)


def run_load(
    client: ChatClient,
    conversations: Sequence[Turns],
    concurrency: int,
    body: Callable[[int], Mapping[str, Any]],
    stopping: Callable[[], bool],
    done: Callable[[], None] = lambda: None,
) -> Run:
    """All conversations, `concurrency` at a time. `body` gives what a request of a conversation
    says besides its messages, `done` is called behind each. Ends early once it is to stop."""
    run = Run()

    def converse(number: int) -> None:
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(conversations[number]):
            if stopping():
                return
            messages.append({"role": "user", "content": text})
            try:
                answer = client.ask({**body(number), "messages": messages})
            except RequestFailed as error:
                run.failures.append(str(error))
                break
            run.answers[number, turn] = answer
            messages.append({"role": "assistant", "content": answer.text})
        done()

    with ThreadPoolExecutor(concurrency) as clients:
        waiting: set[Future[None]] = {
            clients.submit(converse, number) for number in range(len(conversations))
        }
        while waiting:
            ended, waiting = wait(waiting, POLL_S)
            if stopping():
                client.abort()
            for one in ended:
                one.result()
    return run
