"""The form of an answer as OpenAI's clients and vLLM's ask for it: `response_format`,
`structured_outputs` and the older `guided_*`. All of them become a `Guided`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgespec.errors import RequestError
from edgespec.prompts.guided import Guided, guided
from edgespec.prompts.places import JsonPlace, show
from edgespec.serve.fields import OBJECT, STRING, STRINGS, Fields, Values, taken

# vLLM's name of a form -> ours
VLLM = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


def response_format(value: object, here: JsonPlace) -> Guided | None:
    """Returns the form that OpenAI's `response_format` asks for; None for a text."""
    like = '{"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
    inner = value.get("json_schema") if isinstance(value, Mapping) else None
    return typed_form(value, inner, here, here.key("json_schema"), like)


def text_format(value: object, here: JsonPlace) -> Guided | None:
    """Returns the form that `text.format` of OpenAI's Responses asks for; None for a text."""
    like = '{"type": "json_schema", "name": "...", "schema": {...}}'
    return typed_form(value, value, here, here, like)


def typed_form(
    value: object, holder: object, here: JsonPlace, there: JsonPlace, like: str
) -> Guided | None:
    """The form of a type, whose schema a holder at `there` has; `like` is how it is written."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Guided(json_object=True)
    if kind != "json_schema":
        here.refuse(f"is {show(value)}", f"Write {like}.")
    if not isinstance(holder, Mapping) or "schema" not in holder:
        there.refuse("has no schema", f"Write {like}.")
    return guided({"json_schema": holder["schema"]}, there)


def structured_outputs(value: object, here: JsonPlace) -> Guided | None:
    """Returns the form that vLLM's `structured_outputs` asks for."""
    if not isinstance(value, Mapping):
        here.refuse(f"is {show(value)}, not an object", 'Write {"json": {...}}, for example.')
    for name in value:
        if name not in VLLM:
            here.key(str(name)).refuse("is not a known key", f"Known are {', '.join(VLLM)}.")
    given = {VLLM[name]: own for name, own in value.items() if own is not None}
    return guided(given, here) if given else None


def one_form(name: str) -> Callable[[object, JsonPlace], Guided | None]:
    """A check for the value of one form."""
    return lambda value, here: guided({name: value}, here)


FIELDS: Fields = {
    "response_format": taken(response_format, OBJECT),
    "structured_outputs": taken(structured_outputs, OBJECT),
    "guided_json": taken(one_form("json_schema"), OBJECT),
    "guided_regex": taken(one_form("regex"), STRING),
    "guided_choice": taken(one_form("choice"), STRINGS),
    "guided_grammar": taken(one_form("grammar"), STRING),
}


def field_of(values: Values) -> str:
    """The field by which a request asks for a form; empty where none does. Raises RequestError for
    two."""
    given = [name for name in FIELDS if values.get(name) is not None]
    if len(given) > 1:
        message = f"request: {given[0]} and {given[1]} both say a form of the answer."
        raise RequestError(message, "Leave one of them out.", param=given[1])
    return given[0] if given else ""
