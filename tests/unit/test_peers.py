"""The comparison with other engines: what is pure of it. The measurements themselves need the
engines, and are made by scripts/peers/compare.py."""

from __future__ import annotations

import copy
import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.quants import dequantize

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, ModuleType]]:
    """The modules of scripts/peers by name; none stays behind."""
    names = [path.stem for path in (SCRIPTS / "peers").glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        patch.syspath_prepend(SCRIPTS / "peers")
        yield {name: importlib.import_module(name) for name in names}
        for name in (*names, "benchmark"):
            sys.modules.pop(name, None)


# ---- taking turns, and what processes print


def test_each_engine_has_a_turn_in_each_round_and_every_second_round_goes_backwards(
    peers: dict[str, ModuleType],
) -> None:
    found = list(peers["compare"].turns(["a", "b", "c"], 3))
    assert [name for _, name in found] == [*"abc", *"cba", *"abc"]
    assert [turn for turn, _ in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_rows_name_rows_that_are_there(peers: dict[str, ModuleType]) -> None:
    rows = peers["compare"].PEERS
    for row in rows.values():
        assert rows[row.beside].beside == row.beside  # edgespec's own
        assert row.plain is None or rows[row.plain].plain is None
        assert (rows[row.beside].plain is None) == (row.plain is None)


def test_the_measurement_is_the_last_line_that_a_process_printed(
    peers: dict[str, ModuleType],
) -> None:
    said = {"load": 1, "start": 2, "contexts": {}, "memory": {}, "versions": {}}
    parsed = peers["compare"].parsed
    assert parsed(f"warming up\n{json.dumps(said)}\n") == said
    for output in ("", "warming up", "[1]", '{"load": 1}'):
        with pytest.raises(SystemExit, match="No measurement"):
            parsed(output)


def test_a_path_that_is_not_there_is_no_environment(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    environments = peers["compare"].environments
    assert environments([f"gguf={tmp_path}"]) == {"gguf": tmp_path}
    for word in ("gguf", f"gguf={tmp_path / 'no'}"):
        with pytest.raises(SystemExit, match="give NAME=PATH"):
            environments([word])


# ---- one measurement


def test_a_measurement_keeps_prefill_apart_from_decode_and_the_most_memory(
    peers: dict[str, ModuleType],
) -> None:
    measuring = peers["measuring"]
    seconds = iter(range(100))

    def now() -> Any:
        second = next(seconds)
        return measuring.Moment(float(second), second / 2)

    class Opened:
        def __enter__(self) -> Any:
            return lambda prompt, tokens, rows=3: iter([(1, 1)] + [(rows - 1, 1)] * (tokens // 2))

        def __exit__(self, *error: object) -> None:
            return None

    sizes = iter([{"rss_mb": 5.0, "pss_mb": 4.0}] * 2 + [{"rss_mb": 6.0, "pss_mb": 3.0}])
    birth = measuring.Moment(-10.0, 0.0)
    found = measuring.measure(Opened, [4, 8], 5, birth, now, lambda: next(sizes), [4])
    assert found["load"] == {"wall_s": 1.0, "cpu_s": 0.5}
    assert found["start"]["wall_s"] == 12.0
    assert found["contexts"]["8"]["prefill"] == {"wall_s": 1.0, "cpu_s": 0.5, "tokens": 8}
    decode = {"wall_s": 2.0, "cpu_s": 1.0, "tokens": 4, "steps": 2}
    assert found["contexts"]["4"]["decode"] == decode
    assert found["verify"] == {"4": {"wall_s": 2.0, "cpu_s": 1.0, "tokens": 6, "steps": 2}}
    assert found["memory"] == {"rss_mb": 6.0, "pss_mb": 4.0}


def test_an_engine_that_stops_early_is_not_measured(peers: dict[str, ModuleType]) -> None:
    measuring = peers["measuring"]
    with pytest.raises(SystemExit, match="3 of 5 tokens"):
        measuring.passage(lambda *_: iter([(1, 1)] * 3), 4, 5, measuring.own_moment)


def test_own_birth_and_memory_are_those_of_this_process(peers: dict[str, ModuleType]) -> None:
    measuring = peers["measuring"]
    memory = measuring.memory_of()
    assert 0 < memory["anonymous_mb"] <= memory["pss_mb"] <= memory["rss_mb"]
    passed = measuring.own_moment().since(measuring.own_birth())
    assert passed["wall_s"] > 0.1  # pytest has been imported since
    assert passed["cpu_s"] == pytest.approx(measuring.own_moment().cpu, abs=0.1)


# ---- llama.cpp


def test_passes_of_llama_cpp_are_the_tokens_less_the_accepted_drafts(
    peers: dict[str, ModuleType],
) -> None:
    end = {"stop": True, "tokens": [], "timings": {"predicted_n": 9, "draft_n_accepted": 5}}
    events = [{"tokens": [7]}, {"tokens": [8, 9]}, end]
    lines = [b"\n" if i % 2 else b"data: " + json.dumps(events[i // 2]).encode() for i in range(5)]
    assert list(peers["llama_cpp_peer"].events_of(iter(lines))) == [(1, 0), (2, 0), (0, 3)]
    with pytest.raises(SystemExit, match="too long"):
        list(peers["llama_cpp_peer"].events_of(iter([b'data: {"error": "too long"}'])))


def test_rates_of_llama_cpp_are_those_of_all_drafts_up_to_a_place(
    peers: dict[str, ModuleType],
) -> None:
    flags = peers["llama_cpp_peer"].speculation(Path("draft.gguf"), 0.7, 3)
    assert flags[flags.index("--spec-synth-rates") + 1] == "0.700000,0.490000,0.343000"
    assert flags[flags.index("--spec-draft-n-max") + 1] == "3"


@pytest.mark.parametrize(
    ("said", "version"),
    [("(build 1, commit abc123)", "0.5.0 (commit abc123)"), ("(build 0, commit unknown)", "0c1e")],
)
def test_the_version_of_llama_cpp_is_what_its_server_says(
    said: str, version: str, peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    server = tmp_path / "llama-server"
    server.write_text(f"#!/bin/sh\necho 'version: 0.5.0 {said}' >&2\n")
    server.chmod(0o755)
    assert version in peers["llama_cpp_peer"].version_of(server)
    server.write_text("#!/bin/sh\necho b9999\n")
    with pytest.raises(SystemExit, match="b9999"):
        peers["llama_cpp_peer"].version_of(server)


def test_a_server_that_is_too_busy_for_health_is_asked_again(
    peers: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = peers["llama_cpp_peer"]
    monkeypatch.setattr(llama, "SECONDS_OF_HEALTH", 0.05)
    monkeypatch.setattr(llama, "SECONDS_TO_LOAD", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            with pytest.raises(SystemExit, match="not ready"):
                llama.wait_for(running, silent.getsockname()[1])
        finally:
            running.kill()
            running.communicate()
        with pytest.raises(SystemExit, match="ended with exit status"):
            llama.wait_for(running, silent.getsockname()[1])


# ---- GGUF

SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 40,
    "eos_token_id": 39,
}


def write_checkpoint(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes arrays as safetensors has them, bfloat16 or int64."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SIZES))
    header, end = {}, 0
    for name, array in tensors.items():
        kind = "I64" if array.dtype == np.int64 else "BF16"
        where = [end, end := end + array.nbytes]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": where}
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def q4_0(array: np.ndarray) -> np.ndarray:
    """What Q4_0 keeps of an array: per 32 values a scale, which is the largest over -8."""
    blocks = array.astype(np.float32).reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
    scale = largest / -8
    codes = np.clip(np.trunc(blocks * (1 / scale) + 8.5), 0, 15) - 8
    rounded: np.ndarray = codes * scale.astype(np.float16).astype(np.float32)
    return rounded.reshape(array.shape)


def test_a_base_and_a_draft_are_read_back_from_gguf(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    matrix = random.standard_normal((40, 64)).astype(ml_dtypes.bfloat16)
    joined = random.standard_normal((64, 192)).astype(ml_dtypes.bfloat16)
    norm = np.ones(64, ml_dtypes.bfloat16)
    distances = np.array([0, 3, 5], np.int64)
    write_checkpoint(
        tmp_path / "base", {"model.embed_tokens.weight": matrix, "model.norm.weight": norm}
    )
    write_checkpoint(
        tmp_path / "draft", {"lm_head.weight": matrix, "fc.weight": joined, "d2t": distances}
    )
    write = peers["gguf_file"].write
    write(tmp_path / "base", tmp_path / "base.gguf", None)
    write(tmp_path / "draft", tmp_path / "draft.gguf", tmp_path / "base")

    base = gguf.GGUFReader(tmp_path / "base.gguf")
    assert base.fields["qwen3.embedding_length"].contents() == 64
    assert base.fields["qwen3.attention.head_count_kv"].contents() == 1
    tensors = {tensor.name: tensor for tensor in base.tensors}
    assert set(tensors) == {"token_embd.weight", "output_norm.weight"}
    table = tensors["token_embd.weight"]
    assert table.tensor_type == gguf.GGMLQuantizationType.Q4_0
    np.testing.assert_allclose(dequantize(table.data, table.tensor_type), q4_0(matrix), atol=1e-6)
    np.testing.assert_array_equal(tensors["output_norm.weight"].data, np.ones(64, np.float32))

    draft = gguf.GGUFReader(tmp_path / "draft.gguf")
    assert draft.fields["general.architecture"].contents() == "eagle3"
    assert draft.fields["eagle3.target_layers"].contents() == [2, 3, 3]
    assert draft.fields["eagle3.target_hidden_size"].contents() == 64
    tensors = {tensor.name: tensor for tensor in draft.tensors}
    np.testing.assert_array_equal(tensors["d2t"].data, [0, 4, 7])
    np.testing.assert_array_equal(tensors["fc.weight"].data, joined.astype(np.float16))


# ---- what a comparison says


def run_of(seconds: float, steps: int = 10, tokens: int = 10) -> dict[str, Any]:
    """A run whose decode takes so long, and its prefill twice that."""
    part = {
        "prefill": {"wall_s": 2 * seconds, "cpu_s": 2 * seconds, "tokens": 128},
        "decode": {"wall_s": 9.0, "cpu_s": seconds, "tokens": tokens, "steps": steps},
    }
    return {
        "load": {"wall_s": 0.5, "cpu_s": 0.25},
        "start": {"wall_s": 2.0, "cpu_s": 1.5},
        "contexts": {"128": part, "512": part},
        "memory": {"rss_mb": 512.34, "pss_mb": 500.0, "anonymous_mb": 99.5},
    }


def row_of(label: str, beside: str, **more: Any) -> dict[str, Any]:
    kind = {"label": label, "beside": beside, "cache_bytes": 2, "plain": None, "read_mb": None}
    return kind | {"disk_mb": 317.2} | more


@pytest.fixture
def result(peers: dict[str, ModuleType]) -> dict[str, Any]:
    """A comparison of two engines and their drafts, in three runs."""
    found = {
        "shape": "0.6B",
        "contexts": [128, 512],
        "tokens": 16,
        "threads": 1,
        "runs_each": 3,
        "rate": 0.5,
        "position_numbers": 1000,
        "machine": {
            "cpu": "A CPU",
            "cpus": 2,
            "load": [1.0, 2.5],
            "system": "Linux 6",
            "read_gb_s": [40.0, 20.0, 40.0],
        },
        "versions": {"theirs": "2", "edgespec": "1"},
        "command": "python scripts/peers/compare.py --work DIR",
        "rows": {
            "ours": row_of("edgespec int4", "ours", read_mb=400.0),
            "theirs": row_of("Theirs Q4", "ours"),
            "ours-drafts": row_of("edgespec drafts", "ours-drafts", plain="ours", chain=2),
        },
        "runs": {
            "ours": [run_of(0.1), run_of(0.2), run_of(0.4)],
            "theirs": [run_of(0.3), run_of(0.2), run_of(0.6)],
            "ours-drafts": [run_of(0.07, 5), run_of(0.14, 5), run_of(0.35, 5)],
        },
    }
    return found | {"summary": peers["table"].summary(found)}


def test_ratios_are_taken_run_by_run(result: dict[str, Any]) -> None:
    theirs = result["summary"]["theirs"]["token_128_ms"]
    assert theirs["median"] == 30.0
    assert theirs["ratio"] == 1.5  # of 3, 1 and 1.5; the ratio of the medians is 1.5 by 20 as well
    moved = copy.deepcopy(result)
    moved["runs"]["theirs"].reverse()  # 6, 1 and 0.75
    assert result["summary"]["ours"]["token_128_ms"]["ratio"] == 1.0


def test_drafts_are_compared_at_the_length_that_was_dialled(
    result: dict[str, Any], peers: dict[str, ModuleType]
) -> None:
    assert peers["table"].length_of(0.7, 3) == pytest.approx(2.533)
    found = result["summary"]["ours-drafts"]
    assert found["step_128_ms"]["median"] == 28.0
    assert found["length_128"]["median"] == 2.0  # as it came
    assert found["token_128_ms"]["median"] == 16.0  # 28 ms over 1.75 tokens
    assert found["speedup_128"]["median"] == 1.25  # of 10/8, 20/16 and 40/40


def test_the_share_of_the_bandwidth_is_bytes_over_time_over_speed(result: dict[str, Any]) -> None:
    # 400 MB of weights and 136 positions of 2000 bytes in 10, 20 and 40 ms at 40, 20 and 40 GB/s
    assert result["summary"]["ours"]["share_128"]["median"] == pytest.approx(1.0007, abs=1e-4)
    assert result["summary"]["ours"]["share_128"]["least"] == pytest.approx(0.2502, abs=1e-4)
    assert "share_128" not in result["summary"]["theirs"]


def test_the_clock_is_the_wall_where_there_are_more_threads(
    result: dict[str, Any], peers: dict[str, ModuleType]
) -> None:
    found = peers["table"].summary(result | {"threads": 2})
    assert found["ours"]["token_128_ms"]["median"] == 900.0
    assert found["ours"]["load_s"]["median"] == 0.5


def test_the_tables_have_a_row_for_each_engine(
    result: dict[str, Any], peers: dict[str, ModuleType]
) -> None:
    text = peers["table"].markdown(result)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0].startswith("| | a token at 128, ms | prefill of 512, s | bandwidth at 128 |")
    assert rows[2] == (
        "| edgespec int4 | 20.0 | 0.40 | 100 % | 0.25 | 1.50 | 512 | 500 | 99.5 | 317 |"
    )
    assert rows[3].startswith("| Theirs Q4 | 30.0 (1.50) | 0.60 (1.50) | - | 0.25 | 1.50 |")
    assert rows[6] == "| edgespec drafts | 2, 1.75 | 28.0 | 2.00 | 16.0 | 1.25 |"
    assert {line.count("|") for line in rows[:4]} == {11}
    cost = {"perplexity": 8.46, "exported_perplexity": 8.19}
    measured = result | {
        "rows": result["rows"] | {"ours": result["rows"]["ours"] | {"divergence": cost}}
    }
    lines = peers["table"].plain_table(measured).splitlines()
    assert [line.split(" | ")[4] for line in lines[2:]] == ["8.46 (+3.3 %)", "-"]
    assert "theirs 2" in text
    assert "load 1.0 to 2.5, so other work was on the machine" in text
    result["machine"]["load"] = [0.9, 1.2]
    assert "so nothing else was on the machine" in peers["table"].markdown(result)
    assert text.endswith("    python scripts/peers/compare.py --work DIR\n")


def test_a_row_without_its_neighbor_has_no_ratio(
    result: dict[str, Any], peers: dict[str, ModuleType]
) -> None:
    del result["runs"]["ours"], result["rows"]["ours"]
    found = peers["table"].summary(result)
    assert "ratio" not in found["theirs"]["token_128_ms"]
    assert "speedup_128" not in found["ours-drafts"]
    text = peers["table"].markdown(result | {"summary": found})
    assert "bandwidth" not in text
    for run in result["runs"]["theirs"]:
        run["verify"] = {"4": run["contexts"]["128"]["decode"]}
    found = peers["table"].summary(result)
    assert found["theirs"]["verify_4_ms"]["median"] == found["theirs"]["token_128_ms"]["median"]


def test_a_page_keeps_what_is_around_its_tables(
    result: dict[str, Any], peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    table, page, kept = peers["table"], tmp_path / "page.md", tmp_path / "figures.json"
    kept.write_text(json.dumps({"0.6B": result}))
    begin = table.begin("0.6B")
    page.write_text(f"# Before\n\n{begin}\nold\n{table.END}\n\nAfter\n")
    table.write_page(kept, page)
    once = page.read_text()
    assert once.startswith(f"# Before\n\n{begin}\n\n| | a token")
    assert once.endswith(f"{table.END}\n\nAfter\n")
    assert "old" not in once
    table.write_page(kept, page)
    assert page.read_text() == once
    page.write_text("# Before\n")
    with pytest.raises(SystemExit, match="no place"):
        table.write_page(kept, page)


def test_the_page_says_what_was_measured(peers: dict[str, ModuleType]) -> None:
    """docs/performance.json is kept as it was measured; the page is made from it."""
    table, docs = peers["table"], ROOT / "docs"
    page = (docs / "performance.md").read_text()
    for shape, kept in json.loads((docs / "performance.json").read_text()).items():
        assert kept["summary"] == table.summary(kept)
        assert table.replaced(page, shape, table.markdown(kept)) == page
