"""The script that kills commands: one kill of a real run, and that it would notice what it looks
for."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import toys

pytestmark = pytest.mark.deep
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_test.py"


@pytest.fixture(scope="module")
def kills() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("kill_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_test"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kill_test"]


@pytest.fixture(scope="module")
def made(kills: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The script's own stages, of a toy pair. For reading."""
    root = tmp_path_factory.mktemp("kills")
    base = toys.make_base(root / "demo" / "base", "llama", layers=8)
    toys.make_draft(root / "demo" / "draft", base, "eagle")
    kills.DEMO = root / "demo"
    shop = kills.Shop(root / "shop")
    shop.make()
    shop.work.mkdir()
    return shop


@pytest.fixture
def shop(made: Any) -> Any:
    shutil.rmtree(made.work)
    made.work.mkdir()
    return made


def case(kills: ModuleType, name: str) -> Any:
    return next(case for case in kills.CASES if case.name == name)


def test_one_kill_leaves_nothing_false(kills: ModuleType, shop: Any) -> None:
    build = case(kills, "build draft")
    found = kills.kill_once(shop, build, random.Random(1), (3.0, 0.3))
    assert found["killed"] + found["ended by themselves"] == 1
    assert not any(found[fault] for fault in kills.FAULTS)


def test_an_export_that_is_not_whole_and_is_built_would_be_noticed(
    kills: ModuleType, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = case(kills, "export draft")
    shutil.copytree(shop.made / "onnx_draft", shop.work / "onnx_draft")
    assert list(export.false(shop, shop.work)) == []
    data = shop.work / "onnx_draft" / "llm" / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"\x55")
    assert list(export.false(shop, shop.work)) == []  # it is refused
    monkeypatch.setattr(kills, "quietly", lambda _: (0, ""))  # as if nobody looked
    assert len(list(export.false(shop, shop.work))) == 2


def test_engines_that_answer_otherwise_would_be_noticed(
    kills: ModuleType, shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = case(kills, "build base")
    shutil.copytree(shop.made / "engines", shop.work / "engines")
    assert list(build.false(shop, shop.work)) == []
    monkeypatch.setattr(kills, "answers", lambda path: [str(path)])
    assert len(list(build.false(shop, shop.work))) == 2


@pytest.mark.parametrize("name", ["export base", "build base", "infer"])
def test_what_is_left_beside_the_result_would_be_noticed(
    kills: ModuleType, shop: Any, name: str
) -> None:
    one = case(kills, name)
    source = shop.made / one.result
    if source.is_dir():
        shutil.copytree(source, shop.work / one.result)
    else:
        shutil.copyfile(source, shop.work / one.result)
    assert list(one.left(shop, shop.work)) == []
    place = shop.work if name == "infer" else shop.work / one.result
    (place / ".left.tmp-1").touch()
    assert len(list(one.left(shop, shop.work))) == 1


def test_an_output_with_other_answers_would_be_noticed(kills: ModuleType, shop: Any) -> None:
    infer = case(kills, "infer")
    output = json.loads((shop.made / "output.json").read_text())
    output["responses"][1]["output_ids"][0] += 1
    (shop.work / "output.json").write_text(json.dumps(output))
    line = json.dumps(output["responses"][1])
    (shop.work / "output.json.partial.jsonl").write_text(f"{line}\n{line[:9]}")
    assert len(list(infer.false(shop, shop.work))) == 2
