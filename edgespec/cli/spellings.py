"""How the command line spells the parameters that messages name.

A flag is its parameter in kebab-case, but for the rows of OTHERWISE. Knows names alone.
"""

from __future__ import annotations

from edgespec.errors import flag_of

NAMES = """
acceptance against allow allow_control_tokens allow_image_root allow_image_urls allow_pickle
allowed_host api_key_file augmentations aux_layers backend base_model base_model_dir batch_size
calib_data calib_seq_len category chat_template check_lossless compare_quality compute compute_capability
concurrency coverage data device dflash_base draft draft_model draft_onnx draft_weights drafter
drafter_option drafter_time_budget_ms dry_run dspark_base dump_output dump_profile eagle1_base
eagle_base eagle_choices emit_onnx enable_thinking engine_dir exact exclude format guided
hf_model_dir history_file host image image_dataset init input_file input_text input_tokens install
jetspec_base journal json kernels kv_cache_dtype kv_cache_quantization library_version
lm_head_quantization max_batch_size max_disk max_draft_len max_draft_tree_size max_image_tokens
max_image_tokens_per_image max_input_len max_kv_cache_capacity max_matching_ngram_size
max_non_leaves_per_layer max_queue max_verify_tree_size measure_costs medusa_base medusa_choices
min_image_tokens minutes mode model mtp multimodal_engine_dir no_chat_template no_golden no_history
no_share_embedding num_eagle_layers num_logprobs num_medusa_heads num_prompts num_samples onnx_dir
opt_level output output_dir output_file output_tokens picture pictures port prefix_cache_dir
probe_image probe_text prompt prompts quantization rank rows served_model_name share_embedding size
skip_visual spec_base spec_draft spec_draft_step spec_draft_top_k spec_policy spec_verify_size
speculative_model temperature tensorrt tls_certificate tls_key tokenizer_dir topk_logits update url
visual_quantization weight_block weights workspace_mib world_size
""".split()  # noqa: SIM905 - a line each otherwise
OTHERWISE = {
    "allow_image_root": "--allow-image-root DIR",
    "dynamic_tree_max_topK": "--eagle-dynamic-tree-max-top-k",
    "image_root": "the directory of the input file",
    "prefix_cache_bytes": "--prefix-cache-mb",
    "use_dynamic_tree": "--eagle-use-dynamic-tree",
}
SPELLINGS = {name: flag_of(name) for name in NAMES} | OTHERWISE
