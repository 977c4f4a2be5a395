"""A flag is one flag in every spelling, and the guide's commands parse as they stand."""

from __future__ import annotations

import shlex

import click
import pytest

from edgespec.cli.draft_flags import check_tree
from edgespec.cli.flags import kebab
from edgespec.cli.main import COMMANDS, cli
from edgespec.errors import OptionError
from edgespec.runtime.drafters.eagle_options import EagleOptions
from edgespec.runtime.drafters.medusa import MedusaOptions

# The mirrored tool's guide, EAGLE-3 for text and MTP, without its quantise steps.
GUIDE = """\
export M/quantized-base M/onnx/base_export --eagle-base
export M/quantized-draft M/onnx/draft_export
build --onnxDir W/M/onnx/base --engineDir W/M/engines --maxBatchSize 1 --maxInputLen 1024 --maxKVCacheCapacity 4096 --maxVerifyTreeSize 60 --specBase
build --onnxDir W/M/onnx/draft --engineDir W/M/engines --maxBatchSize 1 --maxInputLen 1024 --maxKVCacheCapacity 4096 --maxDraftTreeSize 60 --specDraft
infer --engineDir W/M/engines --inputFile W/input.json --outputFile W/output.json --specDecode
export Qwen/Qwen3.5-4B W/M/onnx --mtp
build --onnxDir W/M/onnx/llm --engineDir W/M/engines --maxBatchSize 1 --maxInputLen 2048 --maxKVCacheCapacity 4096 --maxVerifyTreeSize 7 --specBase
build --onnxDir W/M/onnx/mtp_draft --engineDir W/M/engines --maxBatchSize 1 --maxInputLen 2048 --maxKVCacheCapacity 4096 --maxDraftTreeSize 7 --specDraft
infer --engineDir W/M/engines --inputFile W/input.json --outputFile W/output.json --specDecode --specDraftTopK 1 --specDraftStep 3 --specVerifySize 4
"""  # noqa: E501

KEBAB = {
    "--eagle-base": "--eagle-base",
    "--onnxDir": "--onnx-dir",
    "--engineDir": "--engine-dir",
    "--maxBatchSize": "--max-batch-size",
    "--maxInputLen": "--max-input-len",
    "--maxKVCacheCapacity": "--max-kv-cache-capacity",
    "--maxVerifyTreeSize": "--max-verify-tree-size",
    "--maxDraftTreeSize": "--max-draft-tree-size",
    "--specBase": "--spec-base",
    "--specDraft": "--spec-draft",
    "--inputFile": "--input-file",
    "--outputFile": "--output-file",
    "--specDecode": "--spec-decode",
    "--specDraftTopK": "--spec-draft-top-k",
    "--specDraftStep": "--spec-draft-step",
    "--specVerifySize": "--spec-verify-size",
}
CAMEL = {"--eagle-base": "--eagleBase"} | {flag: flag for flag in KEBAB if flag != "--eagle-base"}
SNAKE = {flag: "--" + name[2:].replace("-", "_") for flag, name in KEBAB.items()}

FILES = {"engine_dir": "W/M/engines", "input_file": "W/input.json", "output_file": "W/output.json"}
LIMITS = {
    "max_batch_size": 1,
    "max_input_len": 1024,
    "max_kv_cache_capacity": 4096,
    "max_verify_tree_size": 60,
    "max_draft_tree_size": 60,
}
MEANT: list[dict[str, object]] = [
    {
        "model": "M/quantized-base",
        "out": "M/onnx/base_export",
        "eagle_base": True,
        "base_model_dir": None,
    },
    {"model": "M/quantized-draft", "out": "M/onnx/draft_export", "eagle_base": False},
    {
        "onnx_dir": "W/M/onnx/base",
        "engine_dir": "W/M/engines",
        "spec_base": True,
        "spec_draft": False,
        **LIMITS,
    },
    {
        "onnx_dir": "W/M/onnx/draft",
        "engine_dir": "W/M/engines",
        "spec_base": False,
        "spec_draft": True,
        **LIMITS | {"max_verify_tree_size": 64},  # not given: the default
    },
    {**FILES, "spec_decode": True, "spec_draft_top_k": None, "check_lossless": False},
    {"model": "Qwen/Qwen3.5-4B", "out": "W/M/onnx", "mtp": True, "eagle_base": False},
    {
        "onnx_dir": "W/M/onnx/llm",
        "spec_base": True,
        "spec_draft": False,
        "max_input_len": 2048,
        "max_verify_tree_size": 7,
    },
    {
        "onnx_dir": "W/M/onnx/mtp_draft",
        "spec_base": False,
        "spec_draft": True,
        "max_draft_tree_size": 7,
    },
    {
        **FILES,
        "spec_decode": True,
        "spec_draft_top_k": 1,
        "spec_draft_step": 3,
        "spec_verify_size": 4,
    },
]


def parsed(line: str) -> dict[str, object]:
    """The parameters that a command line means, paths as text."""
    name, *args = shlex.split(line)
    group = click.Context(cli, **cli.context_settings)
    command = cli.get_command(group, name)
    assert command is not None
    with command.make_context(name, args, parent=group) as context:
        return {
            key: str(value) if "Path" in type(value).__name__ else value
            for key, value in context.params.items()
        }


@pytest.mark.parametrize(
    "spelling", [{}, KEBAB, CAMEL, SNAKE], ids=["guide", "kebab", "camel", "snake"]
)
@pytest.mark.parametrize("row", range(len(MEANT)))
def test_guide_s_commands_parse_in_every_spelling(row: int, spelling: dict[str, str]) -> None:
    line = " ".join(spelling.get(word, word) for word in GUIDE.splitlines()[row].split())
    found = parsed(line)
    assert {key: found[key] for key in MEANT[row]} == MEANT[row]


INFER = "infer --engineDir E --inputFile I --outputFile O"


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (f"{INFER} --eagle", "spec_decode", True),
        (f"{INFER} --specVerifyTreeSize 16", "spec_verify_size", 16),
        (f"{INFER} --spec_verify_tree_size 16", "spec_verify_size", 16),
        (f"{INFER} --eagleVerifyTreeSize 16", "spec_verify_size", 16),
        (f"{INFER} --eagle-verify-tree-size=16", "spec_verify_size", 16),
        (f"{INFER} --specVerifySize 4", "spec_verify_size", 4),
        (f"{INFER} --specDraftTopK 1", "spec_draft_top_k", 1),
        (f"{INFER} --spec_draft_top_k=10", "spec_draft_top_k", 10),
        (f"{INFER} --specDraftStep 3", "spec_draft_step", 3),
        ("build --onnxDir D --engineDir E --eagleBase", "spec_base", True),
        ("build --onnxDir D --engineDir E --eagle_draft", "spec_draft", True),
        ("build --onnxDir D --engineDir E --maxKvCacheCapacity=99", "max_kv_cache_capacity", 99),
        ("export M OUT --baseModelDir My/Base_Model-8B", "base_model_dir", "My/Base_Model-8B"),
        ("export M OUT --aux_layers 2,4,5", "aux_layers", (2, 4, 5)),
    ],
)
def test_other_names_of_the_mirrored_tool_mean_our_flags(
    line: str, key: str, value: object
) -> None:
    assert parsed(line)[key] == value


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ("--maxKVCacheCapacity", "--max-kv-cache-capacity"),
        ("--max_kv_cache_capacity", "--max-kv-cache-capacity"),
        ("--max-kv-cache-capacity", "--max-kv-cache-capacity"),
        ("--specDraftTopK", "--spec-draft-top-k"),
        ("--onnxDir=W/My_Model-8B/onnxBase", "--onnx-dir=W/My_Model-8B/onnxBase"),
        ("--inputFile=--a_b=C_d", "--input-file=--a_b=C_d"),
        ("My_Model-8B", "My_Model-8B"),
        ("-h", "-h"),
        ("-K_x", "-K_x"),
        ("--", "--"),
        ("", ""),
    ],
)
def test_kebab_turns_names_and_leaves_values(flag: str, wanted: str) -> None:
    assert kebab(flag) == wanted


def test_values_keep_their_spelling() -> None:
    found = parsed("build --onnxDir=My_Dir/onnxBase --engineDir My_Engines/maxDir")
    assert (found["onnx_dir"], found["engine_dir"]) == ("My_Dir/onnxBase", "My_Engines/maxDir")


def test_words_behind_the_separator_are_no_flags() -> None:
    found = parsed("export -- --My_Model OUT_dir")
    assert (found["model"], found["out"]) == ("--My_Model", "OUT_dir")


@pytest.mark.parametrize(
    "line",
    [
        f"{INFER} --specDecoding",
        f"{INFER} --spec--decode",
        "build --onnxDir D --engineDir E --maxLen 3",
    ],
)
def test_unknown_flag_is_refused_in_any_spelling(line: str) -> None:
    with pytest.raises(click.NoSuchOption):
        parsed(line)


def test_every_option_has_one_kebab_case_name() -> None:
    """So that a camelCase or snake_case word has one flag to turn into, and no flag cannot be
    reached."""
    found = [cli.get_command(click.Context(cli), name) for name in COMMANDS]
    for command in [
        sub
        for one in found
        for sub in (one.commands.values() if isinstance(one, click.Group) else [one])
    ]:
        assert command is not None
        flags = [
            flag
            for option in command.params
            for flag in option.opts
            if isinstance(option, click.Option)
        ]
        assert flags or command.name in ("completion", "help")
        assert flags == [kebab(flag) for flag in flags]
        assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("method", "tree", "said"),
    [
        ("eagle3", MedusaOptions(num_medusa_heads=2), "--num-medusa-heads: for Medusa heads, and"),
        ("draft_model", MedusaOptions(medusa_choices=[[0]]), "what drafts is Draft model"),
        (None, MedusaOptions(medusa_choices=[[0]]), "is a drafter of your own"),
        ("medusa", EagleOptions(eagle_choices=[[0]], num_eagle_layers=1), "--eagle-choices and"),
        ("medusa", EagleOptions(eagle_choices=[[0]]), "Give --medusa-choices instead"),
    ],
)
def test_tree_by_flags_of_another_method_is_refused(
    method: str | None, tree: EagleOptions | MedusaOptions, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        check_tree(method, tree)


def test_tree_by_the_flags_of_its_method_is_taken() -> None:
    check_tree("medusa", MedusaOptions(num_medusa_heads=2))
    for method in ("eagle1", "eagle3", "draft_model", "ngram"):  # what has no trees says so itself
        check_tree(method, EagleOptions(eagle_choices=[[0], [1]]))
