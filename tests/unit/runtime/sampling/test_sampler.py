"""The sampler keeps the warped law, its noise hangs on seed and position alone, and greedy is the
largest logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgespec.backends.host import HostLogits
from edgespec.errors import EnvironmentProblem
from edgespec.prompts import SamplingParams
from edgespec.runtime.sampling import sampler as sampling
from edgespec.runtime.sampling.sampler import NEAR_TIE, Sampler, gumbel, top_log_probs

LOGITS = np.array([0.1, 1.0, -0.6, 0.5, 1.7, -2.0, 0.3, 1.3, -1.1, 0.8, -0.2, 0.6], np.float32)
SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.6, 5, 1.0),
    (1.0, 6, 0.8),
    (0.5, 6, 0.6),
    (2.5, 8, 0.9),
]
DRAWS = 3000
SUSPICIOUS = (
    1e-4  # p-values below this are taken for a wrong law; seeds are fixed, so this is no lottery
)


def warped_by_transformers(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float
) -> NDArray[np.float64]:
    """Probabilities [V] in the order of Hugging Face's generate: temperature, top-k, top-p."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    row = torch.from_numpy(logits.astype(np.float64))[None]
    return chain(torch.zeros(1, 1, dtype=torch.long), row)[0].softmax(0).numpy()


def probabilities(sampler: Sampler, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    out = np.zeros(len(logits))
    ids, log_probs = sampler.warped(logits)
    out[ids] = np.exp(log_probs)
    return out


def chi_square(tokens: Sequence[int], law: NDArray[np.float64]) -> float:
    """p-value of `tokens` under `law` [V]; a token that cannot be is p = 0, rare ones are counted
    together."""
    counts = np.bincount(tokens, minlength=len(law)).astype(float)
    if counts[law == 0].any():
        return 0.0
    counts, wanted = counts[law > 0], law[law > 0] * len(tokens)
    rare = wanted < 8
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
    return (
        1.0
        if len(wanted) == 1
        else float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)
    )


def over_seeds(pick: Callable[[int, int], int]) -> list[int]:
    return [pick(seed, 17) for seed in range(DRAWS)]


def over_positions(pick: Callable[[int, int], int]) -> list[int]:
    return [pick(5, position) for position in range(DRAWS)]


# Greedy


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    assert Sampler().pick(np.array([0.0, 2.0, -1.0, 2.0], np.float32), [0]) == 1
    assert Sampler().pick(np.zeros(5, np.float32), [1, 2, 3]) == 0


def test_greedy_ignores_seed_position_and_warping() -> None:
    picked = {
        Sampler(0.0, 3, 0.5, seed).pick(LOGITS, range(position))
        for seed in range(20)
        for position in range(20)
    }
    assert picked == {int(np.argmax(LOGITS))}


# Warping


@pytest.mark.parametrize(
    "setting", [*SETTINGS, (0.3, 1, 1.0), (1.0, 12, 0.999), (1.0, 40, 0.3), (1.3, 3, 1e-9)]
)
@pytest.mark.parametrize("seed", range(6))
def test_warping_equals_that_of_transformers(setting: tuple[float, int, float], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 12).astype(np.float32)
    np.testing.assert_allclose(
        probabilities(Sampler(*setting), logits),
        warped_by_transformers(logits, *setting),
        atol=1e-9,
    )


def test_top_k_acts_before_top_p() -> None:
    """Of p = .4 .3 .2 .1, top-k 2 leaves .57 .43, of which top-p .5 needs one; the other order
    would leave both."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert np.flatnonzero(probabilities(Sampler(1.0, 2, 0.5), logits)).tolist() == [0]
    assert np.flatnonzero(probabilities(Sampler(1.0, 0, 0.5), logits)).tolist() == [0, 1]


def test_temperature_acts_before_top_p() -> None:
    """Heat flattens p = .7 .2 .1, so that top-p .5 needs one token cold and more hot."""
    logits = np.log(np.array([0.7, 0.2, 0.1])).astype(np.float32)
    assert np.count_nonzero(probabilities(Sampler(1.0, 0, 0.5), logits)) == 1
    assert np.count_nonzero(probabilities(Sampler(50.0, 0, 0.5), logits)) == 2


def test_top_k_keeps_exactly_k_of_equal_logits_the_lowest_ids() -> None:
    assert Sampler(1.0, 3).warped(np.zeros(9, np.float32))[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 0.01])
def test_top_p_keeps_at_least_the_most_probable(top_p: float) -> None:
    assert np.flatnonzero(probabilities(Sampler(1.0, 0, top_p), LOGITS)).tolist() == [
        int(np.argmax(LOGITS))
    ]


def test_top_p_is_reached_by_a_mass_that_equals_it() -> None:
    assert Sampler(1.0, 0, 0.5).warped(np.zeros(4, np.float32))[0].tolist() == [0, 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-8])
def test_tiny_temperature_is_greedy_and_does_not_crash(temperature: float) -> None:
    sampler = Sampler(temperature, 5, 0.9, 1)
    assert [sampler.pick(LOGITS, range(position)) for position in range(50)] == [
        int(np.argmax(LOGITS))
    ] * 50


@pytest.mark.parametrize("min_p", [1e-6, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("setting", SETTINGS)
def test_min_p_acts_last_as_in_transformers(
    setting: tuple[float, int, float], min_p: float
) -> None:
    temperature, top_k, top_p = setting
    row = torch.from_numpy(LOGITS.astype(np.float64))[None]
    before = torch.from_numpy(np.log(warped_by_transformers(LOGITS, *setting) + 1e-300))[None]
    wanted = (
        MinPLogitsWarper(min_p)(torch.zeros_like(row, dtype=torch.long), before)[0]
        .softmax(0)
        .numpy()
    )
    found = probabilities(Sampler(temperature, top_k, top_p, min_p=min_p), LOGITS)
    np.testing.assert_allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 7.0])
def test_repetition_penalty_is_that_of_transformers_and_comes_before_temperature(
    penalty: float,
) -> None:
    before = [4, 4, 2, 7, 11]
    row = torch.from_numpy(LOGITS.astype(np.float64))[None]
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([before]), row)[0].numpy()
    sampler = Sampler(0.7, 5, repetition_penalty=penalty)
    np.testing.assert_allclose(sampler.adjusted(LOGITS, before), wanted)
    np.testing.assert_allclose(
        probabilities(sampler, sampler.adjusted(LOGITS, before)),
        warped_by_transformers(wanted, 0.7, 5, 1.0),
        atol=1e-9,
    )


def test_added_penalties_are_of_the_answer_alone_once_a_token_and_once_a_time() -> None:
    sampler = Sampler(presence_penalty=0.5, frequency_penalty=0.25, num_prompt=2)
    change = sampler.adjusted(LOGITS, [4, 6, 7, 4, 7, 7]) - LOGITS.astype(np.float64)
    wanted = np.zeros(len(LOGITS))
    wanted[[4, 7]] = -0.75, -1.25  # 6 and one 4 are the prompt's
    np.testing.assert_allclose(change, wanted)


def test_no_end_comes_before_the_least_length_whatever_the_bias() -> None:
    best = int(np.argmax(LOGITS))
    sampler = Sampler(
        logit_bias={best: 100.0}, min_tokens=2, num_prompt=3, end_ids=frozenset({best})
    )
    picked = [sampler.pick(LOGITS, [9] * length) == best for length in (3, 4, 5, 6)]
    assert picked == [False, False, True, True]


def test_seeds_are_64_bits_signed_or_not() -> None:
    seeds = [-1, 2**64 - 1, -(2**63), 2**63]
    samplers = [Sampler.of(SamplingParams(top_p=1.0, seed=seed)) for seed in seeds]
    first, same, other, same_as_other = (
        [sampler.pick(LOGITS, range(n)) for n in range(40)] for sampler in samplers
    )
    assert (first, other) == (same, same_as_other)
    assert first != other


def test_bias_is_added_before_the_penalty_and_moves_greedy_too() -> None:
    sampler = Sampler(repetition_penalty=2.0, logit_bias={5: 4.0})
    adjusted = sampler.adjusted(LOGITS, [5])
    assert adjusted[5] == (-2.0 + 4.0) / 2  # not -2 * 2 + 4
    assert Sampler(logit_bias={0: 100.0}).pick(LOGITS, []) == 0
    assert Sampler(logit_bias={4: -100.0}).pick(LOGITS, []) == 7


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_bias_is_of_the_logit_and_comes_before_temperature(temperature: float) -> None:
    bias = {2: 1.5, 9: -3.0}
    biased = LOGITS.copy()
    for token, amount in bias.items():
        biased[token] += amount
    sampler = Sampler(temperature, 5, 0.9, logit_bias=bias)
    np.testing.assert_allclose(
        probabilities(sampler, sampler.adjusted(LOGITS, [])),
        warped_by_transformers(biased, temperature, 5, 0.9),
        atol=1e-9,
    )


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS.copy()
    Sampler(0.5, 3, 0.5, 1, 0.1, 2.0, {1: 3.0}).pick(logits, [1, 2])
    np.testing.assert_array_equal(logits, LOGITS)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0, 5)])
def test_logits_that_are_no_numbers_are_told_and_not_drawn_from(
    sampler: Sampler, value: float
) -> None:
    logits = LOGITS.copy()
    logits[3] = value
    with pytest.raises(EnvironmentProblem, match="as a logit"):
        sampler.pick(logits, [])


def test_log_probabilities_are_the_model_s_own_and_end_with_the_chosen_one() -> None:
    law = torch.from_numpy(LOGITS.astype(np.float64)).log_softmax(0).numpy()
    rows = HostLogits(np.stack([LOGITS, LOGITS[::-1]]))
    found, other = top_log_probs(rows, 3, [5, 7])
    assert [i for i, _ in found] == [4, 7, 1, 5]
    assert [p for _, p in found] == pytest.approx(law[[4, 7, 1, 5]], abs=1e-6)
    assert [i for i, _ in other] == [7, 4, 10]
    assert len(top_log_probs(rows, 50, [0, 0])[0]) == len(LOGITS)
    assert top_log_probs(rows, 0, [5, 7]) == [found[-1:], other[:1]]
    with pytest.raises(EnvironmentProblem, match="as a logit"):
        top_log_probs(HostLogits(np.array([[np.nan, 1]], np.float32)), 1, [1])


def test_large_temperature_is_uniform() -> None:
    np.testing.assert_allclose(probabilities(Sampler(1e12), LOGITS), 1 / len(LOGITS), rtol=1e-6)


# Noise


def test_token_hangs_on_seed_and_position_alone() -> None:
    """Whichever row of a batch the logits come from, and whatever was drawn before."""
    rows = np.stack([LOGITS, -LOGITS, LOGITS])
    one, other = Sampler(1.0, 0, 1.0, 4), Sampler(1.0, 0, 1.0, 4)
    first = [one.pick(rows[0], range(position)) for position in range(100)]
    for position in reversed(range(100)):
        other.pick(rows[1], range(position))
        assert other.pick(rows[2], range(position)) == first[position]
    assert [
        Sampler(1.0, 0, 1.0, 5).pick(LOGITS, range(position)) for position in range(100)
    ] != first


def test_noise_of_a_token_does_not_hang_on_which_others_are_left() -> None:
    """With top-k the candidates are fewer; those that remain keep their noise."""
    ids = np.array([2, 5, 11])
    assert gumbel(3, 9, ids).tolist() == gumbel(3, 9, np.arange(12))[ids].tolist()


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(gumbel(1, 2, np.arange(20000)), id="tokens"),
        pytest.param(
            np.array([gumbel(1, p, np.array([7]))[0] for p in range(2000)]), id="positions"
        ),
        pytest.param(np.array([gumbel(s, 2, np.array([7]))[0] for s in range(2000)]), id="seeds"),
        pytest.param(
            np.array([gumbel(s << 40, 2, np.array([7]))[0] for s in range(2000)]), id="high-seeds"
        ),
    ],
)
def test_noise_is_standard_gumbel_along_every_axis(noise: NDArray[np.float64]) -> None:
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > SUSPICIOUS


def test_noise_of_neighbours_is_uncorrelated() -> None:
    """Seed s at position p+1 must not be seed s+1 at position p, nor follow it."""
    ids = np.arange(4000)
    here = stats.gumbel_r.cdf(gumbel(8, 100, ids))
    for seed, position in ((8, 101), (9, 100), (9, 99), (108, 0), (100, 8)):
        there = stats.gumbel_r.cdf(gumbel(seed, position, ids))
        assert stats.pearsonr(here, there).pvalue > SUSPICIOUS
    assert stats.pearsonr(here[:-1], here[1:]).pvalue > SUSPICIOUS


def test_noise_of_a_large_vocabulary_has_no_ties() -> None:
    """With 24 bits hundreds of these ids would share theirs, and the lowest id would win."""
    assert len(np.unique(gumbel(1, 2, np.arange(150_000)))) == 150_000


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_at_both_ends_of_the_hash(
    monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    monkeypatch.setattr(sampling, "splitmix", lambda x: np.full(x.shape, bits, np.uint64))
    assert np.isfinite(gumbel(0, 0, np.arange(3))).all()


def test_largest_seed_is_a_seed() -> None:
    assert np.isfinite(gumbel(2**63 - 1, 2**31, np.arange(5))).all()


# The law


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draw", [over_seeds, over_positions])
def test_tokens_follow_the_warped_law(
    setting: tuple[float, int, float], draw: Callable[[Callable[[int, int], int]], list[int]]
) -> None:
    tokens = draw(lambda seed, position: Sampler(*setting, seed).pick(LOGITS, range(position)))
    assert chi_square(tokens, warped_by_transformers(LOGITS, *setting)) > SUSPICIOUS


def cold(seed: int, position: int) -> int:
    return Sampler(0.75, 6, 0.8, seed).pick(LOGITS, range(position))


def without_top_p(seed: int, position: int) -> int:
    return Sampler(1.0, 6, 1.0, seed).pick(LOGITS, range(position))


def one_in_ten_greedy(seed: int, position: int) -> int:
    greedy = gumbel(seed, position + 10**6, np.array([0]))[0] > stats.gumbel_r.ppf(0.9)
    return (
        int(np.argmax(LOGITS))
        if greedy
        else Sampler(1.0, 6, 0.8, seed).pick(LOGITS, range(position))
    )


@pytest.mark.parametrize("biased", [cold, without_top_p, one_in_ten_greedy])
def test_biased_sampler_is_caught_by_the_test_of_the_law(biased: Callable[[int, int], int]) -> None:
    """`tokens_follow_the_warped_law` passes with these settings and the true sampler."""
    assert (
        chi_square(over_positions(biased), warped_by_transformers(LOGITS, 1.0, 6, 0.8)) < SUSPICIOUS
    )


def test_noise_without_the_position_is_caught_by_the_test_of_the_law() -> None:
    law = warped_by_transformers(LOGITS, 1.0, 0, 1.0)
    assert (
        chi_square(
            over_positions(lambda seed, position: Sampler(1.0, 0, 1.0, seed).pick(LOGITS, [])), law
        )
        < SUSPICIOUS
    )


# Margins


def test_greedy_margin_is_the_distance_of_the_logits() -> None:
    logits = np.array([1.0, 0.25, 3.0], np.float32)
    assert Sampler().margin(logits, [], 0, 1) == Sampler().margin(logits, [], 1, 0) == 0.75


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 2.5])
def test_sampled_margin_is_the_change_of_the_logit_that_swaps_the_two(temperature: float) -> None:
    """Raise the loser's logit by a little less and by a little more than the margin says."""
    for position in range(20):
        sampler = Sampler(temperature, 0, 1.0, 3)
        winner = sampler.pick(LOGITS, range(position))
        _, scores = sampler.noised(LOGITS, position)
        loser = int(np.argsort(scores)[-2])
        gap = sampler.margin(LOGITS, range(position), winner, loser)
        for share, wanted in ((0.98, winner), (1.02, loser)):
            nudged = LOGITS.copy()
            nudged[loser] += share * gap
            assert sampler.pick(nudged, range(position)) == wanted


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.5, 8.0])
def test_a_margin_is_of_the_engines_logits_at_any_temperature(temperature: float) -> None:
    for position in range(20):
        sampler = Sampler(temperature, seed=3)
        _, scores = sampler.noised(LOGITS, position)
        winner, loser = np.argsort(scores)[[-1, -2]].tolist()
        wanted = pytest.approx(temperature * (scores[winner] - scores[loser]))
        assert sampler.margin(LOGITS, range(position), winner, loser) == wanted


def test_margin_to_a_token_that_warping_removed_is_at_least_its_way_back() -> None:
    """However much the noise favors it."""
    logits, sampler = np.array([3.0, 2.0, 1.0, 0.5], np.float32), Sampler(0.5, 2, 1.0, 0)
    for position in range(200):
        assert sampler.margin(logits, range(position), 0, 3) >= 2.0 - 0.5
        assert sampler.margin(logits, range(position), 3, 1) >= 2.0 - 0.5


def test_tie_at_the_edge_of_top_k_does_not_excuse_a_token_that_would_not_have_won() -> None:
    logits = np.array([9.0, 1.0, 1.0], np.float32)
    assert Sampler(1.0, 2, 1.0, 0).margin(logits, [], 0, 2) > 1


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [0.8, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize(("temperature", "penalty"), [(0.9, 1.0), (0.05, 1.0), (1.5, 1.3)])
def test_whatever_a_small_change_of_logits_changes_has_a_small_margin(
    top_k: int, top_p: float, min_p: float, temperature: float, penalty: float
) -> None:
    """Rounding may swap two scores, or carry a candidate over an edge of warping: all of it is
    near."""
    rng, size, changed = np.random.default_rng(4), 3e-2, 0
    for position in range(600):
        sampler = Sampler(temperature, top_k, top_p, 5, min_p, penalty)
        logits = rng.normal(0, 2, 24).astype(np.float32)
        nudged = logits + rng.uniform(-size, size, 24).astype(np.float32)
        one, other = (
            sampler.pick(logits, [position % 24] * position),
            sampler.pick(nudged, [position % 24] * position),
        )
        if one != other:
            changed += 1
            assert sampler.margin(logits, [position % 24] * position, one, other) <= 4 * size
    assert changed >= 1


def test_tokens_that_are_not_near_have_a_margin_beyond_rounding() -> None:
    rng, near = np.random.default_rng(6), 0
    for position in range(300):
        sampler = Sampler(0.9, 10, 0.8, 5)
        logits = rng.normal(0, 2, 24).astype(np.float32)
        drawn = sampler.pick(logits, range(position))
        wrong = int((drawn + 1 + rng.integers(23)) % 24)
        near += sampler.margin(logits, range(position), drawn, wrong) <= NEAR_TIE
    assert near == 0


def test_penalty_widens_no_margin_of_tokens_that_it_does_not_touch() -> None:
    logits = np.array([5.0, 5.0009, 0], np.float32)
    punished = Sampler(repetition_penalty=100)
    assert punished.margin(logits, [2], 0, 1) == Sampler().margin(logits, [2], 0, 1) > NEAR_TIE
    assert (
        punished.margin(logits, [1], 1, 0)
        < Sampler(repetition_penalty=1).margin(logits, [1], 1, 0) + 5
    )
