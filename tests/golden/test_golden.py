"""What users and other tools read, under review: configs, manifests, `--help`, output.json,
contracts.

A change shows up as a diff of the files in this directory; `pytest --update-golden` writes them
anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.ort.contract import lowered_contract
from edgespec.backends.ort.native.library import why_missing
from edgespec.cli.main import COMMANDS, run
from edgespec.contract import GraphContract, GraphShape, Role, canonical_contract
from tests.forked import Forked
from tests.lossless.pairs import shared_pair

Golden = Callable[[str, str], None]

REQUESTS = {
    "temperature": 0.0,
    "max_generate_length": 12,
    "requests": [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Count to 3."},
            ]
        },
        {
            "messages": [{"role": "user", "content": "And on?"}],
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "seed": 7,
        },
        {"messages": [{"role": "user", "content": "Plainly."}], "disable_spec_decode": True},
        {"messages": [{"role": "user", "content": "Too long. " * 30}]},
    ],
}


@pytest.fixture(scope="module")
def pair() -> Path:
    return shared_pair("llama", "specforge")


VARYING = (
    "sha256",
    "identity",
    "texts",
    "base_identity",
    "bytes",
    "mtime_ns",
    "edgespec",
    "fingerprint",
    "command",
    "golden_difference",
    "base_model_dir",
)


def settled(value: Any, key: str = "") -> Any:
    """JSON without what changes from run to run: hashes, sizes, versions, times, paths. What is
    null stays null."""
    if key in VARYING or (key.endswith("_s") and isinstance(value, float)):
        return None if value is None else f"<{key}>"
    if key in ("packages", "stages_s"):
        return {name: f"<{name}>" for name in value}
    if isinstance(value, dict):
        return {name: settled(item, name) for name, item in value.items()}
    return [settled(item) for item in value] if isinstance(value, list) else value


def as_text(path: Path) -> str:
    return (
        json.dumps(
            settled(json.loads(path.read_text(encoding="utf-8"))), indent=2, ensure_ascii=False
        )
        + "\n"
    )


@pytest.mark.parametrize("component", ["base", "draft"])
def test_manifest_and_config_of_an_export(pair: Path, golden: Golden, component: str) -> None:
    directory = pair / f"onnx_{component}" / "llm"
    golden(f"export_{component}_manifest.json", as_text(directory / "manifest.json"))
    golden(f"export_{component}_config.json", as_text(directory / "config.json"))


@pytest.mark.parametrize("name", ["manifest.json", "base_config.json", "draft_config.json"])
def test_manifest_and_configs_of_an_engine_directory(pair: Path, golden: Golden, name: str) -> None:
    """Beside the kernels, which depend on the installation, and what was proven of them."""
    found = json.loads(as_text(pair / "engines" / name))
    for entry in found.get("engines", {"config": found}).values():
        rounding = entry["weights"].pop("rounding", None)
        assert rounding in (None, 0.0)
    kernels = found.pop("backend_config", None)
    assert name == "manifest.json" or (kernels is None) == (why_missing() is not None)
    for engine in (found, *found.get("engines", {}).values()):
        engine.get("weights", {}).pop("rounding", None)
    golden(f"engines_{name}", json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def test_output_of_fixed_requests(pair: Path, golden: Golden, tmp_path: Path) -> None:
    """Tokens and counts are kept: the toys are the same everywhere, and greedy and seeded draws
    with them."""
    asked, told = tmp_path / "input.json", tmp_path / "output.json"
    asked.write_text(json.dumps(REQUESTS))
    sizes = ["--spec-draft-top-k", "4", "--spec-draft-step", "3", "--spec-verify-size", "16"]
    files = [
        "--engine-dir",
        str(pair / "engines"),
        "--input-file",
        str(asked),
        "--output-file",
        str(told),
    ]
    assert (
        run(["infer", *files, "--spec-decode", *sizes, "--check-lossless"]) == 5
    )  # the last is too long
    golden("output.json", as_text(told).replace(str(asked), "<input>"))


def shape(value: Any, place: str = "") -> Any:
    """The keys of JSON and the types of what they have; of a list that of its first item. What
    depends on the machine has none."""
    if place in ("environment", "before", "after"):
        return dict.fromkeys(value, f"<{place}>")
    if place in ("device", "backend_settings"):
        return f"<{place}>"
    if isinstance(value, dict):
        return {name: shape(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "null" if value is None else type(value).__name__


def test_keys_and_types_of_a_benchmark_report(pair: Path, golden: Golden, tmp_path: Path) -> None:
    """One row of each mode; docs/benchmark.md says what they mean."""
    told = tmp_path / "report.json"
    sizes = ["--input-tokens", "8", "--output-tokens", "8", "--rows", "1,2", "--repeats", "6"]
    drafts = ["--spec-draft-step", "2", "--synthetic-acceptance", "0.5", "--spec-policy", "fixed"]
    line = ["bench", str(pair / "engines"), *sizes, *drafts, "--warmup", "0", "--json", str(told)]
    assert run(line) == 0
    found = json.loads(told.read_text(encoding="utf-8"))
    rows = {row["mode"]: shape(row) for row in reversed(found.pop("rows"))}
    assert [*rows] == ["speculative", "decode", "verify", "prefill"]
    value = shape(found) | {"rows": rows}
    golden("bench.json", json.dumps(value, indent=2) + "\n")


HELP = """
import os, sys
from edgespec.cli.main import main
for command in sys.argv[1:]:
    print(end=chr(0), flush=True)
    if os.fork():
        assert os.wait()[1] == 0
    else:
        main([*command.split(), "--help"])
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """Each in a process of its own: click remembers in a command how it was first asked."""
    commands, env = ["", *COMMANDS], {**os.environ, "COLUMNS": "100"}
    with Forked(HELP, *commands, env=env) as child:
        shown, said = child.communicate()
    assert child.wait() == 0, said
    return dict(zip(commands, shown.split(chr(0))[1:], strict=True))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(golden: Golden, helps: dict[str, str], command: str) -> None:
    lines = [line.rstrip() for line in helps[command].splitlines()]
    golden(f"help{'_' + command if command else ''}.txt", "\n".join(lines) + "\n")


SHAPES = {
    Role.LLM: GraphShape(Role.LLM, 64, 1, 2, 16, 16, 256),
    Role.BASE: GraphShape(Role.BASE, 64, 1, 2, 16, 16, 256, features=192),
    Role.DRAFT: GraphShape(Role.DRAFT, 64, 1, 2, 16, 16, 96, features=64, base_features=192),
}


def table(contract: GraphContract) -> str:
    rows = [("in", spec) for spec in contract.inputs] + [("out", spec) for spec in contract.outputs]
    return "".join(
        f"{way:4}{spec.name:16} {spec.dtype:8} [{', '.join(map(str, spec.shape))}]\n"
        for way, spec in rows
    )


# A base whose layers have two masks and two rotary tables
MIXED = GraphShape(Role.LLM, 80, 2, 2, 32, 32, 256, sliding=True, local_rotary_dim=32)
TABLES = {**{role.value: shape for role, shape in SHAPES.items()}, "mixed": MIXED}


@pytest.mark.parametrize("name", TABLES)
def test_contract_tables(golden: Golden, name: str) -> None:
    contract = canonical_contract(TABLES[name])
    text = (
        f"canonical\n{table(contract)}\nlowered to ONNX Runtime's CPU"
        f" kernels\n{table(lowered_contract(contract))}"
    )
    golden(f"contract_{name}.txt", text)


def test_golden_files_are_all_in_use(request: pytest.FixtureRequest) -> None:
    """A file that no test writes any more is deleted, not kept."""
    named = {
        f"export_{role}_{file}.json"
        for role in ("base", "draft")
        for file in ("manifest", "config")
    }
    named |= {
        f"engines_{file}" for file in ("manifest.json", "base_config.json", "draft_config.json")
    }
    named |= {"bench.json", "costs_explained.txt", "output.json"}
    named |= {"help.txt", *(f"help_{name}.txt" for name in COMMANDS)}
    named |= {f"contract_{name}.txt" for name in TABLES}
    there = {
        path.name
        for path in Path(request.path).parent.iterdir()
        if path.suffix in (".json", ".txt")
    }
    assert there == named


def test_nothing_of_the_machine_is_kept(request: pytest.FixtureRequest) -> None:
    for path in Path(request.path).parent.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"[0-9a-f]{40}|/tmp/|/home/", text), path.name
