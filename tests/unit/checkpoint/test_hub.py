"""Downloads from a hub on this machine: what is fetched, what is reported, and what is said where
it fails."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from edgespec.checkpoint import hub
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.gguf.repository import chosen
from edgespec.checkpoint.hub import download
from edgespec.errors import CheckpointError, EdgeSpecError, OutputError, UnsupportedModel
from tests import gguf_files, toys
from tests.toys.vision import write_vlm

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 4000,
    "evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download asks for."""

    asked: list[str]
    files: dict[str, bytes] = FILES

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        if "org/gated" in path:
            return self.send(403, b"", body, {"X-Error-Code": "GatedRepo"})
        if "org/model" not in path:
            return self.send(401, b"", body, {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/") and "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.files.items()
            ]
            return self.send(200, json.dumps(tree).encode(), body)
        if path.startswith("/api/"):
            siblings = [{"rfilename": n, "size": len(data)} for n, data in self.files.items()]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
            return self.send(200, json.dumps(info).encode(), body)
        data = self.files[path.partition(f"{COMMIT}/")[2] or path.partition("/main/")[2]]
        etag = hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        if (part := self.headers.get("range")) is not None:
            self.asked[-1] += f" {part}"
            last = int(part.partition("-")[2] or len(data))
            return self.send(206, data[: last + 1], body, headers)
        return self.send(200, data, body, headers)

    def send(
        self, code: int, data: bytes, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


class Counts:
    """A Progress that counts."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, stage: str, total: int) -> None:
        assert stage == "download"
        self.total, self.done = total, 0

    def advance(self, amount: int) -> None:
        self.done += amount


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub on this machine, an empty cache, and what the hub was asked."""
    found: list[str] = []
    handler = type("Asked", (Hub,), {"asked": found})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(proxy, raising=False)
        yield found
        server.shutdown()
        thread.join()


def test_checkpoint_is_fetched_without_code_and_pickles_and_counted(asked: list[str]) -> None:
    counts = Counts()
    path = download("org/model", progress=counts)
    assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    size = len(FILES["config.json"]) + len(FILES["model.safetensors"])
    assert (counts.total, counts.done) == (size, size)


def test_what_is_there_is_not_fetched_again(asked: list[str]) -> None:
    path = download("org/model", progress=Counts())
    asked.clear()
    assert download("org/model", progress=Counts()) == path
    assert not [line for line in asked if line.startswith("GET /org/")]
    assert hub.missing_bytes("org/model", hub.PATTERNS) == 0


def test_files_of_an_interrupted_download_are_kept(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(hub, "PATTERNS", ("*.json",))
        download("org/model", progress=Counts())
    asked.clear()
    assert hub.missing_bytes("org/model", hub.PATTERNS) == len(FILES["model.safetensors"])
    counts = Counts()
    path = download("org/model", progress=counts)
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    (fetched,) = [line for line in asked if line.startswith("GET /org/")]
    assert fetched.endswith("model.safetensors")
    assert counts.done == len(FILES["model.safetensors"])


def test_failed_download_leaves_no_half_file(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Counts):
        def advance(self, amount: int) -> None:
            super().advance(amount)
            if self.done > 3 * 65536:
                raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65536)
    with pytest.raises(CheckpointError, match="broken"):
        download("org/model", progress=Failing())
    assert not list(tmp_path.rglob("model.safetensors"))
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.abort_transfers()  # the library's own transfers may be ended at any time


@pytest.fixture
def gguf_hub(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A repository of models in GGUF alone: a split one, and one of another architecture."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    hf = toys.make_base(tmp_path / "hf", vocab=400)
    gguf_files.write(hf, tmp_path / "Toy-Q8_0.gguf", "Q8_0", split_max_tensors=15)
    gguf_files.write(hf, tmp_path / "Toy.F16.gguf", "F16")
    files = {file.name: file.read_bytes() for file in tmp_path.glob("*.gguf")}
    other = files["Toy.F16.gguf"].replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba")
    more = {"Toy-UD-Q4_K_M.gguf": other, "mmproj-F16.gguf": b"GGUF", "README.md": b"Toy"}
    monkeypatch.setattr(Hub, "files", files | more)
    return asked


def test_a_model_in_gguf_by_its_quantization(
    gguf_hub: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = open_checkpoint("org/model:q8_0")
    assert "model.norm.weight" in checkpoint.tensors
    fetched = [line.rpartition("/")[2] for line in gguf_hub if line.startswith("GET /org/")]
    parts = sorted(name for name in Hub.files if "Q8_0" in name)
    assert len(parts) > 1
    assert sorted(set(fetched)) == sorted({f"{parts[0]} bytes=0-1048575", *parts})
    assert "the text part alone runs: this version reads no image encoder (mmproj" in caplog.text
    gguf_hub.clear()
    assert open_checkpoint("org/model:q8_0").path == checkpoint.path
    assert not [line for line in gguf_hub if line.startswith("GET /org/")]
    assert open_checkpoint("org/model:toy.f16.GGUF").path != checkpoint.path


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("org/model", CheckpointError, r"weights in GGUF.*model:Q8_0.*model:UD-Q4_K_M.*model:F16"),
        ("org/model:Q3_K", CheckpointError, r"no model of GGUF named 'Q3_K'.*org/model:Q8_0"),
        ("org/model:UD-Q4_K_M", UnsupportedModel, "org/model/Toy-UD-Q4_K_M.gguf.*'mamba'"),
    ],
)
def test_names_that_mean_no_model_in_gguf_fetch_no_weights(
    name: str, error: type[EdgeSpecError], says: str, gguf_hub: list[str]
) -> None:
    with pytest.raises(error) as found:
        download(name, progress=Counts())
    assert re.search(says, f"{found.value.what} {found.value.remedy}")
    assert not [line for line in gguf_hub if line.endswith(".gguf")]


def test_models_of_a_repository() -> None:
    files = ["a-Q4_K_M.gguf", "a-IQ4_XS.gguf", "UD/a-UD-Q4_K_XL.gguf", "BF16/a-BF16.gguf", "b.GGUF"]
    for wanted, file in [
        ("q4_k_m", 0),
        ("Q4_K_XL", 2),
        ("bf16", 3),
        ("B.gguf", 4),
        ("xs.gguf", -1),
    ]:
        if file >= 0:
            assert chosen("o/r", files, wanted) == (files[file],)
        else:
            with pytest.raises(CheckpointError, match="no model"):
                chosen("o/r", files, wanted)
    with pytest.raises(CheckpointError, match="2 models") as found:
        chosen("o/r", ["x-Q8_0.gguf", "y-Q8_0.gguf"], "Q8_0")
    assert "o/r:x-Q8_0.gguf, o/r:y-Q8_0.gguf" in found.value.remedy
    with pytest.raises(CheckpointError, match=r"has no a-00002-of-00002\.gguf"):
        chosen("o/r", ["a-00001-of-00002.gguf"], "a")


def test_no_more_is_read_than_the_beginning_where_a_mirror_knows_no_ranges(
    gguf_hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, size = Hub.files["Toy-UD-Q4_K_M.gguf"], 2**28
    sent = [len(begin)]

    def whole(self: Hub, *, body: bool) -> None:
        self.send(200, begin, body, {"Content-Length": str(size)})
        with suppress(OSError):
            while sum(sent) < size:
                sent.append(self.wfile.write(bytes(min(2**16, size - sum(sent)))))

    monkeypatch.setattr(Hub, "answer", whole)
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        hub.look_at_header("org/model", "big.gguf")
    assert sum(sent) < size / 4


def refused(error: type[EdgeSpecError], name: str = "org/model") -> EdgeSpecError:
    with pytest.raises(error, match=f"could not download '{name}'") as found:
        download(name, progress=Counts())
    return found.value


def test_name_that_is_not_there_is_told_from_a_gated_one(asked: list[str]) -> None:
    missing = refused(CheckpointError, "org/missing")
    assert "no such repository, or it is private" in missing.what
    assert "If this is a directory, it does not exist" in missing.remedy
    gated = refused(CheckpointError, "org/gated")
    assert "is gated" in gated.what
    assert f"{constants.ENDPOINT}/org/gated" in gated.remedy
    assert "hf auth login" in gated.remedy


def test_hub_that_cannot_be_reached_is_told_and_its_cache_used(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = download("org/model", progress=Counts())
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert download("org/model", progress=Counts()) == path
    assert "the hub cannot be reached" in refused(CheckpointError, "org/other").what
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = refused(CheckpointError, "org/other")
    assert "HF_HUB_OFFLINE is set" in offline.what
    assert "unset HF_HUB_OFFLINE" in offline.remedy


def test_errors_of_the_client_are_those_of_the_library_in_use() -> None:
    """httpx in 1.x, httpx2 in 2.x: neither's errors are OSErrors."""
    client = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
    assert issubclass(client.ConnectError, hub.download_errors())
    assert not issubclass(TypeError, hub.download_errors())


def test_too_little_room_is_refused_before_the_download(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage())
    with pytest.raises(OutputError, match=r"org/model takes 1\.0 MB, and .* has 0\.0 MB free"):
        download("org/model", progress=Counts())
    assert not [line for line in asked if "model.safetensors" in line]


def test_full_disk_on_the_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    error = hub.explained("org/model", OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(error, OutputError)
    assert "HF_HOME" in error.remedy


def test_interrupt_does_not_wait_for_files_under_way() -> None:
    """A thread of the download ends with the next bytes that it reports."""
    stop, ended = threading.Event(), threading.Event()
    bar = hub.reporting_bars(Counts(), stop)(unit="B", total=10)
    began = threading.Event()

    def endless() -> None:
        try:
            while True:
                bar.update(1)
                if began.is_set():
                    stop.wait(30)
                began.set()
        except hub.DownloadStopped:
            ended.set()
            raise

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if began.wait(10) and not stop.is_set():
                raise KeyboardInterrupt
            super().join(timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub.threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            hub.interruptible(endless, stop)
    assert ended.is_set()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("gpt2", True),
        ("org/model-1.5_b", True),
        ("a/b/c", False),
        ("./a", False),
        ("", False),
        ("a/b:Q4_K_M", True),
    ],
)
def test_names_of_the_hub(name: str, is_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.is_repo_id(name) is is_one


def test_a_class_for_bars_is_what_the_library_wants() -> None:
    """Bars that count files report nothing, and all of them draw nothing."""
    counts: Any = Counts()
    bar = hub.reporting_bars(counts, threading.Event())
    with bar(total=3, desc="Fetching 3 files") as files:
        files.update(1)
    assert (counts.total, counts.done) == (0, 0)
    assert files.disable


def test_the_best_image_encoder_comes_along(
    gguf_hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = tmp_path / "seeing"
    write_vlm(hf, "qwen3_vl")
    gguf_files.write(hf, tmp_path / "See-F32.gguf")
    for kind in ("F16", "BF16", "Q8_0"):
        gguf_files.write_mmproj(hf, tmp_path / f"mmproj-{kind}.gguf", kind)
    files = {file.name: file.read_bytes() for file in tmp_path.glob("*.gguf")}
    monkeypatch.setattr(Hub, "files", files)
    checkpoint = open_checkpoint("org/model:See-F32.gguf")
    assert checkpoint.tensors["model.visual.blocks.0.attn.proj.weight"].dtype == "bfloat16"
    fetched = {line.rpartition("/")[2] for line in gguf_hub if line.startswith("GET /org/")}
    assert fetched == {"See-F32.gguf bytes=0-1048575", "See-F32.gguf", "mmproj-BF16.gguf"}
