"""The Python API checks at its door, and one request leaves nothing behind for the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import edgespec
from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import LimitError, RequestError
from edgespec.prompts import CANCELLED, Message, SamplingParams
from edgespec.prompts.template import JinjaTemplate
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.engine import Engine
from edgespec.runtime.text.thinking import thinking_note
from edgespec.runtime.text.tokenizer import Tokenizer
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.pairs import shared_pair
from tests.pace import paced

GOLDEN = Path(__file__).parents[2] / "golden"
GREEDY = SamplingParams(temperature=0, max_generate_length=6)


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    return shared_pair("llama", "eagle") / "engines"


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Engine:
    return edgespec.load(engine_dir)


def test_ids_of_numpy_are_ids(engine: Engine) -> None:
    ids = [5, 6, 7]
    assert (
        engine.generate(np.array(ids), GREEDY).token_ids == engine.generate(ids, GREEDY).token_ids
    )
    assert engine.encode([5, np.int64(6), 7]) == ids


@pytest.mark.parametrize(
    "prompt", [[Message("user", "a"), 5], [{"role": "user", "content": "a"}, 5], [1.5], [True]]
)
def test_prompt_that_is_a_mixture_is_refused(engine: Engine, prompt: list[object]) -> None:
    with pytest.raises(RequestError, match="a list of token ids"):
        engine.encode(prompt)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = engine.configs["base"].limits.max_input_len
    monkeypatch.setattr(Tokenizer, "encode", None)
    monkeypatch.setattr(Tokenizer, "chars_per_token", 13.0)  # the toy's has not all bytes
    for prompt in ("a" * 2**21, [Message("user", "a" * 2**17)]):
        with pytest.raises(
            LimitError, match=f"built for {most} tokens, which are at most {13 * most} char"
        ):
            engine.encode(prompt)


def note(
    trained: bool | None, model: str, asked: list[bool], *, switch: bool, by_flag: bool = False
) -> str:
    """What is said for a DFlash draft that was `trained` so, its base's template with a switch or
    without."""
    base, draft = config_of("base"), config_of("draft")
    base = replace(base, component=replace(base.component, model=model))
    pair = replace(draft.component.pair, enable_thinking=trained)
    draft = replace(draft, component=replace(draft.component, pair=pair, method="dflash"))
    template = "{% if enable_thinking %}<think>{% endif %}" if switch else "plain"
    tokenizer = Tokenizer(
        tokenizers.Tokenizer(tokenizers.models.BPE()), JinjaTemplate(template, {})
    )
    mode = DRAFTERS["dflash"].trained_with_thinking(base, draft)
    has_mode = tokenizer.knows_thinking()
    return thinking_note(mode, asked, template_has_mode=has_mode, by_flag=by_flag) or ""


def config_of(role: str) -> EngineConfig:
    """Any engine's config of that role."""
    return EngineConfig.read(GOLDEN / f"engines_{role}_config.json")


def test_note_on_thinking_names_what_to_change() -> None:
    qwen3, hybrid = "Qwen3ForCausalLM", "Qwen3_5ForCausalLM"
    for trained in (True, None):  # null: exported without a base, whose architecture tells
        told = note(trained, hybrid, [True, False], switch=True)
        assert told.startswith("1 of 2 requests have enable_thinking off")
        assert told.endswith('Set "enable_thinking": true.')
    assert note(False, qwen3, [True], switch=True).endswith('Leave "enable_thinking" out.')
    chat = note(True, hybrid, [False], switch=True, by_flag=True)
    assert chat.startswith("`enable_thinking` is off")
    assert chat.endswith("Give `enable_thinking`.")
    assert note(True, hybrid, [True], switch=True) == ""
    assert note(None, "LlamaForCausalLM", [True], switch=True) == ""


def test_no_mode_is_advised_that_the_template_has_not() -> None:
    told = note(True, "Qwen3_5ForCausalLM", [False], switch=False)
    assert "its chat template has no such mode" in told
    assert "Export the base again with the chat template" in told
    assert '"enable_thinking": true' not in told


@pytest.mark.parametrize("token", [-1, 10_000])
def test_id_beyond_the_vocabulary_is_refused(engine: Engine, token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token}"):
        engine.generate([5, token], GREEDY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -3},
        {"seed": 2**64},
        {"max_generate_length": 0},
    ],
)
def test_sampling_that_a_file_could_not_hold_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_zero_is_a_size_and_not_the_default(engine: Engine) -> None:
    with pytest.raises(LimitError, match="at least 1"):
        engine.plan(0, 3, 4)


def test_second_stream_of_an_engine_with_one_lane_waits_for_the_first(engine: Engine) -> None:
    expected = [engine.generate(prompt, GREEDY).token_ids for prompt in ([5, 6, 7], [9, 8])]
    first, second = (engine.stream(prompt, GREEDY, engine.plan()) for prompt in ([5, 6, 7], [9, 8]))
    next(first)
    late, early = second.result(), first.result()
    assert [early.token_ids, late.token_ids] == expected
    assert late.metrics.queue_time > early.metrics.queue_time
    assert late.metrics.time_to_first_token > late.metrics.queue_time
    with pytest.raises(StopIteration):
        next(first)


def test_drafter_of_one_s_own_may_read_the_base_s_hidden_states(
    engine: Engine, engine_dir: Path
) -> None:
    prompt = [5, 6, 7]
    truth = engine.plainly(prompt, GREEDY).token_ids
    own = ScriptedDrafter([(prompt, truth)], 256, right=1)
    with Engine(engine_dir, drafter=own) as opened:
        found = opened.generate(prompt, GREEDY, opened.plan(1, 2, 3))
        assert opened.draft_config is None
    assert found.token_ids == truth
    assert max(found.metrics.per_step_accepted) > 0
    assert own.hidden_states[0].shape == (opened.config.component.graph.features,)


def test_drafter_for_a_run_without_drafts_is_refused(engine_dir: Path) -> None:
    with pytest.raises(LimitError, match="spec_decode=False"):
        Engine(engine_dir, drafter=ScriptedDrafter([], 256, 0), spec_decode=False)


def test_accept_rule_that_is_not_in_the_table_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="there is no accept rule 'typicl'") as met:
        engine.generate([5], GREEDY, acceptance="typicl")
    assert met.value.exit_code == 3


def test_closing_twice_is_harmless(engine_dir: Path) -> None:
    with edgespec.load(engine_dir) as opened:
        opened.close()


def test_public_names_are_there() -> None:
    assert all(getattr(edgespec, name) is not None for name in edgespec.__all__)


# Text


def test_text_is_that_of_the_ids_even_where_it_ends_as_a_stop_string_begins(engine: Engine) -> None:
    plain = engine.generate([5, 6, 7], GREEDY)
    stop = plain.text[-2:] + "never said"
    found = engine.generate([5, 6, 7], replace(GREEDY, stop=(stop,)))
    assert found.text == engine.tokenizer.decode(found.token_ids) == plain.text
    stream = engine.stream([5, 6, 7], replace(GREEDY, stop=(stop,)))
    chunks, last = [*stream], stream.result()
    assert "".join(chunk.text for chunk in chunks) == last.text


@pytest.mark.parametrize("length", [1, 3, 5])
def test_cancelled_stream_gives_all_text_in_chunks_and_says_so(engine: Engine, length: int) -> None:
    sampling = replace(GREEDY, stop=("never said",), max_generate_length=40)
    with paced() as allow:
        stream = engine.stream([5, 6, 7], sampling, edgespec.PLAIN)
        allow(length)
        chunks = [next(stream) for _ in range(length)]
        stream.cancel()
        allow(10)
        rest, last = [*stream], stream.result()
    assert last.finish_reason == CANCELLED
    assert last.token_ids == [token for chunk in chunks for token in chunk.token_ids]
    assert (
        "".join(chunk.text for chunk in [*chunks, *rest])
        == last.text
        == engine.tokenizer.decode(last.token_ids)
    )


@pytest.mark.parametrize("flags", [{"enable_thinking": True}, {"add_generation_prompt": False}])
def test_what_only_a_template_can_honour_is_refused_without_one(
    engine: Engine, flags: dict[str, bool]
) -> None:
    with pytest.raises(RequestError, match="apply_chat_template is false"):
        engine.render([Message("user", "a")], apply_chat_template=False, **flags)
