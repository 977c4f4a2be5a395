"""Claims about manifest.py: what edgespec quantize wrote is read and written as it was, and what is
unreadable is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts.manifest import (
    QuantizeFields,
    QuantizeManifest,
    QuantizeOrigin,
    QuantizeRequest,
)
from edgespec.errors import BundleError

# As edgespec wrote it before manifests were values.
CHECK: dict[str, Any] = {
    "logits_cosine": 0.999,
    "logits_kl": 0.0,
    "perplexity_before": None,
    "perplexity_after": None,
    "top1_agreement": 0.98,
    "num_tokens": 64,
    "weight_errors": {"layers.0.mlp.up_proj": 0.02, "lm_head": 0.03},
    "simulated": "weights only",
    "max_weight_error": 0.03,
}
MANIFEST: dict[str, Any] = {
    "format": 1,
    "kind": "quantize",
    "source": {"name": "draft", "identity": "ab" * 32, "texts": "cd" * 32},
    "options": {"quantization": "fp8", "calib_data": {"name": "shipped", "sha256": "ef" * 32}},
    "base": {"name": "base", "identity": "12" * 32, "taps": [2, 4, 6]},
    "weights": {"source": "34" * 32, "base": "56" * 32},
    "edgespec": "0.1.0",
    "command": ["edgespec", "quantize"],
    "packages": {"numpy": "2.0.0", "torch": None},
    "calibrated": {"needed": True, "num_samples": 2, "num_tokens": 64},
    "check": CHECK,
    "files": {"config.json": {"bytes": 4, "sha256": "78" * 32}},
}


def write(path: Path, manifest: dict[str, Any]) -> Path:
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_a_manifest_of_the_version_before_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    manifest = QuantizeManifest.read(write(tmp_path, MANIFEST))
    assert manifest.request.base is not None
    assert manifest.request.base.aux_layers == (2, 4, 6)
    assert (manifest.request.quantization, manifest.request.calib_data) == ("fp8", "shipped")
    assert (manifest.check.max_weight_error, manifest.size_bytes) == (0.03, 4)
    before = (tmp_path / "manifest.json").read_text()
    manifest.write(tmp_path)
    after = json.loads((tmp_path / "manifest.json").read_text())
    assert json.dumps(after) == before  # the order of the keys included


def test_the_first_version_recorded_no_base_and_no_digests(tmp_path: Path) -> None:
    first = {key: value for key, value in MANIFEST.items() if key not in ("base", "weights")}
    assert QuantizeManifest.read(write(tmp_path, first)).to_dict() == first


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"check": CHECK | {"weight_errors": {"lm_head": "x"}}},
            r"\(check\) \(weight_errors\): 'lm_head'",
        ),
        ({"check": CHECK | {"logits_kl": None}}, r"\(check\): 'logits_kl'"),
        ({"packages": None}, "'packages'"),
        ({"calibrated": {"needed": "x"}}, r"\(calibrated\): 'needed'"),
        ({"base": {"taps": [1]}}, r"\(base\): 'identity'"),
    ],
)
def test_an_unreadable_value_is_refused_by_its_key(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(BundleError, match=named):
        QuantizeManifest.read(write(tmp_path, MANIFEST | changed))


def test_a_manifest_of_an_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not that of a quantized checkpoint"):
        QuantizeManifest.read(write(tmp_path, MANIFEST | {"kind": "export"}))


def test_the_origin_is_read_where_the_rest_is_damaged() -> None:
    damaged = MANIFEST | {"check": 7, "files": "all", "base": {"identity": 7}}
    origin = QuantizeOrigin.from_dict(damaged)
    assert (origin.identity, origin.base_identity, origin.files) == ("ab" * 32, None, None)


def request(**changed: Any) -> QuantizeRequest:
    return QuantizeRequest.read(QuantizeFields(MANIFEST | changed, "request.json"))


def test_requests_are_compared_without_names() -> None:
    renamed = request(
        source=MANIFEST["source"] | {"name": "a link"},
        base=MANIFEST["base"] | {"name": None},
    )
    assert renamed != request()
    assert renamed.unnamed() == request().unnamed()
    other_text = {"calib_data": {"name": "x", "sha256": "ab"}}
    same_text = {"calib_data": {"name": "y", "sha256": "ab"}}
    assert request(options=other_text).unnamed() == request(options=same_text).unnamed()


@pytest.mark.parametrize(
    "changed",
    [
        {"source": {"name": "draft", "identity": "ef" * 32, "texts": "cd" * 32}},
        {"options": {"quantization": "fp8"}},
        {"base": None},
    ],
)
def test_requests_differ_by_all_else(changed: dict[str, Any]) -> None:
    assert request(**changed).unnamed() != request().unnamed()
