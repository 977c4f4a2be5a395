"""The flags of images become the rules by which they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from edgespec.cli import tune
from edgespec.cli.image_flags import image_flags, take_image_rules
from edgespec.errors import RequestError
from edgespec.images import ImageProcessor, ImageReader, ImageRules
from edgespec.runtime.vision import image_prompts
from edgespec.tuning.tuner import TuneOptions
from tests.unit.images.samples import png


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


def test_images_of_several_files_of_prompts_are_beside_their_own(tmp_path: Path) -> None:
    """`tune` takes prompts of several files."""
    files, names = [], ("one", "two")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(png(56, 56, seed=len(files)))
        image = {"type": "image", "image": "a.png"}
        lost = {"type": "image", "image": "none.png"}
        messages = [{"role": "user", "content": [image, lost, {"type": "text", "text": "What?"}]}]
        files.append(tmp_path / name / "input.json")
        files[-1].write_text(json.dumps({"requests": [{"messages": messages}]}))
    options = TuneOptions(num_prompts=4)
    found = tune.requests_of(files, options).requests
    values = {"multimodal_engine_dir": None, "allow_image_root": (), "allow_image_urls": False}
    rules = tune.request_of(values, files, tmp_path).image_rules
    assert rules is not None
    reader = ImageReader(rules, ImageProcessor())
    keys = {reader.read(request.messages[0].images[0]).key for request in found}
    assert len(keys) == 2
    for request in found:
        with pytest.raises(RequestError, match="is not there"):
            reader.read(request.messages[0].images[1])


def test_drafts_in_other_formats_are_tuned_with_the_encoder_beside_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "visual").mkdir()
    monkeypatch.setattr(image_prompts, "holds_encoder", lambda path, role: path.is_dir())
    values = {"multimodal_engine_dir": None, "allow_image_root": (), "allow_image_urls": False}
    found = tune.request_of(dict(values), [tmp_path / "a.json"], tmp_path)
    assert found.multimodal_engine_dir == tmp_path / "visual"
    values["multimodal_engine_dir"] = tmp_path
    given = tune.request_of(values, [tmp_path / "a.json"], tmp_path)
    assert given.multimodal_engine_dir == tmp_path
