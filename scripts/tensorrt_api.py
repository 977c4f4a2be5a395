"""Writes down which names of TensorRT's Python API edgespec uses, as each version has them.

    python scripts/tensorrt_api.py [--wheels DIR]

It downloads NVIDIA's bindings (their licence: NVIDIA's; nothing of them is kept but names), lets each
version say its classes, members, parameters and what can be assigned, and writes those names that
`edgespec/backends/tensorrt` and the sample of the tests use to tests/data/tensorrt_api.json. The
bindings of TensorRT are loaded with empty libraries in place of libnvinfer; those of TensorRT-RTX
load with their own. Run it when a new name is used or a new version is supported.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorrt_uses import Api, Member, uses_in

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "edgespec" / "backends" / "tensorrt"
SAMPLE = ROOT / "tests" / "data" / "tensorrt_sample.py"
DATA = ROOT / "tests" / "data" / "tensorrt_api.json"

# Version as it is called here -> package, its version, module, and the package of its libraries
WHEELS: dict[str, tuple[str, str, str, str]] = {
    **{
        name: ("tensorrt-cu13-bindings", version, "tensorrt_bindings", "")
        for name, version in (
            ("10.13", "10.13.3.9"),
            ("10.15", "10.15.1.29"),
            ("10.16", "10.16.1.11"),
            ("11.4", "11.4.0.106"),
        )
    },
    **{
        name: (
            "tensorrt-rtx-cu13-bindings",
            version,
            "tensorrt_rtx_bindings",
            "tensorrt-rtx-cu13-libs",
        )
        for name, version in (
            ("rtx-1.4", "1.4.0.76"),
            ("rtx-1.5", "1.5.0.114"),
            ("rtx-1.6", "1.6.1.120"),
            ("rtx-1.7", "1.7.1.116"),
        )
    },
}
# Classes that members give and the bindings do not say
UNSAID = {"IAttentionInputLayer.attention": "IAttention", "OnnxParser.get_error": "ParserError"}
SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\)(?: -> (.+))?$", re.MULTILINE)


# ---- what was found, as tests read it


class Stored:
    """The API of a data file: {"versions": {name: its full version}, "names": {name: [{"in": versions, without which it is so in all,
    "kind": ..., "overloads": ..., "returns": ..., "writable": ...}]}}."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.versions = tuple(raw["versions"])
        self.known = frozenset(raw["names"])
        self.members: dict[tuple[str, str], Member] = {}
        for name, rows in raw["names"].items():
            for row in rows:
                member = member_of(row)
                versions = row.get("in", self.versions)
                self.members |= {(version, name): member for version in versions}

    def member(self, version: str, name: str) -> Member | None:
        """What a name is in a version; None where there is no such name."""
        return self.members.get((version, name))


def member_of(row: Mapping[str, Any]) -> Member:
    """A row of a data file as a value."""
    overloads = row.get("overloads")
    return Member(
        row["kind"],
        None if overloads is None else tuple(map(tuple, overloads)),
        row.get("returns", ""),
        row.get("writable", False),
    )


def stored() -> Stored:
    """The committed data."""
    return Stored(json.loads(DATA.read_text()))


def package_files() -> dict[str, Path]:
    """The modules that use TensorRT, by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# ---- looking at one version, in a process of its own


def look(module: str) -> dict[str, dict[str, Any]]:
    """Every name of the bindings that are on the path: "Class", "Class.member" -> what it is."""
    trt = __import__(module)
    found: dict[str, dict[str, Any]] = {}
    for name in dir(trt):
        value = getattr(trt, name)
        if not isinstance(value, type):
            if not name.startswith("_") or name == "__version__":
                found[name] = described(value)
            continue
        members = getattr(value, "__members__", None)
        found[name] = {"kind": "class"} if members is None else {"kind": "enum"}
        if members is None:
            found[name] |= signature(value.__init__)
            found[name].pop("returns", None)
        for member in dir(value):
            if not member.startswith("_"):
                seen = inspect.getattr_static(value, member)
                row = described(seen, getattr(value, member))
                if f"{name}.{member}" in UNSAID:
                    row["returns"] = UNSAID[f"{name}.{member}"]
                found[f"{name}.{member}"] = row
        for member in members or ():
            found[f"{name}.{member}"] = {"kind": "member"}
    return found


def described(value: Any, bound: Any = None) -> dict[str, Any]:
    """What a member is."""
    if isinstance(value, property):
        returns = signature(value.fget).get("returns", "")
        return {"kind": "property", "returns": returns, "writable": value.fset is not None}
    if isinstance(bound, type):  # an enum within a class
        return {"kind": "value"}
    if callable(value) or callable(bound):
        return {"kind": "method", **signature(value if bound is None else bound)}
    return {"kind": "value"}


def signature(function: Any) -> dict[str, Any]:
    """Parameters of each overload and the class of the result, from the first lines of the
    documentation that the bindings make of their own types."""
    text = getattr(function, "__doc__", None) or ""
    overloads: list[list[str]] = []
    results = set()
    heads = text.splitlines()[:1] if "Overloaded function." not in text else text.splitlines()
    for line in heads:
        match = SIGNATURE.match(line)
        if match is None or match[1] == "*args, **kwargs":
            continue
        parameters = [parameter(part) for part in split(match[1])]
        overloads.append(parameters[1:] if parameters[:1] in (["self"], ["arg0"]) else parameters)
        results.add(result(match[2] or ""))
    out: dict[str, Any] = {}
    if overloads:
        out["overloads"] = overloads
    if len(results) == 1:
        out["returns"] = results.pop()
    return out


def split(text: str) -> list[str]:
    """Parameters of a signature: at commas that stand in no brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[(<{") - (char in "])>}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def parameter(text: str) -> str:
    """The name of a parameter, with "=" where it has a default."""
    name = re.split(r"[:=]", text, maxsplit=1)[0].strip()
    return f"{name}=" if "=" in text else name


def result(text: str) -> str:
    """The class of a result, if it is one of the library's."""
    match = re.search(r"tensorrt\w*\.tensorrt\w*\.((?:\w+\.)*\w+)", text)
    if match is None:
        return ""
    return f"{match[1]}[]" if re.match(r"(?i)list\[", text) else match[1]


# ---- getting the versions


class Full(Stored):
    """All names of all versions. Remembers those that were asked for."""

    def __init__(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        self.versions = tuple(found)
        self.found = found
        self.asked: set[str] = set()

    def member(self, version: str, name: str) -> Member | None:
        """What a name is in a version."""
        self.asked.add(name)
        row = self.found[version].get(name)
        return None if row is None else member_of(row)


def derive(wheels: Path) -> dict[str, Any]:
    """The data file: what the versions say of each name that is used."""
    full = Full({name: names_of(name, wheels) for name in WHEELS})
    for files in (package_files(), {"sample": SAMPLE}):
        full.asked |= {name for use in uses_in(files, full) for name in use.names}
    return {
        "versions": {name: WHEELS[name][1] for name in WHEELS},
        "names": {name: list(rows(full, name)) for name in sorted(full.asked)},
    }


def rows(full: Full, name: str) -> Iterator[dict[str, Any]]:
    """The forms of a name, each with its versions."""
    forms: dict[str, list[str]] = {}
    for version in full.versions:
        row = full.found[version].get(name)
        if row is not None:
            forms.setdefault(json.dumps(row, sort_keys=True), []).append(version)
    for form, versions in forms.items():
        said = {key: value for key, value in json.loads(form).items() if value not in ("", False)}
        yield said if versions == [*full.versions] else {"in": versions, **said}


def names_of(name: str, wheels: Path) -> dict[str, dict[str, Any]]:
    """What one version says of itself."""
    package, version, module, libraries = WHEELS[name]
    directory = wheels / f"{package}-{version}"
    unpack(package, version, wheels, directory)
    environment = dict(os.environ)
    if libraries:
        unpack(libraries, version, wheels, directory)
    else:
        environment["LD_LIBRARY_PATH"] = str(empty_libraries(directory, module))
    environment["PYTHONPATH"] = str(directory)
    command = [sys.executable, __file__, "--look", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name}: {done.stderr}")
    out: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return out


def unpack(package: str, version: str, wheels: Path, directory: Path) -> None:
    """Download a wheel, unless it is there, and unpack it."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not [*wheels.glob(pattern)]:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*command, f"{package}=={version}"], check=True, stdout=sys.stderr)
    with zipfile.ZipFile(next(wheels.glob(pattern))) as archive:
        archive.extractall(directory)


def empty_libraries(directory: Path, module: str) -> Path:
    """Libraries with the symbols that the bindings ask for, and nothing behind them; where they
    are. Needs a C compiler and binutils."""
    shared = next((directory / module).glob("tensorrt*.so"))
    needed = output("readelf", "-d", str(shared))
    undefined = output("nm", "-D", "--undefined-only", str(shared))
    symbols = re.findall(r"U (\w*_INTERNAL|get\w*Registry|get\w+Version|initLib\w+)\n", undefined)
    place = directory / "empty"
    place.mkdir(exist_ok=True)
    source = place / "empty.c"
    source.write_text("".join(f"void* {symbol}(void) {{ return 0; }}\n" for symbol in symbols))
    for library in re.findall(r"\[(libnv\w+\.so\.\d+)\]", needed):
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library}", str(source)]
        subprocess.run([*command, "-o", str(place / library)], check=True)
    return place


def output(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="where wheels are, or are kept")
    parser.add_argument("--look", metavar="MODULE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        print(json.dumps(look(options.look)))
        return 0
    with tempfile.TemporaryDirectory() as place:
        wheels = options.wheels or Path(place)
        DATA.write_text(text_of(derive(wheels)), encoding="utf-8")
    return 0


def text_of(data: Mapping[str, Any]) -> str:
    """The data file's text: a line for each form of a name."""
    names = ",\n".join(
        f"    {json.dumps(name)}: [{', '.join(json.dumps(row) for row in rows_)}]"
        for name, rows_ in data["names"].items()
    )
    versions = json.dumps(data["versions"], indent=2).replace("\n", "\n  ")
    return f'{{\n  "versions": {versions},\n  "names": {{\n{names}\n  }}\n}}\n'


__all__ = ["Api", "Stored", "package_files", "stored"]

if __name__ == "__main__":
    sys.exit(main())
