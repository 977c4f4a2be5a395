"""What `pairing` asks of a drafting method: the columns of PAIRINGS. Knows no method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.pairing.check_result import CheckResult, Share
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import Reading, pass_aux_layers, shifted_readings

if TYPE_CHECKING:
    from edgespec.graphs.decoder import Decoder
    from edgespec.pairing.forcing import Forced
    from edgespec.pairing.probe_text import ProbeText

Check = Callable[[Pair], Iterator[CheckResult]]
Force = Callable[[Pair, "Decoder", "ProbeText"], "Forced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingRow:
    """`checks` are the topics in the order of the report.

    `force` is the draft under teacher forcing over a text. `readings` are the ways in which
    it is asked, the stated one first; `remedy` is how to have another one. `reads_final`: it reads
    the base's state after the last norm. `image_rows`: its drafter can be given rows of images.
    """

    checks: tuple[tuple[str, Check], ...]
    force: Force
    readings: Callable[[Pair], tuple[Reading, ...]] = shifted_readings
    remedy: Callable[[Share], str] = pass_aux_layers
    reads_final: bool = False
    image_rows: bool = False
