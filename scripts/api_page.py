"""The text of docs/api.md, from the docstrings of what `edgespec` exports.

Knows signatures, docstrings and Markdown. The order of the page stands in PAGE; a test holds that
it leaves no public name out.
"""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import edgespec
from edgespec.runtime import engine

HEAD = """\
# The Python API

<!-- Written by scripts/make_docs.py from the docstrings. Change those, then run `make docs`. -->

What is named here is public; all else in the package may change. The examples are run by the tests.

"""

TYPES = """
## Types in signatures

| name | meaning |
|---|---|
| `Conversation` | a list of `Message`, or of dicts with `role` and `content` |
| `Prompt` | a text, a `Conversation`, or token ids: a list of integers or a numpy array |
| `Plan` | a `DraftPlan` or `StaticPlan`, `PLAIN`, a decoding config such as `AutoDecodingConfig(...)`, or None for `engine.plan()` |
| `Acceptance` | an accept rule by its name, as an object such as `TypicalAcceptance`, or None for the engine's |
| `Samplings`, `Plans`, `Acceptances` | one for all requests of a batch, or a list with one for each |
| `Drafter` | a drafter that makes trees of candidates ([add_a_drafter.md](add_a_drafter.md)) |
| `DrafterOptions` | the options of a drafting method, as an object; a mapping of keys and values does as well |
| `PreparesDraftTokens` | an object with TensorRT-LLM's `prepare_draft_tokens` |
| `Candidates` | a list of token ids with their log-probabilities, descending |
"""

MADE = (  # by the caller
    "load",
    "Message",
    "ImageItem",
    "ImageRules",
    "SamplingParams",
    "Guided",
    "DraftPlan",
    "ExactAcceptance",
    "RejectionAcceptance",
    "TypicalAcceptance",
    "RelaxedAcceptance",
    "Proposal",
)

# Section -> the names in it, with the members that are public
PAGE: dict[str, dict[str, tuple[str, ...]]] = {
    "Engines": {
        "load": (),
        "Engine": (
            "generate",
            "stream",
            "generate_batch",
            "agenerate",
            "astream",
            "agenerate_batch",
            "plan",
            "render",
            "encode",
            "decode",
            "stats",
            "close",
            "aclose",
            "spec_decode",
            "max_batch_size",
            "notes",
            "drafter_notes",
        ),
    },
    "Requests": {
        "Message": ("of",),
        "ImageItem": (),
        "ImageRules": (),
        "SamplingParams": (),
        "Guided": (),
        "DraftPlan": (),
        "StaticPlan": ("of",),
        "PLAIN": (),
        "DecodingConfig": (),
        "ExactAcceptance": (),
        "RejectionAcceptance": (),
        "TypicalAcceptance": (),
        "RelaxedAcceptance": (),
    },
    "A drafter of your own": {
        "UserDrafter": ("propose",),
        "DraftContext": ("position", "max_draft_len", "tokenizer", "decode", "encode"),
        "Proposal": (),
    },
    "Answers": {
        "Response": (),
        "EngineStats": (),
        "RequestMetrics": (
            "acceptance_length",
            "acceptance_rate",
            "tokens_per_s",
            "inter_token_latency",
            "steps",
            "speculative_decoding",
            "to_dict",
        ),
        "Stream": ("result", "cancel", "close"),
        "AsyncStream": ("result", "cancel", "aclose"),
        "Chunk": ("text",),
    },
}


def render() -> str:
    """The whole page."""
    summary, guide = (edgespec.__doc__ or "").split("\n", 1)
    parts = [HEAD, f"{summary}\n\n", markdown(guide)]
    for section, names in PAGE.items():
        parts.append(f"\n## {section}\n")
        for name, members in names.items():
            parts += entry(name, members)
    return "".join([*parts, TYPES, "\n## The tree of errors\n\n", *errors()])


def entry(name: str, members: tuple[str, ...]) -> Iterator[str]:
    """A public name: its signature, its docstring and its members."""
    value = getattr(edgespec, name)
    yield f"\n### edgespec.{name}\n\n"
    if not inspect.isclass(value) and not inspect.isfunction(value):
        yield markdown(type(value).__doc__ or "")
        return
    made_by_caller = name in MADE
    if made_by_caller:
        yield f"```python\nedgespec.{name}{signature(value)}\n```\n\n"
    yield markdown(value.__doc__ or "")
    if dataclasses.is_dataclass(value) and not made_by_caller:
        yield fields(value)
    for member in members:
        yield from member_entry(name, value, member)


def fields(value: Any) -> str:
    """The fields of a class as a list."""
    rows = [
        f"- `{field.name}: {field.type}`\n"
        for field in dataclasses.fields(value)
        if not field.name.startswith("_")
    ]
    return "\n" + "".join(rows)


def member_entry(name: str, owner: Any, member: str) -> Iterator[str]:
    """A method with its signature, or a property."""
    found = inspect.getattr_static(owner, member, None)
    yield f"\n#### {name}.{member}\n\n"
    if inspect.isfunction(found):
        prefix = "await " if inspect.iscoroutinefunction(found) else ""
        yield f"```python\n{prefix}{VARIABLES[name]}.{member}{signature(found)}\n```\n\n"
        yield markdown(found.__doc__ or "")
    elif isinstance(found, classmethod):
        yield f"```python\nedgespec.{name}.{member}{signature(getattr(owner, member))}\n```\n\n"
        yield markdown(found.__doc__ or "")
    elif isinstance(found, property):
        yield markdown(found.__doc__ or "")
    else:
        yield ATTRIBUTES[f"{name}.{member}"]


VARIABLES = {
    "UserDrafter": "drafter",
    "DraftContext": "context",
    "Engine": "engine",
    "Stream": "stream",
    "AsyncStream": "stream",
    "RequestMetrics": "metrics",
}
ATTRIBUTES = {
    "Engine.spec_decode": "Whether something drafts: a draft engine, or a drafter that was given.\n",
    "Engine.max_batch_size": "Sequences that run at a time, as the engines were built.\n",
    "Engine.notes": "What a user should know of the engines, a sentence each.\n",
}


def errors() -> Iterator[str]:
    """The tree of errors with what each is for, as `errors.py` draws it."""
    from edgespec import errors as module

    tree = (module.__doc__ or "").split("\n\n")[1]
    yield f"```text\n{textwrap.dedent(tree)}\n```\n"


def signature(value: Any) -> str:
    """Parameters and result, one parameter a line where they are long."""
    found = inspect.signature(value)
    parameters = [
        each
        for parameter in found.parameters.values()
        for each in (
            options_of(parameter)
            if str(parameter.annotation).startswith("Unpack[")
            else [parameter]
        )
        if parameter.name != "self"
    ]
    parameters.sort(key=lambda parameter: parameter.name == "return_exceptions")
    parts = [re.sub("'([^']+)'", r"\1", str(p)).replace("''", '""') for p in parameters]
    keyword = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    if keyword is not None:
        parts.insert(keyword, "*")
    result = found.return_annotation
    is_class = inspect.isclass(value) or result is found.empty
    end = "" if is_class else f" -> {result!s}"
    line = f"({', '.join(parts)}){end}"
    if len(line) < 80:
        return line
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def options_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The keywords of a TypedDict that is unpacked, with the defaults of `Engine.request` or of
    `Rendering`."""
    defaults = {
        **inspect.signature(engine.Rendering).parameters,
        **inspect.signature(engine.Engine.request).parameters,
    }
    unpacked = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
    return [
        defaults[name].replace(annotation=kind.__forward_arg__, kind=parameter.KEYWORD_ONLY)
        for name, kind in getattr(engine, unpacked).__annotations__.items()
    ]


def markdown(docstring: str) -> str:
    """A docstring as Markdown: examples in fences, without prompts, their output as comments."""
    text, out = inspect.cleandoc(docstring), []
    for part in filter(None, doctest.DocTestParser().parse(text)):
        if isinstance(part, str):
            out.append(part)
        elif out and out[-1].endswith("```\n"):
            out[-1] = out[-1].removesuffix("```\n") + f"{example(part)}```\n"
        else:
            out.append(f"```python\n{example(part)}```\n")
    joined = "".join(out)
    return re.sub(r"\n{3,}", "\n\n", joined).strip("\n") + "\n"


def example(part: doctest.Example) -> str:
    """An example's lines, and its output as a comment."""
    return part.source + "".join(f"# {line}\n" for line in part.want.splitlines())
