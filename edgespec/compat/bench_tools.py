"""What users of llm_bench, trtllm-bench and vllm bench type.

Data alone, as in `compat.trtllm`.
"""

from __future__ import annotations

from edgespec.compat.edgellm import Missing

# Names of llm_bench (OpenVINO, TensorRT Edge-LLM), trtllm-bench and vllm bench
THEIR_NAMES = {
    "--random-input-len": "--input-tokens",
    "--input-len": "--input-tokens",
    "--isl": "--input-tokens",
    "--past-kv-len": "--input-tokens",
    "--random-output-len": "--output-tokens",
    "--output-len": "--output-tokens",
    "--osl": "--output-tokens",
    "--infer-count": "--output-tokens",
    "--concurrency": "--batch-size",
    "--max-concurrency": "--batch-size",
    "--num-requests": "--num-prompts",
    "--dataset": "--prompts",
    "--dataset-path": "--prompts",
    "--prompt-file": "--prompts",
    "--speed-bench-category": "--category",
    "--num-warmups": "--warmup",
    "--num-iters-warmup": "--warmup",
    "--num-iters": "--repeats",
    "--iterations": "--repeats",
    "--output-json": "--json",
    "--report-json": "--json",
    "--verify-tree-size": "--rows",
}
# The same of load tests: genai-perf, aiperf, vllm bench serve
SERVE_NAMES = {
    "--base-url": "--url",
    "--max-concurrency": "--concurrency",
    "--num-requests": "--num-prompts",
    "--dataset-path": "--prompts",
    "--input-file": "--prompts",
}
THEIRS = {
    "--accept-rate": Missing(
        instead="there it is tokens a step; give the probability that a draft is right:"
        " --synthetic-acceptance 0.7"
    ),
    "--spec-synth-rates": Missing(instead="write --synthetic-acceptance 0.8:0.6:0.5"),
    "--dataset-name": Missing(instead="give the file: --prompts FILE.jsonl"),
    "--request-rate": Missing(
        instead="requests of a batch arrive together; leave it out", neutral=("inf",)
    ),
}
