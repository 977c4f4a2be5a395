"""Jinja's immutable sandbox as transformers sets it up: no code of a template runs, ranges are
bounded.

Knows Jinja; knows no conversation.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def sandbox() -> ImmutableSandboxedEnvironment:
    """Returns an environment with what chat templates use beyond Jinja: `tojson` without HTML
    escapes, `raise_exception`, `strftime_now`, `break`, `continue` and `{% generation %}`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; rendering outputs its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """A value as JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
