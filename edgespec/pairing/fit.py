"""Do the parts fit: tensors, widths, taps, and what one lends the other. Knows sizes, and not what
tokens mean."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import is_quantized
from edgespec.checkpoint.origin import origin_of
from edgespec.methods.aux_layers import resolve_aux_layers
from edgespec.methods.dflash import DFlashConfig
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.pairing.check_result import CheckResult
from edgespec.pairing.pair import Pair

_OTHER_BASE = "Give the base that this draft was made for, or a draft of this base."


def whole(pair: Pair) -> Iterator[CheckResult]:
    """Both have the tensors that their graphs ask for."""
    from edgespec.graphs.completeness import check_whole

    check_whole(pair.base, pair.model)
    if pair.draft is not None and pair.config is not None:
        check_whole(pair.draft, pair.config)
    yield CheckResult("ok", "whole", "all tensors are there, by their names and shapes")


def origin(pair: Pair) -> Iterator[CheckResult]:
    """What edgespec quantize recorded of the base with which it made the draft."""
    draft, _ = pair.drafted()
    manifest = origin_of(draft, hashes=False).manifest
    recorded = manifest.get("base") if manifest is not None else None
    if not isinstance(recorded, dict) or not isinstance(recorded.get("identity"), str):
        yield CheckResult(
            "ok", "origin", "nothing is recorded of the base's weights; names and sizes must do"
        )
        return
    if recorded["identity"] in (pair.base.identity(), origin_of(pair.base, hashes=False).identity):
        yield CheckResult("ok", "origin", "the draft was quantised with this very base")
        return
    what = f"the draft was quantised with another base ({recorded.get('name')}) than this one"
    yield CheckResult(
        "warning", "origin", what, "Give that base, or the one that it was quantised to."
    )


def made_for(pair: Pair) -> Iterator[CheckResult]:
    """The base that the draft's config names; a name is no proof, another depth is."""
    _, config = pair.drafted()
    depth = config.num_target_layers if isinstance(config, DFlashConfig) else None
    layers = pair.model.decoder.num_layers
    if depth is not None and depth != layers:
        what = f"the draft was made for a base of {depth} layers, this one has {layers}"
        yield CheckResult("refused", "made for", what, _OTHER_BASE)
        return
    if config.base_name is None:
        yield CheckResult("ok", "made for", "the draft does not say")
        return
    names = _names_of(pair.base)
    wanted = config.base_name.rstrip("/").rpartition("/")[2].lower()
    if any(wanted in name or name in wanted for name in names):
        yield CheckResult("ok", "made for", config.base_name)
        return
    what = (
        f"the draft says that it was made for {config.base_name}; this base is called"
        f" {' or '.join(sorted(names))}"
    )
    yield CheckResult("warning", "made for", what, f"Go on if it is the same model. {_OTHER_BASE}")


def _names_of(base: Checkpoint) -> set[str]:
    """What the base is called: by its directory, by the hub's cache, by its own config."""
    path = base.path.resolve()
    cached = [
        match[1] for part in path.parts if (match := re.fullmatch(r"models--(?:.+--)?(.+)", part))
    ]
    told = base.config.get("_name_or_path")
    told_name = [told.rstrip("/").rpartition("/")[2]] if isinstance(told, str) and told else []
    return {name.lower() for name in (*(cached or [path.name]), *told_name)}


def vocabulary(pair: Pair) -> Iterator[CheckResult]:
    _, config = pair.drafted()
    if config.vocab_size == pair.model.vocab_size:
        yield CheckResult("ok", "vocabulary", f"{config.vocab_size} tokens in both")
        return
    what = (
        f"the draft's vocabulary has {config.vocab_size} tokens, the base's {pair.model.vocab_size}"
    )
    yield CheckResult("refused", "vocabulary", what, _OTHER_BASE)


def hidden_size(pair: Pair) -> Iterator[CheckResult]:
    _, config = pair.drafted()
    width, own = pair.model.decoder.hidden_size, config.decoder.hidden_size
    if config.target_hidden_size == width:
        beside = "" if own == width else f"; the draft itself is {own} wide"
        yield CheckResult("ok", "hidden size", f"taps are {width} wide, as the base is{beside}")
        return
    what = (
        f"the draft reads taps {config.target_hidden_size} wide, the base's hidden size is {width}"
    )
    yield CheckResult("refused", "hidden size", what, _OTHER_BASE)


def aux_layers(pair: Pair) -> Iterator[CheckResult]:
    """Which hidden_states of the base the draft reads, and how its own numbers were understood."""
    _, config = pair.drafted()
    layers = pair.model.decoder.num_layers
    if isinstance(config, Eagle3Config):
        found, reading = (
            resolve_aux_layers(config, layers, pair.aux_layers),
            _eagle_reading(config, pair),
        )
    elif pair.aux_layers is not None:
        what = (
            "--aux-layers means nothing to a DFlash draft, which names its layers or follows a rule"
            " of its own"
        )
        yield CheckResult("refused", "taps", what, "Leave --aux-layers out.")
        return
    else:
        found, reading = config.aux_layer_ids, _dflash_reading(config)
    if found[-1] > layers:
        what = f"hidden_states {_listed(found)}, {reading}; the base has {layers} layers"
        yield CheckResult("refused", "taps", what, _OTHER_BASE)
        return
    if found[-1] == layers:
        what = (
            f"hidden_states {_listed(found)}, {reading}: the last is read before the base's final"
            " norm"
        )
        remedy = (
            "Hugging Face's own list has the normed state there: make sure that the draft was"
            " trained on this one."
        )
        yield CheckResult("warning", "taps", what, remedy)
        return
    yield CheckResult("ok", "taps", f"hidden_states {_listed(found)}, {reading}")


def _eagle_reading(config: Eagle3Config, pair: Pair) -> str:
    if pair.aux_layers is not None:
        return "as --aux-layers says"
    if config.aux_layer_ids is None:
        return "EAGLE-3's default for this depth, since the draft names none"
    found = resolve_aux_layers(config, pair.model.decoder.num_layers)
    converted = config.aux_layer_convention == "output" or (
        config.aux_layer_convention == "hs" and config.layout == "modelopt"
    )
    named = (
        tuple(layer - 1 for layer in config.aux_layer_ids) if converted else config.aux_layer_ids
    )
    return (
        "as the draft names them"
        if named == found
        else f"which the draft names as layer outputs {_listed(named)}"
    )


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _dflash_reading(config: DFlashConfig) -> str:
    if config.layout == "speculators":
        return "as the draft names them"
    return (
        "which the draft names as layer outputs"
        f" {_listed(tuple(layer - 1 for layer in config.aux_layer_ids))}"
    )


def embedding(pair: Pair) -> Iterator[CheckResult]:
    _, config = pair.drafted()
    yield _shared(pair, "embedding", config.own_embedding)


def head(pair: Pair) -> Iterator[CheckResult]:
    _, config = pair.drafted()
    if not config.own_head and is_quantized(pair.base, "lm_head"):
        what = "the base's, which is quantised: the draft proposes through a rounded head"
        yield CheckResult(
            "warning", "head", what, "Quantise the base without its lm_head if acceptance falls."
        )
        return
    yield _shared(pair, "head", config.own_head)


def _shared(pair: Pair, topic: str, own: bool) -> CheckResult:
    """What the draft has not of its own comes from the base, and must be as wide as the draft."""
    _, config = pair.drafted()
    width, lent = config.decoder.hidden_size, pair.model.decoder.hidden_size
    if own:
        return CheckResult("ok", topic, "the draft's own")
    if width == lent:
        return CheckResult("ok", topic, "the base's")
    what = f"the draft borrows the base's, {lent} wide, and is itself {width} wide"
    return CheckResult(
        "refused",
        topic,
        what,
        "Get the whole checkpoint of the draft, or the base that it was made for.",
    )


def mtp(pair: Pair) -> Iterator[CheckResult]:
    """The base's own head: its tensors by names and shapes; what it shares with its base fits by
    itself."""
    from edgespec.graphs.mtp import MtpDraft

    found = MtpDraft.open(pair.base, pair.model).table.stored
    what = f"an MTP head of {len(found)} tensors; embedding, lm_head and RoPE are the base's"
    yield CheckResult("ok", "head", what)
