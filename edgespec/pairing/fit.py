"""Do the parts fit: tensors, widths, aux layers, and what a draft shares with its base.

Knows how a result reads. The rules themselves stand in `methods`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import is_quantized
from edgespec.checkpoint.origin import origin_of
from edgespec.config import DraftConfig
from edgespec.errors import CheckpointError
from edgespec.methods import METHODS, resolve_aux_layers
from edgespec.pairing.check_result import CheckResult
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import listed

_OTHER_BASE = "Give the base that this draft was trained for, or a draft of this base."


def tensors(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok where both have the tensors that their graphs ask for. Raises CheckpointError for
    missing or other tensors; for those of an image encoder, which text does without, it yields a
    warning."""
    from edgespec.graphs.completeness import check_complete, check_vision

    check_complete(pair.base, pair.model)
    if pair.draft is not None and pair.config is not None:
        check_complete(pair.draft, pair.config)
    try:
        check_vision(pair.base, pair.model)
    except CheckpointError as error:
        yield CheckResult("warning", "image encoder", error.what, error.remedy)
        yield CheckResult("ok", "tensors", "all of text are there, by their names and shapes")
        return
    yield CheckResult("ok", "tensors", "all are there, by their names and shapes")


def refused(pair: Pair, topic: str, shown: str | None = None) -> CheckResult | None:
    """The mismatch of a topic as a check result; None where base and draft fit."""
    mismatch = pair.mismatch(topic)
    if mismatch is None:
        return None
    return CheckResult("refused", shown or topic, mismatch.what, mismatch.remedy or _OTHER_BASE)


def origin(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok, or a warning where edgespec quantize made the draft with another base."""
    draft, _ = pair.drafted()
    recorded = origin_of(draft, read_weights=False).recorded
    if recorded is None or recorded.base_identity is None:
        yield CheckResult(
            "ok", "origin", "nothing is recorded of the base's weights; names and sizes must do"
        )
        return
    base_origin = origin_of(pair.base, read_weights=False).identity
    # The identity last: it reads all weights of the base
    if base_origin == recorded.base_identity or pair.base.identity() == recorded.base_identity:
        yield CheckResult("ok", "origin", "the draft was quantized with this very base")
        return
    message = f"the draft was quantized with another base ({recorded.base_name}) than this one"
    yield CheckResult(
        "warning", "origin", message, "Give that base, or the one that it was quantized to."
    )


def made_for(pair: Pair) -> Iterator[CheckResult]:
    """The base that the draft's config names; a name is no proof, another depth is."""
    _, config = pair.drafted()
    if (refusal := refused(pair, "depth", "made for")) is not None:
        yield refusal
        return
    if config.base_name is None:
        yield CheckResult("ok", "made for", "the draft does not say")
        return
    names = _names_of(pair.base)
    wanted = config.base_name.rstrip("/").rpartition("/")[2].lower()
    if any(wanted in name or name in wanted for name in names):
        yield CheckResult("ok", "made for", config.base_name)
        return
    message = (
        f"the draft says that it was made for {config.base_name}; this base is called"
        f" {' or '.join(sorted(names))}"
    )
    yield CheckResult(
        "warning", "made for", message, f"Go on if it is the same model. {_OTHER_BASE}"
    )


def _names_of(base: Checkpoint) -> set[str]:
    """What the base is called: by its directory, by the hub's cache, by its own config."""
    path = base.place.resolve()
    cached = [
        match[1] for part in path.parts if (match := re.fullmatch(r"models--(?:.+--)?(.+)", part))
    ]
    name = base.config.get("_name_or_path")
    named = [name.rstrip("/").rpartition("/")[2]] if isinstance(name, str) and name else []
    return {name.lower() for name in (*(cached or [path.name]), *named)}


def vocabulary(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok where base and draft have the same vocabulary, else refused."""
    _, config = pair.drafted()
    ok = CheckResult("ok", "vocabulary", f"{config.vocab_size} tokens in both")
    yield refused(pair, "vocabulary") or ok


def hidden_size(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok where the draft reads hidden states as wide as the base's are, else refused."""
    _, config = pair.drafted()
    width, own = pair.model.decoder.hidden_size, config.decoder.hidden_size
    beside = "" if own == width else f"; the draft itself is {own} wide"
    message = f"aux hidden states are {width} wide, as the base is{beside}"
    yield refused(pair, "hidden size") or CheckResult("ok", "hidden size", message)


def aux_layers(
    pair: Pair, stated: Callable[[DraftConfig], tuple[int, ...] | None]
) -> Iterator[CheckResult]:
    """Which hidden_states of the base the draft reads, and how its own numbers were understood.

    `stated` are its aux layers in the numbering of its file.
    """
    _, config = pair.drafted()
    method = METHODS[pair.method]
    if pair.aux_layers is not None and not method.takes_aux_layers:
        message = f"`aux_layers` means nothing to {method.draft_title}, which names its own layers"
        yield CheckResult("refused", "aux layers", message, "Leave `aux_layers` out.")
        return
    if (refusal := refused(pair, "aux layers")) is not None:
        yield refusal
        return
    num_layers = pair.model.decoder.num_layers
    layers = resolve_aux_layers(config, num_layers, pair.aux_layers)
    message = f"hidden_states {listed(layers)}, {_reading(pair, layers, stated(config))}"
    if layers[-1] < num_layers:
        yield CheckResult("ok", "aux layers", message)
        return
    remedy = (
        "Hugging Face's own list has the normed state there: make sure that the draft was trained"
        " on this one."
    )
    message = f"{message}: the last is read before the base's final norm"
    yield CheckResult("warning", "aux layers", message, remedy)


def _reading(pair: Pair, layers: tuple[int, ...], stated: tuple[int, ...] | None) -> str:
    if pair.aux_layers is not None:
        return "as `aux_layers` says"
    if stated is None:
        return "the default for this depth, since the draft names none"
    if stated == layers:
        return "as the draft names them"
    return f"which the draft names as layer outputs {listed(stated)}"


def embedding(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok where the draft has an embedding or can share the base's, else refused."""
    _, config = pair.drafted()
    whose = "the draft's own" if config.own_embedding else "the base's"
    yield refused(pair, "embedding") or CheckResult("ok", "embedding", whose)


def head(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok where the draft has an lm_head or can share the base's, else refused; a warning
    where the shared lm_head is quantized."""
    _, config = pair.drafted()
    if (refusal := refused(pair, "head")) is not None:
        yield refusal
    elif not config.own_head and is_quantized(pair.base, "lm_head"):
        message = "the base's, which is quantized: the draft proposes through a quantized lm_head"
        remedy = "Quantize the base without its lm_head if acceptance falls."
        yield CheckResult("warning", "head", message, remedy)
    else:
        whose = "the draft's own" if config.own_head else "the base's"
        yield CheckResult("ok", "head", whose)
