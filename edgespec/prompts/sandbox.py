"""Jinja's sandbox as transformers sets it up, with limits on the time and memory of a rendering.

An operation in C cannot be interrupted, so every value is limited in size: then each operation is
quick, and a clock that is read between them limits the total time. Knows Jinja; knows no
conversation.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
import string
import sys
import time
import types
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MappingView,
    Sequence,
    ValuesView,
)
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 1.0  # of CPU time; the longest templates in use take some milliseconds
MAX_VALUE_BYTES = 2**20  # of one value, the prompt included, in addition to the messages' allowance
VALUE_PER_MESSAGES = 8  # allowance: times the size of the messages
MADE_PER_VALUE = 64  # total size of all values, times the largest
MAX_DEPTH = 50  # of nested lists: hashing them recurses in C
MAX_INT_BITS = 1024
MAX_DATE_CHARS = 256  # of a date's format, each of which can make 25
STEPS_PER_BYTE = 64  # of a search from the end, for each byte that a value may have

CONTAINERS: tuple[type[Iterable[object]], ...] = (
    list,
    tuple,
    set,
    frozenset,
    KeysView,
    ValuesView,
    ItemsView,
)

# What filters and formats reach in Jinja's own objects, such as join(attribute="items.0")
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Cycler: ("items",),
    Joiner: ("sep",),
    jinja2.runtime.LoopContext: ("previtem", "_current", "nextitem"),
    jinja2.runtime.Macro: ("name", "arguments"),
}

T = TypeVar("T")


class Meter:
    """The remaining budget of one rendering: CPU time, and bytes of the values that it creates.

    Methods raise jinja2.TemplateRuntimeError when a limit is exceeded.
    """

    def __init__(self, given: object) -> None:
        self.max_value_bytes = MAX_VALUE_BYTES + VALUE_PER_MESSAGES * _size(given, math.inf)
        self._left_bytes = MADE_PER_VALUE * self.max_value_bytes
        self._deadline = time.thread_time() + MAX_SECONDS

    def tick(self) -> None:
        """Checks the CPU time."""
        if time.thread_time() > self._deadline:
            raise jinja2.TemplateRuntimeError(f"it takes more than {MAX_SECONDS:g} s of CPU time")

    def allow(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Checks the sizes of an operation's arguments and of its result before it runs."""
        self.tick()
        _size((args, kwargs), self.max_value_bytes)
        bound = BOUNDS.get(name)
        if bound is not None and bound([*args, *_in_order(kwargs)]) > self.max_value_bytes:
            raise _too_large(self.max_value_bytes)

    def made(self, value: T) -> T:
        """Charges the result of an operation and returns it."""
        self.tick()
        self._left_bytes -= _size(value, self.max_value_bytes)
        if self._left_bytes < 0:
            raise _too_large(MADE_PER_VALUE * self.max_value_bytes)
        return value

    def collected(self, values: Iterable[T]) -> Iterator[T]:
        """Runs a generator to its end under the meter, and returns an iterator of its values."""
        found: list[T] = []
        size_bytes = 0
        for value in values:
            self.tick()
            size_bytes += _size(value, self.max_value_bytes)
            if size_bytes > self.max_value_bytes:
                raise _too_large(self.max_value_bytes)
            found.append(value)
        return iter(self.made(found))


def _size(value: object, limit: float) -> int:
    """Bytes of a value with its contents; repeated contents count repeatedly, as in printing."""
    total, waiting = 0, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        total += sys.getsizeof(item)
        if total > limit:
            raise _too_large(limit)
        if isinstance(item, str):
            continue
        if depth > MAX_DEPTH:
            raise jinja2.TemplateRuntimeError(f"it nests lists more than {MAX_DEPTH} deep")
        if isinstance(item, int) and item.bit_length() > MAX_INT_BITS:
            raise jinja2.TemplateRuntimeError(f"it makes numbers of more than {MAX_INT_BITS} bits")
        waiting += ((part, depth + 1) for part in _parts(item))
    return total


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, Namespace):
        return (value._Namespace__attrs,)
    if type(value) in ATTRIBUTES:
        return tuple(getattr(value, name) for name in ATTRIBUTES[type(value)])
    return iter(value) if isinstance(value, CONTAINERS) else ()


def _too_large(limit: float) -> jinja2.TemplateRuntimeError:
    return jinja2.TemplateRuntimeError(f"it makes texts or lists of more than {limit:.0f} bytes")


# Upper bounds of the size of the result, computed from the arguments, of operators, filters and
# methods whose result can be larger than their arguments


def _product(args: Sequence[Any]) -> int:
    sizes = [
        1 + operator.length_hint(arg)
        for arg in args
        if hasattr(arg, "__len__") or hasattr(arg, "__next__")
    ]
    return math.prod(sizes) * (1 + sum(_ints(args))) if sizes else 0


def _replaced(args: Sequence[Any]) -> int:
    text, old, new = (len(str(arg)) for arg in args[:3]) if len(args) >= 3 else (0, 0, 0)
    return text + (1 + text // max(old, 1)) * new


def _in_order(kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Values by name in the order of the arguments: of `replace`, which tells them apart by it."""
    named = [name for name in ("old", "new") if name in kwargs]
    return (kwargs[name] for name in dict.fromkeys([*named, *kwargs]))


def _searched(args: Sequence[Any]) -> int:
    """Of a search from the end, which takes the time of both lengths' product, in steps that are
    many times as fast as other work."""
    lengths = [len(arg) for arg in args[:2] if isinstance(arg, str)]
    return math.prod(lengths) // STEPS_PER_BYTE if len(lengths) == 2 else 0


def _listed(args: Sequence[Any]) -> int:
    """Of a text's characters, or of a range's numbers, as a list."""
    if not args or not isinstance(args[0], str | range):
        return 0
    return len(args[0]) * (8 + sys.getsizeof("a" if isinstance(args[0], str) else 1))


def _powered(args: Sequence[Any]) -> int:
    base, exponent = args[0], args[-1]
    whole = isinstance(base, int) and isinstance(exponent, int)
    return base.bit_length() * max(exponent, 0) * MAX_VALUE_BYTES // MAX_INT_BITS if whole else 0


def _rounded(args: Sequence[Any]) -> int:
    return _powered([10, *(abs(arg) for arg in args[1:] if isinstance(arg, int))])


def _printed(args: Sequence[Any]) -> int:
    """A width is in the format string, or an argument for `*` in a `%` format."""
    text = args[0]
    if not isinstance(text, str):
        return 0
    widths = sum(int(digits) for digits in re.findall(r"\d+", text))
    inner = [part for arg in args[1:] for part in (arg if isinstance(arg, tuple) else (arg,))]
    num_fields = text.count("%") + text.count("{")
    return widths + text.count("*") * sum(_ints(inner)) + num_fields * _size(inner, math.inf)


def _ints(args: Iterable[Any]) -> Iterator[int]:
    return (abs(arg) for arg in args if isinstance(arg, int))


MULTIPLIERS = (
    "*",
    "batch",
    "center",
    "expandtabs",
    "indent",
    "join",
    "ljust",
    "lstrip",
    "rjust",
    "rstrip",
    "slice",
    "strip",
    "tojson",
    "trim",
    "zfill",
)

BOUNDS: dict[str, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys(MULTIPLIERS, _product),
    **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _searched),
    **dict.fromkeys(("list", "sort"), _listed),
    "replace": _replaced,
    "**": _powered,
    "round": _rounded,
    "%": _printed,
    "format": _printed,
}

# Methods of strings, numbers, lists and dicts with known cost; wrap_str_format handles `format`
METHODS = frozenset(
    {
        "capitalize",
        "casefold",
        "center",
        "copy",
        "count",
        "endswith",
        "expandtabs",
        "find",
        "get",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "is_integer",
        "items",
        "join",
        "keys",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "values",
        "zfill",
    }
)
DATA = (str, bytes, int, float, list, tuple, dict, set, frozenset, range, MappingView, type)

# Filters and functions for web pages with unknown cost; no template in use calls them
REFUSED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
REFUSED_GLOBALS = ("lipsum",)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox as transformers sets it up; `meter` limits all operations and loops."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.meter = Meter([])
        self.finalize = self.made  # called with each value that is output
        helpers: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.globals = {k: v for k, v in self.globals.items() if k not in REFUSED_GLOBALS} | helpers
        filters = {k: v for k, v in self.filters.items() if k not in REFUSED_FILTERS} | {
            "tojson": self.tojson
        }
        self.filters = {name: self.metered(name, function) for name, function in filters.items()}
        self.filters |= {MADE: _uncompiled(self.made)}
        self.tests = {name: self.metered(name, function) for name, function in self.tests.items()}

    def made(self, value: Any) -> Any:
        """Charges a value to the meter and returns it."""
        return self.meter.made(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metering().visit(tree)
        tree.set_environment(self)
        return tree

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the output of a template, a macro or a set block."""
        return self.meter.made("".join(self.meter.collected(pieces)))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Evaluates a binary operator under the meter."""
        self.meter.allow(operator, (left, right), {})
        return self.meter.made(super().call_binop(context, operator, left, right))

    def call(
        self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function or an allowed method under the meter."""
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if isinstance(owner, DATA) and name not in METHODS:
            raise jinja2.TemplateRuntimeError(f"the method {name!r} is not available in templates")
        self.meter.allow(name, args if owner is None else (owner, *args), kwargs)
        return self.meter.made(super().call(context, function, *args, **kwargs))

    def metered(self, name: str, function: Any) -> Callable[..., Any]:
        """Returns a filter or a test that runs under the meter."""
        # the first argument may be Jinja's context, which is not the template's
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.meter.allow(name, args[num_passed:], kwargs)
            made = function(*args, **kwargs)
            if isinstance(made, types.GeneratorType):
                return self.meter.collected(made)
            return self.meter.made(made)

        return run

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns str.format under the meter; None if `value` is another function."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None:
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            text = value.__self__
            specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
            if any("{" in spec for spec in specs):
                raise jinja2.TemplateRuntimeError("a width in str.format is a field itself")
            self.meter.allow("format", (text, *args), kwargs)
            return self.meter.made(sandboxed(*args, **kwargs))

        return run

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Returns a value as JSON without HTML escapes, unlike Jinja's own filter."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self.concat(encoder.iterencode(value))


MADE = "edgespec.made"


class _Metering(NodeTransformer):
    """Adds the meter where the sandbox has no hook: literals, slices, and loop iterations."""

    def made(self, node: Any, *args: Any) -> jinja2.nodes.Node:
        """Charges a literal with variables."""
        self.generic_visit(node)
        constant = all(map(_is_constant, node.iter_child_nodes()))
        if getattr(node, "ctx", "load") != "load" or constant:
            return node  # type: ignore[no-any-return]
        return _metered(node)

    visit_List = visit_Tuple = visit_Dict = visit_Concat = made  # noqa: N815 - Jinja's names

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:  # noqa: N802
        """Charges a slice."""
        self.generic_visit(node)
        return _metered(node) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        """Checks the CPU time in each iteration."""
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_tick(node), lineno=node.lineno))
        if node.test is not None:
            node.test = jinja2.nodes.And(_tick(node), node.test, lineno=node.lineno)
        return node


def _tick(node: jinja2.nodes.Node) -> jinja2.nodes.Filter:
    return _metered(jinja2.nodes.Const(True, lineno=node.lineno))


def _metered(node: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, MADE, [], [], None, None, lineno=node.lineno)


def _is_constant(node: jinja2.nodes.Node) -> bool:
    return isinstance(node, jinja2.nodes.Const)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter with context, which Jinja never evaluates when it compiles."""
    return jinja2.pass_context(lambda context, value: function(value))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; rendering outputs its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > MAX_DATE_CHARS:
        reason = f"strftime_now has a format of more than {MAX_DATE_CHARS} characters"
        raise jinja2.TemplateRuntimeError(reason)
    return datetime.now().strftime(format)
