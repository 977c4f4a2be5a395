"""The picture of a draft vocabulary: the share of the text by the number of tokens.

Knows shares, and matplotlib, which is imported when it is drawn.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.benchmark.pictures import COLORS, check_installed, figure, save
from edgespec.benchmark.pictures import format_of as by_name


def format_of(path: Path) -> str:
    """The format of a picture by its name. Raises OptionError, and MissingDependency where none can
    be drawn."""
    check_installed()
    return by_name(path)


def draw_coverage(shares: NDArray[np.float64], size: int, path: Path) -> None:
    """The shares of the first 1, 2, ... V tokens, with the size that was chosen. Raises
    OutputError."""
    with figure(1) as (whole, (axis,)):
        axis.plot(np.arange(1, len(shares) + 1), shares, color=COLORS[0])
        label = f"{size} tokens: {shares[size - 1]:.2%}"
        axis.plot([size], [shares[size - 1]], "o", color=COLORS[1], label=label)
        axis.set_xscale("log")
        axis.set_xlabel("tokens of the draft")
        axis.set_ylabel("share of the answers")
        axis.set_ylim(0, 1.02)
        axis.legend()
        save(whole, path, format_of(path))
