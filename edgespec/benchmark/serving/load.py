"""A load: so many clients at once, each of which asks again as soon as it is answered.

Knows threads and conversations. Each turn of a conversation is a request of its own, behind the
answers to those before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from edgespec.benchmark.serving.client import Answer, ChatClient, RequestFailed

Turns = Sequence[str]  # what the user says, in turn
POLL_S = 0.05


@dataclass
class Run:
    """The answers of one run by conversation and turn, or why there is none. Turns behind one that
    failed are not asked."""

    answers: dict[tuple[int, int], Answer | str] = field(default_factory=dict)

    @property
    def answered(self) -> list[Answer]:
        """Those that were answered."""
        return [one for one in self.answers.values() if isinstance(one, Answer)]

    @property
    def failures(self) -> list[str]:
        """Why the others were not."""
        return [one for one in self.answers.values() if isinstance(one, str)]

    @property
    def duration_s(self) -> float:
        """From the first request to the last piece of text."""
        times = [at for a in self.answered for at in (a.started_s, *a.pieces_s[-1:])]
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
    says besides its messages, `done` is called after each. Ends early once it is to stop."""
    waiting: SimpleQueue[tuple[int, Turns]] = SimpleQueue()
    for numbered in enumerate(conversations):
        waiting.put(numbered)
    run = Run()

    def work() -> None:
        while not stopping():
            try:
                number, turns = waiting.get_nowait()
            except Empty:
                return
            converse(number, turns)

    def converse(number: int, turns: Turns) -> None:
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(turns):
            if stopping():
                return
            messages.append({"role": "user", "content": text})
            try:
                answer: Answer | str = client.ask({**body(number), "messages": messages})
            except RequestFailed as error:
                answer = str(error)
            run.answers[number, turn] = answer
            done()
            if isinstance(answer, str):
                return
            messages.append({"role": "assistant", "content": answer.text})

    clients = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for one in clients:
        one.start()
    for one in clients:
        while one.is_alive():
            one.join(POLL_S)
            if stopping():
                client.abort()
    return run


def conversations_of(
    prompts: Sequence[Turns], start: int, requests: int, clients: int
) -> list[Turns]:
    """Conversations from the one at `start` on, from the beginning again behind the last one, that
    have so many requests together. They are cut to as many turns as leave one for each client."""
    taken, left, most = list[Turns](), requests, requests // clients
    while left > 0:
        turns = prompts[(start + len(taken)) % len(prompts)][: min(most, left)]
        taken.append(turns)
        left -= len(turns)
    return taken
