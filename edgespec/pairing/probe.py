"""How often a draft says what its base says, on a little text, without engines.

Teacher-forced: at each position the draft is given the base's true features and the token that
follows, and its first token is compared with the base's own next one. What engines would never
notice, since the output stays the same, shows here: the features are given in the other ways, too,
in which they could have been meant, and the draft is asked which it knows. What a draft is given
stands in `forcing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.names import EMBEDDING
from edgespec.errors import CheckpointError, RequestError
from edgespec.export.sidecars import copy_tokenizer
from edgespec.export.stepwise import Passed, causal_feeds, run_stepwise
from edgespec.graphs.decoder import Decoder
from edgespec.methods.aux_layers import resolve_aux_layers
from edgespec.methods.dflash import DFlashConfig
from edgespec.pairing.check_result import CheckResult, Probed, Share
from edgespec.pairing.forcing import Rows, forced
from edgespec.pairing.pair import Pair

if TYPE_CHECKING:
    from edgespec.pairing.check import Progress

SHIPPED = Path(__file__).with_name("probe.txt")
MIN_TOKENS, MAX_TOKENS = 16, 512
MAX_CHARACTERS = MAX_TOKENS * 128  # of a text: hardly a token is so long
SIGMAS, MATTERS = (
    3.0,
    0.03,
)  # by which another reading must be better to be told: one layer is often worth little
SELDOM = 0.1  # a draft that agrees less often hardly knows its base
AS_STATED = "as stated"
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """A way in which the base's features could be meant: hidden_states, or with none the state
    behind the last norm."""

    name: str
    aux_layers: tuple[int, ...] = ()


def probe(pair: Pair, text: str, progress: Progress) -> Probed:
    """The share of positions where the draft's first token is the base's next one, for each reading
    of the features.

    Raises RequestError for a text of too few tokens; nothing is left on disk.
    """
    tokens, readings = tokens_of(pair.base, text), readings_of(pair)
    base = Decoder.open(pair.base, pair.model, emits_final=pair.draft is None)
    draft = forced(pair, base, tokens)
    progress.start("probe", base.shape.num_layers + draft.graph.shape.num_layers + 4)

    def done() -> None:
        progress.advance(1)

    rows = Rows.read(base.table.source(EMBEDDING), tokens).of(tokens)
    aux_layers = {layer for reading in readings for layer in reading.aux_layers}
    (truth,) = run_stepwise(base, [causal_feeds(rows, pair.model.decoder)], aux_layers, done)
    asked = [draft.passes(features(reading, truth)) for reading in readings]
    said = iter(run_stepwise(draft.graph, [one for passes in asked for one in passes], done=done))
    wanted = truth.best[draft.positions()]
    firsts = [np.concatenate([next(said).best for _ in passes]) for passes in asked]
    right = [draft.ids[first] == wanted for first in firsts]
    shares = [
        compared(reading, one, right[0]) for reading, one in zip(readings, right, strict=True)
    ]
    return Probed(len(wanted), tuple(shares))


def compared(reading: Reading, right: NDArray[np.bool_], stated: NDArray[np.bool_]) -> Share:
    gained, lost = int((right & ~stated).sum()), int((stated & ~right).sum())
    return Share(reading.name, reading.aux_layers, float(right.mean()), gained, lost)


def is_clearly_better(other: Share, stated: Share) -> bool:
    """Beyond chance at the positions where the two readings differ, and by enough to matter."""
    beyond_chance = other.gained - other.lost > SIGMAS * math.sqrt(other.gained + other.lost)
    return beyond_chance and other.share - stated.share > MATTERS


def features(reading: Reading, truth: Passed) -> Array:
    """[T, k*H], what the base says of each position as the reading has it."""
    if reading.aux_layers:
        return np.concatenate([truth.streams[layer] for layer in reading.aux_layers], -1)
    assert truth.state is not None
    return truth.state


def told(probed: Probed, pair: Pair) -> CheckResult:
    """The verdict: what was found, and whether another reading is clearly better."""
    stated, *others = probed.shares
    best = max(others, key=lambda share: share.share, default=stated)
    what = (
        f"the draft's first token is the base's next one at {stated.share:.0%} of"
        f" {probed.positions} positions"
    )
    what += "".join(f"; {other.name} {other.share:.0%}" for other in others)
    if is_clearly_better(best, stated):
        what = f"{what}: it was trained on what it reads {best.name}"
        return CheckResult("warning", "probe", what, remedy_of(best, pair))
    if stated.share < SELDOM:
        remedy = (
            "Make sure that it was trained for this very base; a text of the kind it knows is"
            " --probe-text FILE."
        )
        return CheckResult("warning", "probe", f"{what}: the draft hardly knows this base", remedy)
    return CheckResult("ok", "probe", what)


def remedy_of(better: Share, pair: Pair) -> str:
    """How to have the other reading."""
    aux_layers = ",".join(map(str, better.aux_layers))
    if pair.draft is None:
        return (
            "This version gives a head the state after the norm only; compare with the head of the"
            " original download."
        )
    if isinstance(pair.config, DFlashConfig):
        return (
            f"Correct the layers in the draft's config.json: they are hidden_states {aux_layers}."
        )
    return f"Pass --aux-layers {aux_layers} to the exports of base and draft."


# What is asked


def read_text(source: Path | None) -> str:
    """The text of a file, as much of it as may be needed, or the shipped one. Raises
    RequestError."""
    path = source or SHIPPED
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8.", "Convert it: iconv -f latin1 -t utf-8."
        ) from error
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror}", "Give a text file to --probe-text."
        ) from error


def tokens_of(base: Checkpoint, text: str) -> NDArray[np.int64]:
    """The text's first tokens, by the base's tokenizer."""
    import tokenizers

    with TemporaryDirectory() as name:
        copy_tokenizer(base, Path(name))
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
        except Exception as error:  # what the library raises for any damage
            what = f"tokenizer.json of {base.path} cannot be read: {error}"
            raise CheckpointError(what, "Download it again.") from error
    ids = np.array(tokenizer.encode(text).ids[:MAX_TOKENS], np.int64)
    if len(ids) < MIN_TOKENS:
        what = f"the probe's text has {len(ids)} tokens; at least {MIN_TOKENS} are needed"
        raise RequestError(
            what, "Give a file with some paragraphs to --probe-text, or leave it out."
        )
    return ids


def readings_of(pair: Pair) -> tuple[Reading, ...]:
    """As the draft states it, and then what is easily mistaken for it."""
    layers = pair.model.decoder.num_layers
    if pair.draft is None:
        return Reading(AS_STATED), Reading("from before the base's last norm", (layers,))
    stated = stated_aux_layers(pair)
    shifted = {
        "with taps one layer lower": tuple(layer - 1 for layer in stated),
        "with taps one layer higher": tuple(layer + 1 for layer in stated),
    }
    others = [
        Reading(name, aux_layers)
        for name, aux_layers in shifted.items()
        if aux_layers[0] >= 1 and aux_layers[-1] <= layers
    ]
    return Reading(AS_STATED, stated), *others


def stated_aux_layers(pair: Pair) -> tuple[int, ...]:
    _, config = pair.drafted()
    if isinstance(config, DFlashConfig):
        return pair.aux_layers or config.aux_layer_ids
    return resolve_aux_layers(config, pair.model.decoder.num_layers, pair.aux_layers)
