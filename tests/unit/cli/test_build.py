"""What `edgespec build` refuses before it reads anything."""

from __future__ import annotations

import click
import pytest
from click.core import ParameterSource
from click.testing import CliRunner

from edgespec.backends.tensorrt import devices
from edgespec.cli import build
from edgespec.cli.main import cli
from edgespec.cli.terminal import ours
from edgespec.contract import Limits
from edgespec.runtime.trees.static_tree import DEFAULT, NAMED, num_non_leaves


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--weight-block", "0"], "--weight-block means nothing with --weights fp32"),
        (["--weights", "int4", "--weight-block", "0"], "--weight-block 0 is for --weights int8"),
        (["--weights", "int8", "--calib-data", "shipped"], "--calib-data is for --weights int4"),
    ],
)
def test_options_that_do_not_go_with_the_weights_are_refused(flags: list[str], said: str) -> None:
    command = ["build", "--onnx-dir", "onnx", "--engine-dir", "engine", *flags]
    with pytest.raises(click.UsageError) as refused:
        cli.main(command, "edgespec", standalone_mode=False)
    assert said in ours(refused.value.format_message())


@pytest.mark.parametrize("flags", [[], ["--"], ["--backend"], ["--json"]])
def test_a_line_without_the_directories_is_wrong_usage(flags: list[str]) -> None:
    result = CliRunner().invoke(cli, ["build", *flags])
    assert result.exit_code == 2


def test_engines_have_room_for_the_default_trees_of_tensorrt_llm_unless_told_otherwise() -> None:
    nodes = 1 + len(NAMED[DEFAULT])
    assert (Limits().max_verify_tree_size, nodes) == (64, 64)
    rows = sum(num_non_leaves(NAMED[DEFAULT])[1:])
    assert Limits().max_draft_tree_size >= rows


@pytest.mark.parametrize(
    ("text", "largest", "smaller"),
    [("4096", 4096, ()), ("1024,4096", 4096, (1024,)), ("512, 4096,1024", 4096, (512, 1024))],
)
def test_capacities_are_one_number_or_several(
    text: str, largest: int, smaller: tuple[int, ...]
) -> None:
    values = {"max_kv_cache_capacity": build.Capacities().convert(text, None, None), "else": 1}
    limits = build.limits_of(("max_kv_cache_capacity",), values)
    assert limits == Limits(max_kv_cache_capacity=largest, smaller_kv_cache_capacities=smaller)
    assert values == {"else": 1}


@pytest.mark.parametrize("text", ["", "many", "1024,", "1024;4096", "1e3"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="1024,4096"):
        build.Capacities().convert(text, None, None)


def said_of_devices(source: ParameterSource) -> list[str]:
    context = click.Context(build.command)
    context.set_parameter_source("backend", source)
    with context.scope():
        return [*build.other_device()]


def test_a_build_that_leaves_a_cuda_device_unused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    orin = devices.DeviceModel("Orin", 87, "12.6", 2**35)
    monkeypatch.setattr(devices, "device_here", lambda: orin)
    monkeypatch.setattr(build, "find_spec", lambda module: module == "tensorrt" or None)
    (said,) = said_of_devices(ParameterSource.DEFAULT)
    assert said == (
        "built for the CPU, as --backend was left out: for the Orin here, --backend tensorrt"
        " (NVIDIA TensorRT)"
    )
    monkeypatch.setattr(build, "find_spec", lambda module: None)
    (said,) = said_of_devices(ParameterSource.DEFAULT)
    assert "which is not installed. On a Jetson install JetPack's" in said
    assert said_of_devices(ParameterSource.COMMANDLINE) == []
    monkeypatch.setattr(devices, "device_here", lambda: None)
    assert said_of_devices(ParameterSource.DEFAULT) == []
