"""What users of TensorRT-LLM's example scripts type (convert_checkpoint.py, trtllm-build, run.py,
summarize.py) and edgespec does not have, by command.

Data alone, as in `edgellm`. Flags that have another name here are in ALIASES.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.cli.edgellm import DONE_ANYWAY, Missing, switch

ALIASES: Mapping[str, Mapping[str, str]] = {
    "infer": {"--max-output-len": "--max-generate-length", "--random-seed": "--seed"},
    "build": {
        "--max-seq-len": "--max-kv-cache-capacity",
        "--checkpoint-dir": "--onnx-dir",
        "--output-dir": "--engine-dir",
    },
    "eval summarize": {
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
GREEDY = "answers are greedy, so that they can be compared; leave it out"
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

FLAGS: dict[str, dict[str, Missing]] = {
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
        "--temperature": Missing(instead=GREEDY, neutral=("0", "0.0")),
        "--top-k": Missing(instead=GREEDY, neutral=("1",)),
        "--top-p": Missing(instead=GREEDY, neutral=("0", "0.0", "1", "1.0")),
        "--num-beams": ONE_BEAM,
        "--eagle-model-dir": Missing(instead=DRAFT_IN_ENGINES),
        "--output-dir": Missing(instead="--output-file FILE keeps the answers"),
        "--use-py-session": DONE_ANYWAY,
        "--log-level": LOG,
    },
}
