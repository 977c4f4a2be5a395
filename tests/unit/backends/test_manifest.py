"""Claims about backends/manifest.py: what is written is read again, engines of earlier versions are
read, and what is wrong is refused by its key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends import engine_dir as engines
from edgespec.backends.engine_config import FP32_WEIGHTS, EngineConfig, EngineFields, EngineWeights
from edgespec.backends.manifest import EngineEntry, EngineManifest, FileEntry
from edgespec.contract import Role
from edgespec.errors import BundleError

GOLDEN = Path(__file__).parents[2] / "golden"
SHA256 = "ab" * 32
# As edgespec wrote it before manifests were values.
INT4 = {"scheme": "int4", "block": 32, "method": "rtn", "rounding": 0.25}
DIVERGENCE = {
    "tokens": 1022,
    "perplexity": 8.5,
    "exported_perplexity": 8.2,
    "kl": 0.04,
    "kl_error": 0.001,
    "top1": 0.9,
}
ENTRY: dict[str, Any] = {
    "backend": "ort",
    "fingerprint": {"onnxruntime": "1.22.0", "machine": "x86_64", "cpu_features": ["avx2", "fma"]},
    "source": {"name": "base", "identity": "a", "texts": {}, "base_identity": None},
    "golden_difference": 0.03,
    "weights": INT4,
    "golden_cosine": 0.97,
    "divergence": DIVERGENCE,
    "files": {"spec_base.onnx": {"bytes": 4, "sha256": SHA256, "mtime_ns": 1700000000000000000}},
}
MANIFEST: dict[str, Any] = {
    "format": 1,
    "kind": "engine",
    "edgespec": "0.1.0",
    "command": ["edgespec", "build"],
    "packages": {"numpy": "2.0.0"},
    "engines": {"base": ENTRY},
}


def write(path: Path, manifest: dict[str, Any]) -> Path:
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_a_manifest_of_the_version_before_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    manifest = EngineManifest.read(write(tmp_path, MANIFEST))
    entry = manifest.engines[Role.BASE]
    assert (entry.backend, entry.golden_difference, entry.golden_cosine) == ("ort", 0.03, 0.97)
    assert entry.weights.why_not_exact is None
    assert entry.files["spec_base.onnx"] == FileEntry(
        size_bytes=4, sha256=SHA256, mtime_ns=1700000000000000000
    )
    manifest.write(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["engines"] == {"base": ENTRY}


def test_an_entry_of_the_first_version_says_nothing_of_its_weights(tmp_path: Path) -> None:
    first = {key: value for key, value in ENTRY.items() if key not in ("weights", "golden_cosine")}
    entry = EngineEntry.from_dict(first | {"source": None}, tmp_path, "base")
    assert entry.weights == FP32_WEIGHTS
    assert (entry.source, entry.golden_cosine) == (None, None)


def test_a_config_of_the_first_version_has_float32_weights() -> None:
    raw = json.loads((GOLDEN / "engines_base_config.json").read_text())
    del raw["weights"]
    config = EngineConfig.from_dict(raw, "base_config.json")
    assert config.weights == FP32_WEIGHTS
    assert config.why_not_exact is None


def test_a_plain_engine_that_was_built_without_a_verify_size_verifies_one_node() -> None:
    raw = json.loads((GOLDEN / "engines_base_config.json").read_text())
    raw |= {"spec_decode_type": "none", "engine_role": "llm"}
    raw["graph"] |= {"role": "llm", "features": 0}
    del raw["builder_config"]["max_verify_tree_size"], raw["eagle_hidden_state_layers"]
    assert EngineConfig.from_dict(raw, "config.json").limits.verify_tree_size == 1


OLD_WEIGHTS: list[dict[str, Any]] = [
    {"scheme": "fp32", "method": "as exported"},
    {"scheme": "fp32", "method": "as exported", "rounding": 0.0002},
    {"scheme": "int8", "method": "rtn", "compute": "int8", "exact": True, "rounding": 0.1},
    {"scheme": "int4", "block": 128, "method": "rtn", "rounding": 0.5},
    {
        "scheme": "int4",
        "block": 128,
        "method": "rtn",
        "embedding": {"bits": 4, "block": 128, "rows": 256, "offset": 0, "scales_offset": 4096},
        "rounding": 0.5,
    },
    {"scheme": "nvfp4", "method": "as exported", "compute": "float32", "emulated": "emulated"},
    {"scheme": "int8_sq", "method": "as exported", "compute": "int8", "exact": True},
]


@pytest.mark.parametrize("weights", OLD_WEIGHTS)
def test_weights_of_the_version_before_are_written_as_they_were_read(
    weights: dict[str, Any],
) -> None:
    assert EngineWeights.read(EngineFields(weights, "config.json")).to_dict() == weights


WRONG: list[tuple[list[str], Any, str]] = [
    (["backend"], None, "'backend'"),
    (["backend"], 3, "'backend'"),
    (["fingerprint"], "here", "'fingerprint'"),
    (["fingerprint"], None, "'fingerprint'"),
    (["golden_difference"], "small", "'golden_difference'"),
    (["divergence"], 0.1, "'divergence'"),
    (["divergence", "kl"], "small", "'kl'"),
    (["divergence", "top1"], 1.5, "'top1'"),
    (["divergence", "perplexity"], 0, "'perplexity'"),
    (["weights", "scheme"], 4, "'scheme'"),
    (["weights", "rounding"], "much", "'rounding'"),
    (["files"], None, "does not list its files"),
    (["files", "spec_base.onnx", "bytes"], "4", "does not list its files"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG)
def test_what_is_wrong_in_an_entry_is_refused_by_its_key(
    tmp_path: Path, path: list[str], value: Any, said: str
) -> None:
    manifest = copy.deepcopy(MANIFEST)
    place = manifest["engines"]["base"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(BundleError, match=said) as caught:
        EngineManifest.read(write(tmp_path, manifest))
    assert "again" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "export"}, "is not an engine directory"),
        ({"engines": [ENTRY]}, "does not describe engines"),
        ({"engines": {"base": "there"}}, "does not describe engines"),
        ({"engines": {"judge": ENTRY}}, "names an engine 'judge'"),
        ({"format": 9}, "has format 9"),
    ],
)
def test_what_describes_no_engines_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(BundleError, match=said):
        EngineManifest.read(write(tmp_path, MANIFEST | changes))


def test_a_directory_without_a_manifest_has_no_engines(tmp_path: Path) -> None:
    assert EngineManifest.read(tmp_path).engines == {}
    with pytest.raises(BundleError, match="is an empty directory"):
        engines.open_engine(tmp_path, Role.BASE)
