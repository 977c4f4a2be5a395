"""Finds every use of TensorRT's Python API in files of Python, and says in which versions each is
wrong.

NVIDIA's bindings have no types, and no version of them is needed here: types are followed through
constructors, returned values, attributes and the calls within the files, and each use is compared
with what scripts/tensorrt_api.py found in the bindings of each version. Blocks that run for some
versions alone (`if capabilities.NAME:`, and those that a table names) are compared with those.

What is not followed is not compared: containers other than lists, and names that are computed.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

MODULE = "trt"  # what the module is called wherever it is used
ROUNDS = 8  # types travel one call further in each


@dataclass(frozen=True)
class Member:
    """What a name is in one version: module, class, enum, member, property, method, value.

    `overloads` are parameters, "name" or "name=" where there is a default; None: not known.
    `returns` is the class of what it gives.
    """

    kind: str
    overloads: tuple[tuple[str, ...], ...] | None = None
    returns: str = ""
    writable: bool = False


class Api(Protocol):
    """What is known of the versions."""

    versions: tuple[str, ...]

    def member(self, version: str, name: str) -> Member | None:
        """What "Class" or "Class.member" is in a version; None where there is no such name."""


@dataclass(frozen=True)
class Type:
    """A kind of value: the module, a class of it, an instance, a list, or something of the files."""

    kind: str  # trt, class, instance, bound, list, function, pyclass, pyinstance, pymodule
    name: str = ""
    of: frozenset[Type] = frozenset()


Types = frozenset[Type]
NOTHING: Types = frozenset()
TRT = Type("trt")


@dataclass(frozen=True)
class Use:
    """One use: the name is that of one of `names` ("Class.member"), in `versions`."""

    place: str
    names: tuple[str, ...]
    store: bool
    call: tuple[int, frozenset[str]] | None  # positional arguments, keywords; None: not called
    versions: frozenset[str]

    def problems(self, api: Api) -> Iterator[tuple[str, str]]:
        """A version and what is wrong there."""
        for version in sorted(self.versions, key=api.versions.index):
            said = [self.problem(api.member(version, name), name) for name in self.names]
            if said and all(said):
                yield version, f"{self.place}: {said[0]}"

    def problem(self, member: Member | None, name: str) -> str:
        """What is wrong with this use of a name; empty: nothing."""
        if member is None:
            return f"there is no {name}"
        if self.store and not member.writable:
            return f"{name} cannot be assigned"
        if self.call is None or member.overloads is None:
            return ""
        count, keywords = self.call
        if any(fits(overload, count, keywords) for overload in member.overloads):
            return ""
        given = ", ".join([*["..."] * count, *(f"{word}=" for word in sorted(keywords))])
        return f"{name} takes no ({given})"


def fits(overload: tuple[str, ...], count: int, keywords: Collection[str]) -> bool:
    """Whether parameters take so many positional arguments and these keywords."""
    if any(word.startswith("*") for word in overload):
        return True
    names = [word.rstrip("=") for word in overload]
    rest = names[count:]
    if count > len(names) or not set(keywords) <= set(rest):
        return False
    needed = {word for word in overload[count:] if not word.endswith("=")}
    return needed <= set(keywords)


Guard = Callable[[str], frozenset[str] | None]


def uses_in(files: Mapping[str, Path], api: Api, guard: Guard = lambda text: None) -> list[Use]:
    """All uses in files, given by their modules' names. `guard` gives the versions for which a
    condition, given as its text, holds; None where it says nothing of versions."""
    return Analysis(
        {name: ast.parse(path.read_text()) for name, path in files.items()}, api, guard
    ).run()


@dataclass
class Function:
    """A function of the files: its scope is where its names live."""

    scope: str
    module: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: str = ""  # the class that it is a method of


@dataclass
class Analysis:
    """Types by name, grown round by round until nothing is new."""

    trees: Mapping[str, ast.Module]
    api: Api
    guard: Guard
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    bases: dict[str, Types] = field(default_factory=dict)
    names: defaultdict[tuple[str, str], Types] = field(
        default_factory=lambda: defaultdict(frozenset)
    )
    returned: defaultdict[str, Types] = field(default_factory=lambda: defaultdict(frozenset))
    callers: defaultdict[str, frozenset[str]] = field(
        default_factory=lambda: defaultdict(frozenset)
    )
    called: set[str] = field(default_factory=set)
    optional: dict[str, frozenset[str]] = field(default_factory=dict)  # text -> where it is a value
    uses: dict[tuple[str, tuple[str, ...], bool], Use] = field(default_factory=dict)

    def run(self) -> list[Use]:
        """Follow types to the end, and return the uses."""
        for name, tree in self.trees.items():
            self.declare(tree.body, name, name, "")
        everywhere = frozenset(self.api.versions)
        for _ in range(ROUNDS):
            before = self.state()
            self.uses.clear()
            for name, tree in self.trees.items():
                Walker(self, name, name, everywhere).block(tree.body)
            for key, function in list(self.functions.items()):
                versions = self.callers[key] if key in self.called else everywhere
                Walker(self, function.scope, function.module, versions, function).body()
            if self.state() == before:
                break
        return list(self.uses.values())

    def state(self) -> tuple[int, ...]:
        """Grows as long as something is learnt."""
        tables: Iterable[Mapping[Any, frozenset[Any]]] = (self.names, self.returned, self.callers)
        return tuple(sum(len(found) for found in table.values()) for table in tables)

    def declare(self, body: list[ast.stmt], scope: str, module: str, owner: str) -> None:
        """Functions, classes and imports of a block, and of the blocks in it."""
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                key = f"{scope}.{node.name}"
                self.functions[key] = Function(key, module, node, owner)
                self.names[scope, node.name] |= {Type("function", key)}
                self.declare(node.body, key, module, "")
            elif isinstance(node, ast.ClassDef):
                key = f"{scope}.{node.name}"
                self.classes[key] = node
                self.names[scope, node.name] |= {Type("pyclass", key)}
                self.declare(node.body, key, module, key)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found = self.imported(node.module, alias.name)
                    self.names[scope, alias.asname or alias.name] |= found
            else:
                for part in ("body", "orelse", "finalbody"):
                    self.declare(getattr(node, part, []), scope, module, owner)

    def imported(self, module: str, name: str) -> Types:
        """What `from module import name` gives, of these files."""
        if f"{module}.{name}" in self.trees:
            return frozenset({Type("pymodule", f"{module}.{name}")})
        return frozenset({Type("name", f"{module}:{name}")}) if module in self.trees else NOTHING

    def lookup(self, scope: str, name: str) -> Types:
        """What a name means in a scope or in those around it."""
        while scope:
            if (scope, name) in self.names:
                return self.resolved(self.names[scope, name])
            scope = scope.rpartition(".")[0]
        return NOTHING

    def resolved(self, types: Types) -> Types:
        """The same, with imported names replaced by what they mean."""
        out: set[Type] = set()
        for each in types:
            if each.kind == "name":
                module, _, name = each.name.partition(":")
                out |= self.names.get((module, name), NOTHING)
            else:
                out.add(each)
        return frozenset(out)

    def has(self, owner: str, name: str) -> bool:
        """Whether a class of the files has an attribute or a method itself."""
        return (f"{owner}()", name) in self.names or (owner, name) in self.names

    def attribute(self, owner: str, name: str) -> Types:
        """An attribute of an instance of a class of the files, or a method of it."""
        if found := self.names.get((f"{owner}()", name), NOTHING):
            return found
        return self.names.get((owner, name), NOTHING)


@dataclass
class Walker:
    """Reads one block in one scope, for some versions."""

    analysis: Analysis
    scope: str
    module: str
    versions: frozenset[str]
    function: Function | None = None

    def body(self) -> None:
        """Read the function."""
        assert self.function is not None
        node, owner = self.function.node, self.function.owner
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        if owner and arguments and not static:
            self.bind(arguments[0].arg, frozenset({Type("pyinstance", owner)}))
        for each in arguments:
            if each.annotation is not None:
                self.bind(each.arg, self.annotated(each.annotation))
        if owner:
            self.overrides(owner, node)
        self.block(node.body)

    def overrides(self, owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """A method with the name of one of the library's class is called by the library, with so
        many arguments."""
        if node.name.startswith("__"):
            return
        count = len(node.args.posonlyargs) + len(node.args.args) - 1
        for base in self.analysis.bases.get(owner, NOTHING):
            name = f"{base.name}.{node.name}"
            known = any(self.analysis.api.member(v, name) for v in self.versions)
            if base.kind == "class" and known:
                self.use(node, (name,), call=(count, frozenset()))

    def annotated(self, node: ast.expr) -> Types:
        """The instances that an annotation names."""
        found = self.quiet(node) if isinstance(node, ast.Name | ast.Attribute) else NOTHING
        return frozenset(Type("pyinstance", t.name) for t in found if t.kind == "pyclass")

    def quiet(self, node: ast.expr) -> Types:
        """The value of a name, which counts as no use."""
        return self.analysis.lookup(self.scope, node.id) if isinstance(node, ast.Name) else NOTHING

    def bind(self, name: str, types: Types) -> None:
        self.analysis.names[self.scope, name] |= types

    def use(
        self,
        node: ast.AST,
        names: tuple[str, ...],
        *,
        store: bool = False,
        call: tuple[int, frozenset[str]] | None = None,
    ) -> None:
        """Note a use."""
        where = f"{self.module}:{getattr(node, 'lineno', 0)}"
        column = getattr(node, "col_offset", 0)
        key = (f"{where}:{column}:{call is not None}", names, store)
        self.analysis.uses[key] = Use(where, names, store, call, self.versions)

    # ---- statements

    def block(self, body: list[ast.stmt]) -> None:
        """Read statements in their order; a return under a guard narrows those behind it."""
        whole = self.versions
        for node in body:
            self.statement(node)
            if isinstance(node, ast.If) and leaves(node.body):
                held = self.held(node.test)
                self.versions = self.versions if held is None else self.versions - held
        self.versions = whole

    def statement(self, node: ast.stmt) -> None:
        """Read one statement."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.ClassDef):
            self.class_(node)
        elif isinstance(node, ast.If):
            self.if_(node)
        elif isinstance(node, ast.Assign):
            self.assignment(node)
        elif isinstance(node, ast.AnnAssign):
            types = self.value(node.value) if node.value else NOTHING
            self.assign(node.target, types | self.annotated(node.annotation))
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.assign(node.target, elements(self.value(node.iter)))
            self.block([*node.body, *node.orelse])
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                types = self.value(item.context_expr)
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, types)
            self.block(node.body)
        elif isinstance(node, ast.Return):
            types = self.value(node.value) if node.value else NOTHING
            self.analysis.returned[self.scope] |= types
        else:
            self.parts(node)

    def parts(self, node: ast.AST) -> None:
        """Read what a statement or an expression is made of."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                found = self.value(child)
                if isinstance(node, ast.Expr) and isinstance(child, ast.Yield):
                    self.analysis.returned[self.scope] |= found
            else:
                self.parts(child)

    def class_(self, node: ast.ClassDef) -> None:
        """A class: what it is derived from."""
        key = f"{self.scope}.{node.name}"
        for base in node.bases:
            self.analysis.bases[key] = self.analysis.bases.get(key, NOTHING) | self.value(base)
        inner = Walker(self.analysis, key, self.module, self.versions)
        inner.block([each for each in node.body if not isinstance(each, ast.FunctionDef)])

    def if_(self, node: ast.If) -> None:
        """Both branches; a guard narrows them."""
        self.value(node.test)
        whole, held = self.versions, self.held(node.test)
        self.versions = whole if held is None else whole & held
        self.block(node.body)
        self.versions = whole if held is None else whole - held
        self.block(node.orelse)
        self.versions = whole

    def held(self, test: ast.expr) -> frozenset[str] | None:
        """The versions for which a condition may hold; None where it says nothing of them."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.held(test.operand)
            return None if inner is None else frozenset(self.analysis.api.versions) - inner
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            known = [held for each in test.values if (held := self.held(each)) is not None]
            return frozenset.intersection(*known) if known else None
        text = ast.unparse(test)
        return self.analysis.optional.get(text) or self.analysis.guard(text)

    def assignment(self, node: ast.Assign) -> None:
        """Give targets their values; of tuples each its own."""
        for target in node.targets:
            pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            if pair and len(target.elts) == len(node.value.elts):
                for each, value in zip(target.elts, node.value.elts, strict=True):
                    self.assign(each, self.value(value))
            else:
                self.assign(target, self.value(node.value))
                found = self.analysis.optional.get(ast.unparse(node.value))
                if found is not None:
                    self.analysis.optional[f"{ast.unparse(target)} is not None"] = found

    def assign(self, target: ast.expr, types: Types) -> None:
        """Give a target a value."""
        if isinstance(target, ast.Name):
            self.bind(target.id, types)
        elif isinstance(target, ast.Attribute):
            self.assign_attribute(target, types)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self.assign(each, elements(types))
        else:
            self.parts(target)

    def assign_attribute(self, target: ast.Attribute, types: Types) -> None:
        """Give an attribute a value: of an object of the files, or of the library."""
        owners = self.value(target.value)
        if target.attr == "__class__":
            made = frozenset(Type("instance", t.name) for t in types if t.kind == "class")
            self.assign(target.value, made)
            return
        for each in owners:
            if each.kind == "pyinstance":
                self.analysis.names[f"{each.name}()", target.attr] |= types
        names = tuple(sorted(f"{t.name}.{target.attr}" for t in owners if t.kind == "instance"))
        if names and not any(each.kind == "pyinstance" for each in owners):
            self.use(target, names, store=True)

    # ---- expressions

    def value(self, node: ast.expr) -> Types:
        """The types of an expression; uses in it are noted."""
        if isinstance(node, ast.Name):
            found = self.analysis.lookup(self.scope, node.id)
            return found | {TRT} if node.id == MODULE else found
        if isinstance(node, ast.Attribute):
            return self.attribute(node, self.value(node.value))
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            self.generators(node.generators)
            return frozenset({Type("list", of=self.value(node.elt))})
        if isinstance(node, ast.DictComp):
            self.generators(node.generators)
            self.value(node.key)
            return self.value(node.value) & NOTHING
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = [self.value(each) for each in node.elts]
            return frozenset({Type("list", of=frozenset().union(*parts))})
        if isinstance(node, ast.IfExp):
            return self.if_expression(node)
        if isinstance(node, ast.BoolOp):
            return frozenset().union(*map(self.value, node.values))
        if isinstance(node, ast.NamedExpr):
            types = self.value(node.value)
            self.assign(node.target, types)
            return types
        if isinstance(node, ast.Subscript):
            self.value(node.slice)
            return elements(self.value(node.value))
        if isinstance(node, ast.Yield):
            return self.value(node.value) if node.value else NOTHING
        if isinstance(node, ast.Lambda):
            return self.value(node.body) & NOTHING
        self.parts(node)
        return NOTHING

    def if_expression(self, node: ast.IfExp) -> Types:
        """Both values; a guard narrows them."""
        self.value(node.test)
        whole, held = self.versions, self.held(node.test)
        self.versions = whole if held is None else whole & held
        types = self.value(node.body)
        self.versions = whole if held is None else whole - held
        types |= self.value(node.orelse)
        self.versions = whole
        return types

    def generators(self, generators: list[ast.comprehension]) -> None:
        """The loops of a comprehension."""
        for each in generators:
            self.assign(each.target, elements(self.value(each.iter)))
            for test in each.ifs:
                self.value(test)

    def attribute(self, node: ast.Attribute, owners: Types) -> Types:
        """An attribute of a value."""
        if node.attr == MODULE:
            return frozenset({TRT})
        out: set[Type] = set()
        own = False
        names: list[str] = []
        for each in owners:
            if each.kind == "pyinstance":
                out |= self.analysis.attribute(each.name, node.attr)
                own = own or self.analysis.has(each.name, node.attr)
            elif each.kind in ("pymodule", "pyclass"):
                out |= self.analysis.resolved(
                    self.analysis.names.get((each.name, node.attr), NOTHING)
                )
            elif each.kind == "trt":
                names.append(node.attr)
            elif each.kind in ("class", "instance"):
                names.append(f"{each.name}.{node.attr}")
        if own:  # of a class of the files that is derived from one of the library's
            return frozenset(out)
        if names:
            self.use(node, tuple(sorted(names)))
        for name in names:
            out |= self.meaning(name)
        return frozenset(out)

    def meaning(self, name: str) -> Types:
        """What a name of the library gives, in any version."""
        out: set[Type] = set()
        for version in self.analysis.api.versions:
            member = self.analysis.api.member(version, name)
            if member is None:
                continue
            if member.kind in ("class", "enum"):
                out.add(Type("class", name))
            elif member.kind == "method":
                out.add(Type("bound", name))
            elif member.kind == "member":
                out.add(Type("instance", name.rpartition(".")[0]))
            elif member.returns:
                out |= given(member.returns)
        return frozenset(out)

    def call(self, node: ast.Call) -> Types:
        """A call: of the library, or of the files."""
        if named_attribute(node):
            return self.asked(node)
        function = self.value(node.func)
        arguments = [self.value(each) for each in node.args]
        keywords = {each.arg: self.value(each.value) for each in node.keywords}
        starred = None in keywords or any(isinstance(each, ast.Starred) for each in node.args)
        words = {word: types for word, types in keywords.items() if word is not None}
        out: set[Type] = set()
        names = tuple(sorted(t.name for t in function if t.kind in ("class", "bound")))
        if names and not starred:
            self.use(node, names, call=(len(arguments), frozenset(words)))
        for each in function:
            if each.kind == "class":
                out.add(Type("instance", each.name))
            elif each.kind == "bound":
                for version in self.analysis.api.versions:
                    member = self.analysis.api.member(version, each.name)
                    out |= given(member.returns) if member is not None else NOTHING
            elif each.kind == "function":
                skip = 1 if self.analysis.functions[each.name].owner else 0
                out |= self.enter(each.name, arguments, words, skip)
            elif each.kind == "pyclass":
                out |= self.construct(each.name, arguments, words)
        return frozenset(out)

    def asked(self, node: ast.Call) -> Types:
        """getattr with a name: with a default it says nothing of versions that have no such
        name."""
        owner, name = node.args[:2]
        assert isinstance(name, ast.Constant)
        made = ast.Attribute(owner, str(name.value), ast.Load())
        ast.copy_location(made, node)
        owners, whole = self.value(owner), self.versions
        if len(node.args) == 3:
            classes = [each.name for each in owners if each.kind in ("class", "instance")]
            names = [f"{each}.{name.value}" for each in classes] or [str(name.value)]
            member = self.analysis.api.member
            known = frozenset(v for v in whole if any(member(v, each) for each in names))
            self.versions = known or whole
            self.analysis.optional[ast.unparse(node)] = self.versions
        found = self.attribute(made, owners)
        self.versions = whole
        return found

    def enter(self, key: str, arguments: list[Types], words: dict[str, Types], skip: int) -> Types:
        """A call of a function of the files: its parameters learn, and its result."""
        function = self.analysis.functions[key]
        self.analysis.called.add(key)
        self.analysis.callers[key] |= self.versions
        parameters = [*function.node.args.posonlyargs, *function.node.args.args][skip:]
        for parameter, types in zip(parameters, arguments, strict=False):
            self.analysis.names[key, parameter.arg] |= types
        for word, types in words.items():
            self.analysis.names[key, word] |= types
        passed = self.passed_on(function, parameters, arguments)
        return self.analysis.returned[key] if passed is None else passed

    def passed_on(
        self, function: Function, parameters: list[ast.arg], arguments: list[Types]
    ) -> Types | None:
        """The result of a function that returns one of its parameters: that argument's type, and
        not those of all calls. None for other functions."""
        results = [n.value for n in ast.walk(function.node) if isinstance(n, ast.Return)]
        names = {n.id for n in results if isinstance(n, ast.Name)}
        if len(names) != 1 or len(names) != len({ast.unparse(n) for n in results if n}):
            return None
        pairs = zip(parameters, arguments, strict=False)
        return next((types for parameter, types in pairs if parameter.arg in names), None)

    def construct(self, key: str, arguments: list[Types], words: dict[str, Types]) -> Types:
        """An instance of a class of the files: its constructor or its fields learn."""
        if f"{key}.__init__" in self.analysis.functions:
            self.enter(f"{key}.__init__", arguments, words, 1)
        else:
            body = self.analysis.classes[key].body
            fields = [
                each.target.id
                for each in body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            for name, types in [*zip(fields, arguments, strict=False), *words.items()]:
                self.analysis.names[f"{key}()", name] |= types
        bases = self.analysis.bases.get(key, NOTHING)
        own = frozenset({Type("pyinstance", key)})
        return own | frozenset(Type("instance", b.name) for b in bases if b.kind == "class")


def named_attribute(node: ast.Call) -> bool:
    """Whether a call is getattr with a name that is written down."""
    called = isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1
    return called and isinstance(node.args[1], ast.Constant)


def elements(types: Types) -> Types:
    """What a list of these types has in it."""
    return frozenset().union(*(each.of for each in types if each.kind == "list"))


def given(returns: str) -> Types:
    """The types of what the library gives: a class, or a list of it."""
    if not returns:
        return NOTHING
    if returns.endswith("[]"):
        return frozenset({Type("list", of=given(returns[:-2]))})
    return frozenset({Type("instance", returns)})


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a block always ends its function or its turn of a loop."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
