"""What users of TensorRT-LLM's example scripts type (convert_checkpoint.py, trtllm-build, run.py,
summarize.py) and edgespec does not have, by command.

Data alone, as in `edgellm`. Flags that have another name here are in ALIASES.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.compat.edgellm import DONE_ANYWAY, Missing, switch

# Those of trtllm-serve and trtllm-bench, for every command that drafts
OF_DRAFTS = {"--extra-llm-api-options": "--config"}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "infer": {
        **OF_DRAFTS,
        "--max-output-len": "--max-generate-length",
        "--random-seed": "--seed",
    },
    "chat": OF_DRAFTS,
    "run": OF_DRAFTS,
    "build": {
        "--max-seq-len": "--max-kv-cache-capacity",
        "--checkpoint-dir": "--onnx-dir",
        "--output-dir": "--engine-dir",
    },
    "eval summarize": {
        **OF_DRAFTS,
        "--random-seed": "--seed",
        "--max-input-length": "--max-input-len",
        "--max-output-len": "--output-len",
        "--tensorrt-llm-rouge1-threshold": "--rouge1-threshold",
        "--dataset-path": "--dataset",
    },
}

DRAFT_IN_ENGINES = (
    "the draft is in the engine directory: edgespec export DRAFT OUT --base-model-dir BASE, then"
    " edgespec build into the base's directory"
)
DRAFT_AS_MODEL = "give the draft as MODEL: edgespec export DRAFT OUT --base-model-dir BASE"
ALL_TOKENS = "at a --temperature above 0 all tokens are drawn from; leave it out"
ONE_BEAM = Missing(instead="there is no beam search here; leave it out", neutral=("1",))
LOG = Missing(
    instead="edgespec --verbose shows what is done",
    neutral=("error", "warning", "info", "internal_error"),
)
LOCAL = (
    'nothing is downloaded: give --dataset FILE, a JSONL file whose lines are {"article": ...,'
    ' "highlights": ...}'
)
AT_RUN_TIME = "it is a flag of edgespec infer; leave it out here"

AS_KEY = (
    "it is a key of a file: --config FILE.yaml, or without a file speculative_config.{}, written"
    " without dashes"
)
SPECULATIVE: Mapping[str, Missing] = {
    "--speculative-config": Missing(instead=AS_KEY.format("KEY=VALUE")),
    "--decoding-type": Missing(instead=AS_KEY.format("decoding_type=NAME")),
    "--speculative-model": Missing(instead=AS_KEY.format("speculative_model=DIR")),
    "--speculative-model-dir": Missing(instead=AS_KEY.format("speculative_model=DIR")),
    "--ngram-config": Missing(
        instead="its first two numbers are --drafter ngram --max-draft-len N"
        " --max-matching-ngram-size N"
    ),
    "--lookahead-config": Missing(
        instead="there is no lookahead decoding here. From the text alone draft --drafter suffix"
        " and --drafter ngram"
    ),
    "--draft-engine-dir": Missing(instead=DRAFT_IN_ENGINES),
    "--draft-target-model-config": Missing(
        instead="its first number is --max-draft-len N, with --spec-decode; " + DRAFT_IN_ENGINES
    ),
}

FLAGS: dict[str, dict[str, Missing]] = {
    "chat": dict(SPECULATIVE),
    "run": {
        **SPECULATIVE,
        "--draft-engine-dir": Missing(instead="give the draft's checkpoint: --draft DIR|NAME"),
        "--speculative-model": Missing(instead="it is --draft DIR|NAME"),
        "--speculative-model-dir": Missing(instead="it is --draft DIR|NAME"),
    },
    "export": {
        "--eagle-model-dir": Missing(instead=DRAFT_AS_MODEL),
        "--medusa-model-dir": Missing(instead=DRAFT_AS_MODEL),
        "--num-eagle-layers": Missing(instead=AT_RUN_TIME),
        "--max-draft-len": Missing(instead=AT_RUN_TIME),
        "--max-non-leaves-per-layer": Missing(instead=AT_RUN_TIME),
        "--num-medusa-heads": Missing(instead="the heads are counted in the file; leave it out"),
    },
    "build": {
        "--speculative-decoding-mode": Missing(
            instead="the export says what an engine is for; leave it out",
            neutral=("eagle", "medusa", "draft_tokens_external"),
        ),
        "--max-beam-width": ONE_BEAM,
        "--gemm-plugin": Missing(instead="there are no plugins here; leave it out"),
        "--use-paged-context-fmha": Missing(
            instead="the KV cache is contiguous; leave it out", neutral=("enable", "disable")
        ),
        "--max-draft-len": Missing(
            instead="a base verifies --max-verify-tree-size nodes, which is one more; a draft makes"
            " --max-draft-tree-size"
        ),
        "--log-level": LOG,
    },
    "infer": {
        **SPECULATIVE,
        "--eagle-model-dir": Missing(instead=DRAFT_IN_ENGINES),
        "--medusa-model-dir": Missing(instead=DRAFT_IN_ENGINES),
        "--hf-model-dir": Missing(
            instead="the engines bring all of the model. To compare with transformers: edgespec"
            " eval summarize --hf-model-dir"
        ),
        "--max-input-length": Missing(
            instead="a prompt is never cut; edgespec build --max-input-len sets what engines take"
        ),
        "--num-beams": ONE_BEAM,
        "--streaming": DONE_ANYWAY,
        "--use-py-session": DONE_ANYWAY,
        "--run-profiling": switch("edgespec infer --dump-profile shows the times"),
        "--log-level": LOG,
    },
    "eval summarize": {
        **SPECULATIVE,
        "--test-trt-llm": DONE_ANYWAY,
        "--test-hf": switch(
            "--hf-model-dir DIR compares with transformers; leave it out",
            beside=("--hf-model-dir",),
        ),
        "--check-accuracy": switch(
            "--rouge1-threshold says how good the summaries must be",
            beside=("--rouge1-threshold",),
        ),
        "--eval-task": Missing(instead="summaries are what is evaluated", neutral=("summarize",)),
        "--max-ite": Missing(
            instead="--num-articles is the number of articles: theirs times the batch size"
        ),
        "--dataset-dir": Missing(instead=LOCAL),
        "--dataset-cache-dir": Missing(instead=LOCAL),
        "--rouge-dir": Missing(instead="the library rouge-score computes it; leave it out"),
        "--data-type": Missing(
            instead="transformers computes in float32; leave it out", neutral=("fp32",)
        ),
        "--hf-data-type": Missing(
            instead="transformers computes in float32; leave it out", neutral=("fp32",)
        ),
        "--top-k": Missing(instead=ALL_TOKENS, neutral=("1",)),
        "--top-p": Missing(instead=ALL_TOKENS, neutral=("0", "0.0", "1", "1.0")),
        "--num-beams": ONE_BEAM,
        "--eagle-model-dir": Missing(instead=DRAFT_IN_ENGINES),
        "--output-dir": Missing(instead="--output-file FILE keeps the answers"),
        "--use-py-session": DONE_ANYWAY,
        "--log-level": LOG,
    },
}
