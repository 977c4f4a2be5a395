"""Lossless speculative decoding for edge devices.

>>> import edgespec
>>> engine = edgespec.load("engines")
>>> sampling = edgespec.SamplingParams(temperature=0, max_generate_length=8)
>>> response = engine.generate([{"role": "user", "content": "Why is the sky blue?"}], sampling)
>>> print(response.text)
>>> response.metrics.completion_tokens
8

## Prompts

A text goes to the model as it is, with the special tokens that its tokenizer adds. Messages go
through the chat template; they are dicts as OpenAI's clients write them, or `Message`. Token ids
are a list of integers, or a numpy array. Anything else is a RequestError.

>>> same = engine.generate([edgespec.Message("user", "Why is the sky blue?")], sampling)
>>> same.token_ids == response.token_ids
True
>>> engine.generate(response.prompt_ids, sampling).text == response.text
True

## One answer, piece by piece, or many

>>> stream = engine.stream("The sky is blue because", sampling)
>>> for chunk in stream:
...     print(chunk.text, end="", flush=True)
>>> stream.result().finish_reason
'max-length'
>>> answers = engine.generate_batch(["One", "Two", "Three"], sampling)
>>> [len(answer.token_ids) for answer in answers]
[8, 8, 8]

All forms take the same prompts and parameters, and without a plan all draft alike: with
`engine.plan()` where the engine has a draft. `edgespec.PLAIN` decodes without drafts.

>>> plain = engine.generate("The sky is blue because", sampling, edgespec.PLAIN)
>>> plain.token_ids == stream.result().token_ids
True

## How much is drafted

`engine.plan()` is what suits the device. `engine.plan(top_k, steps, verify_size)` drafts a chain or
a dynamic tree of these sizes; `StaticPlan.of` makes a plan that always drafts the same tree.

>>> tree = edgespec.StaticPlan.of([[0], [1], [0, 0]])
>>> branching = engine.generate("The sky is blue because", sampling, tree)
>>> branching.token_ids == plain.token_ids
True

## Which drafts are accepted

An answer made with drafts is that of plain decoding: the accept rule is `exact`. Others are
`RejectionAcceptance` (the same distribution, other tokens), and two that are lossy:
`TypicalAcceptance` and `RelaxedAcceptance`. They are chosen for an engine (`edgespec.load(...,
acceptance="rejection")`) or for a request, by name or with their options; the metrics say which it
was, and what it guarantees. docs/acceptance.md has the definitions.

>>> typical = edgespec.TypicalAcceptance(posterior_threshold=0.09)
>>> answer = engine.generate("The sky is blue because", acceptance=typical)
>>> answer.metrics.acceptance, answer.metrics.lossless
('typical', 'no')

## A drafter of your own

An object with a method `propose` drafts instead of a draft engine: docs/own_drafter.md.

>>> class Repeat:
...     def propose(self, context):
...         return [context.tokens[-1]] * context.max_draft_len
>>> with edgespec.load("engines", drafter=Repeat()) as own:
...     repeated = own.generate("The sky is blue because", sampling)
>>> repeated.token_ids == plain.token_ids
True

## Threads

Any number of threads may use one engine. Their requests join one scheduler: as many run at a time
as the engines were built for (`edgespec build --max-batch-size`), and the others wait in the order
in which they came. In float32 an answer does not depend on what runs beside it; in low-bit engines
it may where two candidates are close, as rounding depends on the number of rows. An error ends the
request that met it. Where the engine itself fails, the requests that are in that step end.

>>> from concurrent.futures import ThreadPoolExecutor
>>> with ThreadPoolExecutor(4) as pool:
...     asked = [pool.submit(engine.generate, word, sampling) for word in ("One", "Two", "Three")]
>>> [request.result().token_ids for request in asked] == [answer.token_ids for answer in answers]
True

Prompts are read in turn, the one with the shortest rest first, and each fourth time the one that
came first. Beside answers that run a step reads so many rows of a prompt as cost about one and a
half of their steps, by the costs that `build` stored (32 rows where there are none); where nothing
runs, as many as the engine reads best. A prompt is kept at its end, as far as `prefix_cache_bytes`
allows, and whoever begins alike with the same `cache_salt` goes on from there. Requests of a lower
`priority` go first, `timeout_s` ends one with what there is (finish reason `timeout`), and with
`edgespec.load(..., max_queue=N)` no more than N wait: the next one gets QueueFull. `engine.stats()`
says what runs, waits and was done.

A thread of the engine's own computes while requests wait. Ctrl-C interrupts whoever waits in the
main thread, ends that request, and no other. The thread does not keep the interpreter alive.

## Event loops

`agenerate`, `astream` and `agenerate_batch` are the same for asyncio.

>>> import asyncio
>>> async def main():
...     async with edgespec.load("engines") as engine:
...         first, second = await asyncio.gather(
...             engine.agenerate("One", sampling), engine.agenerate("Two", sampling)
...         )
...         async with engine.astream("Three", sampling) as stream:
...             pieces = [chunk.text async for chunk in stream]
...             third = await stream.result()
...     return [first.text, second.text, third.text, "".join(pieces)]
>>> asyncio.run(main()) == [*(answer.text for answer in answers), answers[2].text]
True

## Cancelling

`stream.cancel()`, from any thread, ends a request after the step that runs; what there is comes as
a Response whose finish reason is `cancelled`. A stream that is closed or dropped, a task that is
cancelled and an exception in whoever waits do the same.

>>> with engine.stream("The sky is blue because", sampling) as stream:
...     first = next(stream)
>>> stream.result().finish_reason in ("cancelled", "max-length")
True

## Errors

All errors are children of EdgeSpecError. `what` says what happened, `remedy` what to do.

>>> try:
...     engine.generate([{"role": "usr", "content": "Hi"}])
... except edgespec.RequestError as error:
...     print(error.what)
prompt: [0].role is "usr".

## Logging

The logger is `edgespec`; without a handler of the application it says nothing. At INFO: engines
that are opened, and each request's end with its metrics. At DEBUG: its arrival and the lane that it
gets. At WARNING: notes on an engine (`engine.notes`) and requests that fail. No line holds text of
prompts or answers. ONNX Runtime writes its own errors to stderr and its warnings not at all; what
fails in it is raised as EnvironmentProblem.

>>> import logging
>>> logging.basicConfig()
>>> logging.getLogger("edgespec").setLevel(logging.INFO)

## Processes

An engine cannot be pickled, and in a fork of its process it refuses requests: open one in each
process. `close` ends the requests that run and frees the memory; a `with` block does it.

>>> engine.close()
>>> engine.generate("One")
Traceback (most recent call last):
...
edgespec.errors.EngineClosed: this engine is closed
Open it again with edgespec.load, and keep it open while requests run.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Ctrl-C in the first moment of the command line ends in Python's own traceback: import nothing here
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any, Literal

    from edgespec.compat.decoding import DecodingConfig
    from edgespec.errors import (
        BuildError,
        BundleError,
        CheckpointError,
        ContractError,
        EdgeSpecError,
        EngineClosed,
        EngineMismatch,
        EnvironmentProblem,
        GoldenMismatch,
        InternalError,
        LimitError,
        MissingDependency,
        OptionError,
        OutputError,
        OverwriteError,
        PairingError,
        QueueFull,
        RequestError,
        UnsupportedModel,
    )
    from edgespec.images import ImageRules
    from edgespec.prompts import Guided, ImageItem, Message, SamplingParams
    from edgespec.runtime.acceptance.verify import (
        Acceptance,
        ExactAcceptance,
        RejectionAcceptance,
        RelaxedAcceptance,
        TypicalAcceptance,
    )
    from edgespec.runtime.drafters.base import Drafter
    from edgespec.runtime.drafters.options import DrafterOptions
    from edgespec.runtime.drafters.trtllm import PreparesDraftTokens
    from edgespec.runtime.drafters.user import DraftContext, Proposal, UserDrafter
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.loop.generation import Chunk, Response
    from edgespec.runtime.loop.metrics import RequestMetrics
    from edgespec.runtime.loop.stats import EngineStats
    from edgespec.runtime.streams import AsyncStream, Stream
    from edgespec.runtime.trees.static_tree import StaticPlan
    from edgespec.runtime.trees.tree import PLAIN, DraftPlan

__all__ = [
    "PLAIN",
    "AsyncStream",
    "BuildError",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "ContractError",
    "DecodingConfig",
    "DraftContext",
    "DraftPlan",
    "EdgeSpecError",
    "Engine",
    "EngineClosed",
    "EngineMismatch",
    "EngineStats",
    "EnvironmentProblem",
    "ExactAcceptance",
    "GoldenMismatch",
    "Guided",
    "ImageItem",
    "ImageRules",
    "InternalError",
    "LimitError",
    "Message",
    "MissingDependency",
    "OptionError",
    "OutputError",
    "OverwriteError",
    "PairingError",
    "Proposal",
    "QueueFull",
    "RejectionAcceptance",
    "RelaxedAcceptance",
    "RequestError",
    "RequestMetrics",
    "Response",
    "SamplingParams",
    "StaticPlan",
    "Stream",
    "TypicalAcceptance",
    "UnsupportedModel",
    "UserDrafter",
    "load",
]

# Where the public names stand; all others are internal. They load when they are first used.
HOMES = {
    "PLAIN": "edgespec.runtime.trees.tree",
    "AsyncStream": "edgespec.runtime.streams",
    "Chunk": "edgespec.runtime.loop.generation",
    "DecodingConfig": "edgespec.compat.decoding",
    "DraftContext": "edgespec.runtime.drafters.user",
    "DraftPlan": "edgespec.runtime.trees.tree",
    "Engine": "edgespec.runtime.engine",
    "ExactAcceptance": "edgespec.runtime.acceptance.verify",
    "Guided": "edgespec.prompts",
    "ImageItem": "edgespec.prompts",
    "ImageRules": "edgespec.images",
    "Message": "edgespec.prompts",
    "Proposal": "edgespec.runtime.drafters.user",
    "RejectionAcceptance": "edgespec.runtime.acceptance.verify",
    "RelaxedAcceptance": "edgespec.runtime.acceptance.verify",
    "RequestMetrics": "edgespec.runtime.loop.metrics",
    "EngineStats": "edgespec.runtime.loop.stats",
    "Response": "edgespec.runtime.loop.generation",
    "SamplingParams": "edgespec.prompts",
    "StaticPlan": "edgespec.runtime.trees.static_tree",
    "Stream": "edgespec.runtime.streams",
    "TypicalAcceptance": "edgespec.runtime.acceptance.verify",
    "UserDrafter": "edgespec.runtime.drafters.user",
}


def load(
    engine_dir: str | Path,
    *,
    spec_decode: bool | Literal["auto"] | None = None,
    drafter: str | Drafter | UserDrafter | PreparesDraftTokens | None = None,
    drafter_options: DrafterOptions | Mapping[str, object] | None = None,
    speculative_config: DecodingConfig | Mapping[str, object] | None = None,
    exact: bool = False,
    prefix_cache_bytes: int | None = 256 * 2**20,
    prefix_cache_dir: str | Path | None = None,
    acceptance: Acceptance = None,
    spec_policy: Literal["fixed", "adaptive"] | None = None,
    tuned: bool = True,
    multimodal_engine_dir: str | Path | None = None,
    image_root: str | Path | Sequence[str | Path] | None = None,
    allow_image_urls: bool = False,
    max_queue: int | None = None,
) -> Engine:
    """Opens an engine directory, as `edgespec build` made it, and returns the engine.

    `spec_decode` None enables speculative decoding if the directory has a draft engine, "auto" also
    where it has only a plain one, by a method that needs no draft. `drafter` is the name of such a
    method, or a drafter of your own, as an object or as `package.module:Class`
    (docs/own_drafter.md); `drafter_options` are the method's or its own. `speculative_config` names
    a method with its sizes and options instead, as TensorRT-LLM does (docs/config.md); a
    `speculative_model` in it must be what the draft engine was made from. `exact` is
    that of `infer --exact`. `prefix_cache_bytes` bounds the KV rows that are kept for later prompts
    that begin alike; 0 keeps none, None as many as prompts of the whole context in all lanes have,
    up to an eighth of the memory. In `prefix_cache_dir` they are kept for engines that are opened
    later, 16 times as many bytes (docs/serving.md). `acceptance` is the accept rule, by its name or
    with its options: see "Which drafts are accepted". `spec_policy` "adaptive" drafts each step as
    much as pays, "fixed" always the plan; None is adaptive where no sizes are given and the costs
    of steps were measured. `tuned` False leaves the plan of `edgespec tune` out.
    `multimodal_engine_dir` holds the image encoder of a vision-language model; None is `visual` in
    `engine_dir`, where that is there. Names of images begin at `image_root`, and only files below
    it are read; of several directories names begin at the first. None is the working directory.
    URLs are fetched only with `allow_image_urls` (docs/images.md). With `max_queue` a request that
    finds so many waiting for a lane raises QueueFull. Raises BundleError, PairingError,
    EngineMismatch, LimitError or EnvironmentProblem; OptionError or RequestError for options, an
    accept rule or a drafter that cannot be.
    """
    from pathlib import Path

    from edgespec.images import ImageRules
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.engine_request import compare_named

    given = [image_root] if isinstance(image_root, str | Path) else image_root or ()
    roots = [Path(root) for root in given]
    engine = Engine(
        engine_dir,
        spec_decode=spec_decode,
        drafter=drafter,
        drafter_options=drafter_options,
        speculative_config=speculative_config,
        exact=exact,
        prefix_cache_bytes=prefix_cache_bytes,
        prefix_cache_dir=prefix_cache_dir,
        acceptance=acceptance,
        spec_policy=spec_policy,
        tuned=tuned,
        multimodal_engine_dir=multimodal_engine_dir,
        image_rules=ImageRules(roots[0] if roots else None, tuple(roots[1:]), allow_image_urls),
        max_queue=max_queue,
    )
    if engine.speculation is not None:
        from edgespec.pairing.named import check_named

        compare_named(engine, check_named)
    return engine


def __getattr__(name: str) -> Any:
    if name.endswith("DecodingConfig") and name != "DecodingConfig":
        from edgespec.compat.speculative_config import class_named

        return class_named(name)
    if name not in __all__:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES.get(name, "edgespec.errors")), name)


def __dir__() -> list[str]:
    from edgespec.compat.speculative_config import config_names

    return [*__all__, *config_names(), "__version__"]
