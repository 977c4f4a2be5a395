"""Claims about backends/ort/fingerprint.py: an engine is bound to the machine and to the version
that built it, and says which of the two is another."""

from __future__ import annotations

import sys

import pytest

from edgespec.backends.ort import fingerprint as module
from edgespec.backends.ort.backend import BACKEND
from edgespec.backends.ort.fingerprint import check, fingerprint
from edgespec.errors import EngineMismatch, EnvironmentProblem

ENGINE = "the base engine in engines"


def test_engine_of_this_machine_is_taken() -> None:
    check(fingerprint(), ENGINE)
    features = fingerprint()["cpu_features"]
    check(fingerprint() | {"cpu_features": features[::-1], "later": 1}, ENGINE)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("onnxruntime", "1.0.0", ["ONNX Runtime 1.0.0"]),
        ("machine", "riscv64", ["riscv64"]),
        ("cpu_features", ["avx9000"], ["avx9000", "another CPU"]),
        ("cpu_features", None, ["does not say for which machine"]),
        ("cpu_features", [7], ["does not say for which machine"]),
    ],
)
def test_engine_of_another_machine(key: str, value: object, said: list[str]) -> None:
    with pytest.raises(EngineMismatch) as caught:
        check(fingerprint() | {key: value}, ENGINE)
    for word in (ENGINE, *said):
        assert word in caught.value.what
    assert "edgespec build again" in caught.value.remedy


def test_engine_of_a_cpu_with_fewer_features_is_of_another_one() -> None:
    """Its kernels were chosen without them, and its bits were proven so."""
    fewer = fingerprint()["cpu_features"][1:]
    with pytest.raises(EngineMismatch, match="another CPU"):
        check(fingerprint() | {"cpu_features": fewer}, ENGINE)


def test_both_packages_of_onnx_runtime_are_refused_before_one_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where an engine is staged too, and not only where it is finished."""
    versions = {"onnxruntime-gpu": "1.31.1", "onnxruntime": "1.32.0"}
    monkeypatch.setattr(module, "installed_version", versions.get)
    monkeypatch.setitem(
        sys.modules, "edgespec.backends.ort.staging", None
    )  # would be an ImportError
    ways = (fingerprint, lambda: BACKEND.stage(*[None] * 5), lambda: BACKEND.plan(*[None] * 3))  # type: ignore[arg-type]
    for way in ways:
        with pytest.raises(EnvironmentProblem) as caught:
            way()
        assert "onnxruntime-gpu 1.31.1 and onnxruntime 1.32.0 are both" in caught.value.what
        assert "pip uninstall -y onnxruntime-gpu onnxruntime" in caught.value.remedy
