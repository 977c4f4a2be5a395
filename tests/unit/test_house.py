"""The house stands as drawn: who leans on whom, what is imported when, and that `--help` stays
light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "edgespec"

HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "tensorrt", "PIL")

# Lowest first: each may lean on those before it, so there is no circle.
GROUND = (
    "errors",
    "progress",
    "quantization",
    "config",
    "safe_read",
    "families",
    "contract",
    "rope",
    "methods",
    "artifacts",
    "prompts",
    "vision",
    "images",
)
LEANS_ON: dict[str, tuple[str, ...]] = {
    **{room: GROUND[:floor] for floor, room in enumerate(GROUND)},
    "checkpoint": GROUND,
    "graphs": ("checkpoint", *GROUND),
    "export": ("graphs", "checkpoint", *GROUND),
    "modules": GROUND,
    "quantize": ("modules", "graphs", "checkpoint", *GROUND),
    "layouts": ("graphs", "checkpoint", *GROUND),
    "pairing": ("export", "graphs", "checkpoint", *GROUND),
    "training": ("modules", "graphs", "checkpoint", *GROUND),
    "backends": GROUND,
    # Each leans on the other; RUNTIME has the floor between its rooms on which compat stands
    "compat": ("runtime", "backends", *GROUND),
    "runtime": ("compat", "backends", *GROUND),
    "evaluation": ("runtime", "backends", *GROUND),
    "benchmark": ("runtime", "backends", *GROUND),
    "data": ("benchmark", "runtime", "backends", *GROUND),
    "tuning": ("benchmark", "runtime", "compat", "backends", *GROUND),
    "serve": ("runtime", "backends", *GROUND),
    "deploy": GROUND,
}
ROOMS = tuple(LEANS_ON)
ROOF: dict[str, tuple[str, ...]] = {
    "pipeline": ROOMS,
    "cli": (*ROOMS, "pipeline"),
    "__init__": ROOMS,
    "__main__": (*ROOMS, "pipeline", "cli"),
}
TABLE = {**LEANS_ON, **ROOF}
# The rooms of the runtime, lowest first: each leans on those before it alone, also in functions.
# Below compat nobody knows another tool's words: it makes of them what `opening` has.
RUNTIME = (
    "costs",
    "faults",
    "limits",
    "sampling",
    "text",
    "lanes",
    "trees",
    "grammar",
    "acceptance",
    "plans",
    "vision",
    "drafters",
    "loop",
    "opening",
    "compat",
    "streams",
    "batch",
    "engine",
    "engine_request",
    "measuring",
    "requests",
    "checks",
)


# Files outside cli/ that name flags: those of other programs, and how ours are spelled
NAMES_FLAGS = {
    "errors.py": "flag_of",
    "compat/bench_tools.py": "flags of other tools, and which of ours are meant",
    "compat/config_keys.py": "why a key of another tool means nothing here",
    "compat/edgellm.py": "flags of other tools, and what to do instead",
    "compat/serving.py": "flags of other tools, and what to do instead",
    "compat/trtllm.py": "flags of other tools, and what to do instead",
    "backends/cuda/device/nvrtc.py": "NVRTC",
    "backends/tensorrt/emit.py": "trtexec",
    "backends/tensorrt/versions.py": "pip, venv",
    "images/decode.py": "pip",
    "prompts/convert.py": "genai-perf, aiperf, vllm",
}
FLAG = re.compile(r"(?<![\w-])--[a-z]")


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Full names of what one statement imports; a relative import begins with a dot."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr) == "import_module"
    ):
        yield from (part.value for part in node.args[:1] if isinstance(part, ast.Constant))


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        for name in (
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in imported_modules(node)
        ):
            parts = name.split(".")
            if parts[0] == "":
                found.append(f"{path.relative_to(package)}: relative import {name}")
            elif (
                parts[0] == "edgespec" and len(parts) > 1 and parts[1] not in (room, "__version__")
            ):
                if room not in TABLE:
                    found.append(
                        f"{path.relative_to(package)}: the room {room} has no row in the table"
                    )
                elif parts[1] not in TABLE[room]:
                    found.append(f"{path.relative_to(package)}: {room} leans on {parts[1]}")
    return found


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def imports(node: ast.AST, *, lazy: bool) -> Iterator[str]:
    """What a file imports but for types; without `lazy` not what its functions import."""
    yield from imported_modules(node)
    if isinstance(node, FUNCTIONS) and not lazy:
        return
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = node.orelse
    for child in children:
        yield from imports(child, lazy=lazy)


def modules_of(package: Path) -> dict[str, Path]:
    """Full name -> file of each module of a package."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if parts and parts[-1] == "__init__" else parts
        found[".".join(("edgespec", *parts))] = path
    return found


def file_imports(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of the package that its file imports, also in functions."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = list(imports(ast.parse(path.read_text()), lazy=True))
        # `from package import name`: a module, or something in the package's own file
        targets = {i if i in modules else i.rpartition(".")[0] for i in imported}
        graph[name] = (targets & modules.keys()) - {name}
    return graph


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """The first circle of imports that is found, from a module to itself; empty: there is none."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if circle := visit(target, [*trail, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := visit(name, []))), [])


def heavy_imports(source: str) -> list[str]:
    names = imports(ast.parse(source), lazy=False)
    return [name for name in names if name.split(".")[0] in HEAVY]


def ground_files() -> list[Path]:
    return [
        path
        for room in GROUND
        for path in (PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py"))
        if path.exists()
    ]


def plant(package: Path, file: str, source: str) -> None:
    path = package / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def test_rooms_lean_only_on_whom_the_table_allows() -> None:
    assert violations(PACKAGE) == []


def test_every_room_has_a_row_in_the_table() -> None:
    rooms = {room_of(path, PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert {"errors", "prompts", "runtime"} <= rooms
    assert rooms <= set(TABLE)


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        (
            "prompts.py",
            "from edgespec.runtime.text.tokenizer import Tokenizer",
            "prompts leans on runtime",
        ),
        (
            "errors.py",
            "def f():\n    import edgespec.artifacts.hashes",
            "errors leans on artifacts",
        ),
        ("config.py", "from edgespec import contract", "config leans on contract"),
        (
            "runtime/session.py",
            "from edgespec.graphs.decoder import Decoder",
            "runtime leans on graphs",
        ),
        ("export/onnx.py", "from edgespec.runtime import rope", "export leans on runtime"),
        (
            "backends/ort/staging.py",
            "if True:\n    from edgespec.cli.main import cli",
            "backends leans on cli",
        ),
        (
            "graphs/eagle.py",
            "importlib.import_module('edgespec.export.x')",
            "graphs leans on export",
        ),
        ("graphs/eagle.py", "from .decoder import Decoder", "relative import .decoder.Decoder"),
        ("pipeline/x.py", "from edgespec.cli import main", "pipeline leans on cli"),
        ("attic/x.py", "from edgespec import errors", "the room attic has no row"),
    ],
)
def test_planted_violation_is_caught(tmp_path: Path, file: str, source: str, said: str) -> None:
    plant(tmp_path, file, source)
    (found,) = violations(tmp_path)
    assert said in found


def test_allowed_import_is_not_taken_for_a_violation(tmp_path: Path) -> None:
    plant(
        tmp_path,
        "runtime/session.py",
        "from edgespec import __version__, artifacts\nfrom edgespec.runtime import tree",
    )
    plant(
        tmp_path,
        "cli/main.py",
        "from edgespec.export.onnx import export\nimport edgespec\nimport numpy",
    )
    assert violations(tmp_path) == []


def runtime_violations(package: Path) -> list[str]:
    """What a room of the runtime imports of one above it."""
    rank = {room: floor for floor, room in enumerate(RUNTIME)}
    modules = modules_of(package)
    found = []
    for name, path in modules.items():
        if (own := runtime_room(name)) is None:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for target in imported_modules(node):
                room = runtime_room(target)
                if room is not None and rank[room] > rank[own]:
                    found.append(f"{name}: {own} leans on {target}")
    return found


def runtime_room(module: str) -> str | None:
    """The row of RUNTIME in which a module stands; None for one of another room."""
    parts = module.split(".")
    if parts[:2] == ["edgespec", "runtime"] and len(parts) > 2:
        return parts[2]
    return "compat" if parts[:2] == ["edgespec", "compat"] else None


def test_rooms_of_the_runtime_lean_downward() -> None:
    assert runtime_violations(PACKAGE) == []


@pytest.mark.parametrize("above", ["runtime.measuring.x", "compat.decoding"])
def test_an_arrow_up_within_the_runtime_is_caught(tmp_path: Path, above: str) -> None:
    plant(tmp_path, "runtime/loop/session.py", f"def f():\n    import edgespec.{above}")
    assert runtime_violations(tmp_path) == [
        f"edgespec.runtime.loop.session: loop leans on edgespec.{above}"
    ]


def test_files_import_each_other_in_no_circle() -> None:
    graph = file_imports(PACKAGE)
    assert "edgespec.runtime.loop.session" in graph
    assert len(graph["edgespec.runtime.loop.session"]) > 3
    assert circle_of(graph) == []


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        (
            {
                "pairing/check.py": "from edgespec.pairing.probe import probe",
                "pairing/probe.py": "from edgespec.pairing import check",
            },
            ["edgespec.pairing.check", "edgespec.pairing.probe", "edgespec.pairing.check"],
        ),
        (
            {
                "a.py": "import edgespec.b",
                "b.py": "class B:\n    from edgespec.c import C",
                "c.py": "try:\n    import edgespec.a\nexcept ImportError:\n    raise",
            },
            ["edgespec.a", "edgespec.b", "edgespec.c", "edgespec.a"],
        ),
        (
            {"a.py": "from edgespec.b import B", "b.py": "def f():\n    import edgespec.a"},
            ["edgespec.a", "edgespec.b", "edgespec.a"],
        ),
        (
            {
                "a.py": "from edgespec.b import B",
                "b.py": "if TYPE_CHECKING:\n    import edgespec.a",
            },
            [],
        ),
    ],
)
def test_planted_circle_of_files_is_found(
    tmp_path: Path, files: dict[str, str], circle: list[str]
) -> None:
    for file, source in files.items():
        plant(tmp_path, file, source)
    plant(tmp_path, "pairing/__init__.py", "")
    assert circle_of(file_imports(tmp_path)) == circle


def test_ground_imports_nothing_heavy_at_module_level() -> None:
    files = ground_files()
    assert PACKAGE / "prompts" / "__init__.py" in files
    assert {str(path): heavy_imports(path.read_text()) for path in files} == {
        str(path): [] for path in files
    }


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from onnx import helper",
        "try:\n    import onnxruntime as ort\nexcept ImportError:\n    pass",
        "class A:\n    import transformers.models",
        "if x:\n    pass\nelse:\n    import tensorrt",
    ],
)
def test_planted_heavy_import_is_caught(source: str) -> None:
    assert len(heavy_imports(source)) == 1


def test_heavy_import_in_a_function_or_for_types_is_fine() -> None:
    source = "if TYPE_CHECKING:\n    import torch\ndef f():\n    import onnx\nimport onnx_ir"
    assert heavy_imports(source) == []


SAY_WHAT_IS_IMPORTED = f"import sys; print(sorted({set(HEAVY)!r} & set(sys.modules)))"


def heavy_after(statement: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{SAY_WHAT_IS_IMPORTED}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_help_imports_nothing_heavy() -> None:
    said = heavy_after(
        "from edgespec.cli.main import cli; cli.main(['--help'], 'edgespec', standalone_mode=False)"
    )
    assert said.startswith("Usage: edgespec")
    assert said.splitlines()[-1] == "[]"


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert heavy_after("import edgespec") == "[]\n"
    assert heavy_after("import edgespec, onnx") == "['onnx']\n"  # the check can see


def test_running_an_engine_imports_no_onnx() -> None:
    """onnx_ir brings sympy along: half of what `infer` needs to start."""
    needed = "edgespec.runtime.engine, edgespec.runtime.requests, edgespec.backends.ort.runner"
    said = heavy_after(f"import sys, {needed}; print('onnx_ir' in sys.modules)")
    assert said == "False\n['onnxruntime']\n"


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string of a file's code, without its docstrings; a value in an f-string
    is an x."""
    tree = ast.parse(path.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", "x") for part in node.values)
            yield node.lineno, "".join(part if isinstance(part, str) else "x" for part in parts)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


def test_flags_are_named_on_the_command_line_alone() -> None:
    """Messages name parameters; each surface spells them."""
    flags = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if room_of(path, PACKAGE) != "cli" and str(path.relative_to(PACKAGE)) not in NAMES_FLAGS
        if FLAG.search(path.read_text())
        for line, text in texts_of(path)
        if FLAG.search(text)
    ]
    assert not flags, "\n".join(flags)
