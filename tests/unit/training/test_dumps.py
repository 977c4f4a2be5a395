"""Trainings from dumped hidden states: the same as with the base, and which dumps are refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from edgespec.cli.main import cli
from edgespec.errors import EdgeSpecError, LimitError, OutputError
from edgespec.pipeline.engine_states import EngineSource
from edgespec.training import dumping
from edgespec.training import train as trains
from edgespec.training.acceptance import answers_of
from edgespec.training.data import Batches, Question, Row
from edgespec.training.dumping import Part, Plan, TorchSource, dump, refuse_size
from edgespec.training.ranks import ALONE
from edgespec.training.trainer import Objective
from tests.small_pair import small_pair
from tests.unit.training.test_train import BLOCK, job_of, run

ONE = ("training.per_device_train_batch_size=1", "training.bf16=false")


def dumped(base: Path, chats: Path, out: Path, method: str, *keys: str, top: int = 0) -> Path:
    job = job_of(base, chats, out, method, *ONE, *keys)
    dump(Plan.of(job, top, Part()), TorchSource(job))
    return out


@pytest.fixture(scope="module")
def eagle(base: Path, chats: Path) -> Path:
    return dumped(base, chats, base.parent / "eagle-dump", "eagle3")


def losses_of(
    monkeypatch: pytest.MonkeyPatch, training: Callable[[], object]
) -> tuple[list[float], int]:
    """The loss of each step, and the layers of the base that were loaded."""
    seen, layers, real = list[float](), [0], Objective.forward

    def forward(self: Objective, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        found = real(self, **batch)
        layers[0] = len(self.task.base.model.layers)
        seen.append(float(found["loss"].detach()))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Objective, "forward", forward)
        training()
    return seen, layers[0]


@pytest.mark.parametrize(("method", "keys", "top"), [
    ("eagle3", ("eagle.eagle_architecture_config={draft_vocab_size: 100}",), 0),
    ("eagle3", (), 256),
    ("dflash", BLOCK, 0),
    ("eagle1", (), 0),
    ("eagle1", (), 256),
    ("medusa", (), 256),
])  # fmt: skip
def test_offline_equals_online(
    method: str, keys: tuple[str, ...], top: int, base: Path, chats: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Loss by loss, and the same bytes of the draft. All logits are as good as the last state."""
    path = dumped(base, chats, tmp_path / "dump", method, *keys, top=top)
    offline = f"data.offline_data_path={path}", "model.use_fake_base_for_offline=true"
    there, layers = losses_of(
        monkeypatch, lambda: run(base, chats, tmp_path / "a", method, *ONE, *keys)
    )
    here, none = losses_of(
        monkeypatch, lambda: run(base, chats, tmp_path / "b", method, *ONE, *keys, *offline)
    )
    assert (there, layers, none) == (here, 7, 0)
    files = [next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_each_process_reads_the_states_of_its_part(
    base: Path, chats: Path, eagle: Path, tmp_path: Path
) -> None:
    job = job_of(base, chats, tmp_path / "x", "eagle3", *ONE, f"data.offline_data_path={eagle}")
    assert job.dump is not None
    asked = list[int]()

    def states(rows: Sequence[Row], width: int) -> dict[str, torch.Tensor]:
        asked.append(len(rows))
        return job.dump.batch(rows, width)  # type: ignore[union-attr]

    whole = Batches(job.rows.rows, 4, 0, 1, states=job.dump.batch)[0]
    parts = Batches(job.rows.rows, 4, 0, 1, None, 2, states=states)
    for part in (0, 1):
        batch = parts[part]
        assert all(torch.equal(batch[name], whole[name][part::2]) for name in whole)
    assert {"aux", "targets"} < whole.keys()
    assert asked == [2, 2]


def test_the_best_logits_are_near_all_of_them(
    base: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for top in (0, 64):
        path = dumped(base, chats, tmp_path / f"{top}", "eagle3", top=top)
        keys = (*ONE, f"data.offline_data_path={path}", "training.max_steps=1")
        out = tmp_path / f"draft-{top}"
        losses, _ = losses_of(monkeypatch, lambda: run(base, chats, out, "eagle3", *keys))  # noqa: B023
        found.append(losses[0])
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_ranks_share_the_work_and_go_on(
    base: Path,
    chats: Path,
    eagle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dumping, "SHARD_BYTES", 1)  # a shard a conversation
    job = job_of(base, chats, tmp_path / "d", "eagle3", *ONE)
    plans = [Plan.of(job, 0, Part(rank, 2)) for rank in (0, 1)]
    source, real, left = (
        TorchSource(job),
        TorchSource.read,
        [3],
    )  # of an answer, and of two conversations

    def killed(self: TorchSource, ids: list[int], top: int) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, ids, top)

    with monkeypatch.context() as patched:
        patched.setattr(TorchSource, "read", killed)
        with pytest.raises(KeyboardInterrupt):
            dump(plans[0], source)
    again = job_of(base, chats, tmp_path / "d", "eagle3", *ONE, occupied=True)
    with pytest.raises(EdgeSpecError, match=r"5 of 7 shards are missing.*states-00001"):
        job_of(base, chats, tmp_path / "x", "eagle3", *ONE, f"data.offline_data_path={again.out}")
    assert [dump(plan, source) for plan in (*plans, *plans)] == [2, 3, 0, 0]
    whole = load_file(eagle / "states-00000.safetensors")
    parts = [load_file(file) for file in sorted(again.out.glob("states-*"))]
    assert len(parts) == 7
    assert all(torch.equal(whole[name], tensor) for part in parts for name, tensor in part.items())
    other = job_of(base, chats, again.out, "eagle3", *ONE, "training.seed=3", occupied=True)
    with pytest.raises(OutputError, match=r"has a dump with another training\.seed: 0, not 3"):
        dump(Plan.of(other, 0, Part()), source)


def test_what_a_dump_takes_is_known_first(base: Path, chats: Path, eagle: Path) -> None:
    plan = Plan.of(job_of(base, chats, eagle, "eagle3", *ONE, occupied=True), 0, Part())
    sizes = plan.sizes()
    on_disk = sum(file.stat().st_size for file in eagle.glob("*.safetensors"))
    assert on_disk == pytest.approx(sizes.total_bytes, rel=0.2)
    assert sizes.left_bytes == 0
    refuse_size(plan, sizes, sizes.total_bytes)
    with pytest.raises(LimitError, match=r"(?s)`max_disk` is .*sample_size=6"):
        refuse_size(plan, sizes, sizes.total_bytes - 1)


def test_a_full_disk_is_refused(
    base: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan.of(job_of(base, chats, tmp_path / "d", "eagle3", *ONE), 0, Part())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OutputError, match=r"has 1e-06 GB free; the dump needs 0\.0\d+ GB"):
        refuse_size(plan, plan.sizes(), None)


def damage(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = path / "states-00000.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def says(path: Path, **keys: object) -> None:
    file = path / "dump.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


AUX = "3.aux_hidden_states"
BAD: list[tuple[str, Callable[[Path], object], str, tuple[str, ...]]] = [
    ("base", lambda p: says(p, base={"name": "Q", "identity": "1f"}), "another base: Q .1f", ()),
    ("tokenizer", lambda p: says(p, tokenizer="ab"), "another tokenizer", ()),
    ("layers", lambda p: says(p, aux_layers=[1, 2, 3]), "another set of aux layers", ()),
    ("seq_len", lambda p: None, "training_seq_len 2048", ("training.training_seq_len=512",)),
    ("answers", lambda p: (p / "answers.safetensors").unlink(), "answers.safetensors is miss", ()),
    ("torn", lambda p: (p / "states-00000.safetensors").write_bytes(b"no"), "is damaged", ()),
    ("lacks", lambda p: damage(p, lambda t: t.pop(AUX)), "lacks 3.aux_hidden_states", ()),
    ("type", lambda p: damage(p, lambda t: t.update({AUX: t[AUX].half()})), "is F16", ()),
    ("nan", lambda p: damage(p, lambda t: t[AUX].fill_(math.nan)), r"NaN or Inf", ()),
    ("none", lambda p: (p / "dump.json").unlink(), "it is no dump", ()),
    ("fake", lambda p: None, "use_fake_base_for_offline goes with",
     ("data.offline_data_path=", "model.use_fake_base_for_offline=true")),
    ("engine", lambda p: None, "training.engine is modelopt, which runs the base",
     ("training.engine=modelopt",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said", "keys"), [row[1:] for row in BAD], ids=[r[0] for r in BAD]
)
def test_another_dump_is_refused(
    change: Callable[[Path], object], said: str, keys: tuple[str, ...], base: Path, chats: Path,
    eagle: Path, tmp_path: Path,
) -> None:  # fmt: skip
    path = Path(shutil.copytree(eagle, tmp_path / "dump"))
    change(path)
    with pytest.raises(EdgeSpecError, match=said):
        run(base, chats, tmp_path / "x", "eagle3", *ONE, f"data.offline_data_path={path}", *keys)


@pytest.fixture
def pt_files(eagle: Path, tmp_path: Path) -> Path:
    """The same states as ModelOpt's script writes them."""
    rows, states = (load_file(eagle / f"{n}.safetensors") for n in ("rows", "states-00000"))
    path = tmp_path / "pt"
    path.mkdir()
    ends = rows["lengths"].cumsum(0)[:-1]
    for i, ids in enumerate(torch.tensor_split(rows["ids"].long(), ends)):
        mask = torch.arange(len(ids)) >= len(ids) // 2
        keys = {name: states[f"{i}.{name}"] for name in ("aux_hidden_states", "hidden_states")}
        made = {"input_ids": ids, "loss_mask": mask.long(), "conversation_id": f"{i}", **keys}
        torch.save(made, path / f"{i}.pt")
    return path


def test_dumps_of_modelopt_are_read(
    pt_files: Path,
    base: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = (*ONE, f"data.offline_data_path={pt_files}", "training.answer_only_loss=true")
    job = job_of(base, chats, tmp_path / "a", "eagle3", *keys)
    row = job.rows.rows[0]
    first = len(row.ids) // 2
    assert row.predicts.tolist() == [first - 1 <= t < len(row.ids) - 1 for t in range(len(row.ids))]
    states, real = job.dump.batch([row], len(row.ids)), trains.prepared  # type: ignore[union-attr]
    objective, *_ = real(job_of(base, chats, tmp_path / "b", "eagle3", *ONE), ALONE, answers=False)
    aux, final = objective.task.states(torch.tensor(row.ids)[None])
    assert torch.equal(states["aux"], aux)
    assert torch.equal(states["targets"], final)
    done = run(base, chats, tmp_path / "c", "eagle3", *keys)
    assert done.acceptance is not None
    assert done.acceptance.num_tokens > 0


@pytest.mark.parametrize(("change", "said"), [
    ({"loss_mask": None}, "has no loss_mask"),
    ({"aux_hidden_states": torch.zeros(40, 7)}, "is of other aux layers"),
    ({"hidden_states": torch.zeros(40, 7, dtype=torch.int8)}, "int8, not a floating type"),
    ({"hidden_states_prenorm": True}, "before the last norm"),
    ({"input_ids": 999}, "tokens beyond the 256"),
])  # fmt: skip
def test_other_dumps_of_modelopt_are_refused(
    change: dict[str, object],
    said: str,
    pt_files: Path,
    base: Path,
    chats: Path,
    tmp_path: Path,
) -> None:
    read = torch.load(pt_files / "2.pt", weights_only=True)
    if change.get("input_ids"):
        change = {"input_ids": torch.full_like(read["input_ids"], 999)}
    torch.save(read | change, pt_files / "2.pt")
    with pytest.raises(EdgeSpecError, match=said):
        job_of(base, chats, tmp_path / "x", "eagle3", *ONE, f"data.offline_data_path={pt_files}")


def test_code_in_a_pt_file_is_not_run(
    pt_files: Path,
    base: Path,
    chats: Path,
    tmp_path: Path,
) -> None:
    torch.save({"input_ids": shutil.rmtree}, pt_files / "2.pt")
    with pytest.raises(EdgeSpecError, match=r"2\.pt cannot be read"):
        job_of(base, chats, tmp_path / "x", "eagle3", *ONE, f"data.offline_data_path={pt_files}")


def test_an_engine_gives_what_torch_gives(tmp_path: Path) -> None:
    """A float32 engine: its states and logits are the base's, and a draft is trained from them."""
    pair = small_pair()
    chats = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "and then"}]}
        for q in ("the cat", "a mat", "it ran")
    ]
    chats.write_text("\n".join(map(json.dumps, lines)))
    keys = (*ONE, "training.training_seq_len=40", "validation.max_new_tokens=4")
    job = job_of(pair.base, chats, tmp_path / "d", "eagle3", *keys)
    source = EngineSource(pair.base_engine, job)
    try:
        ids = job.rows.rows[0].ids.tolist()
        engine, exact = source.read(ids, 256), TorchSource(job).read(ids, 256)
        dump(Plan.of(job, 64, Part()), source)
    finally:
        source.close()
    for name in ("aux_hidden_states", "top_logits"):
        found = torch.as_tensor(engine[name])
        torch.testing.assert_close(found, exact[name], rtol=1e-4, atol=1e-5)
    assert json.loads((job.out / "dump.json").read_text())["source"]["kind"] == "engine"
    done = run(
        pair.base, chats, tmp_path / "draft", "eagle3", *keys, f"data.offline_data_path={job.out}"
    )
    assert done.acceptance is not None
    more = "training.training_seq_len=100", "validation.max_new_tokens=60"
    long = job_of(pair.base, chats, tmp_path / "f", "eagle3", *keys, *more)
    with pytest.raises(LimitError, match=r"holds 64 tokens, a conversation and its answer have"):
        EngineSource(pair.base_engine, long)
    layers = "eagle.eagle_architecture_config={eagle_aux_hidden_state_layer_ids: [0, 3, 5]}"
    other = job_of(pair.base, chats, tmp_path / "e", "eagle3", *keys, layers)
    with pytest.raises(EdgeSpecError, match=r"emits \[2, 4, 5\], the draft reads \[1, 4, 6\]"):
        EngineSource(pair.base_engine, other)


def test_an_engine_of_another_base_is_refused(base: Path, chats: Path, tmp_path: Path) -> None:
    job = job_of(base, chats, tmp_path / "d", "eagle3", *ONE)
    with pytest.raises(EdgeSpecError, match="was made of another base"):
        EngineSource(small_pair().base_engine, job)


def test_questions_of_mt_bench_are_asked_turn_by_turn(
    base: Path, chats: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "question.jsonl"
    line = {"question_id": 81, "category": "writing", "turns": ["the cat sat", "and then"]}
    questions.write_text(json.dumps(line))
    keys = (*ONE, f"validation.data_path={questions}", "training.max_steps=1")
    job = job_of(base, chats, tmp_path / "d", "eagle3", *keys)
    (question,) = job.questions
    asked = list[list[int]]()

    def answering(prompts: Sequence[Question]) -> list[list[int]]:
        asked.extend([*prompt.ids] for prompt in prompts)
        return [job.template.encoded("far away")] * len(prompts)

    answers = answers_of(job.questions, job.template, answering)
    text = job.template.tokenizer.decode(asked[1])
    assert [answer.place for answer in answers] == [(0, 0), (0, 1)]
    assert asked[0] == [*question.ids]
    assert text.index("the cat sat") < text.index("far away") < text.index("and then")
    done = run(base, chats, tmp_path / "draft", "eagle3", *keys)
    report = json.loads((done.directory / "training.json").read_text())
    assert [*report["acceptance_rate"]["Request_AL"]["0"]] == ["0", "1"]
    assert done.acceptance is not None
    emitted = sum(int(k) * n for k, n in report["acceptance_rate"][
        "Acceptance_Length_Histogram"].items())  # fmt: skip
    assert emitted == done.acceptance.num_tokens


def test_the_commands_from_a_dump_to_another_layout(
    base: Path, chats: Path, tmp_path: Path
) -> None:
    def edgespec(*args: object, code: int = 0) -> str:
        done = CliRunner().invoke(cli, [*map(str, args)])
        assert done.exit_code == code, done.output
        return done.output

    dump_dir, draft = tmp_path / "dump", tmp_path / "draft"
    data = "--base-model", base, "--data", chats, "--output-dir", dump_dir
    said = edgespec("data", "hidden-states", "eagle3", *data, "--topk-logits", 32, "--dry-run")
    assert not dump_dir.exists()
    assert "309 tokens of 1024 bytes" in said
    edgespec("data", "hidden-states", "eagle3", *data, "--topk-logits", 32)
    said = edgespec(
        "train", "eagle3", f"data.offline_data_path={dump_dir}", "training.max_steps=1",
        "--base-model", base, "--output-dir", draft, "--ar-lower-bound", 50, code=1,
    )  # fmt: skip
    assert "is below --ar-lower-bound 50" in said
    edgespec("export-draft", draft, tmp_path / "vllm", "--format", "speculators")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(base)
