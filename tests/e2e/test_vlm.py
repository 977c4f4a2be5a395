"""A vision-language pair from checkpoint to answers, in the guide's directories: lossless with
pictures and without, the answers those of transformers, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import edgespec
from edgespec.cli.train import recipe_of
from edgespec.errors import RequestError, UnsupportedModel
from edgespec.modules.base_model import load_base
from edgespec.progress import Silent
from edgespec.prompts import ImageItem, NoJournal, read_requests
from edgespec.runtime.checks.token_check import Quiet
from edgespec.runtime.requests.file_runner import FileRun
from edgespec.training.job import Job, open_job
from edgespec.training.ranks import ALONE
from edgespec.training.recipe import read_recipe
from edgespec.training.train import batches_of, train
from tests import shared, toys
from tests.e2e.workshop import ROOT, Cli, cli, responses, script
from tests.unit.training.test_train import unstopped

__all__ = ["cli"]  # a fixture

REFUSED, SOME_FAILED = 3, 5
SIZES = ["--maxBatchSize", 3, "--maxInputLen", 256, "--maxKVCacheCapacity", 512]
NO_END = {"0": -100, "2": -100}  # a logit_bias: random models end by chance


def make(path: Path) -> None:
    """A random pair, by the script that trains the demo's, and all that is made of it by the
    guide's commands."""
    script("train_demo_vlm.py", "--out", path / "pair", "--smoke")
    train(job_of_pair(path / "pair"), unstopped)
    base, draft, onnx = path / "pair" / "base", path / "pair" / "draft", path / "onnx"
    call("export", base, onnx / "base_export", "--eagle-base")
    call("export", draft, onnx / "draft_export", "--base-model-dir", base)
    llm, visual = onnx / "base_export" / "llm", onnx / "base_export" / "visual"
    made = ["--engineDir", path / "engines" / "llm", *SIZES]
    trees = ["--maxVerifyTreeSize", 60, "--maxDraftTreeSize", 60]
    call("build", "--onnxDir", llm, *made, *trees, "--specBase")
    call("build", "--onnxDir", onnx / "draft_export" / "llm", *made, *trees, "--specDraft")
    images = ["--minImageTokens", 4, "--maxImageTokens", 128, "--maxImageTokensPerImage", 64]
    call("build", "--onnxDir", visual, "--engineDir", path / "engines", *images)


def job_of_pair(pair: Path, *keys: str, **flags: object) -> Job:
    """The training of the demo's draft in toy sizes, measured with what it is trained on."""
    chats = pair / "chats.jsonl"
    few = ("max_steps=40", "answer_only_loss=false", "bf16=false", "per_device_train_batch_size=7")
    few = *(f"training.{key}" for key in few), "validation.max_new_tokens=12"
    places = {"base_model": pair / "base", "data": chats, "output_dir": pair / "draft"}
    recipe = recipe_of(
        str(ROOT / "recipes/training/demo_vlm.yaml"),
        (*few, f"validation.data_path={chats}", *keys),
        {"minutes": None, **places, **flags},
    )
    return open_job(recipe, None, Silent(), lambda _: None)


def call(*args: object) -> None:
    from edgespec.cli.main import run

    assert run([str(arg) for arg in args]) == 0


@dataclass(frozen=True)
class Shop:
    root: Path

    @property
    def base(self) -> Path:
        return self.root / "pair" / "base"

    @property
    def llm(self) -> Path:
        return self.root / "engines" / "llm"

    @property
    def visual(self) -> Path:
        return self.root / "engines" / "visual"


@pytest.fixture(scope="module")
def shop() -> Shop:
    return Shop(shared.made_once("a vision-language pair", make))


def drawn(place: Path) -> Path:
    """Noise of odd sizes, the same each time."""
    random = torch.Generator().manual_seed(0)
    for number, size in enumerate([(112, 112), (87, 200), (300, 61)]):
        noise = torch.randint(0, 255, (*size[::-1], 3), dtype=torch.uint8, generator=random)
        Image.fromarray(noise.numpy()).save(place / f"{number}.png")
    return place


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return drawn(tmp_path)


def test_torch_accepts_what_the_engine_does(shop: Shop) -> None:
    pair = shop.root / "pair"
    report = json.loads((pair / "draft" / "training.json").read_text())["acceptance"]
    assert report["length"] > 1.1
    lines = (pair / "chats.jsonl").read_text().splitlines()
    asked = [json.loads(line)["messages"][0]["content"] for line in lines]
    sampling, found = edgespec.SamplingParams(temperature=0, max_generate_length=12), []
    with edgespec.load(shop.llm, multimodal_engine_dir=shop.visual, image_root=pair) as engine:
        for content in asked:
            parts = [
                {**part, "image": str(pair / part["image"])} if "image" in part else part
                for part in content
            ]
            messages = [{"role": "user", "content": parts}]
            found.append(engine.generate(messages, sampling, engine.plan(1, 3, 4)).metrics)
    assert sum(m.decode_tokens for m in found) == report["num_tokens"]
    assert sum(m.steps for m in found) == report["num_steps"]


def test_images_are_trained_on_as_transformers_reads_them(shop: Shop, tmp_path: Path) -> None:
    """Patches and positions are those of the base's own processor and model; in an image nothing is
    learned."""
    pair = shop.root / "pair"
    job = job_of_pair(pair, output_dir=tmp_path / "draft")
    batches, _ = batches_of(job, ALONE)
    batch = batches[0]
    base = load_base(pair / "base", "cpu", torch.float32)
    image = batch["ids"] == job.model.image_tokens.image  # type: ignore[union-attr]
    assert image.any()
    assert not (batch["predicts"] & image).any()
    assert not (batch["predicts"][:, :-1] & image[:, 1:]).any()
    assert batch["predicts"].sum() == (~image).sum() - (~image[:, :-1] & image[:, 1:]).sum() - (
        batch["ids"].numel() - batch["lengths"].sum()
    )
    processor = Qwen2VLImageProcessorPil.from_pretrained(pair / "base")
    names = {p.item.source for row in job.rows.rows for p in row.pictures}
    read = processor(images=[Image.open(pair / n) for n in sorted(names)], return_tensors="pt")
    theirs = {*map(tuple, read["pixel_values"].numpy().round(4).tolist())}
    assert {*map(tuple, batch["pixel_values"].numpy().round(4).tolist())} == theirs
    positions, _ = base.model.get_rope_index(
        batch["ids"], mm_token_type_ids=image.int(), image_grid_thw=batch["image_grid_thw"]
    )
    inside = torch.arange(batch["ids"].shape[1]) < batch["lengths"][:, None]
    assert torch.equal(positions[:, inside], batch["positions"][:, inside])


def test_images_that_cannot_be_trained_on_are_refused_by_their_line(
    shop: Shop, tmp_path: Path
) -> None:
    pair, text = shop.root / "pair", toys.make_base(tmp_path / "base", "qwen3")
    out = {"output_dir": tmp_path / "draft"}
    with pytest.raises(RequestError, match=r"chats.jsonl, line 1 has an image, and .* text alone"):
        job_of_pair(pair, "eagle.eagle_architecture_config={}", base_model=text, **out)
    with pytest.raises(RequestError, match=r"chats.jsonl, line 1: image .* not"):
        job_of_pair(pair, f"data.vlm_img_dir={tmp_path}", **out)
    places = {
        "metadata": {"recipe_type": "speculative_dflash"},
        "model": {"model_name_or_path": str(pair / "base")},
        "data": {"data_path": str(pair / "chats.jsonl")},
        "training": {"output_dir": str(tmp_path / "draft")},
        "dflash": {"dflash_mask_token_id": 6},
    }
    recipe = read_recipe(places, "test")
    with pytest.raises(UnsupportedModel, match="line 1 has an image, and drafts of this method"):
        open_job(recipe, None, Silent(), lambda _: None)


Content = str | list[dict[str, str]]


def see(*names: str, text: str = "What is it?") -> Content:
    images = [{"type": "image", "image": name} for name in names]
    return [*images, {"type": "text", "text": text}]


def write_requests(place: Path, contents: Sequence[Content]) -> Path:
    requests = [{"messages": [{"role": "user", "content": one}]} for one in contents]
    settings = {"temperature": 0.0, "max_generate_length": 24, "logit_bias": NO_END}
    (place / "input.json").write_text(json.dumps(settings | {"requests": requests}))
    return place / "input.json"


def ask(shop: Shop, place: Path, cli: Cli, contents: Sequence[Content], *flags: object) -> Any:
    write_requests(place, contents)
    line = ["infer", "--engineDir", shop.llm, "--multimodalEngineDir", shop.visual]
    files = ["--inputFile", place / "input.json", "--outputFile", place / "output.json"]
    return cli(*line, *files, *flags)


def by_transformers(shop: Shop, place: Path, content: Content, count: int) -> list[int]:
    """Greedy ids, by transformers' model and processor."""
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(shop.base, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(shop.base)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    parts = content if isinstance(content, list) else []
    images = [Image.open(place / part["image"]) for part in parts if part["type"] == "image"]
    given: dict[str, torch.Tensor] = {}
    if images:
        processor = Qwen2VLImageProcessorPil.from_pretrained(shop.base)
        given = dict(processor(images=images, return_tensors="pt"))
        for _, height, width in given["image_grid_thw"].tolist():
            text = text.replace("<|image_pad|>", "<|seen|>" * (height * width // 4), 1)
        text = text.replace("<|seen|>", "<|image_pad|>")
    ids = torch.tensor([tokenizer(text).input_ids])
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    image = model.config.image_token_id
    with torch.no_grad():
        found = model.eval().generate(
            **given,
            mm_token_type_ids=(ids == image).int(),
            max_new_tokens=count,
            do_sample=False,
            suppress_tokens=[int(token) for token in NO_END],
        )
    answer: list[int] = found[0, ids.shape[1] :].tolist()
    return answer


QUESTIONS: list[Content] = [
    see("0.png"),
    see("1.png", "2.png", text="Which of the two?"),
    "No picture at all.",
    see("2.png", text=""),
    [
        {"type": "text", "text": "Before "},
        {"type": "image", "image": "1.png"},
        {"type": "text", "text": " behind."},
    ],
]


@pytest.fixture(scope="module")
def wanted(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What transformers answers to QUESTIONS."""
    place = drawn(tmp_path_factory.mktemp("pictures"))
    return [by_transformers(shop, place, content, 24) for content in QUESTIONS]


@pytest.mark.parametrize("flags", [(), ("--batchSize", 3), ("--specDraftTopK", 2)])
def test_answers_are_those_of_transformers_and_lossless(
    shop: Shop, pictures: Path, cli: Cli, wanted: list[list[int]], flags: tuple[object, ...]
) -> None:
    done = ask(shop, pictures, cli, QUESTIONS, "--specDecode", "--check-lossless", *flags)
    assert done.code == 0, done.err
    assert ["lossless", "yes"] in [line.split() for line in done.out.splitlines()]
    assert [answer["output_ids"] for answer in responses(pictures)] == wanted


def test_a_profile_has_the_pictures(shop: Shop, pictures: Path, cli: Cli) -> None:
    path = pictures / "profile.json"
    asked = [see("0.png"), see("0.png", "1.png"), "No picture."]
    done = ask(shop, pictures, cli, asked, "--profile-output-file", path, "--dump-profile")
    assert done.code == 0, done.err
    found = json.loads(path.read_text())
    assert found["multimodal"]["total_images"] == 3
    stages = {one["stage_id"]: one["total_runs"] for one in found["stages"]}
    assert (stages["multimodal_processing"], stages["vision_encoder"]) == (3, 2)
    tokens = found["multimodal"]["total_image_tokens"]
    assert f"3, {tokens} tokens" in " ".join(done.out.split())
    assert "vision_encoder" in done.out
    without = ask(shop, pictures, cli, ["No picture."], "--profile-output-file", path)
    assert without.code == 0, without.err
    assert "multimodal" not in json.loads(path.read_text())
    assert "images" not in without.out


def test_a_picture_goes_with_the_prompt_of_the_command_line(
    shop: Shop, pictures: Path, cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever it is."""
    out = tmp_path_factory.mktemp("elsewhere") / "output.json"
    assert ask(shop, pictures, cli, [see("0.png"), see("0.png", "1.png")], "--seed", 1).code == 0
    wanted = responses(pictures)
    line = ["infer", "--engine-dir", shop.llm, "--multimodal-engine-dir", shop.visual]
    greedy = ["--temperature", 0, "--max-generate-length", 24]
    for count in (1, 2):
        named = [flag for n in range(count) for flag in ("--image", pictures / f"{n}.png")]
        done = cli(*line, "--prompt", "What is it?", *named, *greedy, "--output-file", out)
        assert done.code == 0, done.err
        (found,) = json.loads(out.read_text())["responses"]
        ids, same = found["output_ids"], wanted[count - 1]
        assert found["formatted_complete_request"] == same["formatted_complete_request"]
        assert found["metrics"]["prompt_tokens"] == same["metrics"]["prompt_tokens"]
        # There is no logit_bias on the command line, so that the answer may end
        assert ids[:-1] == same["output_ids"][: len(ids) - 1]
    for flags, said in (
        (["--prompt", "Hi", "--image", pictures / "none.png"], "none.png is no file"),
        (["--input-file", pictures / "input.json", "--image", pictures / "0.png"], "with --prompt"),
    ):
        refused = cli(*line, *flags, "--output-file", out)
        assert refused.code == 2
        assert said in " ".join(refused.err.split())


def test_run_answers_about_a_picture(shop: Shop, pictures: Path, cli: Cli) -> None:
    line = ["run", shop.llm, "--multimodal-engine-dir", shop.visual, "--temperature", 0]
    asked = ["--prompt", "What is it?", "--max-generate-length", 8]
    seen = cli(*line, *asked, "--image", pictures / "0.png")
    assert seen.code == 0, seen.err
    assert seen.out != cli(*line, *asked).out


def test_pictures_come_as_data_urls_too(shop: Shop, pictures: Path, cli: Cli) -> None:
    code = base64.b64encode((pictures / "0.png").read_bytes()).decode()
    done = ask(shop, pictures, cli, [see("0.png"), see(f"data:image/png;base64,{code}")])
    assert done.code == 0, done.err
    first, second = responses(pictures)
    assert first["output_ids"] == second["output_ids"]
    assert code not in json.dumps(second["messages"])


def test_a_picture_is_encoded_once(shop: Shop, pictures: Path) -> None:
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=4)
    with edgespec.load(shop.llm, multimodal_engine_dir=shop.visual, image_root=pictures) as engine:
        assert engine.images is not None
        for _ in range(3):
            message = edgespec.Message.of("user", [ImageItem("0.png"), "What is it?"])
            engine.generate([message], sampling)
        assert (engine.images.stats.images, engine.images.stats.encoded) == (3, 1)


def test_python_reads_below_its_roots_alone_and_says_so_in_its_words(
    shop: Shop, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pictures / "other"
    other.mkdir()
    shutil.move(pictures / "1.png", other / "1.png")
    monkeypatch.chdir("/")
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=2)

    def asked(name: str) -> list[edgespec.Message]:
        return [edgespec.Message.of("user", [ImageItem(name), "What is it?"])]

    def refused(name: str) -> edgespec.RequestError:
        with pytest.raises(edgespec.RequestError) as caught:
            engine.generate(asked(name), sampling)
        return caught.value

    roots = [pictures, str(other)]
    with edgespec.load(shop.llm, multimodal_engine_dir=shop.visual, image_root=roots) as engine:
        for name in ("0.png", str(other / "1.png")):
            assert engine.generate(asked(name), sampling).token_ids
        assert "is not there" in refused(str(pictures / "2.png")[1:]).what  # of the directory /
        assert refused("none.png").remedy == "Write its path as seen from `image_root`."
        assert refused("/etc/hostname").remedy == (
            "Put it in `image_root`, or allow its directory: image_root=[..., DIR]."
        )
        assert "allow_image_urls=True" in refused("https://host/a.png").remedy
    with edgespec.load(shop.llm) as engine:
        assert "by `multimodal_engine_dir`" in refused("0.png").remedy


@pytest.mark.parametrize("check_lossless", [False, True])
def test_no_answer_of_a_run_holds_rows_of_pictures(
    shop: Shop, pictures: Path, check_lossless: bool
) -> None:
    requests = write_requests(pictures, QUESTIONS[:3])
    with edgespec.load(shop.llm, multimodal_engine_dir=shop.visual, image_root=pictures) as engine:
        asked = read_requests(requests)
        run = FileRun(
            engine,
            asked,
            engine.plan(),
            NoJournal(),
            stopping=lambda: False,
            warn=lambda text: None,
        )
        run.run(Quiet(), warmup=0, check_lossless=check_lossless)
    assert run.fault is None
    answers = run.in_order()
    for answer in answers:
        assert answer.response is not None
        assert isinstance(answer.response.prompt_ids, list)
        assert (answer.plain is not None) is check_lossless
        if answer.plain is not None:
            assert answer.difference is None  # with the same pictures
            assert isinstance(answer.plain.prompt_ids, list)


def test_another_picture_is_another_prefix(shop: Shop, pictures: Path) -> None:
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=4)

    def asked(name: str) -> list[edgespec.Message]:
        return [edgespec.Message.of("user", [ImageItem(name), "What is it?"])]

    with edgespec.load(shop.llm, multimodal_engine_dir=shop.visual, image_root=pictures) as engine:
        first = engine.generate(asked("0.png"), sampling, keep=True)
        again = engine.generate(asked("0.png"), sampling)
        assert again.metrics.reused_tokens > 16  # rows of the picture too
        Image.new("RGB", (112, 112), "red").save(pictures / "red.png")
        other = engine.generate(asked("red.png"), sampling)
        assert other.metrics.reused_tokens < 8  # what stands before it
        assert again.token_ids == first.token_ids


def test_chat_sends_a_picture_with_the_next_turn(shop: Shop, pictures: Path, cli: Cli) -> None:
    said = f"/image {pictures / '0.png'}\nWhat is it?\nAnd now?\n/image {pictures}/none.png\n"
    flags = ("--multimodal-engine-dir", shop.visual, "--max-generate-length", 6, "--seed", 1)
    done = cli("chat", "--engine-dir", shop.llm, *flags, "--temperature", 0, stdin=said)
    assert done.code == SOME_FAILED
    assert "0.png: 16 tokens; it goes with the next turn]" in done.err
    assert "is not there" in done.err
    assert len(done.out.splitlines()) >= 2


def test_bench_measures_the_very_prompts_with_their_pictures(
    shop: Shop, pictures: Path, cli: Cli
) -> None:
    """Two prompts of the same ids whose answers differ: what is right for one is not for both."""
    for name, colour in (("red", (255, 0, 0)), ("noise", None)):
        noise = torch.randint(0, 255, (112, 112, 3), dtype=torch.uint8).numpy()
        image = Image.fromarray(noise) if colour is None else Image.new("RGB", (112, 112), colour)
        image.save(pictures / f"{name}.png")
    asked = write_requests(pictures, [see("red.png"), see("noise.png")])
    answers = [by_transformers(shop, pictures, see(f"{n}.png"), 24) for n in ("red", "noise")]
    assert answers[0] != answers[1]
    report = pictures / "report.json"
    line = ["bench", "run", shop.llm, "--multimodal-engine-dir", shop.visual]
    what = ["--input-file", asked, "--output-tokens", 24, "--batch-size", 2, "--json", report]
    flags = ["--mode", "decode,speculative", "--synthetic-acceptance", 1, "--spec-draft-step", 3]
    done = cli(*line, *what, *flags, "--repeats", 1, "--warmup", 0)
    assert done.code == 0, done.err
    rows = json.loads(report.read_text())["rows"]
    assert [row["answers_equal_to_plain"] for row in rows] == [2, 2]
    assert rows[1]["speculation"]["acceptance_rate"] == 1


def test_tune_reads_the_pictures_beside_its_prompts(
    shop: Shop, pictures: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    engines = Path(shutil.copytree(shop.llm, pictures / "engines"))
    asked = write_requests(pictures, [see("0.png"), see("1.png", "2.png")])
    line = ["tune", engines, "--prompts", asked, "--multimodal-engine-dir", shop.visual, "--json"]
    sizes = ["--num-prompts", 2, "--output-tokens", 8, "--measure", 1]
    done = cli(*line, *sizes)
    assert done.code == 0, done.err
    assert json.loads(done.out)["kept"] == str(engines)


def test_verify_reads_the_pictures_of_its_requests(shop: Shop, pictures: Path, cli: Cli) -> None:
    asked = write_requests(pictures, QUESTIONS[:2])
    line = ["verify", "--engine-dir", shop.llm, "--input-file", asked, "--json"]
    out = ["--output-file", pictures / "verify.json"]
    done = cli(*line, *out, "--multimodal-engine-dir", shop.visual)
    assert done.code == 0, done.err
    (tokens,) = [c for c in json.loads(done.out)["checks"] if c["check"] == "tokens"]
    assert (tokens["outcome"], tokens["answers"]) == ("passed", 2)


def test_engines_beside_their_encoder_find_it(shop: Shop, pictures: Path, cli: Cli) -> None:
    own = Path(shutil.copytree(shop.llm, pictures / "own"))
    line = ["infer", "--engine-dir", own, "--input-file", pictures / "input.json"]
    out = ["--output-file", pictures / "output.json"]
    ask(shop, pictures, cli, [see("0.png"), "Text."])
    alone = cli(*line, *out)
    assert alone.code == SOME_FAILED
    assert "there is no image encoder" in alone.err
    assert "--multimodal-engine-dir" in alone.err
    assert responses(pictures)[0]["finish_reason"] == "error"
    onnx = shop.root / "onnx" / "base_export" / "visual"
    built = cli("build", "--onnx-dir", onnx, "--engine-dir", own)
    assert built.code == 0, built.err
    assert cli(*line, *out).code == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (see("none.png"), 'image "none.png" is not there'),
        (see("/etc/hostname"), "outside the directories that may be read"),
        (see("torn.png"), "torn.png"),
        (see("http://127.0.0.1/a.png"), "--allow-image-urls"),
        (see("0.png", text="see <|image_pad|>"), "stands for the rows of an image"),
        (see("big.png", "0.png", "big.png"), "--max-image-tokens"),
    ],
)
def test_a_bad_picture_fails_alone(
    shop: Shop, pictures: Path, cli: Cli, content: Content, said: str
) -> None:
    (pictures / "torn.png").write_bytes((pictures / "0.png").read_bytes()[:200])
    Image.new("RGB", (800, 800), "blue").save(pictures / "big.png")
    done = ask(shop, pictures, cli, [content, see("0.png")])
    assert done.code == SOME_FAILED
    assert said in done.err
    bad, good = responses(pictures)
    assert bad["finish_reason"] == "error"
    assert len(good["output_ids"]) == 24


def test_the_encoder_of_another_checkpoint_is_refused(shop: Shop, pictures: Path, cli: Cli) -> None:
    other = Path(shutil.copytree(shop.visual, pictures / "visual"))
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"identity": "0" * 64}))
    line = ["infer", "--engine-dir", shop.llm, "--multimodal-engine-dir", other]
    done = cli(*line, "--prompt", "Hello")
    assert done.code == REFUSED
    assert "config.json" in done.err  # it is not what the manifest says
    path = other / "manifest.json"
    manifest, data = json.loads(path.read_text()), (other / "config.json").read_bytes()
    entry = manifest["engines"]["visual"]["files"]["config.json"]
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    entry.pop("mtime_ns", None)
    path.write_text(json.dumps(manifest))
    done = cli(*line, "--prompt", "Hello")
    assert done.code == REFUSED
    assert "another checkpoint" in done.err


def test_check_probes_a_pair_with_a_picture(shop: Shop, pictures: Path, cli: Cli) -> None:
    """The pair hardly learned anything, so what is said of it may be any of the four."""
    draft = shop.root / "pair" / "draft"
    line = "check", shop.base, draft, "--probe", "--probe-image", pictures / "0.png"
    done = cli(*line, "--json")
    (probed,) = [one for one in json.loads(done.out)["results"] if one["topic"] == "probe"]
    assert "positions of text with 1 image;" in probed["what"]
    assert "; with rows of images in place of the image token " in probed["what"]
    assert "; without images " in probed["what"]


def test_a_picture_for_a_probe_must_be_asked_for_and_be_one(
    shop: Shop, pictures: Path, cli: Cli
) -> None:
    line = "check", shop.base, shop.root / "pair" / "draft", "--probe-image", pictures / "0.png"
    done = cli(*line)
    assert (done.code, "--probe-image means nothing without --probe" in done.err) == (2, True)
    (pictures / "no.png").write_text("no picture")
    done = cli(*line, "--probe", "--probe-image", pictures / "no.png")
    assert (done.code, "no.png" in done.err) == (3, True)
