"""SamplingParams checks a Python caller as the file is checked, and normalizes what has more than
one spelling."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

from edgespec import prompts
from edgespec.errors import RequestError
from edgespec.prompts import LogitBias, SamplingParams


def made(**given: Any) -> SamplingParams:
    return SamplingParams(**given)


def refusal(**given: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        made(**given)
    assert caught.value.what.startswith("SamplingParams: ")
    assert caught.value.remedy
    return caught.value


def test_old_fields_keep_their_order() -> None:
    old = SamplingParams(0.5, 0.6, 7, 8, 9)
    assert (old.temperature, old.top_p, old.top_k, old.seed, old.max_generate_length) == (
        0.5,
        0.6,
        7,
        8,
        9,
    )


def test_new_fields_are_off_by_default() -> None:
    found = SamplingParams()
    assert (found.min_p, found.repetition_penalty, found.num_logprobs) == (0.0, 1.0, 0)
    assert (dict(found.logit_bias), found.stop) == ({}, ())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("temperature", object()),
        ("top_k", 1.0),
        ("min_p", 2),
        ("min_p", True),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("num_logprobs", 51),
        ("num_logprobs", True),
        ("num_logprobs", None),
        ("stop", 1),
        ("stop", {"a": 1}),
        ("logit_bias", "7"),
        ("logit_bias", [1, 2]),
    ],
)
def test_python_caller_is_refused_as_the_file_is(key: str, value: object) -> None:
    assert f"SamplingParams: {key} is " in refusal(**{key: value}).what


@pytest.mark.parametrize("key", ["temperature", "top_k", "seed"])
def test_number_too_long_to_print_is_refused_all_the_same(key: str) -> None:
    assert f"{key} is a number of thousands of digits" in refusal(**{key: 10**5000}).what


def test_bound_of_the_penalty_is_said() -> None:
    assert "from 0.01 to 100; 1 is off" in refusal(repetition_penalty=1000).remedy


def test_bias_is_the_same_from_ids_and_from_digit_strings() -> None:
    one, other = made(logit_bias={7: 1, 9: -100}), made(logit_bias={"9": -100.0, "07": 1.0})
    assert one == other
    assert hash(one) == hash(other)
    assert dict(one.logit_bias) == {7: 1.0, 9: -100.0}
    assert all(type(bias) is float for bias in one.logit_bias.values())


@pytest.mark.parametrize("twice", [{"7": 1, "07": 1}, {7: 1, "7": 2}])
def test_token_that_is_biased_twice_is_refused(twice: object) -> None:
    assert "logit_bias names the token 7 twice" in refusal(logit_bias=twice).what


@pytest.mark.parametrize(
    "key",
    ["-1", "+1", " 1", "1.0", "", "x", "²", "٣", "9" * 5000, str(2**31), -1, 2**31, True, 1.0],
)
def test_what_is_not_a_token_id_is_refused(key: object) -> None:
    assert "which is not a token id" in refusal(logit_bias={key: 1}).what


@pytest.mark.parametrize("bias", [100.1, -101, math.nan, math.inf, True, "1", None, 10**400])
def test_bias_out_of_its_range_is_refused_at_its_token(bias: object) -> None:
    assert "logit_bias.7 is " in refusal(logit_bias={"7": bias}).what


def test_number_of_biases_is_bounded() -> None:
    assert len(made(logit_bias=dict.fromkeys(range(1024), 100)).logit_bias) == 1024
    assert (
        "has 1025 tokens, and 1024 is the limit"
        in refusal(logit_bias=dict.fromkeys(range(1025), 0)).what
    )


def test_bias_cannot_change_behind_the_params() -> None:
    given = {7: 1.0}
    held = made(logit_bias=given)
    given[7] = 2.0
    assert held.logit_bias[7] == 1.0
    assert not hasattr(held.logit_bias, "__setitem__")


def test_params_can_be_copied_and_pickled() -> None:
    held = made(logit_bias={7: 1}, stop="x")
    assert copy.deepcopy(held) == pickle.loads(pickle.dumps(held)) == held
    assert repr(held.logit_bias) == "{7: 1.0}"
    assert LogitBias({7: 1}) != LogitBias({7: 2})


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (None, ()),
        ([], ()),
        ((), ()),
        ("END", ("END",)),
        (["a", "bb"], ("a", "bb")),
        (("\n\n", "😀"), ("\n\n", "😀")),
        (["a"] * 16, ("a",) * 16),
        ("é" * 512, ("é" * 512,)),
    ],
)
def test_stop_is_a_tuple_of_strings_however_it_was_written(
    given: object, held: tuple[str, ...]
) -> None:
    assert made(stop=given).stop == held


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a", ""], "stop[1] is an empty string"),
        ([None], "stop[0] is null, not a string"),
        ([["a"]], "stop[0] is a list, not a string"),
        (["a"] * 17, "stop has 17 strings, and 16 is the limit"),
        ("é" * 513, "stop has 1026 bytes of text, and 1024 is the limit"),
        (["x" * 1025], "stop[0] has 1025 bytes"),
        ("a\ud83d", "stop has an unpaired surrogate, \\ud83d, at character 1"),
        (["\udc00"], "stop[0] has an unpaired surrogate"),
    ],
)
def test_bad_stop_is_refused_at_its_place(given: object, said: str) -> None:
    assert said in refusal(stop=given).what


def test_finish_reasons_are_those_of_the_mirrored_tool_and_one_more() -> None:
    reasons = {
        prompts.CAPACITY,
        prompts.END_OF_SEQUENCE,
        prompts.MAX_LENGTH,
        prompts.STOP_WORDS,
        prompts.CANCELLED,
        prompts.ERROR,
    }
    wanted = {"end-of-sequence", "max-length", "stop-words", "cancelled", "error"}
    assert reasons == wanted | {"capacity"}
