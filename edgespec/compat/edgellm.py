"""What users of TensorRT Edge-LLM type and edgespec does not have: its flags by command, and its
programs.

Data alone: each row says what to do instead, and which values ask for nothing. Flags that have
another name here are the `aliases` of their command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A flag that this version does not have. `instead` follows the flag and a colon.

    Its values in `neutral` ask for what is done anyway and are accepted; so is every value beside
    one of the flags `beside`. A `switch` takes no value.
    """

    instead: str
    switch: bool = False
    neutral: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def asks_for_nothing(self, value: str | bool, flags: frozenset[str]) -> bool:
        """Whether the flag with this value changes nothing; `flags` are all on the line."""
        if flags.intersection(self.beside):
            return True
        return ("" if self.switch else str(value)) in self.neutral


def switch(instead: str, *, beside: tuple[str, ...] = ()) -> Missing:
    """A flag without a value that is refused."""
    return Missing(instead=instead, switch=True, beside=beside)


DONE_ANYWAY = Missing(instead="", switch=True, neutral=("",))  # it asks for what is done
NO_TOWERS = "this version quantizes text decoders and image encoders; leave the flag out"
NO_ENCODER = "a draft has no image encoder; leave the flag out"
NO_AUDIO = "this version calibrates with text and images; leave the flag out, and see --calib-data"
OWN_TYPE = (
    "weights that are not quantized keep the checkpoint's type, and engines compute in float32."
    " Leave the flag out"
)
BLOCK_SIZE = Missing(
    instead="a block is as long as the draft was trained for; --spec-verify-size shortens it",
    neutral=("0",),
)
PROPOSAL_LENGTH = Missing(
    instead="a DSpark block is as long as pays, or by the method's option confidence_threshold:"
    " see docs/methods.md. Leave the flag out"
)
FULL_VOCABULARY = "this version exports the whole vocabulary; leave the flag out"
NO_LORA = "this version has no LoRA adapters. Merge the adapter into the checkpoint before export"
OWN_BLOCK = "a block is as long as the draft was trained for"
AS_ARGUMENTS = "write both without a flag: edgespec export MODEL OUT"

_QUANTIZE = {
    "--dtype": Missing(instead=OWN_TYPE),
    "--audio-dataset": Missing(instead=NO_AUDIO),
    "--audio-quantization": Missing(instead=NO_TOWERS),
    "--cp-quantization": Missing(instead=NO_TOWERS),
    "--trust-remote-code": switch("code of a checkpoint is never run; leave the flag out"),
}

FLAGS: dict[str, dict[str, Missing]] = {
    "quantize llm": _QUANTIZE,
    "quantize draft": _QUANTIZE
    | {
        "--visual-quantization": Missing(instead=NO_ENCODER),
        "--image-dataset": Missing(instead=NO_ENCODER),
    },
    "export": {
        "--model-dir": Missing(instead=AS_ARGUMENTS),
        "--output-dir": Missing(instead=AS_ARGUMENTS),
        "--dtype": Missing(instead=OWN_TYPE, neutral=("float16", "fp16")),  # of encoders there
        "--skip-llm": switch(
            "nothing would be left to export; leave the flag out, or pass --dflash-draft,"
            " --jetspec-draft or --dspark-draft for the draft alone",
            beside=("--dflash-draft", "--jetspec-draft", "--dspark-draft"),
        ),
        "--skip-audio": DONE_ANYWAY,
        "--skip-code2wav": DONE_ANYWAY,
        "--skip-action": DONE_ANYWAY,
        "--components": Missing(
            instead=(
                "export writes the text decoder, the image encoder where there is one, and with"
                " --mtp the draft head. Leave it out"
            ),
            neutral=("thinker",),
        ),
        "--mtp-draft-dir": Missing(
            instead="this version reads MTP heads inside the base's checkpoint (--mtp), not beside",
            neutral=("",),
        ),
        "--fp8-embedding": switch(
            "the embedding keeps the checkpoint's type. For a smaller one, leave the flag out and"
            " build with --weights int8 or int4, which share the lm_head's where it is tied"
        ),
        "--reduced-vocab-dir": Missing(instead=FULL_VOCABULARY, neutral=("",)),
        "--draft-reduced-vocab-dir": Missing(instead=FULL_VOCABULARY, neutral=("",)),
        "--externalize-weights": Missing(
            instead="all weights are outside of the graph, in model.onnx.data. Leave it out"
        ),
        "--tp-size": Missing(instead="an engine runs on one device; leave it out", neutral=("1",)),
        "--num-decoder-layer": Missing(instead="all layers are exported; leave the flag out"),
        "--max-kv-cache-capacity": Missing(
            instead="leave it out here and pass it to edgespec build"
        ),
        "--device": Missing(instead="nothing is run on a GPU; leave it out", neutral=("cpu",)),
        "--trust-remote-code": switch("code of a checkpoint is never run; leave the flag out"),
    },
    "build": {
        "--max-lora-rank": Missing(instead=NO_LORA, neutral=("0",)),
        "--profiling-detailed": switch(
            "engines need no build of their own for it; edgespec infer --dump-profile shows the"
            " times"
        ),
        "--dflash-block-size": Missing(instead=OWN_BLOCK, neutral=("0",)),
    },
    "infer": {
        "--dflash-block-size": BLOCK_SIZE,
        "--jetspec-block-size": BLOCK_SIZE,
        "--dspark-scheduler": PROPOSAL_LENGTH,
        "--dspark-confidence-threshold": PROPOSAL_LENGTH,
        "--dspark-min-proposal-len": PROPOSAL_LENGTH,
        "--dspark-max-proposal-len": PROPOSAL_LENGTH,
        "--output-audio-dir": Missing(
            instead="this version gives text only; leave the flag out", neutral=("",)
        ),
    },
}

# Their programs, and commands that similar tools have
PROGRAMS: Mapping[str, str] = {
    "llm_build": "Run edgespec build.",
    "llm_inference": "Run edgespec infer.",
    "llm_bench": "Run edgespec bench.",
    "benchmark": "Run edgespec bench.",
    "visual_build": "Run edgespec build.",
    "qwen3-omni": "This version takes no speech: edgespec quantize llm.",
    "reduce-vocab": "This version exports the whole vocabulary.",
    "insert-lora": f"{NO_LORA}.",
    "process-lora": f"{NO_LORA}.",
    "merge-lora": "Merge it with peft: merge_and_unload(), then save_pretrained().",
    "convert": "Run edgespec export.",
    "compile": "Run edgespec build.",
    "generate": "Run edgespec infer.",
    "run.py": "Run edgespec infer --input-text.",
    "summarize": "Run edgespec eval summarize.",
    "summarize.py": "Run edgespec eval summarize.",
    "convert-checkpoint": "Run edgespec export.",
    "trtllm-build": "Run edgespec build.",
}
