"""Signals while Python runs what drops exceptions: they still end the command."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from edgespec.cli.signals import Raising, Terminated

PATIENCE_S = 5.0


class Dying:
    """Sends this process a signal while it is collected, where Python drops what is raised."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        sum(range(10))  # the handler runs in here


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_for_signal_of(thing: Dying) -> None:
    with Raising():
        del thing
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "wanted"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_signal_in_a_callback_is_not_lost(number: int, wanted: type[BaseException]) -> None:
    with pytest.raises(wanted):
        wait_for_signal_of(Dying(number))


def test_nothing_comes_after_the_block() -> None:
    with Raising():
        thing = Dying(signal.SIGINT)
        del thing
    time.sleep(0.05)
