"""Calls of tools apart from the answer, as the text comes.

Knows the forms in which models write calls, by their marks, as text or as special tokens, which
make none. What begins like a call and is none stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from edgespec.prompts import Guided
from edgespec.prompts.guided import MAX_SCHEMA_BYTES
from edgespec.prompts.places import JsonPlace
from edgespec.runtime.grammar.grammars import JSON_FORM
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.serve.bodies import SOURCE
from edgespec.serve.reasoning import ThoughtSplitter, ending

UNTERMINATED = "Unterminated string"  # what json says of a text that ends within one
BETWEEN = re.compile(r"[\s;,]*")  # objects that are several calls
ESCAPE = "<escape>"
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")
BARE_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")
PYTHONS = {"True": True, "False": False, "None": None}  # as templates write them too
MAX_START = 64  # characters that tell whether a call starts
LARK_TOKEN = "<[{}]>"
Parts = list[tuple[Any, Any]]  # names with their arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; `arguments` is a text of JSON."""

    id: str
    name: str
    arguments: str


class Texts(dict[str, str]):
    """Arguments that were written as texts, whatever their types."""


class Unended(ValueError):
    """A text that is a call if it goes on."""


# ---- what stands between the marks. Parsers raise ValueError for what is no call


def of_objects(text: str) -> Parts:
    """Calls as JSON: an object, several, or a list of them."""
    found: Parts = []
    decoder, at = json.JSONDecoder(parse_constant=_no_number), 0
    while (at := _behind_blanks(text, at)) < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if error.msg.startswith(UNTERMINATED):
                raise Unended(text) from error
            raise
        found += [_of_object(item) for item in (value if isinstance(value, list) else [value])]
    return found


def of_elements(text: str) -> Parts:
    """`<function=NAME><parameter=KEY>value</parameter></function>`, or what `of_objects` takes."""
    if not text.lstrip().startswith("<"):
        return of_objects(text)
    found: Parts = []
    while text := text.strip():
        name, text = _element(text, "<function=")
        values = Texts()
        while not (text := text.lstrip()).startswith("</function>"):
            key, text = _element(text, "<parameter=")
            value, end, text = text.partition("</parameter>")
            if not end:
                raise ValueError("no end of a parameter")
            values[key] = value.removeprefix("\n").removesuffix("\n")
        text = text.removeprefix("</function>")
        found.append((name, values))
    return found


def of_named(text: str) -> Parts:
    """`NAME[ARGS]{...}`, or what `of_objects` takes."""
    named = NAMED.match(text)
    if named is None:
        return of_objects(text)
    value = json.loads(text[named.end() :], parse_constant=_no_number)
    return [(named[1], value)]


def of_escaped(text: str) -> Parts:
    """`call:NAME{key:<escape>text<escape>,other:3}`."""
    name, brace, rest = text.strip().removeprefix("call:").partition("{")
    parts = f"{brace}{rest}".split(ESCAPE)  # every second one is a text
    written = [
        json.dumps(part) if index % 2 else BARE_KEY.sub(r'\1"\2":', part)
        for index, part in enumerate(parts)
    ]
    return [(name, json.loads("".join(written), parse_constant=_no_number))]


def _behind_blanks(text: str, at: int) -> int:
    found = BETWEEN.match(text, at)
    return at if found is None else found.end()


def _of_object(value: object) -> tuple[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    function = value.get("function")
    own = function if isinstance(function, dict) else value
    arguments = own.get("arguments", own.get("parameters", {}))
    name = own.get("name", function)
    return name, json.loads(arguments) if isinstance(arguments, str) else arguments


def _element(text: str, mark: str) -> tuple[str, str]:
    name, end, rest = text.removeprefix(mark).partition(">")
    if not text.startswith(mark) or not end:
        raise ValueError(f"no {mark}")
    return name.strip(), rest


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# ---- schemas of arguments, and the rules of a grammar that follow from them

Schema = Mapping[str, Any]
SPACED = {key: JSON_FORM[key] for key in ("whitespace_flexible", "item_separator", "key_separator")}


def schema_of(function: Mapping[str, Any]) -> Schema:
    """The schema of a function's arguments; without one they are empty."""
    return _mapping(function.get("parameters")) or {"additionalProperties": False}


def types(schema: object) -> set[str]:
    """The types that a schema names; empty where it names none."""
    own = _mapping(schema).get("type")
    found = {item for item in (own if isinstance(own, list) else [own]) if isinstance(item, str)}
    return found.union(*map(types, _list(_mapping(schema).get("anyOf"))))


def typed(values: Texts, schema: Schema) -> dict[str, Any]:
    """Values that were written as texts, of the types that a schema says."""
    known = _mapping(schema.get("properties"))
    return {key: _typed(text, types(known.get(key))) for key, text in values.items()}


def json_rule(name: str, schema: Schema) -> Iterator[str]:
    """The rule of arguments that are an object of JSON."""
    yield f"{name}: %json {json.dumps({'type': 'object', **schema, 'x-guidance': SPACED})}"


def element_rules(name: str, schema: Schema) -> Iterator[str]:
    """The rules of arguments that are an element each, in the order of the schema."""
    parts, required = [], _list(schema.get("required"))
    for number, (key, own) in enumerate(_mapping(schema.get("properties")).items()):
        value, kinds, end = f"{name}_{number}", types(own), "\n</parameter>\n"
        words = [word for word in _list(_mapping(own).get("enum")) if isinstance(word, str)]
        if kinds and "string" not in kinds:
            more = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            yield f"{value}: %json {json.dumps({**own, **more, 'x-guidance': SPACED})}"
        elif words:
            yield f"{value}: {' | '.join(map(json.dumps, words))}"
        else:
            yield rf'{value}[suffix="</parameter>"]: /(.|\n)*/'
            end = "\n"
        before = json.dumps(f"<parameter={key}>\n")
        part = f"{before} {value} {json.dumps(end)}"
        parts.append(part if key in required else f"({part})?")
    yield f"{name}: {' '.join(parts) or json.dumps('')}"


def _typed(text: str, kinds: set[str]) -> Any:
    if not kinds or ("string" in kinds and not (text == "null" and "null" in kinds)):
        return text
    try:
        return json.loads(text, parse_constant=_no_number)
    except ValueError:
        return PYTHONS.get(text, text)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


# ---- the forms


@dataclass(frozen=True, slots=True)
class Form:
    """A row: how calls of a model are written.

    A chat template that has `spelled` in its text is of this form, or else a vocabulary with the
    token `begin`. Without an `end` a call goes to the end of the answer. `starts` are how the text
    behind `begin` may start, without its blanks; `bare`: an answer may start so without a mark.
    `inner` are further marks in the text. `grammar` is a call with NAME and ARGUMENTS, of which
    `arguments` makes the rules; None where none can be forced. `between` stands between several
    calls, and `around` around them.
    """

    begin: str
    end: str | None
    parse: Callable[[str], Parts]
    spelled: str
    starts: tuple[str, ...] = ("",)
    inner: tuple[str, ...] = ()
    bare: bool = False
    grammar: str | None = None
    arguments: Callable[[str, Schema], Iterable[str]] = json_rule
    between: str | None = None
    around: tuple[str, str] = ("", "")
    id_prefix: str = "call_"
    id_length: int = 24


TAGS = ("<tool_call>", "</tool_call>")
OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
FORMS = (
    Form(
        *TAGS,
        of_elements,
        "<function=",
        ("<function=", "{", "["),
        grammar=f"{TAGS[0]}\n<function=NAME>\nARGUMENTS</function>\n{TAGS[1]}",
        arguments=element_rules,
        between="\n",
    ),
    Form(
        *TAGS,
        of_elements,
        "<tool_call>",
        ("<function=", "{", "["),
        grammar=f"{TAGS[0]}\n{OBJECT}\n{TAGS[1]}",
        between="\n",
    ),
    Form(
        "[TOOL_CALLS]",
        None,
        of_named,
        "[TOOL_CALLS]",
        inner=("[ARGS]", "[CALL_ID]"),
        grammar=OBJECT,
        between=", ",
        around=("[TOOL_CALLS][", "]"),
        id_prefix="",  # its chat template takes ids of nine letters and digits alone
        id_length=9,
    ),
    Form(
        "<start_function_call>",
        "<end_function_call>",
        of_escaped,
        "<start_function_call>",
        ("call:",),
        inner=(ESCAPE,),
    ),
    Form(
        "<|python_tag|>",
        None,
        of_objects,
        "<|python_tag|>",
        ('{"name"', '{"type":"function"', '{"function"', '[{"name"'),
        bare=True,
        grammar='{"name": "NAME", "parameters": ARGUMENTS}',
    ),
)


def form_of(tokenizer: Tokenizer) -> Form | None:
    """The form of a model's calls; None where it is not known."""
    source = tokenizer.template.source
    spelled = (form for form in FORMS if form.spelled in source)
    known = (form for form in FORMS[1:] if tokenizer.token_id(form.begin) is not None)
    return next(spelled, None) or next(known, None)


def forced(
    form: Form, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, several: bool
) -> Guided | None:
    """A grammar of calls of these tools, and nothing else; None where there is none. Raises
    RequestError for one that is too long."""
    if form.grammar is None:
        return None
    first, last = (literal(part, form, tokenizer) for part in form.around)
    repeated = ""
    if several and form.between is not None:
        repeated = f"({literal(form.between, form, tokenizer)} call)*"
    lines = [f"start: {first} call {repeated} {last}"]
    calls = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        before, after = form.grammar.split("ARGUMENTS")
        before = before.replace("NAME", json.dumps(function["name"])[1:-1])
        parts = [literal(before, form, tokenizer), f"a{index}", literal(after, form, tokenizer)]
        calls.append(" ".join(parts))
        lines += form.arguments(f"a{index}", schema_of(function))
    grammar = "\n".join([*lines, f"call: {' | '.join(calls)}"])
    remedy = "Offer fewer functions, or let tool_choice be auto."
    JsonPlace(SOURCE).key("tools").at_most(
        MAX_SCHEMA_BYTES, len(grammar), "bytes of grammar", remedy
    )
    return Guided(grammar=grammar)


def literal(text: str, form: Form, tokenizer: Tokenizer) -> str:
    """A text in a grammar, its special marks as their tokens."""
    marks = [mark for mark in (form.begin, form.end) if mark]
    found = []
    for part in re.split(f"({'|'.join(map(re.escape, marks))})", text):
        token = tokenizer.token_id(part) if part in marks else None
        if token is not None and tokenizer.is_special(token):
            found.append(LARK_TOKEN.format(token))
        elif part:
            found.append(json.dumps(part))
    return " ".join(found)


# ---- as the text comes

Items = list[str | ToolCall]


class CallSplitter:
    """Divides the text of an answer to a request with `tools`. With `single` the calls behind the
    first are left out."""

    def __init__(
        self,
        form: Form,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        *,
        single: bool = False,
    ) -> None:
        self.form, self.single, self.num_calls = form, single, 0
        self.functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        names = (form.begin, form.end, *form.inner)
        ids = {name: tokenizer.token_id(name) for name in names if name}
        self.marks = {i: n for n, i in ids.items() if i is not None and tokenizer.is_special(i)}
        special = self.marks.values()
        self.begin = None if form.begin in special else form.begin  # where it is text
        self.end = None if form.end in special else form.end
        self.bare = form.bare  # whether a call may still begin without a mark
        self.held = ""  # outside: might become a mark
        self.blanks = ""  # outside: are left out in front of a call
        self.inside = self.sure = False  # in what may be a call; in what started as one
        self.mark = self.body = self.shown = ""  # inside; `shown` is `body` without special marks

    def push(self, text: str, token: int | None = None) -> Items:
        """What a token adds, with the text that it made certain."""
        items = self.taken(text)
        mark = None if token is None else self.marks.get(token)
        if mark is None:
            return items
        if mark == self.form.begin:
            items += self.ended()
            self.enter("")
        elif self.inside and mark == self.form.end:
            items += self.closed()
        elif self.inside:
            self.body += mark
        return items

    def flush(self) -> Items:
        """What was held back: what is whole without its end is a call too."""
        items = self.ended()
        blanks, self.blanks = self.blanks, ""
        return [*items, blanks] if blanks and not self.num_calls else items

    def ended(self) -> Items:
        """What was held back, blanks apart."""
        items: Items = []
        while self.inside:
            items += self.closed()
        held, self.held = self.held, ""
        return items + self.said(held)

    def taken(self, text: str) -> Items:
        """What a text adds."""
        items: Items = []
        while text:
            text, more = self.within(text) if self.inside else self.outside(text)
            items += more
        return items

    def outside(self, text: str) -> tuple[str, Items]:
        """The rest of a text from a call on, and what is before it."""
        text, self.held = self.held + text, ""
        if self.bare:
            known = self.starts(text)
            if known is None:
                self.held = text
                return "", []
            self.bare = False
            if known:
                self.enter("")
                return text, []
        if self.begin is None:
            return "", self.said(text)
        before, mark, after = text.partition(self.begin)
        if mark:
            self.enter(mark)
            return after, self.said(before)
        kept = len(text) - ending(text, self.begin)
        self.held = text[kept:]
        return "", self.said(text[:kept])

    def within(self, text: str) -> tuple[str, Items]:
        """The rest of a text behind a call, and the call."""
        start = max(0, len(self.body) - len(self.end or "") + 1)
        self.body, self.shown = self.body + text, self.shown + text
        if not self.sure:
            known = self.starts(self.body)
            if known is False:
                return self.given_up()
            self.sure = known is True
        while self.end is not None and (at := self.body.find(self.end, start)) >= 0:
            try:
                calls = self.calls_of(self.body[:at])
            except Unended:
                start = at + 1
                continue
            if calls is None:
                return self.given_up()
            rest, self.inside = self.body[at + len(self.end) :], False
            return rest, self.called(calls)
        return "", []

    def closed(self) -> Items:
        """What was inside, which ends here."""
        try:
            calls = self.calls_of(self.body)
        except Unended:
            calls = None
        if calls is not None:
            self.inside = False
            return self.called(calls)
        text, items = self.given_up()
        return items + self.taken(text)

    def enter(self, mark: str) -> None:
        """What follows may be a call."""
        self.inside, self.sure, self.bare = True, False, False
        self.mark, self.body, self.shown = mark, "", ""

    def given_up(self) -> tuple[str, Items]:
        """The text behind a mark, which begins no call."""
        self.inside = False
        return self.shown, self.said(self.mark)

    def said(self, text: str) -> Items:
        """Text, without the blanks at its end."""
        text = self.blanks + text
        shown = text.rstrip()
        self.blanks = text[len(shown) :]
        return [shown] if shown else []

    def called(self, calls: list[ToolCall]) -> Items:
        """Calls."""
        self.blanks = ""
        taken = calls[: max(0, 1 - self.num_calls)] if self.single else calls
        self.num_calls += len(calls)
        return [*taken]

    def starts(self, text: str) -> bool | None:
        """Whether a call may start so; None: not yet known."""
        start = "".join(text.lstrip()[:MAX_START].split())
        if any(start.startswith(known) for known in self.form.starts):
            return True
        return None if any(known.startswith(start) for known in self.form.starts) else False

    def calls_of(self, text: str) -> list[ToolCall] | None:
        """The calls that a text is; None where it is none. Raises Unended."""
        try:
            calls = [self.call_of(*part) for part in self.form.parse(text)]
        except Unended:
            raise
        except (ValueError, RecursionError):
            return None
        return calls or None

    def call_of(self, name: object, arguments: object) -> ToolCall:
        """A call. Raises ValueError for what is none."""
        known = isinstance(name, str) and name and (name in self.functions or not self.form.bare)
        if not known or not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError("no call")
        if isinstance(arguments, Texts):
            arguments = typed(arguments, schema_of(self.functions.get(name, {})))
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()  # raises for an unpaired surrogate
        own_id = f"{self.form.id_prefix}{uuid4().hex[: self.form.id_length]}"
        return ToolCall(own_id, name, text)


class AnswerSplitter:
    """Divides an answer into thoughts, text and calls. `calls` None: there are none."""

    def __init__(self, thoughts: ThoughtSplitter, calls: CallSplitter | None = None) -> None:
        self.thoughts, self.calls = thoughts, calls

    @property
    def num_calls(self) -> int:
        """The calls so far."""
        return 0 if self.calls is None else self.calls.num_calls

    def push(self, token_ids: Sequence[int], pieces: Sequence[str]) -> tuple[str, Items]:
        """What a step adds: thoughts, and text and calls in their order."""
        if self.calls is None:
            thoughts, text = self.thoughts.push(token_ids, pieces)
            return thoughts, [text] if text else []
        thoughts, items = "", Items()
        for index in range(max(len(token_ids), len(pieces))):
            tokens = token_ids[index : index + 1]
            thought, text = self.thoughts.push(tokens, pieces[index : index + 1])
            token = None if self.thoughts.inside or not tokens else tokens[0]
            thoughts, items = thoughts + thought, items + self.calls.push(text, token)
        return thoughts, items

    def flush(self) -> tuple[str, Items]:
        """What was held back."""
        thoughts, text = self.thoughts.flush()
        if self.calls is None:
            return thoughts, [text] if text else []
        return thoughts, self.calls.push(text) + self.calls.flush()
