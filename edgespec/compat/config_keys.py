"""Keys of TensorRT-LLM's files (`--extra-llm-api-options`) that edgespec does not have.

Data alone: a key of published examples has a sentence, the others share one.
"""

from __future__ import annotations

from typing import NamedTuple


class Foreign(NamedTuple):
    """A key: why it means nothing here. `neutral` None: a file may have it with any value, and a
    note says why; else only with these, as another would be missed."""

    why: str
    neutral: tuple[object, ...] | None = None


ONE = (None, 1)
OFF = (None, False)
NONE = (None,)
ONE_MACHINE = "engines run on one machine, in one process"
BUILT = "engines have the limits they were built for (edgespec build)"
IN_THE_ENGINE = "this is decided when the engine is built"
REPORTED = "all metrics are in the output"
LOSES_NOTHING = "there is no such key, and nothing is lost without it"
LOSES = "there is no such key, and what it asks for would be missed"

PUBLISHED: dict[str, Foreign] = {
    "kv_cache_config": Foreign(
        "a KV cache is as large as the engine was built for (build --max-kv-cache-capacity), and"
        " prefixes are reused within --prefix-cache-mb"
    ),
    "backend": Foreign(IN_THE_ENGINE),
    "cuda_graph_config": Foreign("it tunes kernels of GPUs, which are not used"),
    "torch_compile_config": Foreign("engines are no torch programs"),
    "attn_backend": Foreign(IN_THE_ENGINE),
    "moe_config": Foreign(IN_THE_ENGINE),
    "disable_overlap_scheduler": Foreign("a step ends before the next one begins"),
    "scheduler_config": Foreign("requests run in the order in which they came"),
    "enable_chunked_prefill": Foreign("prompts are always read in chunks"),
    "stream_interval": Foreign("each step's text streams at once"),
    "print_iter_log": Foreign(REPORTED),
    "enable_iter_perf_stats": Foreign(REPORTED),
    "model": Foreign("the model is TARGET of edgespec run, or --engine-dir", NONE),
    "tokenizer": Foreign("an engine has its tokenizer beside it, from export", NONE),
    "decoding_config": Foreign("its successor is speculative_config", NONE),
    "trust_remote_code": Foreign("no code of a checkpoint is ever run", OFF),
    "dtype": Foreign("weights are chosen by edgespec build --weights", (None, "auto")),
    "quant_config": Foreign("checkpoints are quantized by edgespec quantize", NONE),
    "build_config": Foreign(BUILT, NONE),
    "max_batch_size": Foreign(
        "an engine runs as many requests as it was built for (build --max-batch-size); fewer at a"
        " time is batch_size",
        NONE,
    ),
    "max_seq_len": Foreign(f"{BUILT}: --max-kv-cache-capacity", NONE),
    "max_input_len": Foreign(f"{BUILT}: --max-input-len", NONE),
    "max_num_tokens": Foreign("a step takes what the lanes need; prompts are read in chunks", None),
    "tensor_parallel_size": Foreign(ONE_MACHINE, ONE),
    "lora_config": Foreign("there are no LoRA adapters", NONE),
    "guided_decoding_backend": Foreign("structured output is by llguidance", (None, "llguidance")),
}
NOTED = """
use_cuda_graph encoder_cuda_graph_config prefill_cuda_graph_backend
prefill_capture_num_tokens enable_in_graph_sampling enable_low_latency_host_dispatch
enable_min_latency enable_layerwise_nvtx_marker use_fine_grained_sync
use_cute_dsl_blockscaling_mm use_cute_dsl_blockscaling_bmm use_cute_dsl_bf16_bmm
use_cute_dsl_bf16_gemm enable_autotuner nvfp4_gemm_config allreduce_strategy
attention_dp_config ray_worker_extension_cls ray_placement_config ray_worker_nsight_options
reorder_policy_config batch_wait_timeout_ms batch_wait_timeout_iters
batch_wait_max_tokens_ratio enable_early_first_token_response sampler_force_async_worker
sampler_type enable_iter_req_stats return_perf_metrics perf_metrics_max_requests
iter_stats_max_iterations request_stats_max_iterations max_stats_len
prometheus_metrics_config telemetry_config layer_wise_benchmarks_config
garbage_collection_gen0_threshold num_postprocess_workers load_format checkpoint_format
checkpoint_io_policy mx_config gms_config enable_resource_governor sleep_config
multimodal_config disable_mm_encoder encoder_max_batch_size encoder_max_num_tokens
fast_build enable_build_cache orchestrator_type gpus_per_node
"""
REFUSED: dict[tuple[object, ...], str] = {
    (None, "auto"): """
tokenizer_mode
""",
    NONE: """
custom_tokenizer tokenizer_revision postprocess_tokenizer_dir post_processor_hook
batched_logits_processor checkpoint_loader revision model_kwargs sparse_attention_config
kv_cache_compression_config otlp_traces_endpoint perf_metrics_output_dir pp_partition
cp_config dwdp_config calib_config peft_cache_config cache_transceiver_config
kv_connector_config reasoning_parser env_overrides
""",
    OFF: """
skip_tokenizer_init encode_only mm_encoder_only enable_mla_skip_correction
force_dynamic_quantization enable_energy_metrics enable_lm_head_tp_in_adp
enable_attention_dp enable_lora gather_generation_logits
""",
    ONE: """
num_serve_frontends max_beam_width pipeline_parallel_size context_parallel_size
""",
    (None, 1, -1): """
moe_tensor_parallel_size moe_expert_parallel_size moe_cluster_parallel_size
""",
}
FOREIGN = {
    **PUBLISHED,
    **{key: Foreign(LOSES_NOTHING) for key in NOTED.split()},
    **{key: Foreign(LOSES, only) for only, keys in REFUSED.items() for key in keys.split()},
}

# TensorRT-LLM's names of flags
ALSO_CALLED = {"max_tokens": "max_generate_length", "max_new_tokens": "max_generate_length"}
