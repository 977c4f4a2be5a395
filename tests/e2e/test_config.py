"""--config and key=value, as a user types them: what the file says is what drafts, flags come
first, and what cannot be is refused by name before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import edgespec
from edgespec.backends.engine_config import EngineWeights
from edgespec.cli import infer, run
from edgespec.cli.chat import command as chat
from edgespec.cli.config_file import BLOCK, divided, flag_name, is_of_files
from edgespec.compat.config_keys import FOREIGN
from edgespec.errors import EdgeSpecError, OptionError, PairingError, RequestError
from edgespec.pipeline.cache import Cache
from tests.e2e.test_run import checkpoints, kept, made
from tests.e2e.workshop import Cli, Outcome, cli
from tests.lossless.pairs import shared_pair

__all__ = ["checkpoints", "cli", "kept", "made"]  # fixtures

Infer = Callable[..., tuple[Outcome, dict[str, Any]]]
ASKED = {"messages": [{"role": "user", "content": "one two one two one two "}]}


@pytest.fixture(scope="module")
def pair() -> Path:
    return shared_pair("llama", "eagle")


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def infer_with(pair: Path, tmp_path: Path, cli: Cli) -> Infer:
    """Answers one request with a configuration; what came of it, and the metrics of its drafts."""

    def call(text: str, *more: object, **request: Any) -> tuple[Outcome, dict[str, Any]]:
        asked, out = tmp_path / "input.json", tmp_path / "out.json"
        asked.write_text(json.dumps({"temperature": 0, "requests": [ASKED | request]}))
        out.unlink(missing_ok=True)
        words = ["--engine-dir", pair / "engines", "--input-file", asked, "--output-file", out]
        done = cli("infer", "--config", config(tmp_path, text), *words, *more)
        if not out.exists():
            return done, {}
        (answer,) = json.loads(out.read_text())["responses"]
        return done, answer.get("metrics", {}).get("speculative_decoding", {}) | {
            "length": len(answer["output_ids"]),
            "error": answer.get("error"),
        }

    return call


EAGLE = (
    "max_generate_length: 10\nspeculative_config:\n  decoding_type: Eagle3\n  max_draft_len: 2\n"
)


def test_file_says_what_drafts_and_how_much(infer_with: Infer) -> None:
    done, found = infer_with(EAGLE)
    assert done.code == 0, done.err
    assert "top-k 1, step 2, verify size 3" in done.err
    assert set(found["per_step_drafted"]) <= {0, 1, 2}
    assert max(found["per_step_drafted"]) == 2
    assert found["length"] <= 10


def test_key_value_overrides_the_file_and_a_flag_overrides_both(infer_with: Infer) -> None:
    done, found = infer_with(EAGLE, "speculative_config.max_draft_len=1", "max_generate_length=6")
    assert done.code == 0, done.err
    assert max(found["per_step_drafted"]) == 1
    assert found["length"] <= 6
    done, found = infer_with(
        EAGLE, "max_generate_length=6", "--max-generate-length", 3, "--spec-draft-step", 4
    )
    assert "step 4, verify size 5" in done.err
    assert found["length"] <= 3


def test_alias_is_warned_of_and_keys_without_a_meaning_are_named(infer_with: Infer) -> None:
    text = (
        EAGLE.replace("Eagle3", "Eagle") + "  load_format: dummy\nkv_cache_config: {dtype: fp8}\n"
    )
    done, _ = infer_with(text)
    assert done.code == 0
    assert done.err.count("decoding_type Eagle is Eagle3, as in TensorRT-LLM; write Eagle3") == 1
    assert done.err.count("load_format means nothing here") == 1
    assert done.err.count("kv_cache_config means nothing here: a KV cache is as large as") == 1


def test_file_without_keys_is_noted(infer_with: Infer) -> None:
    done, found = infer_with("# speculative_config: {decoding_type: NGram}")
    assert (done.code, "per_step_drafted" in found) == (0, False)
    assert "has no keys, so it changes nothing" in done.err


def test_request_s_own_block_overrides_that_of_the_file(infer_with: Infer) -> None:
    done, found = infer_with(EAGLE, speculative={"max_draft_len": 4})
    assert done.code == 0, done.err
    assert max(found["per_step_drafted"]) == 4
    done, found = infer_with(EAGLE, speculative={"decoding_type": "NGram", "max_draft_len": 1})
    assert done.code == 0, done.err
    assert max(found["per_step_drafted"]) == 1
    _, found = infer_with(EAGLE, disable_spec_decode=True)
    assert "per_step_drafted" not in found


def test_drafter_of_one_s_own_is_refused_in_a_request_by_its_place(infer_with: Infer) -> None:
    done, found = infer_with(EAGLE, speculative={"decoding_type": "User_Provided"})
    assert (done.code, found) == (3, {})
    assert "requests[0].speculative: decoding_type User_Provided needs a drafter" in done.err


def test_check_that_a_block_s_rule_excludes_names_the_block(infer_with: Infer) -> None:
    done, found = infer_with(EAGLE, "--check-lossless", speculative={"posterior_threshold": 0.1})
    assert (done.code, found) == (3, {})
    assert "the typical acceptance that requests[0].speculative asks for is LOSSY" in done.err
    assert "--acceptance typical" not in done.err
    done, _ = infer_with(EAGLE + "  posterior_threshold: 0.1\n", "--check-lossless")
    assert done.code == 3
    assert "the typical acceptance that speculative_config asks for is LOSSY" in done.err


REFUSED: list[tuple[str, int, str]] = [
    ("speculative_config: {decoding_type: Eagle9}", 2, "no decoding_type Eagle9"),
    ("speculative_config: {decoding_type: MTP}", 2, "Write decoding_type: Eagle3"),
    ("speculative_config: {max_draft_len: 3}", 2, "decoding_type is missing"),
    (
        "speculative_config: {decoding_type: Eagle3, max_draf_len: 3}",
        2,
        "Did you mean max_draft_len?",
    ),
    (
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 999}",
        3,
        "decoding_type Eagle3: ",
    ),
    ("speculative_config: [Eagle3]", 3, "speculative_config is ['Eagle3']"),
    ("max_draft_len: 3", 3, "Write it below speculative_config"),
    ("decoding_type: Eagle3", 3, "below speculative_config:, indented"),
    ("speculative_config: {decoding_type: Eagle2}", 2, "decoding_type Eagle1 (or Eagle2) was"),
    ("batch_sizes: 3", 3, "Did you mean batch_size?"),
    ("batch-size: 1\nbatch_size: 1", 3, "batch_size is given twice"),
    ("temperature: hot", 3, "temperature is hot"),
    ("seed: 1.5", 3, "seed is 1.5"),
    ("json: 1", 3, "Write true or false"),
    ("tensor_parallel_size: 2", 3, "tensor_parallel_size is not supported: engines run on one"),
    ("guided_decoding_backend: xgrammar", 3, "structured output is by llguidance"),
    ("a: &x 1", 3, "line 1: an anchor or alias"),
    ("- 1", 3, "holds a list"),
]


KEYS_OF_FLAGS: list[tuple[str, int, str]] = [
    ("check_lossless: true", 2, "check_lossless means nothing without --spec-decode"),
    (
        "check_lossless: true\nacceptance: typical\n" + EAGLE,
        3,
        "check_lossless compares with plain decoding, and acceptance typical is LOSSY",
    ),
]


@pytest.mark.parametrize(("text", "code", "said"), [*REFUSED, *KEYS_OF_FLAGS])
def test_what_cannot_be_is_refused_by_name(
    infer_with: Infer, text: str, code: int, said: str
) -> None:
    done, found = infer_with(text)
    assert (done.code, found) == (code, {})
    assert said in done.err


def test_exact_trees_are_refused_where_kernels_round_rows_apart(
    infer_with: Infer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineWeights, "is_bitwise", False)
    done, found = infer_with("exact: true\n" + EAGLE + "  dynamic_tree_max_topK: 2\n")
    assert (done.code, found) == (3, {})
    assert (
        "dynamic_tree_max_topK 2 drafts trees, and only chains are exact\n"
        "  Set dynamic_tree_max_topK to 1, or leave exact out."
    ) in done.err


VALUES = (
    *("3", "-1", "1.5", ".nan", "'3'", "''", "x", "[1, 2]", "[[1]]", "{a: 1}", "true", "null"),
    *("9" * 399, "-" + "9" * 399, '"\\uD83D"', '"a\\0b"', "é", '"--x"', '"\\e[31m"', "1e308"),
)


def params_of(command: click.Command) -> list[click.Parameter]:
    return [p for p in command.get_params(click.Context(command)) if is_of_files(p)]


@pytest.mark.parametrize("name", ["infer", "chat", "run"])
def test_any_value_of_a_flag_is_taken_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    command = {"infer": infer.command, "chat": chat.command, "run": run.command}[name]
    params = params_of(command)
    if name != "run":  # what it has too is read alike
        known = {(flag_name(p), repr(p.type)) for p in params_of(run.command)}
        params = [p for p in params if (flag_name(p), repr(p.type)) not in known]
    arguments = ["model"] if name == "run" else ["--engine-dir", str(tmp_path)]
    for param in params:
        key = flag_name(param)
        for value in VALUES:
            path = config(tmp_path, f"{key}: {value}\n")
            message = ""
            try:
                command.make_context(name, ["--config", str(path), *arguments]).close()
            except EdgeSpecError as error:
                message = str(error)
            except click.BadParameter as error:
                message = error.format_message()
            assert not message or key in message.replace("-", "_")


def test_key_that_a_flag_gave_is_named_by_the_flag(pair: Path, cli: Cli) -> None:
    line = ("infer", "--engine-dir", pair / "engines", "--prompt", "one", "--spec-decode")
    done = cli(*line, "--max-draft-len", 99)
    assert done.code == 3
    assert "--max-draft-len 99 (100 nodes with the root) exceeds the 60" in done.err
    assert "Set --max-draft-len to 59 or less" in done.err
    done = cli(*line, "--drafter", "ngram", "--max-matching-ngram-size", -1)
    assert done.code == 2
    assert "--max-matching-ngram-size is -1" in done.err


def test_help_is_no_key_of_a_file(tmp_path: Path, infer_with: Infer) -> None:
    done, _ = infer_with("help: true")
    assert done.code == 3
    assert "help is not a known key" in done.err


def test_neutral_values_of_foreign_keys_are_no_matter(infer_with: Infer) -> None:
    text = "tensor_parallel_size: 1\nenable_lora: false\nlora_config: null\n" + EAGLE
    done, _ = infer_with(text)
    assert done.code == 0
    assert "means nothing" not in done.err


# Fields of TorchLlmArgs and BaseLlmArgs in TensorRT-LLM's llm_args.py, and older ones of LlmArgs
NAMES = """
model tokenizer tokenizer_mode custom_tokenizer post_processor_hook skip_tokenizer_init
trust_remote_code tensor_parallel_size dtype revision tokenizer_revision model_kwargs
pipeline_parallel_size context_parallel_size gpus_per_node moe_cluster_parallel_size
moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp enable_lm_head_tp_in_adp
pp_partition cp_config load_format enable_lora lora_config kv_cache_config enable_chunked_prefill
guided_decoding_backend batched_logits_processor iter_stats_max_iterations
request_stats_max_iterations peft_cache_config scheduler_config cache_transceiver_config
sparse_attention_config kv_cache_compression_config speculative_config max_batch_size max_input_len
max_seq_len max_beam_width max_num_tokens gather_generation_logits num_postprocess_workers
postprocess_tokenizer_dir num_serve_frontends reasoning_parser decoding_config otlp_traces_endpoint
backend return_perf_metrics perf_metrics_output_dir perf_metrics_max_requests
prometheus_metrics_config enable_energy_metrics orchestrator_type env_overrides telemetry_config
garbage_collection_gen0_threshold cuda_graph_config encoder_cuda_graph_config multimodal_config
attention_dp_config disable_overlap_scheduler moe_config nvfp4_gemm_config dwdp_config
encoder_max_batch_size encoder_max_num_tokens attn_backend enable_mla_skip_correction sampler_type
sampler_force_async_worker enable_in_graph_sampling enable_early_first_token_response
enable_low_latency_host_dispatch enable_iter_perf_stats enable_iter_req_stats print_iter_log
batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio torch_compile_config
prefill_cuda_graph_backend prefill_capture_num_tokens enable_autotuner use_fine_grained_sync
enable_layerwise_nvtx_marker enable_min_latency stream_interval force_dynamic_quantization
allreduce_strategy checkpoint_loader checkpoint_format checkpoint_io_policy mx_config gms_config
kv_connector_config mm_encoder_only disable_mm_encoder encode_only ray_worker_extension_cls
ray_placement_config ray_worker_nsight_options sleep_config reorder_policy_config
enable_resource_governor use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm
use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm max_stats_len layer_wise_benchmarks_config
use_cuda_graph build_config quant_config calib_config fast_build enable_build_cache
"""
THEIRS = NAMES.split()


def test_keys_of_tensorrt_llm_s_files_are_known() -> None:
    params = infer.command.get_params(click.Context(infer.command))
    flags = {flag_name(param) for param in params}
    assert [name for name in THEIRS if name not in {*FOREIGN, *flags, BLOCK}] == []
    _, read = divided({"backend": "pytorch"}, params, "f")
    assert read.notes == (
        "f: backend means nothing here: this is decided when the engine is built",
    )


def test_every_foreign_key_is_noted_or_refused() -> None:
    params = infer.command.get_params(click.Context(infer.command))
    for name, row in FOREIGN.items():
        if row.neutral is None:
            _, read = divided({name: {"x": 1}}, params, "f")
            assert read.notes == (f"f: {name} means nothing here: {row.why}",)
        else:
            assert divided(dict.fromkeys([name], row.neutral[0]), params, "f")[1].notes == ()
            with pytest.raises(RequestError, match=f"f: {name} is not supported"):
                divided({name: "something"}, params, "f")


# ---- speculative_model


def test_draft_that_the_engine_was_made_from_is_told_from_another(
    infer_with: Infer, pair: Path
) -> None:
    own = EAGLE + f"  speculative_model: {pair / 'draft'}\n"
    assert infer_with(own)[0].code == 0
    older = EAGLE + f"  speculative_model_dir: {pair / 'draft'}\n"
    assert infer_with(older)[0].code == 0
    done, _ = infer_with(EAGLE + f"  speculative_model: {pair / 'base'}\n")
    assert done.code == 3
    assert "is not what the draft engine was made from" in done.err
    done, _ = infer_with(EAGLE + "  speculative_model: nobody/nothing\n")
    assert done.code == 3
    assert "is not on this machine" in done.err
    done, _ = infer_with("speculative_config: {decoding_type: NGram, speculative_model: a/b}")
    assert done.code == 2
    assert "NGram drafts without a model" in done.err


def test_python_refuses_the_model_that_the_commands_refuse(pair: Path) -> None:
    def loaded(model: object, **more: Any) -> None:
        block = {"decoding_type": "Eagle3", "speculative_model": str(model), **more}
        edgespec.load(pair / "engines", speculative_config=block).close()

    loaded(pair / "draft")
    for model in ("/nonexistent", "nobody/nothing"):
        with pytest.raises(PairingError, match="is not on this machine"):
            loaded(model)
    with pytest.raises(PairingError, match="is not what the draft engine was made from"):
        loaded(pair / "base")
    with pytest.raises(OptionError, match="`speculative_model` is empty"):
        loaded("")
    with pytest.raises(PairingError, match=r"speculative_config names \[0, 1, 2\]"):
        loaded(pair / "draft", eagle3_layers_to_capture=[0, 1, 2])


def test_layers_that_the_draft_does_not_read_are_refused(infer_with: Infer) -> None:
    done, _ = infer_with(EAGLE + "  eagle3_layers_to_capture: [0, 1, 2]\n")
    assert done.code == 3
    assert "and speculative_config names [0, 1, 2]" in done.err
    right = [int(word) for word in done.err.split("layers [")[1].split("]")[0].split(",")]
    assert infer_with(EAGLE + f"  eagle3_layers_to_capture: {right}\n")[0].code == 0


def test_run_makes_engines_of_the_model_that_the_file_names(
    checkpoints: Path, cli: Cli, kept: Cache, made: list[str], tmp_path: Path
) -> None:
    block = "speculative_config:\n  decoding_type: Eagle3\n"
    block += f"  speculative_model: {checkpoints / 'eagle'}\n"
    sizes = "max_input_len: 48\nmax_kv_cache_capacity: 64\nmax_generate_length: 8\ntemperature: 0\n"
    words = ("run", checkpoints / "base", "--prompt", "a", "--config")
    first = cli(*words, config(tmp_path, sizes + block), "speculative_config.max_draft_len=2")
    assert first.code == 0, first.err
    assert made == ["export", "build", "export", "build"]
    assert "step 2, verify size 3" in first.err
    by_flag = cli(*words, tmp_path / "config.yaml", "--draft", checkpoints / "eagle")
    assert (by_flag.code, by_flag.out, len(made)) == (0, first.out, 4)
    other = cli(*words, tmp_path / "config.yaml", "--draft", checkpoints / "block")
    assert other.code == 2
    assert "and speculative_config says" in other.err
    text = block.replace("eagle", "block")
    wrong = cli(*words, config(tmp_path, sizes + text))
    assert (wrong.code, len(made)) == (2, 4)  # refused before anything is made
    assert "the pair has a DFlash draft" in wrong.err
    assert "Write decoding_type: DFlash" in wrong.err
    none = cli(*words, config(tmp_path, sizes + "speculative_config: {decoding_type: Eagle3}"))
    assert (none.code, len(made)) == (2, 4)
    assert "the pair has no draft" in none.err


def test_chat_takes_a_file_too(pair: Path, cli: Cli, tmp_path: Path) -> None:
    path = config(tmp_path, EAGLE + "temperature: 0\nno_chat_template: true\n")
    done = cli("chat", "--engine-dir", pair / "engines", "--config", path, stdin="hello\n")
    assert done.code == 0, done.err
    assert "step 2, verify size 3" in done.err
