"""The flags of images become the rules by which they are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from edgespec.cli.image_flags import image_flags, take_image_rules
from edgespec.images import ImageRules


def rules_of(*args: str, input_file: Path | None = None) -> tuple[Result, list[ImageRules]]:
    found: list[ImageRules] = []

    @click.command()
    @click.option("--other", default=3)
    @image_flags
    def command(**values: Any) -> None:
        found.append(take_image_rules(values, input_file))
        assert values == {"other": 3}

    return CliRunner().invoke(command, args), found


def test_nothing_but_the_directory_of_the_input_is_read_by_default(tmp_path: Path) -> None:
    (tmp_path / "input.json").write_text("{}")
    _, (rules,) = rules_of(input_file=tmp_path / "input.json")
    assert rules == ImageRules(directory=tmp_path, also_working_directory=True)


def test_flags_allow_more(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    roots = ("--allow-image-root", str(tmp_path), "--allow-image-root", str(tmp_path / "more"))
    _, (rules,) = rules_of(*roots, "--allow-image-urls")
    assert rules.roots == (tmp_path, tmp_path / "more")
    assert rules.allow_urls


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    done, rules = rules_of("--allow-image-root", str(tmp_path / "missing"))
    assert (done.exit_code, rules) == (2, [])
    assert "--allow-image-root" in done.output


@pytest.mark.parametrize("name", ["-", "--prompt", "stdin"])
def test_what_comes_in_no_file_begins_at_the_working_directory(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _, (rules,) = rules_of(input_file=Path(name))
    assert rules.directory is None


def test_a_relative_input_file_gives_a_directory_that_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("input.json").write_text("{}")
    _, (rules,) = rules_of(input_file=Path("input.json"))
    assert rules.directory == Path(os.path.realpath(tmp_path))
