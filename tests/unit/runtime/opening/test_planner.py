"""Which plans an open engine makes and takes, by its accept rule and by --exact."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.backends.base import PlanHints
from edgespec.backends.engine_config import FP32_WEIGHTS
from edgespec.compat.speculative_config import keys_as_written, read_config
from edgespec.errors import LimitError, OptionError, in_terms_of
from edgespec.runtime.acceptance.verify import RejectionAcceptance, acceptance_of
from edgespec.runtime.drafters.eagle_options import EagleOptions
from edgespec.runtime.opening.planner import Planner
from edgespec.runtime.opening.speculation import Speculation
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import DraftPlan

ROOM = SimpleNamespace(limits=SimpleNamespace(verify_tree_size=64), weights=FP32_WEIGHTS)
DRAFT = SimpleNamespace(limits=lambda config: TreeLimits(64, 60, 1000, static_trees=True))
DRAFTING: Any = SimpleNamespace(of=lambda drafter, options: DRAFT)


def planner(**how: Any) -> Planner:
    hints = PlanHints(steps=3, block_nodes=8)
    rule = acceptance_of(None)
    given = {"hints": hints, "drafting": DRAFTING, "exact": False, "acceptance": rule} | how
    return Planner(ROOM, **given)  # type: ignore[arg-type]


BRANCHING = EagleOptions(eagle_choices="mc_sim_7b_63")
CHAIN = EagleOptions(eagle_choices="[[0], [0, 0]]")


def test_a_static_tree_that_branches_is_refused_as_such_where_only_chains_will_do() -> None:
    with pytest.raises(LimitError, match="63 nodes branches, and only chains are exact") as exact:
        planner(exact=True).by_tree(BRANCHING)
    assert "choices" in exact.value.remedy
    assert "`exact`" in exact.value.remedy
    assert "top-k" not in exact.value.what + exact.value.remedy
    rejection = planner(acceptance=RejectionAcceptance())
    with pytest.raises(LimitError, match="for chains, and the static tree of 63 nodes branches"):
        rejection.check_acceptance(rejection.acceptance, StaticPlan.of("mc_sim_7b_63"))
    assert planner(exact=True).by_tree(CHAIN).top_k == 1
    with pytest.raises(LimitError, match="`spec_draft_top_k` 4 drafts trees"):
        planner(exact=True).by_sizes(4, 2, 8)


def test_trees_are_exact_where_a_row_has_the_same_bits_in_every_pass() -> None:
    weights = replace(FP32_WEIGHTS, scheme="int4", block=128, rounding=0.0)
    config: Any = SimpleNamespace(limits=ROOM.limits, weights=weights)
    bitwise = replace(planner(exact=True), config=config)
    assert bitwise.by_tree(BRANCHING).top_k > 1
    assert bitwise.by_sizes(4, 2, 8).top_k == 4
    with pytest.raises(LimitError, match="not what plain decoding gives bit for bit"):
        bitwise.check_acceptance(RejectionAcceptance(), bitwise.by_tree(CHAIN))


def asked_by(**block: Any) -> Speculation:
    config, _ = read_config(block)
    assert config is not None
    return config.speculation


@pytest.mark.parametrize("how", [{"exact": True}, {"acceptance": RejectionAcceptance()}])
def test_a_method_of_trees_drafts_chains_where_only_they_will_do(how: dict[str, Any]) -> None:
    """Suffix decoding drafts trees, unless a width was named that is none of a chain."""
    from edgespec.runtime.drafters.suffix import SuffixLimits

    draft = SimpleNamespace(limits=lambda config: SuffixLimits(64))
    drafting = SimpleNamespace(of=lambda drafter, options: draft)
    asked = asked_by(decoding_type="Suffix", max_draft_len=5)
    assert planner(drafting=drafting, speculation=asked).by_sizes().top_k == 4
    narrow = planner(drafting=drafting, speculation=asked, **how)
    assert narrow.by_sizes() == DraftPlan(1, 5, 6)


def test_heads_are_those_of_the_draft_whoever_asks_for_them() -> None:
    """By flags, by a file's block and by a request's or a caller's config."""
    from edgespec.runtime.drafters.medusa import MedusaLimits, MedusaOptions

    draft = SimpleNamespace(limits=lambda config: MedusaLimits(64, 3, 1000))
    drafting = SimpleNamespace(of=lambda drafter, options: draft)
    keys: dict[str, Any] = {"medusa_choices": [[0], [0, 0]], "num_medusa_heads": 4}
    asked = asked_by(decoding_type="Medusa", **keys)
    of_file = planner(drafting=drafting, speculation=asked)
    plans = [
        lambda: of_file.by_tree(MedusaOptions(**keys)),
        of_file.by_sizes,
        lambda: planner(drafting=drafting).by_speculation(asked),
    ]
    for plan in plans:
        with pytest.raises(LimitError, match="`num_medusa_heads` 4, and the draft has 3") as error:
            plan()
        assert "Set it to 3 or less" in error.value.remedy


LIMITED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"max_draft_len": 99},
        "max_draft_len 99 (100 nodes with the root) exceeds the 64",
        "Set max_draft_len to 63 or less, or build",
    ),
    ({"num_eagle_layers": 61}, "num_eagle_layers 61 exceeds the 60", "Set it to 60"),
    ({"draft_len_schedule": {2: 61}}, "draft_len_schedule[2] 61 exceeds the 60", "60"),
    (
        {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "num_eagle_layers": 40},
        "dynamic_tree_max_topK 2 times num_eagle_layers 40 exceeds",
        "`max_draft_tree_size` 80",
    ),
    (
        {"use_dynamic_tree": True, "dynamic_tree_max_topK": 9, "max_total_draft_tokens": 70},
        "max_total_draft_tokens 70 (71 nodes with the root) exceeds the 64",
        "Set max_total_draft_tokens to 63 or less",
    ),
    ({"eagle_choices": [[0]], "max_draft_len": 3}, "max_draft_len 3", "or max_draft_len 1."),
    (
        {"eagle_choices": [[0], [1]], "max_total_draft_tokens": 1},
        "max_total_draft_tokens is 1",
        (
            "Raise max_total_draft_tokens to 2, or give choices of fewer nodes; a chain of 1 is"
            " max_draft_len 1."
        ),
    ),
    (
        {"dynamic_tree_max_topK": 2, "use_rejection_sampling": True},
        "dynamic_tree_max_topK 2 drafts trees",
        "Set dynamic_tree_max_topK to 1",
    ),
]


@pytest.mark.parametrize(("keys", "what", "remedy"), LIMITED)
def test_limits_of_a_config_are_named_by_the_keys_that_were_given(
    keys: dict[str, Any], what: str, remedy: str
) -> None:
    asked = asked_by(decoding_type="Eagle1", **keys)
    with pytest.raises(LimitError) as error:
        planner().by_speculation(asked)
    said = error.value.spelled(keys_as_written())
    assert what in said.what
    assert remedy in said.remedy
    assert "spec_" not in str(said)


def test_a_schedule_s_length_is_that_of_heads_too() -> None:
    asked = asked_by(decoding_type="Medusa", draft_len_schedule={1: 3})
    assert asked.tree is not None
    assert asked.tree.plan(64).steps == 3
    said = pytest.raises(LimitError, match=r"`draft_len_schedule\[1\]` 3, and the draft has 2")
    with said, in_terms_of(asked.spellings):
        asked.tree.plan(64, 2)
    with pytest.raises(OptionError, match=r"draft_len_schedule\[1\]` is 7"):
        read_config({"decoding_type": "Medusa", "draft_len_schedule": {1: 7}})


def test_a_config_s_own_rule_counts_where_a_request_brings_one() -> None:
    asked = asked_by(decoding_type="Suffix", max_draft_len=5, use_rejection_sampling=True)
    assert planner().by_speculation(asked).top_k == 1
