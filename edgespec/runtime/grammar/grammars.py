"""Compiles what requests say of their answers, by llguidance, within limits.

Knows an engine's vocabulary and its end tokens; keeps what was compiled last. Knows no sequence.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from edgespec.errors import EdgeSpecError, LimitError, MissingDependency, RequestError
from edgespec.prompts import Guided
from edgespec.runtime.grammar.guide import Guide
from edgespec.runtime.grammar.weight import Weight, weight
from edgespec.runtime.text.thinking import Thoughts
from edgespec.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)
MAX_KEPT = 64  # compiled grammars
MAX_WEIGHT = 10_000  # letters of a pattern with all repetitions written out: some 4 ms a token
MAX_MULTIPLE = 1000  # of multipleOf: its automaton has as many states
MAX_COMPILE_S = 0.5  # of processor time, its first mask included
# What one token may cost (see LLParserLimits); the defaults are up to ten times as much
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # they would hold the schema's text
}
# JSON as json.dumps writes it: what a schema says then leaves most tokens no choice
JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
JSON_PART = re.compile(r"%json\s*")  # of a Lark grammar; a schema follows
UNSUPPORTED = re.compile(r"Unimplemented keys: (\[.*?\])|(oneOf) constraints are not supported")


class Grammars:
    """The grammars of one engine. Any thread may ask for one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.end_ids = tuple(sorted(end_ids))
        self.kept: OrderedDict[Guided, LLMatcher] = OrderedDict()
        self.lock = Lock()
        self.vocabulary: LLTokenizer | None = None

    def guide(self, guided: Guided, prompt: Sequence[int]) -> Guide:
        """What a request's grammar allows behind its prompt.

        Raises RequestError for a grammar that cannot be, LimitError for one that is too dear,
        MissingDependency without llguidance.
        """
        with self.lock:
            matcher = self.kept.get(guided)
            if matcher is None:
                matcher = self.kept[guided] = self.compiled(guided)
            self.kept.move_to_end(guided)
            while len(self.kept) > MAX_KEPT:
                self.kept.popitem(last=False)
            matcher = matcher.deep_copy()
        thoughts = Thoughts.of(prompt, self.tokenizer)
        return Guide(matcher, self.vocab_size, self.end_ids, len(prompt), thoughts)

    def compiled(self, guided: Guided) -> LLMatcher:
        """The matcher of a grammar, at its beginning."""
        check_weight(guided)
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise MissingDependency(
                "structured output needs llguidance, which is not installed",
                "Run: pip install 'edgespec[structured]'.",
            ) from error
        vocabulary, began_s = self.opened(), time.thread_time()
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        matcher = LLMatcher(vocabulary, source(guided), log_level=0, limits=limits)
        if matcher.is_error():
            raise refused(matcher.get_error())
        matcher.compute_bitmask()
        spent_s = time.thread_time() - began_s
        if matcher.is_error() or spent_s > MAX_COMPILE_S:
            why = matcher.get_error() or f"its first token takes {spent_s:.1f} s"
            raise too_dear(why)
        logger.debug("a grammar was compiled in %.1f ms", 1000 * spent_s)
        return matcher

    def opened(self) -> LLTokenizer:
        """The vocabulary as llguidance has it; ids beyond the tokenizer's are never allowed."""
        from llguidance import LLTokenizer

        if not self.end_ids:
            raise RequestError(
                "this model has no end token, and an answer of a form has to end",
                "Ask for an answer without a form.",
            )
        if self.vocabulary is None:
            try:
                self.vocabulary = LLTokenizer(
                    self.tokenizer.to_json(), self.vocab_size, list(self.end_ids)
                )
            except Exception as error:  # of whatever kind: its own reader is stricter than ours
                message = f"llguidance cannot read this model's tokenizer: {str(error)[:200]}"
                raise RequestError(message, "Ask for an answer without a form.") from error
        return self.vocabulary


def source(guided: Guided) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher

    if guided.json_schema is not None or guided.json_object:
        schema = guided.json_schema if guided.json_object is False else '{"type": "object"}'
        assert isinstance(schema, str)
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)  # type: ignore[arg-type]
    if guided.choice is not None:
        lines = "\n  | ".join(json.dumps(text) for text in guided.choice)
        return LLMatcher.grammar_from_lark(f"start: {lines}")
    if guided.regex is not None:
        return LLMatcher.grammar_from_regex(guided.regex)
    assert guided.grammar is not None
    return LLMatcher.grammar_from_lark(guided.grammar)


def check_weight(guided: Guided) -> None:
    """Raises LimitError for counted repetitions that would take too long, and RequestError for keys
    of a schema that would loosen it."""
    if guided.grammar is not None:
        text, schemas = without_schemas(guided.grammar)
        parts = [weight(line) for line in text.splitlines()]
        parts += [schema_weight(schema) for schema in schemas]
        total = max(
            math.prod(part.times for part in parts), sum(part.size for part in parts)
        )  # rules stand in each other by their names
    elif guided.json_schema is not None:
        assert isinstance(guided.json_schema, str)
        schema = json.loads(guided.json_schema)
        if any(key == "x-guidance" for key, _ in pairs(schema)):
            raise unsupported(["x-guidance"])
        total = schema_weight(schema).size
    else:
        total = 0 if guided.regex is None else weight(guided.regex).size
    if total > MAX_WEIGHT:
        why = f"its repetitions written out are {total} long, and {MAX_WEIGHT} is the limit"
        raise too_dear(why)


def without_schemas(grammar: str) -> tuple[str, list[object]]:
    """A grammar without the schemas that stand in it, and these. What llguidance does not read as
    one either stays."""
    texts, schemas, start = list[str](), list[object](), 0
    for found in JSON_PART.finditer(grammar):
        if found.start() < start:  # inside of one
            continue
        with suppress(ValueError, RecursionError):
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
            texts.append(grammar[start : found.end()])
            schemas.append(schema)
            start = end
    return "".join((*texts, grammar[start:])), schemas


def schema_weight(schema: object) -> Weight:
    """The patterns of a schema: their letters together, and the largest product of counts. Raises
    LimitError for a multipleOf that is too large."""
    patterns = list[Weight]()
    for key, value in pairs(schema):
        if key == "multipleOf" and isinstance(value, int | float) and value > MAX_MULTIPLE:
            raise too_dear(f"multipleOf is {value:g}, and {MAX_MULTIPLE} is the limit")
        if key == "pattern" and isinstance(value, str):
            patterns.append(weight(value))
        if key == "patternProperties" and isinstance(value, dict):
            patterns += map(weight, value)
    times = max((pattern.times for pattern in patterns), default=1)
    return Weight(sum(pattern.size for pattern in patterns), times)


def pairs(value: object) -> Iterator[tuple[str, object]]:
    """All keys of a schema with their values, whatever they stand in."""
    for child in value if isinstance(value, list) else []:
        yield from pairs(child)
    for key, child in value.items() if isinstance(value, dict) else []:
        yield key, child
        yield from pairs(child)


def refused(error: str) -> EdgeSpecError:
    """The error for what llguidance does not take."""
    if found := UNSUPPORTED.search(error):
        return unsupported(json.loads(found[1]) if found[1] else [found[2]])
    if "too big" in error or "fuel" in error or "too complex" in error.lower():
        return too_dear(error)
    why = " ".join(error.split())[:300]
    return RequestError(f"`guided` cannot be: {why}", "Correct it.")


def unsupported(keys: Sequence[str]) -> RequestError:
    """The error for keys of a schema that say what no grammar here can."""
    message = f"`guided` has {', '.join(keys)}, which this version does not support"
    remedy = "Remove it, or say it by type, enum, anyOf, pattern, minimum or maxItems."
    return RequestError(message, remedy)


def too_dear(why: str) -> LimitError:
    """The error for a grammar that would hold up all other requests."""
    return LimitError(f"`guided` is too large: {why[:200]}", "Simplify it.")
