"""What stands open behind an engine: the base and what drafts for it, its plans and limits, the
tokenizer and the image encoder, and what its user should know of them.

Knows the order in which they are opened, and that nothing stays open where one cannot be. Knows no
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.artifacts.provenance import installed_version
from edgespec.backends.machine import machine_bytes
from edgespec.backends.registry import backend_of
from edgespec.errors import LimitError, counted
from edgespec.images import ImageRules
from edgespec.methods.names import SpecPolicy
from edgespec.runtime.acceptance.verify import (
    EXACT,
    Acceptance,
    acceptance_of,
    acceptance_words,
)
from edgespec.runtime.costs.cost_profile import device_of, hashes_of
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.limits import RequestLimits
from edgespec.runtime.loop.prefix import PREFIX_CACHE_BYTES, PrefixCache
from edgespec.runtime.loop.prefix_store import PrefixStore
from edgespec.runtime.opening.drafting import Drafting
from edgespec.runtime.opening.open_engine import (
    OpenBase,
    OpenCosts,
    SpecDecode,
    TunedChoice,
    choose_draft,
    choose_tuned,
    directory_of,
    open_base,
    open_costs,
    with_options,
)
from edgespec.runtime.opening.planner import Planner, check_policy
from edgespec.runtime.opening.speculation import Speculation
from edgespec.runtime.opening.tuned_plan import TunedPlan, not_taken
from edgespec.runtime.sampling.sampler import NEAR_TIE
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.vision.image_prompts import ImagePrompts, beside

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An open engine directory. `costs` are those of its steps, `prior` the acceptance by depth
    that adaptive drafting begins with, empty: of a usual draft; `notes` are for its user."""

    path: Path
    base: OpenBase
    drafting: Drafting
    planner: Planner
    limits: RequestLimits
    tokenizer: Tokenizer
    images: ImagePrompts | None
    costs: OpenCosts
    prior: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rounding(self) -> float:
        """How far apart, in nats, two candidates may be where a run with drafts takes the other
        one."""
        margin = self.base.config.weights.rounding
        return 0.0 if self.planner.exact else NEAR_TIE if margin is None else margin

    def warnings(self) -> Iterator[str]:
        """What a user should know about these engines."""
        draft, weights = self.drafting.default, self.base.config.weights
        most, held = None if draft is None else draft.drafter.capacity, self.base.decoder.capacity
        if most is not None and most < held:
            yield (
                f"the draft follows {most} tokens, the base's KV cache holds {held}: beyond {most}"
                " nothing is drafted"
            )
        if weights.emulated:
            yield f"weights in {weights.scheme}: {weights.emulated}"
        if draft is None:
            return
        if self.rounding > NEAR_TIE:
            yield (
                f"{weights.rounded_by}: lossless up to kernel rounding (margin"
                f" {self.rounding:.2g} nats)"
            )
        if weights.is_quantized and weights.is_bitwise:
            yield f"{weights.scheme}, lossless: bitwise (a row has the same bits in every pass)"
        acceptance = self.planner.acceptance
        if acceptance.rule != EXACT:
            yield f"acceptance: {acceptance_words(acceptance.rule)}"
            if acceptance.note is not None:
                yield acceptance.note

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of a token, of base and draft."""
        return sum(
            backend_of(self.path, config.role).memory(config).kv_bytes_per_token
            for config in self.limits.configs.values()
        )

    def identity(self) -> str:
        """What the bits of keys and values depend on: the engines, how they are run, on what."""
        role = self.base.config.role
        roles = [config.role for config in self.limits.configs.values()]
        engines, device = hashes_of(self.path, roles), device_of(self.path, role)
        return f"{installed_version('edgespec')} {self.planner.exact} {engines} {device}"

    def log(self) -> None:
        """What was opened, and as warnings what a user should know of it."""
        nothing = self.drafting.default is None
        drafts = "no drafts" if nothing else self.drafting.method or "a drafter of the caller's"
        logger.info(
            "opened %s: %s, %s, up to %s at a time, %d tokens each",
            self.path,
            self.base.config.weights.scheme,
            drafts,
            counted(self.limits.max_batch_size, "request"),
            self.base.decoder.capacity,
        )
        for note in self.notes:
            logger.warning("%s: %s", self.path, note)

    def close(self) -> None:
        """Free the engines; closing twice is harmless."""
        self.base.decoder.runner.close()
        self.drafting.close()
        self.base.devices.close()
        if self.images is not None:
            self.images.close()


def open_parts(
    engine_dir: str | Path,
    *,
    spec_decode: SpecDecode,
    drafter: object | None,
    drafter_options: DrafterOptions | Mapping[str, object] | None,
    speculation: Speculation | None,
    exact: bool,
    acceptance: Acceptance,
    spec_policy: SpecPolicy | None,
    tuned: bool,
    multimodal_engine_dir: str | Path | None,
    image_rules: ImageRules | None,
    notes: tuple[str, ...],
) -> EngineParts:
    """Opens an engine directory. Takes and raises what `Engine` does; a `speculation` says more of
    the `drafter`."""
    check_policy(spec_policy)
    path = directory_of(engine_dir)
    if speculation is not None:
        spec_decode, drafter_options = True, speculation.options
        acceptance = speculation.acceptance if acceptance is None else acceptance
    rule = acceptance_of(acceptance)  # before a large engine is loaded
    choice = choose_draft(path, spec_decode, drafter)
    chosen = TunedChoice(with_options(choice, drafter_options))
    if tuned and drafter is None and speculation is None and not drafter_options:
        chosen = choose_tuned(path, chosen.choice, spec_decode)
    choice = chosen.choice
    with ExitStack() as undo:
        base = open_base(path, choice, exact=exact)
        undo.callback(base.devices.close)
        undo.callback(base.decoder.runner.close)
        tokenizer = Tokenizer.open(path)
        costs = open_costs(path, base, choice)
        if costs.model is not None:
            base = replace(base, row_cost=costs.model.row_cost)
        drafting = Drafting(path, base, choice)
        undo.callback(drafting.close)
        images = open_images(path, multimodal_engine_dir, base, image_rules)
        planner = Planner(
            base.config,
            base.hints,
            drafting,
            exact,
            rule.for_model(tokenizer),
            speculation,
            spec_policy,
            can_adapt=costs.model is not None and not drafting.is_paced,
            why_no_costs=costs.why,
            gates=None if speculation is None else speculation.gates(),
        )
        if drafting.default is not None:
            planner.check_adaptive(spec_policy)
        planner, misfit = with_tuned(planner, chosen.tuned)
        undo.pop_all()
    configs = {"base": base.config}
    if drafting.default is not None and drafting.default.config is not None:
        configs["draft"] = drafting.default.config
    parts = EngineParts(
        path,
        base,
        drafting,
        planner,
        RequestLimits(configs, drafting.max_batch_size),
        tokenizer,
        images,
        costs,
        () if planner.tuned is None else planner.tuned.prior,
    )
    fixed = costs.note if spec_policy is None else None
    said = (choice.note, chosen.note, misfit, *notes, *parts.warnings(), fixed)
    return replace(parts, notes=tuple(note for note in said if note))


def open_prefixes(
    parts: EngineParts, size_bytes: int | None, directory: str | Path | None
) -> tuple[PrefixCache, PrefixStore | None]:
    """What keeps prefixes in memory, and where a directory is given on disk. None bytes are those
    of a prompt of the whole context for each lane, an eighth of the machine's memory at most and
    the usual ones at least. Closes the engines where it raises what `PrefixStore` does."""
    decoder = parts.base.decoder
    if size_bytes is None:
        whole = parts.kv_bytes_per_token * decoder.capacity * len(decoder.lanes)
        size_bytes = max(PREFIX_CACHE_BYTES, min(whole, (machine_bytes() or 0) // 8))
    cache, draft = PrefixCache(size_bytes), parts.drafting.default
    if directory is None:
        return cache, None
    drafter = None if draft is None else draft.drafter
    try:
        return cache, PrefixStore(Path(directory), parts.identity(), cache, decoder, drafter)
    except BaseException:
        parts.close()
        raise


def with_tuned(planner: Planner, tuned: TunedPlan | None) -> tuple[Planner, str | None]:
    """A planner that plans as tuned.json says; where base or drafter do not take that plan, it is
    left, and a note says so."""
    if tuned is None:
        return planner, None
    tuned_planner = replace(planner, tuned=tuned)
    try:
        tuned_planner.by_tuning()
    except LimitError:
        why = f"these engines do not take its plan ({tuned.words})"
        return planner, not_taken(planner.drafting.engine_dir, why)
    return tuned_planner, None


def open_images(
    engine_dir: Path, directory: str | Path | None, base: OpenBase, rules: ImageRules | None
) -> ImagePrompts | None:
    """What reads the images of prompts; None where there is no encoder. Raises what
    `ImagePrompts.open` does."""
    encoder_dir = beside(engine_dir) if directory is None else Path(directory)
    if encoder_dir is None:
        return None
    return ImagePrompts.open(encoder_dir, base.config.component, rules)
