"""Every flag of TensorRT Edge-LLM, and of TensorRT-LLM's example scripts, is ours, an alias, or
answered with what to do instead."""

from __future__ import annotations

import click
import pytest

from edgespec.cli.flags import EdgeCommand, flags_of
from edgespec.cli.main import cli, run
from edgespec.compat import edgellm, trtllm
from edgespec.compat.edgellm import PROGRAMS, Missing

# As their version 0.9.1 spells them, by our command; what a flag takes follows it.
THEIRS = {
    "quantize llm": """--model_dir --output_dir --quantization --lm_head_quantization
        --kv_cache_quantization --visual_quantization --audio_quantization --cp_quantization
        --dtype --device --text_dataset --image_dataset --audio_dataset --num_samples""",
    "quantize draft": """--base_model_dir --draft_model_dir --output_dir --quantization
        --lm_head_quantization --kv_cache_quantization --visual_quantization
        --audio_quantization --cp_quantization --dtype --device --text_dataset --image_dataset
        --audio_dataset --num_samples""",
    "export": """--dtype --skip-llm --skip-visual --skip-audio --skip-code2wav --skip-action
        --components --eagle-base --mtp --mtp-draft-dir --dflash-base --dflash-tree-base
        --dflash-draft --dflash-draft-dir --fp8-embedding --reduced-vocab-dir
        --draft-reduced-vocab-dir --externalize-weights --tp-size --num-decoder-layer
        --max-kv-cache-capacity""",
    "build": """--onnxDir --engineDir --maxInputLen --maxKVCacheCapacity --maxBatchSize
        --maxLoraRank --specBase --eagleBase --specDraft --eagleDraft --maxVerifyTreeSize
        --maxDraftTreeSize --profilingDetailed --minImageTokens --maxImageTokens
        --maxImageTokensPerImage""",
    "infer": """--engineDir --inputFile --outputFile --multimodalEngineDir --dumpProfile
        --profileOutputFile --warmup --dumpOutput --batchSize --maxGenerateLength --numLogprobs
        --specDecode --eagle --specDraftTopK --specDraftStep --specVerifySize
        --specVerifyTreeSize --eagleVerifyTreeSize --dflashBlockSize""",
}
# convert_checkpoint.py, trtllm-build, run.py and summarize.py as the EAGLE example runs them
SCRIPTS = {
    "export": "--eagle_model_dir --dtype --max_draft_len --num_eagle_layers",
    "build": """--checkpoint_dir --output_dir --max_batch_size --max_input_len --max_seq_len
        --speculative_decoding_mode --gemm_plugin --use_paged_context_fmha --max_draft_len""",
    "infer": """--engine_dir --tokenizer_dir --max_output_len --input_text --eagle_choices
        --eagle_use_dynamic_tree --eagle_dynamic_tree_max_top_k --temperature --top_k --top_p
        --random_seed --num_beams --streaming --use_py_session --log_level
        --eagle_posterior_threshold --medusa_choices --ngram_config --lookahead_config
        --draft_engine_dir --draft_target_model_config""",
    "chat": "--extra_llm_api_options --speculative_config --decoding_type",
    "run": "--extra_llm_api_options --speculative_config --decoding_type --speculative_model_dir",
    "eval summarize": """--test_hf --test_trt_llm --hf_model_dir --tokenizer_dir --data_type
        --engine_dir --batch_size --eagle_choices --max_ite --output_len --max_input_length
        --check_accuracy --tensorrt_llm_rouge1_threshold --dataset_dir --rouge_dir --eval_task
        --num_beams --temperature --top_k --log_level --output_dir --eagle_posterior_threshold
        --medusa_choices --ngram_config --lookahead_config --random_seed
        --extra_llm_api_options""",
}
FLAGS = {
    name: {**edgellm.FLAGS.get(name, {}), **trtllm.FLAGS.get(name, {})}
    for name in edgellm.FLAGS | trtllm.FLAGS
}
LINES = {
    "quantize llm": "--model-dir M --output-dir O --quantization fp8",
    "quantize draft": "--base-model-dir B --draft-model-dir D --output-dir O --quantization fp8",
    "export": "M OUT",
    "build": "--onnx-dir D --engine-dir E",
    "infer": "--engine-dir E --input-file I --output-file O",
    "chat": "--engine-dir E",
    "run": "M",
    "eval summarize": "--engine-dir E --dataset D",
}


def command_of(name: str) -> tuple[EdgeCommand, click.Context]:
    command, context = cli, click.Context(cli)
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(context, word)
        context = click.Context(command, info_name=word, parent=context)
    assert isinstance(command, EdgeCommand)
    return command, context


def parse(name: str, words: str) -> None:
    command, context = command_of(name)
    command.make_context(name, [*LINES[name].split(), *words.split()], parent=context.parent)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        (name, flag)
        for tool in (THEIRS, SCRIPTS)
        for name, flags in tool.items()
        for flag in flags.split()
    ],
)
def test_flag_of_the_mirrored_tool_is_known(name: str, flag: str) -> None:
    command, context = command_of(name)
    ours = command.canonical(flag)
    hidden = {opt for param in command.params for opt in param.opts}
    assert ours in flags_of(command, context) or ours in FLAGS[name] or ours in hidden


REFUSED = [(name, flag, row) for name, rows in FLAGS.items() for flag, row in rows.items()]
VALUE = "7"  # of no row a neutral one


@pytest.mark.parametrize(("name", "flag", "row"), REFUSED)
def test_flag_that_we_do_not_have_says_what_to_do(name: str, flag: str, row: Missing) -> None:
    if row.switch and "" in row.neutral:
        parse(name, flag)
        return
    with pytest.raises(click.UsageError) as refused:
        parse(name, flag if row.switch else f"{flag} {VALUE}")
    assert refused.value.message.startswith(flag)
    assert row.instead in refused.value.message
    assert len(row.instead) > 20


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [(name, flag, value) for name, flag, row in REFUSED for value in row.neutral if value],
)
def test_value_that_asks_for_nothing_is_accepted(name: str, flag: str, value: str) -> None:
    parse(name, f"{flag} {value}")
    parse(name, f"{flag}={value}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("build", "--maxLoraRank 0"),
        ("build", "--dflashBlockSize 0 --minImageTokens 0 --maxImageTokens=0"),
        ("infer", "--dflashBlockSize 0"),
        ("export", "--skip-visual --skip_audio"),
        ("export", "--dtype float16 --tpSize 1"),
        ("export", "--dflash-draft --dflash-draft-dir D --skip-llm"),
        ("quantize llm", "--text_dataset cnn_dailymail"),
    ],
)
def test_commands_as_their_users_type_them_parse(name: str, words: str) -> None:
    parse(name, words)


def test_skip_llm_alone_leaves_nothing_to_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "M", "OUT", "--skip-llm"]) == 2
    assert "--skip-llm: nothing would be left to export" in capsys.readouterr().err


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_of_the_mirrored_tool_is_answered(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ["quantize"] if program == "qwen3-omni" else []
    assert run([*group, program, "--engineDir", "E"]) == 2
    said = capsys.readouterr().err
    assert f"No such command: {program}. {PROGRAMS[program]}" in said


def test_no_flag_is_both_ours_and_missing() -> None:
    for name, rows in FLAGS.items():
        command, context = command_of(name)
        assert not set(rows) & set(flags_of(command, context))
        assert not set(rows) & set(command.aliases)
