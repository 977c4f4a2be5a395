"""What users of trtllm-serve and of vLLM's server type, and `edgespec serve` does not have.

Data alone, as in `edgellm`.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.compat.edgellm import DONE_ANYWAY, Missing, switch
from edgespec.compat.trtllm import LOG, OF_DRAFTS, ONE_BEAM, SPECULATIVE

ALIASES: Mapping[str, str] = {
    **OF_DRAFTS,
    "--max-seq-len": "--max-kv-cache-capacity",
    "--max-model-len": "--max-kv-cache-capacity",
    "--max-num-seqs": "--max-batch-size",
    "--ssl-certfile": "--tls-certificate",
    "--ssl-keyfile": "--tls-key",
}
ONE_MACHINE = Missing(instead="an engine runs in one process; leave it out", neutral=("1",))
OF_MODEL = "the model's own is found in its directory; leave it out"
MEMORY = "a KV cache is as large as the engine was built for; see --max-kv-cache-capacity"
FLAGS: Mapping[str, Missing] = {
    **SPECULATIVE,
    "--speculative-model": Missing(instead="it is --draft DIR|NAME"),
    "--speculative-model-dir": Missing(instead="it is --draft DIR|NAME"),
    "--draft-engine-dir": Missing(instead="give the draft's checkpoint: --draft DIR|NAME"),
    "--tp-size": ONE_MACHINE,
    "--pp-size": ONE_MACHINE,
    "--ep-size": ONE_MACHINE,
    "--gpus-per-node": ONE_MACHINE,
    "--tensor-parallel-size": ONE_MACHINE,
    "--max-beam-width": ONE_BEAM,
    "--log-level": LOG,
    "--max-num-tokens": Missing(instead="prompts are read in chunks; leave it out"),
    "--kv-cache-free-gpu-memory-fraction": Missing(instead=MEMORY),
    "--gpu-memory-utilization": Missing(instead=MEMORY),
    "--trust-remote-code": switch("no code of a checkpoint is ever run; leave it out"),
    "--enable-chunked-prefill": DONE_ANYWAY,
    "--enable-prefix-caching": DONE_ANYWAY,
    "--tokenizer": Missing(instead=OF_MODEL),
    "--reasoning-parser": Missing(instead=OF_MODEL),
    "--tool-parser": Missing(instead="this version calls no tools"),
    "--tool-call-parser": Missing(instead="this version calls no tools"),
    "--api-key": Missing(
        instead="others see a command line: write keys to a file, one a line, and name it by"
        " --api-key-file"
    ),
}
