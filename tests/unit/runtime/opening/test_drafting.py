"""An engine opens a method without an engine when a request first names it, with the options that
the request has; keys and values of options are checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest

from edgespec.errors import EdgeSpecError, EngineClosed, LimitError, OptionError
from edgespec.methods import METHODS
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.options import DrafterOptions, option, read_options
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.drafters.row import DrafterSources
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.opening.drafting import MAX_NAMED
from tests.e2e.repeating_drafter import METHOD, NAME, ROW, Repeating
from tests.lossless.pairs import shared_pair

GREEDY = SamplingParams(temperature=0, max_generate_length=12)
PROMPT = [5, 6, 7, 5, 6, 7, 5]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatOptions(DrafterOptions):
    """Of a method of this file."""

    max_size: int = option(2, "Tokens that are compared, at most.", low=1, high=64)
    threshold: float = option(0.5, "Below it nothing is drafted.", low=0.0, high=1.0)
    is_public: bool = option(True, "Whether requests share what was said.")
    order: str = option("oldest", "Which of several is taken.", choices=("oldest", "newest"))
    limit: int | None = option(None, "Tokens kept; None: all.", low=1)

    def __post_init__(self) -> None:
        DrafterOptions.__post_init__(self)
        if self.order == "newest" and self.limit == 1:
            raise OptionError("limit is 1 and order newest", "Raise limit.")


def open_drafter(sources: DrafterSources) -> Repeating:
    assert isinstance(sources.options, RepeatOptions)
    drafter = Repeating(num_lanes=sources.num_lanes)
    drafter.options = sources.options  # type: ignore[attr-defined]
    return drafter


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ROW, open=open_drafter, options=RepeatOptions)
    monkeypatch.setitem(METHODS, NAME, METHOD)
    monkeypatch.setitem(DRAFTERS, NAME, row)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(shared_pair("llama", "eagle") / "engines") as opened:
        opened.stop_ids = frozenset()
        yield opened


def answer(engine: Engine, **more: Any) -> Response:
    request = GenerationRequest(PROMPT, GREEDY, engine.plan(1, 3, 4), **more)
    end = [event for _, event in engine.run_queue(deque([request]))][-1]
    if isinstance(end, EdgeSpecError):
        raise end
    assert isinstance(end, Response)
    return end


# ---- by request


def test_requests_of_one_engine_name_their_methods(engine: Engine) -> None:
    plain = engine.plainly(PROMPT, GREEDY).token_ids
    own = Repeating()
    for drafter in (None, NAME, own, "ECHO"):
        assert answer(engine, drafter=drafter).token_ids == plain
    named = engine.drafting.of(NAME)
    assert named is engine.drafting.of("echo")
    assert named is not None
    assert isinstance(named.drafter, Repeating)
    assert own.num_proposed > 0
    assert engine.method != NAME


def test_options_of_a_request_open_the_method_with_them(engine: Engine) -> None:
    given = engine.drafting.of(NAME, {"max_size": 4})
    same = engine.drafting.of("echo", RepeatOptions(max_size=4))
    other = engine.drafting.of(NAME)
    assert given is not None
    assert given is same is not other
    assert given.options == RepeatOptions(max_size=4)
    assert given.drafter.options.max_size == 4  # type: ignore[attr-defined]


def test_only_so_many_sets_of_options_stay_open(engine: Engine) -> None:
    found = [engine.drafting.of(NAME, {"max_size": size}) for size in range(1, MAX_NAMED + 2)]
    assert len(engine.drafting.named) == MAX_NAMED
    assert engine.drafting.of(NAME, {"max_size": MAX_NAMED + 1}) is found[-1]
    assert engine.drafting.of(NAME, {"max_size": 1}) is not found[0]


def test_engine_is_opened_with_a_method_and_its_options() -> None:
    path = shared_pair("llama", "eagle") / "engines"
    with Engine(path, drafter=NAME, drafter_options={"max_size": 3}) as opened:
        assert opened.drafting.default is not None
        assert opened.drafting.default.options == RepeatOptions(max_size=3)
        assert opened.drafting.of(NAME) is opened.drafting.default
        assert opened.drafting.of(NAME, {"max_size": 5}) is not opened.drafting.default
        assert opened.drafting.of(None, {"max_size": 3}) is opened.drafting.default
        drafter = opened.drafter
    assert isinstance(drafter, Repeating)
    assert drafter.closed
    with pytest.raises(EngineClosed):
        opened.generate(PROMPT, GREEDY)


def test_what_cannot_draft_is_refused_by_name(engine: Engine) -> None:
    path = shared_pair("llama", "eagle") / "engines"
    with pytest.raises(LimitError, match="no drafting method 'guess'"):
        answer(engine, drafter="guess")
    with pytest.raises(OptionError, match="options of repetition: max_sizes is not a known"):
        answer(engine, drafter=NAME, drafter_options={"max_sizes": 3})
    with pytest.raises(
        OptionError, match="the options of a drafter of your own: max_size is not a known key"
    ):
        answer(engine, drafter=Repeating(), drafter_options={"max_size": 3})
    with pytest.raises(LimitError, match=r"holds 0 sequences at a time.* runs 1"):
        answer(engine, drafter=Repeating(num_lanes=0))
    with pytest.raises(OptionError, match="no method is named"):
        Engine(path, spec_decode=False, drafter_options={"max_size": 3})
    with Engine(path, spec_decode=False) as plain, pytest.raises(LimitError, match="its draft"):
        plain.plan()


# ---- keys and values


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_size": 0}, "max_size is 0\nGive an integer from 1 to 64."),
        ({"max_size": 65}, "from 1 to 64"),
        ({"max_size": 2.0}, "max_size is 2.0\nGive an integer"),
        ({"max_size": True}, "max_size is True"),
        ({"max_size": "2"}, "max_size is '2'"),
        ({"max_size": None}, "max_size is None"),
        ({"threshold": float("nan")}, "threshold is nan\nGive a number from 0.0 to 1.0."),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": 10**400}, "threshold is 1000"),
        ({"is_public": 1}, "is_public is 1\nGive true or false."),
        ({"order": "any"}, "order is 'any'\nGive one of oldest, newest."),
        ({"order": "x" * 1000}, r"order is 'x{50,60}\.\.\."),
        ({"limit": 0}, "limit is 0\nGive an integer of 1 or more."),
        ({"order": "newest", "limit": 1}, "limit is 1 and order newest"),
        ({"max_siz": 2}, r"max_siz is not a known key\nDid you mean max_size\?"),
        ({"zzz": 2}, r"zzz is not a known key\nRemove it. Known keys: max_size, threshold"),
        ([("max_size", 2)], "are of type list"),
    ],
)
def test_value_that_cannot_be_is_refused_with_its_key(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read_options(RepeatOptions, given, "repetition")


def test_values_that_can_be_are_taken_as_they_are() -> None:
    given = {"max_size": 64, "threshold": 1, "is_public": False, "order": "newest", "limit": 2}
    found = read_options(RepeatOptions, given, "repetition")
    assert found == RepeatOptions(**given)
    assert read_options(RepeatOptions, found, "repetition") is found
    assert read_options(RepeatOptions, None, "repetition") == RepeatOptions()
    with pytest.raises(FrozenInstanceError):
        found.limit = 3  # type: ignore[misc]


def test_method_without_options_takes_none() -> None:
    assert read_options(None, None, "MTP") is None
    assert read_options(None, {}, "MTP") is None
    with pytest.raises(OptionError, match="MTP has no options"):
        read_options(None, {"a": 1}, "MTP")
