"""What is likely to spoil a training is said, and nothing of a sound one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.errors import EnvironmentProblem, MissingDependency
from edgespec.modules.base_model import load_base
from edgespec.pipeline.training_curve import draw_curve
from edgespec.training import job as jobs
from edgespec.training import train as trains
from edgespec.training.acceptance import surprise
from edgespec.training.data import Row
from edgespec.training.doctor import CHECKS, Facts, findings
from edgespec.training.row import Task
from tests import toys
from tests.unit.training.conftest import write_chats
from tests.unit.training.test_train import job_of, run

SOUND: dict[str, Any] = {
    "num_conversations": 600_000, "learned": 0.5, "answers_only": True, "dropped": 0.01,
    "coverage": 0.99, "other_template": False, "surprise": (0.9, 0.8),
    "lengths": (1.0, 1.5, 1.9, 2.1, 2.2, 2.3), "engine": (2.3, 2.29),
}  # fmt: skip
SPOILT = {
    "too-little-data": {"num_conversations": 5_000},
    "mask-of-all": {"learned": 1.0},
    "mask-of-nothing": {"learned": 0.01},
    "no-answer-in-reach": {"dropped": 0.5},
    "coverage": {"coverage": 0.9},
    "other-template": {"other_template": True},
    "foreign-answers": {"surprise": (2.0, 0.8)},
    "plateau": {"lengths": (1.0, 1.5, 1.9, 2.2, 2.1, 2.21)},
    "engine-disagrees": {"engine": (2.3, 1.2)},
}


def test_each_row_finds_its_own_fault_alone() -> None:
    assert findings(Facts(**SOUND)) == findings(Facts()) == []
    assert [row.id for row in CHECKS] == [*SPOILT]
    for name, fault in SPOILT.items():
        (found,) = findings(Facts(**SOUND | fault))
        assert found.id == name
        assert found.value in str(found)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("doctor") / "base", "qwen3", layers=7)


def test_answers_of_the_base_surprise_it_as_much_as_its_own_words(base: Path) -> None:
    model = load_base(base, "cpu", torch.float32)
    model.lm_head.weight.data *= 20  # sure of what it says
    torch.manual_seed(0)
    start = torch.tensor([[5, 6, 7]])
    own = model.generate(start, do_sample=True, max_new_tokens=300, min_new_tokens=300, top_k=0)[0]
    other = torch.randint(4, 250, (300,))
    recipe = {"training.bf16": False}
    task = Task(recipe, None, model, None, (1,))  # type: ignore[arg-type]
    (said, entropy), (strange, _) = (
        surprise(task, [Row(ids.numpy(), np.arange(len(ids)) > 1)]) or (0.0, 0.0)
        for ids in (own, other)
    )
    assert abs(said - entropy) < 0.25  # nats: four times the scatter of a mean of 300
    assert strange > entropy + 2


def test_a_run_says_what_it_found_and_keeps_it(base: Path, tmp_path: Path) -> None:
    chats, template = write_chats(tmp_path / "chats.jsonl"), tmp_path / "template"
    template.write_text("{% for m in messages %}{{ m.role }} {{ m.content }}<eos>{% endfor %}")
    key = f"data.chat_template={template}"
    done = run(base, chats, tmp_path / "draft", "eagle3", key, "training.max_steps=1")
    report = json.loads((done.directory / "training.json").read_text())
    ids = [finding["id"] for finding in report["findings"]]
    assert {"too-little-data", "other-template"} <= {*ids}
    assert [point["step"] for point in report["curve"]] == [1]


def test_what_does_not_fit_is_refused_with_what_is_free(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    monkeypatch.setattr(
        trains.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100_000})
    )
    with pytest.raises(EnvironmentProblem, match=r"needs at least .* GB .* 0\.0 GB are free"):
        run(base, chats, tmp_path / "draft", "eagle3")
    assert not (tmp_path / ".draft.train").exists()
    monkeypatch.setattr(jobs, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="tensorboard"):
        job_of(base, chats, tmp_path / "draft", "eagle3", "training.report_to=tensorboard")


def test_a_run_is_drawn_and_written_for_tensorboard(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chats = write_chats(tmp_path / "chats.jsonl")
    key = "training.report_to=tensorboard"
    done = run(base, chats, tmp_path / "draft", "eagle3", key, "training.max_steps=2")
    (events,) = (done.directory / "runs").glob("*/events*")
    read = EventAccumulator(str(events)).Reload()
    report = json.loads((done.directory / "training.json").read_text())
    lengths = [event.value for event in read.Scalars("eval/acceptance_length")]
    assert lengths == pytest.approx([point["acceptance_length"] for point in report["curve"]])
    draw_curve(report, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
