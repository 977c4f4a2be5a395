"""A request on its way: its seed, its pieces of text, its times, and the answer at the end."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models

from edgespec.prompts import CANCELLED, END_OF_SEQUENCE, MAX_LENGTH, STOP_WORDS, SamplingParams
from edgespec.runtime.loop.generation import Generation, GenerationRequest
from edgespec.runtime.loop.sequence import StepOutput
from edgespec.runtime.text.tokenizer import Tokenizer


def letters() -> Tokenizer:
    """One token a letter, and a special token."""
    vocab = {letter: i for i, letter in enumerate("abcdefgh")}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<|end|>"])
    return Tokenizer(raw)


LETTERS = letters()


def generation(stop: tuple[str, ...] = (), **sampling: object) -> Generation:
    params = SamplingParams(**{"max_generate_length": 9, "stop": stop} | sampling)
    return Generation(GenerationRequest([0, 1], params), LETTERS, frozenset())


def step(handle: Generation, text: str, room: int = 99) -> list[str]:
    """A step with a token per letter; the pieces of its chunk."""
    tokens = [LETTERS.token_id(letter) or 0 for letter in text]
    return handle.chunk(handle.take(StepOutput(tokens), room)).pieces


def test_a_seed_is_drawn_anew_for_each_request_without_one() -> None:
    handles = [generation(temperature=1.0) for _ in range(5)]
    assert len({handle.seed for handle in handles}) == 5
    assert all(handle.sampler.seed == handle.seed for handle in handles)
    assert handles[0].response(MAX_LENGTH).seed == handles[0].seed
    assert generation(temperature=1.0, seed=7).seed == 7


def test_a_greedy_answer_has_no_seed() -> None:
    assert generation(temperature=0.0).response(MAX_LENGTH).seed is None


def test_pieces_add_up_to_the_text_of_the_answer() -> None:
    handle = generation(stop=("de",))
    pieces = [step(handle, "ab"), step(handle, "cd"), step(handle, "f")]
    assert pieces == [["a", "b"], ["c", ""], ["df"]]  # d might begin the stop string
    assert handle.response(MAX_LENGTH).text == "abcdf"


def test_what_was_held_back_comes_with_the_last_piece() -> None:
    handle = generation(stop=("de",), max_generate_length=4)
    assert [step(handle, "ab"), step(handle, "cd")] == [["a", "b"], ["c", "d"]]
    assert handle.response(MAX_LENGTH).text == "abcd"


def test_what_a_cancelled_request_held_back_is_a_piece_without_a_token() -> None:
    handle = generation(stop=("de",))
    step(handle, "ad")
    chunk = handle.chunk(StepOutput([], finish_reason=CANCELLED))
    assert (chunk.token_ids, chunk.pieces) == ([], ["d"])
    response = handle.response(CANCELLED)
    assert (response.text, response.finish_reason) == ("ad", CANCELLED)


def test_no_stop_string_begins_within_the_least_length() -> None:
    handle = generation(stop=("cd",), min_tokens=3)
    assert step(handle, "abcd") == ["a", "b", "c", "d"]
    assert step(handle, "cde") == ["", ""]
    assert handle.response(STOP_WORDS).text == "abcd"


def test_a_token_to_stop_at_ends_the_answer_and_is_no_part_of_its_text() -> None:
    handle = generation(stop_token_ids=(3,))
    output = handle.take(StepOutput([1, 3, 4]), 99)
    assert (output.finish_reason, output.tokens) == (END_OF_SEQUENCE, [1, 3])
    handle.chunk(output)
    assert handle.response(END_OF_SEQUENCE).text == "b"


def test_an_answer_ends_with_the_token_that_completes_a_stop_string() -> None:
    handle = generation(stop=("de",))
    assert step(handle, "bcdefg") == ["b", "c", "", ""]
    response = handle.response(STOP_WORDS)
    assert (response.text, response.token_ids) == ("bc", [1, 2, 3, 4])


def test_a_stop_that_is_a_special_token_ends_at_it() -> None:
    handle = generation(stop=("<|end|>",))
    end = LETTERS.token_id("<|end|>")
    assert end is not None
    output = handle.take(StepOutput([2, end, 3]), 99)
    assert (output.tokens, output.finish_reason) == ([2, end], STOP_WORDS)


def test_times_count_from_when_a_request_came() -> None:
    request = GenerationRequest([0], SamplingParams(max_generate_length=9), arrived_s=0.0)
    handle = Generation(request, LETTERS, frozenset())
    handle.begun()
    assert handle.metrics.queue_time > 0
    step(handle, "a")
    assert handle.metrics.time_to_first_token >= handle.metrics.queue_time
    later = GenerationRequest([0], SamplingParams(max_generate_length=9))
    now = Generation(later, LETTERS, frozenset())
    now.begun()
    assert now.metrics.queue_time < handle.metrics.queue_time


def test_an_answer_says_what_was_reused_and_where_it_began() -> None:
    handle = generation(num_logprobs=1)
    handle.num_reused, handle.slot = 1, 2
    handle.chunk(handle.take(StepOutput([1], logprobs=[[(1, -0.5)]]), 0))
    response = handle.response(MAX_LENGTH)
    assert (response.metrics.reused_tokens, response.slot) == (1, 2)
    assert (response.prompt_ids, response.logprobs) == ([0, 1], [[(1, -0.5)]])
