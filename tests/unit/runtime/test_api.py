"""The Python API as an application uses it: from threads and event loops, with every form of a
prompt, and through all that can end a request early."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import edgespec
from edgespec import (
    PLAIN,
    BundleError,
    DraftPlan,
    EdgeSpecError,
    Engine,
    EngineClosed,
    EnvironmentProblem,
    InternalError,
    LimitError,
    Message,
    OptionError,
    RequestError,
    SamplingParams,
)
from edgespec.prompts import CANCELLED
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.loop.scheduler import Scheduler
from edgespec.runtime.loop.session import Session
from edgespec.runtime.opening import parts
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.text.detokenizer import TextStream
from edgespec.runtime.text.prompt_encoder import PromptEncoder
from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue
from edgespec.vision.rows import ImageRows
from tests.lossless.engines import api_engines
from tests.pace import paced

ROOT = Path(__file__).resolve().parents[3]
GREEDY = SamplingParams(temperature=0, max_generate_length=6)
LONG = SamplingParams(temperature=0, max_generate_length=40)
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    return api_engines() / "four"


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Iterator[Engine]:
    """Room for four requests at a time, which end by their length alone."""
    with edgespec.load(engine_dir) as opened:
        opened.stop_ids = frozenset()
        yield opened


@pytest.fixture
def own(engine_dir: Path) -> Iterator[Engine]:
    """One that the test may close."""
    with edgespec.load(engine_dir) as opened:
        opened.stop_ids = frozenset()
        yield opened


def prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(3, 250, 3 + number % 20).tolist()


def sampled(number: int) -> SamplingParams:
    """Lengths, seeds and temperatures of all kinds."""
    temperature = (0.0, 0.7, 1.3)[number % 3]
    return SamplingParams(temperature, seed=number, max_generate_length=1 + number % 17)


def plan_of(number: int) -> Any:
    return (None, PLAIN, edgespec.DraftPlan(3, 2, 6))[number % 3]


def idle(engine: Engine) -> bool:
    """Whether nothing is left of any request; to be asked once all have ended."""
    return not engine.driver.pending and not engine.session.running


# Threads


def test_requests_of_many_threads_get_what_they_get_alone_and_share_steps(engine: Engine) -> None:
    numbers, batches, real = range(48), [], Session.step

    def step(self: Session) -> Any:
        batches.append(len(self.running))
        return real(self)

    def ask(number: int) -> list[int]:
        return engine.generate(prompt(number), sampled(number), plan_of(number)).token_ids

    with mock.patch.object(Session, "step", step), ThreadPoolExecutor(8) as pool:
        together = [*pool.map(ask, numbers)]
    assert max(batches) == 4
    assert together == [ask(number) for number in numbers]
    assert idle(engine)


def test_stress_in_every_form_gives_what_each_gets_alone(engine: Engine) -> None:
    """scripts/stress_api.py in a small size; its own is 16 threads with 500 requests each."""
    stress = runpy.run_path(str(ROOT / "scripts" / "stress_api.py"))["stress"]
    found = stress(engine, threads=8, requests=20, distinct=24, longest=8)
    assert found["wrong"] == []
    assert found["requests"] >= 160
    assert len(found["forms"]) >= 6


def test_wrong_requests_among_right_ones_fail_alone(engine: Engine) -> None:
    def ask(number: int) -> object:
        wrong = {1: "", 2: [5, 10**6], 3: b"ids", 4: [Message("user", "a"), 7]}.get(number % 7)
        try:
            return engine.generate(prompt(number) if wrong is None else wrong, GREEDY).token_ids
        except EdgeSpecError as error:
            return type(error), error.what.split()[0]

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(ask, range(40))] == [ask(number) for number in range(40)]


@pytest.mark.parametrize("where", [(Sampler, "pick_from"), (TextStream, "push")])
def test_bug_that_one_request_meets_is_its_own(engine: Engine, where: tuple[type, str]) -> None:
    """Of whatever kind: a KeyError of ours is told as an internal error, and the mates go on."""
    kind, name = where
    real, victims = getattr(kind, name), set[int]()

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        if id(self) in victims:
            raise KeyError("planted")
        return real(self, *args, **options)

    expected = [engine.generate(prompt(number), LONG).token_ids for number in range(4)]
    with paced() as allow, mock.patch.object(kind, name, broken):
        streams = [engine.stream(prompt(number), LONG) for number in range(4)]
        allow(6)
        for stream in streams:
            next(stream)
        handle = streams[1].handle
        victims.add(id(handle.sampler if kind is Sampler else handle.text))
        allow(10_000)
        with pytest.raises(InternalError, match="KeyError: 'planted'") as caught:
            streams[1].result()
    assert isinstance(caught.value.__cause__, KeyError)
    others = [number for number in range(4) if number != 1]
    assert [streams[n].result().token_ids for n in others] == [expected[n] for n in others]
    assert engine.generate(prompt(1), LONG).token_ids == expected[1]


def test_step_that_breaks_is_told_to_those_in_it_and_to_nobody_else(engine: Engine) -> None:
    expected = [engine.generate(prompt(number), LONG).token_ids for number in range(6)]
    real, broken = Session.step, []

    def step(self: Session) -> Any:
        if len(self.running) == 4 and not broken:
            broken.append(self.running)
            raise AssertionError("planted")
        return real(self)

    with mock.patch.object(Session, "step", step):
        found = engine.generate_batch(
            [prompt(number) for number in range(6)], LONG, return_exceptions=True
        )
    assert [type(end) for end in found[:4]] == [InternalError] * 4
    assert len({id(end) for end in found[:4]}) == 4  # each may be raised in a thread of its own
    assert [end.token_ids for end in found[4:]] == expected[4:]
    assert idle(engine)


def test_memory_that_ends_fails_those_in_the_step(engine: Engine) -> None:
    with mock.patch.object(Session, "step", side_effect=MemoryError):
        found = engine.generate_batch([[5, 6], [7, 8]], GREEDY, return_exceptions=True)
    assert [type(end) for end in found] == [EnvironmentProblem] * 2
    assert found[0] is not found[1]
    assert len(engine.generate([5, 6], GREEDY).token_ids) == 6


def test_request_from_inside_a_step_is_refused_and_not_waited_for(engine: Engine) -> None:
    real, met = Session.step, []

    def step(self: Session) -> Any:
        if not met:
            with pytest.raises(LimitError, match="inside one of its own steps") as error:
                engine.generate([5, 6], GREEDY)
            met.append(error)
        return real(self)

    with mock.patch.object(Session, "step", step):
        assert len(engine.generate([5, 6, 7], GREEDY).token_ids) == 6
    assert met


# Forms of a request


def test_every_form_gives_the_same_answer_by_the_same_default_plan(engine: Engine) -> None:
    async def by_loop() -> list[edgespec.Response]:
        stream = engine.astream(ASK, GREEDY)
        chunks = [chunk async for chunk in stream]
        last = await stream.result()
        assert [token for chunk in chunks for token in chunk.token_ids] == last.token_ids
        return [
            last,
            await engine.agenerate(ASK, GREEDY),
            *await engine.agenerate_batch([ASK, [Message("user", "Hi")]], GREEDY),
        ]

    stream = engine.stream(ASK, GREEDY)
    chunks = [*stream]
    assert [token for chunk in chunks for token in chunk.token_ids] == stream.result().token_ids
    assert "".join(chunk.text for chunk in chunks) == stream.result().text
    found = [
        stream.result(),
        engine.generate([Message("user", "Hi")], GREEDY),
        engine.generate(ASK, GREEDY, engine.plan()),
        engine.generate(engine.encode(ASK), GREEDY),
        engine.generate(np.array(engine.encode(ASK)), GREEDY),
        *engine.generate_batch([ASK, ASK], GREEDY),
        *asyncio.run(by_loop()),
    ]
    assert len({tuple(response.token_ids) for response in found}) == 1
    assert len({tuple(response.prompt_ids) for response in found}) == 1
    assert {sum(response.metrics.per_step_drafted) > 0 for response in found} == {True}


def test_plain_decoding_is_asked_for_by_name(engine: Engine) -> None:
    for response in (
        engine.generate(ASK, GREEDY, PLAIN),
        engine.stream(ASK, GREEDY, PLAIN).result(),
        *engine.generate_batch([ASK], GREEDY, PLAIN),
        asyncio.run(engine.agenerate(ASK, GREEDY, PLAIN)),
    ):
        assert sum(response.metrics.per_step_drafted) == 0
        assert response.metrics.steps == 5
    assert repr(PLAIN) == "edgespec.PLAIN"


def test_sampling_may_be_left_out(engine: Engine) -> None:
    stream = engine.stream([5, 6, 7])
    assert len(next(stream).token_ids) == 1
    stream.close()
    assert stream.result().seed is not None


def test_text_is_taken_as_it_is_and_messages_go_through_the_template(engine: Engine) -> None:
    text = engine.render(ASK)
    assert engine.encode(text) == engine.tokenizer.encode(text, add_special_tokens=True)
    assert engine.encode(ASK) == engine.tokenizer.encode(text)
    assert engine.encode("Hi") != engine.encode(ASK)
    assert "Hi" in engine.decode(engine.encode(ASK))


def test_messages_are_written_as_openai_s_clients_write_them(engine: Engine) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert engine.encode([{"role": "user", "content": parts}]) == engine.encode(ASK)
    mixed = [Message("system", "Be brief."), *ASK]
    as_dicts = [{"role": "system", "content": "Be brief."}, *ASK]
    assert engine.encode(mixed) == engine.encode(as_dicts)


def test_what_is_empty_in_a_client_s_dump_says_nothing(engine: Engine) -> None:
    dumped = {"content": "Hi", "refusal": None, "role": "user", "annotations": [], "audio": None}
    tools = {"function_call": None, "tool_calls": None, "tool_call_id": "", "name": None}
    part = {"type": "text", "text": "Hi", "annotations": [], "cache_control": None}
    assert engine.encode([dumped | tools]) == engine.encode(ASK)
    assert engine.encode([{"role": "user", "content": [part]}]) == engine.encode(ASK)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}],
            r"\[0\].tool_calls\[0\].function is null, not a named function",
        ),
        ([{"role": "user", "content": "a", "refusal": "No"}], r'\[0\].refusal is "No", which'),
        (b"abc", "prompt is bytes, not text"),
        (bytearray(b"abc"), "prompt is bytearray, not text"),
        ({"role": "user", "content": "a"}, "one message, not a list"),
        (Message("user", "a"), "one message, not a list"),
        (5, "of type int"),
        (None, "of type NoneType"),
        ({5, 6}, "of type set"),
        ([{"role": "usr", "content": "a"}], r'\[0\].role is "usr"'),
        ([{"role": "user"}], r"\[0\].content is missing"),
        ([{"role": "user", "content": "a", "nme": "b"}], r"\[0\].nme is not a known key"),
        ([5, {"role": "user", "content": "a"}], r"prompt\[1\] is a message"),
        ([5, True], r"prompt\[1\] is true"),
        ([np.array([1, 2])], r"prompt\[0\] is"),
        ("\ud800", "unpaired surrogate"),
    ],
)
def test_prompt_that_is_none_is_refused_with_its_place(
    engine: Engine, wrong: Any, said: str
) -> None:
    for call in (engine.generate, engine.stream, engine.encode):
        with pytest.raises(RequestError, match=said) as error:
            call(wrong)
        assert error.value.remedy
    assert idle(engine)


@pytest.mark.parametrize("empty", ["", []])
def test_empty_prompt_is_refused_at_the_door(engine: Engine, empty: Any) -> None:
    with pytest.raises(LimitError, match="the prompt is empty"):
        engine.stream(empty)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("usr", "a"), 'Message: role is "usr"'),
        (("user", b"a"), "Message: content is"),
        (("user", None), "Message: content is null, not a string"),
        (("user", "\udfff"), "unpaired surrogate"),
    ],
)
def test_message_that_no_template_could_take_is_refused(wrong: tuple[Any, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Message(*wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sampling": {"temperature": 0}}, "sampling is of type dict"),
        ({"plan": "plain"}, "plan is of type str"),
        ({"plan": False}, "plan is of type bool"),
        ({"enable_thinking": True}, "the prompt has no messages"),
    ],
)
def test_parameter_of_another_kind_is_refused(
    engine: Engine, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        engine.generate([5, 6], **wrong)


# Batches


def test_batch_answers_in_order_each_with_its_own_parameters(engine: Engine) -> None:
    numbers = range(9)
    prompts, samplings = [prompt(n) for n in numbers], [sampled(n) for n in numbers]
    found = engine.generate_batch(prompts, samplings, [plan_of(n) for n in numbers])
    assert [response.token_ids for response in found] == [
        engine.generate(prompt(n), sampled(n), plan_of(n)).token_ids for n in numbers
    ]
    assert engine.generate_batch([]) == []


def test_requests_of_a_batch_decode_together(engine: Engine) -> None:
    """None begins before the last one is there."""
    found = engine.generate_batch([[5, 6], [7, 8], [9, 10], [11, 12]], GREEDY, PLAIN)
    sizes = {len(response.metrics.per_step_s) for response in found}
    assert sizes == {5}
    verify = found[0].metrics.stages.verify
    assert all(response.metrics.stages.verify == verify for response in found)


def test_first_error_of_a_batch_is_raised_with_its_place(engine: Engine) -> None:
    for call in (engine.generate_batch, in_loop(engine.agenerate_batch)):
        with pytest.raises(RequestError, match="token id 1000000") as error:
            call([[5, 6], [5, 10**6]], GREEDY)
        assert error.value.__notes__ == ["at prompts[1]"]
    assert idle(engine)


def test_errors_of_a_batch_stand_in_their_places_where_asked(engine: Engine) -> None:
    prompts: list[Any] = [[5, 6], [5, 10**6], [7, 8], b"x"]
    alone = [engine.generate(ids, GREEDY).token_ids for ids in ([5, 6], [7, 8])]
    for call in (engine.generate_batch, in_loop(engine.agenerate_batch)):
        found = call(prompts, GREEDY, return_exceptions=True)
        assert [type(end) for end in found[1::2]] == [RequestError] * 2
        assert [end.token_ids for end in found[::2]] == alone


def test_a_prompt_of_a_batch_without_memory_for_it_harms_no_other(engine: Engine) -> None:
    real = engine.encode

    def encode(prompt: Any, **how: Any) -> Any:
        if prompt == "large":
            raise MemoryError
        return real(prompt, **how)

    with mock.patch.object(engine, "encode", encode):
        found = engine.generate_batch(["large", [5, 6]], GREEDY, return_exceptions=True)
    assert isinstance(found[0], EnvironmentProblem)
    assert len(found[1].token_ids) == 6


def test_a_prompt_that_was_encoded_stays_as_it_is(engine: Engine) -> None:
    rows = ImageRows(np.zeros((6, 8), np.float32), {}, (1, 4, 6), "an image")
    seen = PromptValue.with_images([5, *[6] * 6], [ImageSlots(1, rows)], 2)
    assert engine.encode(seen) is seen
    assert engine.request(seen).prompt.images == seen.images
    with pytest.raises(RequestError, match="enable_thinking"):
        engine.encode(seen, enable_thinking=True)


LOOKS: list[Any] = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]


@pytest.mark.parametrize("form", ["agenerate", "agenerate_batch", "astream"])
def test_an_event_loop_goes_on_while_images_are_read_and_encoded(engine: Engine, form: str) -> None:
    asked, loop_went_on = threading.Event(), threading.Event()

    def encode(prompt: Any, **how: Any) -> list[int]:
        if prompt is LOOKS:
            asked.set()
            assert loop_went_on.wait(60)
        return [5, 6]

    async def answer() -> edgespec.Response:
        if form == "astream":
            return await engine.astream(LOOKS, GREEDY).result()
        if form == "agenerate":
            return await engine.agenerate(LOOKS, GREEDY)
        return (await engine.agenerate_batch(["Hi", LOOKS], GREEDY))[1]

    async def both() -> edgespec.Response:
        task = asyncio.create_task(answer())
        while not asked.is_set():
            await asyncio.sleep(0.001)
        loop_went_on.set()
        return await task

    with mock.patch.object(engine, "encode", encode), mock.patch.object(engine, "images", True):
        found = asyncio.run(both())
    assert found.token_ids == engine.generate([5, 6], GREEDY).token_ids


def test_a_stream_whose_images_cannot_be_read_raises_that(engine: Engine) -> None:
    def encode(prompt: Any, **how: Any) -> list[int]:
        raise RequestError("not there", "Write another.")

    async def ask() -> None:
        stream = engine.astream(LOOKS, GREEDY)
        with pytest.raises(RequestError, match="not there"):
            await stream.result()

    with mock.patch.object(engine, "encode", encode), mock.patch.object(engine, "images", True):
        asyncio.run(ask())
    assert idle(engine)


def test_a_stream_that_is_left_while_its_images_are_read_ends_its_request(engine: Engine) -> None:
    go_on = threading.Event()

    def encode(prompt: Any, **how: Any) -> list[int]:
        assert go_on.wait(60)
        return [5, 6]

    async def ask() -> edgespec.Response:
        stream = engine.astream(LOOKS, LONG)
        stream.cancel()
        go_on.set()
        return await stream.result()

    with mock.patch.object(engine, "encode", encode), mock.patch.object(engine, "images", True):
        found = asyncio.run(ask())
    assert (found.finish_reason, found.token_ids) == ("cancelled", [])
    assert idle(engine)


def test_event_loop_is_woken_once_for_all_answers_of_a_step(engine: Engine) -> None:
    async def answered() -> tuple[int, int]:
        loop, wakes = asyncio.get_running_loop(), list[object]()
        call_soon = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: Any, **more: Any) -> asyncio.Handle:
            wakes.append(callback)
            return call_soon(callback, *args, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        before = engine.stats().steps
        sampling = edgespec.SamplingParams(max_generate_length=8, ignore_eos=True)
        streams = [engine.astream([5 + i] * 4, sampling, edgespec.PLAIN) for i in range(2)]
        responses = [await stream.result() for stream in streams]
        assert [len(response.token_ids) for response in responses] == [8, 8]
        own = [wake for wake in wakes if getattr(wake, "__name__", "") == "take"]
        return len(own), engine.stats().steps - before

    num_wakes, num_steps = asyncio.run(answered())
    assert 7 <= num_wakes <= num_steps + 2  # and the two chunks of the prompts


def in_loop(call: Callable[..., Any]) -> Callable[..., Any]:
    async def called(*args: Any, **how: Any) -> Any:
        return await call(*args, **how)

    return lambda *args, **how: asyncio.run(called(*args, **how))


@pytest.mark.parametrize("wrong", ["abc", 5, None])
def test_batch_that_is_no_list_is_refused(engine: Engine, wrong: Any) -> None:
    with pytest.raises(RequestError, match="not a list of prompts"):
        engine.generate_batch(wrong)


@pytest.mark.parametrize("wrong", [{"sampling": [GREEDY]}, {"plan": [PLAIN]}])
def test_parameters_that_are_not_one_each_are_refused(engine: Engine, wrong: Any) -> None:
    with pytest.raises(RequestError, match="is a list of 1, and there are 2 prompts"):
        engine.generate_batch([[5], [6]], **wrong)


# Ends before the end


def test_stream_that_is_closed_gives_its_lane_back(engine: Engine) -> None:
    with paced() as allow:
        with engine.stream(prompt(1), LONG) as stream:
            allow(1)
            next(stream)
        allow(1)
        assert stream.result().finish_reason == CANCELLED
        with pytest.raises(StopIteration):
            next(stream)
    assert idle(engine)


def test_stream_that_is_dropped_gives_its_lane_back(engine: Engine) -> None:
    with paced() as allow:
        stream = engine.stream(prompt(1), LONG)
        allow(1)
        next(stream)
        handle = stream.handle
        del stream
        gc.collect()
        allow(1)
        assert len(engine.driver.pending) <= 1
    assert len(engine.generate([9, 8], GREEDY).token_ids) == 6
    assert handle.num_emitted == 1
    assert idle(engine)


def test_request_is_cancelled_by_another_thread(engine: Engine) -> None:
    with paced() as allow:
        stream = engine.stream(prompt(2), LONG)
        allow(1)
        next(stream)
        canceller = threading.Thread(target=stream.cancel)
        canceller.start()
        canceller.join()
        allow(1)
        response = stream.result()
    assert (response.finish_reason, len(response.token_ids)) == (CANCELLED, 1)


def test_stream_that_is_not_read_goes_on_and_harms_nobody(engine: Engine) -> None:
    unread = engine.stream(prompt(3), LONG)
    assert len(engine.generate([9, 8], GREEDY).token_ids) == 6
    assert len(unread.result().token_ids) == 40


def test_task_that_is_cancelled_ends_its_request(engine: Engine) -> None:
    async def all_of_them() -> list[Any]:
        tasks = [
            asyncio.create_task(engine.agenerate(prompt(1), LONG)),
            asyncio.create_task(engine.agenerate_batch([prompt(2), prompt(3)], LONG)),
            asyncio.create_task(engine.astream(prompt(4), LONG).result()),
        ]
        while len(engine.driver.pending) < 4:  # until they have asked
            await asyncio.sleep(0.001)
        handles.extend(engine.driver.pending)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    handles: list[Any] = []
    with paced() as allow:
        found = asyncio.run(all_of_them())
        allow(1)
    assert [type(end) for end in found] == [asyncio.CancelledError] * 3
    assert len(engine.generate([9, 8], GREEDY).token_ids) == 6
    assert all(handle.cancelled for handle in handles)
    assert max(handle.num_emitted for handle in handles) <= 1
    assert idle(engine)


def test_prompts_are_encoded_outside_the_event_loop(engine: Engine) -> None:
    async def ask() -> None:
        await engine.agenerate(ASK, GREEDY)
        await engine.agenerate_batch([ASK], GREEDY)
        await engine.astream(ASK, GREEDY).result()

    threads, real = list[Any](), PromptEncoder.encode

    def encode(self: PromptEncoder, *args: Any, **more: Any) -> Any:
        threads.append(threading.current_thread())
        return real(self, *args, **more)

    with mock.patch.object(PromptEncoder, "encode", encode):
        asyncio.run(ask())
    assert len(threads) == 3
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"priority": True}, "priority"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_options_of_a_request_s_turn_are_checked(
    engine: Engine, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as raised:
        engine.generate([5], GREEDY, **options)
    assert raised.value.param == param


def test_loop_that_leaves_an_iteration_ends_the_request(engine: Engine) -> None:
    async def first_chunk() -> edgespec.AsyncStream:
        async with engine.astream(prompt(4), LONG) as stream:
            allow(1)
            async for _ in stream:
                break
        return stream

    with paced() as allow:
        stream = asyncio.run(first_chunk())
        allow(1)
    assert stream.handle.cancelled
    assert len(engine.generate([9, 8], GREEDY).token_ids) == 6


def test_loop_that_is_closed_meanwhile_ends_the_request_and_nothing_else(engine: Engine) -> None:
    async def ask() -> edgespec.AsyncStream:
        return engine.astream(prompt(4), LONG)

    with paced() as allow:
        stream = asyncio.run(ask())
        allow(1)
    assert len(engine.generate([9, 8], GREEDY).token_ids) == 6
    assert stream.handle.cancelled


def test_interrupt_of_whoever_waits_ends_that_request_alone(engine: Engine) -> None:
    """As Ctrl-C in the main thread, while the engine works in its own."""
    expected = engine.generate(prompt(5), LONG).token_ids
    with paced() as allow:
        mate = engine.stream(prompt(5), LONG)
        allow(1)
        next(mate)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt(6), LONG)
        timer.join()
        interrupted = [handle for handle in engine.driver.pending if handle is not mate.handle]
        assert all(handle.cancelled for handle in interrupted)
        allow(10_000)
        assert mate.result().token_ids == expected
    assert idle(engine)


# Closed, forked, pickled, dropped


def test_closed_engine_says_so(own: Engine) -> None:
    assert len(own.generate([5, 6], GREEDY).token_ids) == 6
    own.close()
    own.close()
    for call in (
        own.generate,
        own.stream,
        lambda ids: own.generate_batch([ids]),
        lambda ids: asyncio.run(own.agenerate(ids)),
        own.next_logits,
    ):
        with pytest.raises(EngineClosed, match="this engine is closed") as error:
            call([5, 6])
        assert "edgespec.load" in error.value.remedy


def test_close_ends_what_is_under_way_and_the_thread(own: Engine) -> None:
    with paced() as allow:
        streams = [own.stream(prompt(number), LONG) for number in range(6)]
        allow(1)
        next(streams[0])
        thread = own.driver.work.thread
        closer = threading.Thread(target=own.close)
        closer.start()
        allow(1)
        for stream in streams:
            with pytest.raises(EngineClosed, match="before this request ended"):
                stream.result()
        closer.join(60)
    assert thread is not None
    assert not thread.is_alive()
    assert not closer.is_alive()


def test_engine_in_an_event_loop_is_closed_with_its_block(engine_dir: Path) -> None:
    async def use() -> Engine:
        async with edgespec.load(engine_dir) as opened:
            assert len((await opened.agenerate([5, 6], GREEDY)).token_ids) > 0
        return opened

    with pytest.raises(EngineClosed):
        asyncio.run(use()).generate([5, 6])


def test_engine_that_is_dropped_leaves_neither_memory_nor_thread(engine_dir: Path) -> None:
    opened = edgespec.load(engine_dir)
    opened.generate([5, 6], GREEDY)
    thread, runner = opened.driver.work.thread, weakref.ref(opened.base.runner)
    assert thread is not None
    del opened
    for _ in range(60):  # the thread may still be on its way out of the last step
        gc.collect()
        thread.join(1)
        if not thread.is_alive():
            break
    gc.collect()
    assert not thread.is_alive()
    assert runner() is None


def test_engine_is_neither_pickled_nor_copied(engine: Engine) -> None:
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"Open one in each process, with edgespec\.load"):
            call(engine)


def test_error_is_pickled_whole() -> None:
    for error in (LimitError("too long", "Shorten it."), EngineClosed("closed")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (again.what, again.remedy, str(again)) == (error.what, error.remedy, str(error))


PROGRAM = """
import os, sys, threading
import edgespec
from edgespec import SamplingParams
engine = edgespec.load(sys.argv[1])
sampling = SamplingParams(temperature=0, max_generate_length=4)
engine.generate([5, 6], sampling)
"""


def python(program: str, *args: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM + program, *map(str, args)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done


FORK = """
child = os.fork()
if child == 0:
    try:
        engine.generate([5, 6], sampling)
    except edgespec.EnvironmentProblem as error:
        print(error, flush=True)
    engine.close()
    del engine
    os._exit(7)  # as multiprocessing does: with exit handlers ONNX Runtime's own would hang
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(len(engine.generate([5, 6], sampling).token_ids))
"""


def test_fork_is_refused_and_ends_and_its_parent_goes_on(engine_dir: Path) -> None:
    said = python(FORK, engine_dir).stdout
    assert "of which this is a fork" in said
    assert "Open an engine after the fork" in said
    assert said.splitlines()[-1] == "4"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("stream = engine.stream([5, 6]); next(stream); raise SystemExit(4)", 4),
        ("t = threading.Thread(target=engine.generate, args=([5, 6], sampling)); t.start()", 0),
    ],
)
def test_interpreter_ends_whatever_is_open(engine_dir: Path, program: str, code: int) -> None:
    assert python(program, engine_dir, code=code).stderr == ""


# What a file's run and an application's requests have of each other


def test_run_over_a_file_and_requests_of_threads_share_the_engine(engine: Engine) -> None:
    expected = [engine.generate(prompt(n), LONG).token_ids for n in range(4)]
    queue = deque(GenerationRequest(prompt(n), LONG, engine.plan()) for n in range(2))
    requests = list(queue)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(engine.generate, prompt(n), LONG) for n in (2, 3)]
        found = {
            requests.index(asked): event.token_ids
            for asked, event in engine.run_queue(queue, 2)
            if isinstance(event, Response)
        }
        assert [other.result().token_ids for other in others] == expected[2:]
    assert [found[0], found[1]] == expected[:2]


def test_answer_may_be_asked_for_in_the_midst_of_a_run_over_a_file(engine: Engine) -> None:
    queue = deque([GenerationRequest(prompt(1), GREEDY)])
    lengths = [len(engine.generate([5, 6], GREEDY).token_ids) for _ in engine.run_queue(queue)]
    assert lengths == [6] * 7


def test_step_of_a_file_s_run_that_is_interrupted_is_told_to_the_others(engine: Engine) -> None:
    real, interrupted = Scheduler.step, threading.Event()

    def step(self: Scheduler) -> Any:
        if threading.current_thread() is threading.main_thread():
            real(self)
            interrupted.set()
            raise KeyboardInterrupt
        mate_runs = any(seq.num_emitted for seq in self.session.running)
        return [] if mate_runs and not interrupted.is_set() else real(self)

    with mock.patch.object(Scheduler, "step", step):
        mate = engine.stream(prompt(2), LONG)
        next(mate)
        run = engine.run_queue(deque([GenerationRequest(prompt(1), GREEDY)]))
        with pytest.raises(KeyboardInterrupt):
            next(run)
        with pytest.raises(EnvironmentProblem, match="interrupted"):
            mate.result()
    assert len(engine.generate([9, 8], GREEDY).token_ids) == 6
    assert idle(engine)


def test_passes_are_recorded_for_a_run_over_a_file_alone(engine: Engine) -> None:
    """What serves for days must not keep a list of every pass."""
    engine.generate([5, 6], GREEDY)
    assert engine.session.log.passes == {}


# What is said


def test_requests_are_logged_with_their_metrics_and_without_their_text(
    own: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "edgespec")
    response = own.generate(ASK, GREEDY)
    with pytest.raises(LimitError):
        own.generate([5] * 49, GREEDY)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    added, admitted, finished = (text for _, text in said)
    assert [level for level, _ in said] == ["DEBUG", "DEBUG", "INFO"]
    assert added.startswith("request 1: ")
    assert admitted.startswith("request 1 has lane 0 after ")
    assert finished.startswith("request 1: max-length, ")
    assert "6 tokens" in finished
    assert "acceptance length" in finished
    assert response.text not in finished


def test_library_says_nothing_unless_asked(engine_dir: Path) -> None:
    asked = "import logging; logging.basicConfig(level='INFO'); engine.generate([5, 6], sampling)"
    assert "INFO:edgespec.runtime.loop.driver:request 2: " in python(asked, engine_dir).stderr


# What is public


def test_errors_are_public_down_to_the_last() -> None:
    def below(kind: type[EdgeSpecError]) -> Sequence[type[EdgeSpecError]]:
        children = [k for k in kind.__subclasses__() if k.__module__ == "edgespec.errors"]
        return [kind, *(error for child in children for error in below(child))]

    errors = {error.__name__: error for error in below(EdgeSpecError)}
    assert len(errors) > 10
    assert {name: getattr(edgespec, name) for name in errors} == errors


def test_nothing_else_is_public() -> None:
    configs = {name for name in dir(edgespec) if name.endswith("DecodingConfig")}
    assert set(dir(edgespec)) == {*edgespec.__all__, *configs, "__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'Scheduler'"):
        _ = edgespec.Scheduler


# ---- mistakes of a caller


def test_sizes_are_refused_in_words_of_python(engine: Engine) -> None:
    with pytest.raises(LimitError) as refused:
        engine.plan(top_k=100, steps=100)
    assert refused.value.what.startswith("top_k 100 times steps 100 exceeds")
    with pytest.raises(LimitError) as refused:
        engine.generate([5], plan=DraftPlan(1, 2, 9))
    assert refused.value.what.startswith("verify_size 9: with top-k 1")
    assert "`spec`" not in str(refused.value)


@pytest.mark.parametrize("nowhere", [None, "", 5])
def test_what_is_no_path_is_refused(nowhere: Any) -> None:
    with pytest.raises(BundleError, match="not the path of a directory"):
        edgespec.load(nowhere)


def test_directory_that_is_missing_is_named_without_a_flag(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as refused:
        edgespec.load(tmp_path / "nosuch")
    assert refused.value.what == f"{tmp_path / 'nosuch'} does not exist"


@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_bytes_that_cannot_be_are_refused(engine_dir: Path, size: Any) -> None:
    with pytest.raises(OptionError, match=f"prefix_cache_bytes is {size}"):
        edgespec.load(engine_dir, prefix_cache_bytes=size)


def test_memory_for_prompts_of_the_whole_context_in_all_lanes(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PREFIX_CACHE_BYTES", 100)
    budgets = []
    for memory in (2**40, 8 * 1000, None):
        monkeypatch.setattr(parts, "machine_bytes", lambda memory=memory: memory)
        with edgespec.load(engine_dir, prefix_cache_bytes=None) as engine:
            budgets.append(engine.session.prefixes.budget_bytes)
    assert budgets[1:] == [1000, 100]
    with edgespec.load(engine_dir, prefix_cache_bytes=budgets[0]) as engine:
        engine.generate([5] * 20, edgespec.SamplingParams(max_generate_length=1))
        (entry,) = engine.session.prefixes.entries
        lanes = len(engine.base.lanes)
        room = budgets[0] / lanes * len(entry.cache_key) / engine.base.capacity
    assert len(entry.cache_key) == 20
    assert entry.size_bytes <= room < 1.1 * entry.size_bytes


def test_closed_engine_does_nothing_more(engine_dir: Path) -> None:
    engine = edgespec.load(engine_dir)
    engine.close()
    for call in (engine.__enter__, engine.plan, lambda: engine.encode("a")):
        with pytest.raises(EngineClosed):
            call()
