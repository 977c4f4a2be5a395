"""Claims about `edgespec check` as users type it: lines, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.cli.check import TOPIC_WIDTH
from edgespec.pairing.table import PAIRINGS
from tests import toys
from tests.e2e.workshop import Cli, cli
from tests.lossless.pairs import agree

__all__ = ["cli"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check")
    base = toys.make_base(path / "base", "qwen3", layers=8)
    toys.make_dflash(path / "dflash", base, aux_layers=[2, 6], mask_token=0)
    toys.make_qwen3_5(path / "hybrid", images=True)
    agree(toys.make_qwen3_5(path / "agreeing") / "model.safetensors")
    return path


def test_a_pair_that_fits_ends_with_zero(shop: Path, cli: Cli) -> None:
    done = cli("check", shop / "base", shop / "dflash")
    assert done.code == 0
    assert "ok       tokenizer       the base's, 256 ids" in done.out
    assert done.out.splitlines()[-1] == "DFlash: fits"


@pytest.mark.parametrize("flags", [[], ["--mtp"]])
def test_a_base_alone_is_checked_for_its_own_head(shop: Path, cli: Cli, flags: list[str]) -> None:
    assert cli("check", shop / "hybrid", *flags).out.splitlines()[-1] == "MTP: fits"
    done = cli("check", shop / "base", *flags)
    assert done.code == 3
    assert "refused  head" in done.out
    assert done.out.splitlines()[-1] == "MTP: does not fit, 1 refused"


def test_json_has_every_verdict(shop: Path, cli: Cli) -> None:
    done = cli("check", shop / "hybrid", shop / "dflash", "--json")
    said = json.loads(done.out)
    assert (done.code, said["method"], said["refused"]) == (3, "dflash", 2)
    refused = [result for result in said["results"] if result["level"] == "refused"]
    assert [result["topic"] for result in refused] == ["made for", "aux layers"]
    assert all(result["remedy"] for result in refused)
    assert said["warnings"] == sum(result["level"] == "warning" for result in said["results"])


def test_flags_that_exclude_each_other_are_a_matter_of_usage(shop: Path, cli: Cli) -> None:
    assert cli("check", shop / "base", shop / "dflash", "--mtp").code == 2
    assert cli("check", shop / "base", "--aux-layers", "1,2").code == 2


def test_control_characters_of_strangers_are_spelt_out(
    tmp_path: Path, shop: Path, cli: Cli
) -> None:
    draft = toys.make_draft(tmp_path / "draft", shop / "base", "specforge")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "a\x1b[2Jb"})
    )
    done = cli("check", shop / "base", draft)
    assert "\x1b" not in done.out
    assert "a\\x1b[2Jb" in done.out


def test_a_directory_that_is_none_is_an_error_with_a_remedy(tmp_path: Path, cli: Cli) -> None:
    done = cli("check", tmp_path)
    assert done.code == 3
    assert "has no config.json" in done.err


@pytest.mark.parametrize(
    ("names", "method", "related"),
    [
        (("base", "dflash"), "DFlash", False),  # random both, but for their shapes
        (("agreeing",), "MTP", True),
    ],
)
def test_probe_tells_how_often_both_agree_and_refuses_what_agrees_by_chance(
    shop: Path, tmp_path: Path, cli: Cli, names: tuple[str, ...], method: str, related: bool
) -> None:
    text, pair = tmp_path / "text", [shop / name for name in names]
    text.write_text("The ferry leaves at seven in the morning and comes back at noon. " * 2)
    probing = "check", *pair, "--probe", "--probe-text", text
    done = cli(*probing)
    assert done.code == (0 if related else 3), done.out
    assert "the draft's first token is the base's next one at" in done.out
    last = "fits" if related else "shapes fit, but the draft was not made for this base"
    assert done.out.splitlines()[-1] == f"{method}: {last}"
    said = json.loads(cli(*probing, "--json").out)
    assert (said["method"], said["results"][-1]["topic"]) == (method.lower(), "probe")
    assert said["probe"]["positions"] > 20
    assert said["probe"]["shares"][0]["name"] == "as stated"
    assert 0 < said["probe"]["chance"] < 0.3
    assert said["probe"]["unrelated"] != related
    without = cli("check", *pair, "--json")
    assert (without.code, json.loads(without.out)["probe"]) == (0, None)


def test_probe_s_text_must_be_there_and_be_asked_for(shop: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("check", shop / "hybrid", "--probe-text", tmp_path).code == 2
    done = cli("check", shop / "hybrid", "--probe", "--probe-text", tmp_path / "nowhere")
    assert (done.code, "--probe-text" in done.err) == (3, True)
    (tmp_path / "short").write_text("one")
    done = cli("check", shop / "hybrid", "--probe", "--probe-text", tmp_path / "short")
    assert (done.code, "at least 16" in done.err) == (3, True)


def test_each_topic_has_room_beside_what_was_found() -> None:
    topics = {topic for row in PAIRINGS.values() for topic, _ in row.checks}
    assert max(map(len, topics)) < TOPIC_WIDTH
