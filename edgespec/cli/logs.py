"""What `--verbose` shows: the log of the package on stderr, each record on a line of its own.

Knows logging. The records are those of the logger "edgespec" and of its children.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click

from edgespec.cli.terminal import ours

NAME = "edgespec"
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
TIME = "%H:%M:%S"


class StderrHandler(logging.Handler):
    """Writes records to the stderr of the moment, with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record; one that cannot be written is dropped, as logging does it."""
        try:
            click.echo(ours(self.format(record)), err=True)
        except (OSError, ValueError):
            self.handleError(record)


@contextmanager
def shown(level: int | None) -> Iterator[None]:
    """Within the block, records of at least this level are shown; None: the log is left alone."""
    if level is None:
        yield
        return
    logger, handler = logging.getLogger(NAME), StderrHandler()
    handler.setFormatter(logging.Formatter(FORMAT, TIME))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
