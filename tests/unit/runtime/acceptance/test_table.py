"""The table of rules: names, options, guarantees, and the flags that end in it."""

from __future__ import annotations

import dataclasses

import pytest

from edgespec.cli import accept_flags
from edgespec.errors import OptionError, RequestError
from edgespec.runtime.acceptance.verify import (
    ACCEPT_RULES,
    EXACT_ACCEPTANCE,
    AcceptOptions,
    RejectionAcceptance,
    RelaxedAcceptance,
    TypicalAcceptance,
    acceptance_of,
    acceptance_words,
    lossless,
)


def test_rule_is_found_by_its_name_and_by_its_options() -> None:
    assert acceptance_of(None) == acceptance_of("exact") == EXACT_ACCEPTANCE
    assert acceptance_of("rejection") == RejectionAcceptance()
    assert acceptance_of("relaxed", relaxed_topk=4) == RelaxedAcceptance(relaxed_topk=4)
    own = TypicalAcceptance(0.09)
    assert acceptance_of(own) is own
    assert {name: row.options.rule for name, row in ACCEPT_RULES.items()} == {
        name: name for name in ACCEPT_RULES
    }


@pytest.mark.parametrize("asked", ["typicl", 3, ["exact"]])
def test_what_is_no_rule_is_refused_with_the_rules(asked: object) -> None:
    with pytest.raises(RequestError) as met:
        acceptance_of(asked)  # type: ignore[arg-type]
    assert "exact, rejection, typical, relaxed" in met.value.remedy


def test_rule_that_is_in_no_table_is_refused() -> None:
    class Other(AcceptOptions):
        rule = "other"

    with pytest.raises(RequestError, match="'other'"):
        acceptance_of(Other())


def test_option_of_no_rule_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="typical acceptance has no option 'posterior_thresold'"):
        acceptance_of("typical", posterior_thresold=0.1)
    with pytest.raises(OptionError) as met:
        acceptance_of("typical", posterior_thresold=0.1)
    assert 'Did you mean "posterior_threshold"?' in met.value.remedy


def test_guarantee_of_rejection_is_that_of_greedy_decoding_at_temperature_0() -> None:
    rejection = acceptance_of("rejection")
    assert [lossless(rejection, t) for t in (0.0, 0.5)] == ["tokens", "distribution"]
    for lossy in ("typical", "relaxed"):
        assert [lossless(acceptance_of(lossy), t) for t in (0.0, 0.5)] == ["no", "no"]
        assert "LOSSY" in acceptance_words(lossy)
    assert lossless(EXACT_ACCEPTANCE, 1.0) == "tokens"


def test_flags_are_options_of_the_table() -> None:
    for rule, option in accept_flags.OPTIONS.values():
        known = {item.name for item in dataclasses.fields(ACCEPT_RULES[rule].options)}
        assert option in known | {""}
