"""--spec-policy as a user gives it: by flag, variable, file and /set; what drafted is said, in the
plan's line, the summary and the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.costs import with_costs
from tests.e2e.workshop import Cli, asked, cli, infer, responses
from tests.lossless.pairs import shared_pair

__all__ = ["cli"]  # a fixture

ADAPTIVE = "drafting adaptively: up to 8 drafts in a chain, each step as far as that pays"


@pytest.fixture(scope="module")
def plain() -> Path:
    """Engines whose costs nobody measured."""
    return shared_pair("llama", "eagle") / "engines"


@pytest.fixture(scope="module")
def engines(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with costs of drafts that never pay for long."""
    return with_costs(plain, tmp_path_factory.mktemp("policy") / "engines", "eagle3", 0.1, 0.2)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESPEC_SPEC_POLICY", raising=False)


def drafting(engines: Path, tmp_path: Path, *flags: object) -> list[object]:
    one = asked("one two") | {"max_generate_length": 30}
    return [*infer(engines, tmp_path, one), "--spec-decode", "--json", *flags]


def metrics(tmp_path: Path) -> dict[str, Any]:
    (answer,) = responses(tmp_path)
    found: dict[str, Any] = answer["metrics"]
    return found


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), ADAPTIVE),
        (("--spec-draft-step", 2), "drafting a chain: top-k 1, step 2, verify size 3 (fixed)"),
        (("--spec-policy", "fixed"), "step 3, verify size 4 (fixed, the default on a CPU)"),
        (
            ("--spec-policy", "adaptive", "--spec-draft-step", 2),
            "drafting adaptively: up to 2 drafts in a chain",
        ),
        (
            ("--spec-policy", "adaptive", "--spec-draft-top-k", 3, "--spec-draft-step", 3),
            "drafting adaptively: up to 21 drafts in a tree of top-k 3, step 3",
        ),
        (
            ("--spec-policy", "adaptive", "--eagle-choices", "[[0],[1],[0,0]]"),
            "drafting adaptively: up to 3 drafts in a tree of top-k 2, a static tree of 2 levels",
        ),
    ],
)
def test_flags_say_what_decodes_and_the_output_says_it_too(
    engines: Path, tmp_path: Path, cli: Cli, flags: tuple[object, ...], line: str
) -> None:
    done = cli(*drafting(engines, tmp_path, *flags, "--check-lossless"))
    assert done.code == 0, done.err
    assert line in done.err
    policy = "adaptive" if "adaptively" in line else "fixed"
    summary, found = json.loads(done.out), metrics(tmp_path)
    assert (summary["spec_policy"], found["spec_policy"]) == ({policy: 1}, policy)
    assert ("steps_paused" in found) == ("steps_paused" in summary) == (policy == "adaptive")
    assert summary["lossless"] == "yes"


def test_variable_is_the_default_of_the_flag_and_harms_no_plain_run(
    engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_SPEC_POLICY", "fixed")
    done = cli(*drafting(engines, tmp_path))
    assert "(fixed, the default on a CPU)" in done.err
    done = cli(*drafting(engines, tmp_path, "--spec-policy", "adaptive"))
    assert ADAPTIVE in done.err
    assert cli(*infer(engines, tmp_path, asked("one two"))).code == 0
    monkeypatch.setenv("EDGESPEC_SPEC_POLICY", "sometimes")
    done = cli(*drafting(engines, tmp_path))
    assert done.code == 2
    assert "EDGESPEC_SPEC_POLICY" in done.err


def test_file_has_it_as_a_key_beside_the_sizes_of_the_block(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    block = "speculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 4\n"
    (tmp_path / "own.yaml").write_text(block)
    done = cli(*drafting(engines, tmp_path, "--config", tmp_path / "own.yaml"))
    assert "step 4, verify size 5 (fixed)" in done.err
    (tmp_path / "own.yaml").write_text(f"spec_policy: adaptive\n{block}")
    done = cli(*drafting(engines, tmp_path, "--config", tmp_path / "own.yaml"))
    assert "drafting adaptively: up to 4 drafts in a chain" in done.err
    assert metrics(tmp_path)["spec_policy"] == "adaptive"


def test_adaptive_is_refused_where_costs_were_not_measured(
    plain: Path, tmp_path: Path, cli: Cli
) -> None:
    done = cli(*drafting(plain, tmp_path, "--spec-policy", "adaptive"))
    assert done.code == 3
    assert "what a step costs here was not measured" in done.err
    assert "--measure-costs" in done.err
    done = cli(*drafting(plain, tmp_path))
    assert (done.code, "adaptively" in done.err) == (0, False)


@pytest.mark.parametrize("command", ["infer", "chat"])
def test_a_policy_without_drafts_is_refused(
    engines: Path, tmp_path: Path, cli: Cli, command: str
) -> None:
    words: list[object] = [*infer(engines, tmp_path, asked("one"))]
    if command == "chat":
        words = ["chat", "--engine-dir", engines, "--no-spec-decode"]
    done = cli(*words, "--spec-policy", "adaptive")
    assert done.code == 2
    assert "--spec-policy" in done.err


def test_chat_changes_it_by_set(engines: Path, cli: Cli) -> None:
    typed = "/set spec_policy fixed\n/set spec_policy lucky\n/set spec_policy none\n/set\n"
    done = cli("chat", "--engine-dir", engines, "--no-chat-template", stdin=typed)
    assert ADAPTIVE in done.err
    assert "[drafting a chain: top-k 1, step 3, verify size 4 (fixed)]" in done.err
    assert "Write fixed or adaptive, or none." in done.err
    assert done.err.count("drafting adaptively") == 2
    assert "spec_policy" in done.err


def test_chat_refuses_adaptive_by_set_without_costs(plain: Path, cli: Cli) -> None:
    typed = "/set spec_policy adaptive\n"
    done = cli("chat", "--engine-dir", plain, "--no-chat-template", stdin=typed)
    assert "what a step costs here was not measured" in done.err
