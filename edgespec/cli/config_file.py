"""`--config FILE.yaml` and `key=value`: a file's keys become the defaults of a command's flags, and
its `speculative_config` goes to the engine.

Knows flags, and which keys of TensorRT-LLM's files mean nothing here, and why. How YAML is read
stands in `edgespec.recipe`, what the block means in `runtime.speculative_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from edgespec.cli.flags import EdgeCommand, kebab, rest, until_separator
from edgespec.cli.paths import FILE
from edgespec.errors import RequestError
from edgespec.recipe import nearest, read_config, shown

BLOCK = "speculative_config"
META = f"{__name__}.read"  # in a context's meta: what the file and the overrides say
OWN = ("config", "overrides", "help")  # parameters that a file does not give


class Foreign(NamedTuple):
    """A key of TensorRT-LLM's files: why it means nothing here. `neutral` None: a file may have it
    with any value, and its user is told why; else only with these, as another would be missed."""

    why: str
    neutral: tuple[object, ...] | None = None


ONE = (None, 1)
OFF = (None, False)
NONE = (None,)
ONE_MACHINE = "engines run on one machine, in one process"
BUILT = "engines have the limits they were built for (edgespec build)"
IN_THE_ENGINE = "this is decided when the engine is built"
OF_GPUS = "it tunes kernels of GPUs, which are not used"
REPORTED = "all metrics are in the output"

FOREIGN: dict[str, Foreign] = {
    "kv_cache_config": Foreign(
        "a KV cache is as large as the engine was built for (build --max-kv-cache-capacity), and"
        " prefixes are reused within --prefix-cache-mb"
    ),
    "cuda_graph_config": Foreign(OF_GPUS),
    "use_cuda_graph": Foreign(OF_GPUS),
    "torch_compile_config": Foreign("engines are no torch programs"),
    "enable_autotuner": Foreign(OF_GPUS),
    "attn_backend": Foreign(IN_THE_ENGINE),
    "moe_config": Foreign(IN_THE_ENGINE),
    "nvfp4_gemm_config": Foreign(OF_GPUS),
    "allreduce_strategy": Foreign(ONE_MACHINE),
    "disable_overlap_scheduler": Foreign("a step ends before the next one begins"),
    "scheduler_config": Foreign("requests run in the order in which they came"),
    "enable_chunked_prefill": Foreign("prompts are always read in chunks"),
    "batch_wait_timeout_ms": Foreign("requests that arrive together run together"),
    "batch_wait_timeout_iters": Foreign("requests that arrive together run together"),
    "batch_wait_max_tokens_ratio": Foreign("requests that arrive together run together"),
    "stream_interval": Foreign("each step's text streams at once"),
    "sampler_type": Foreign("there is one sampler, the same with and without drafts"),
    "print_iter_log": Foreign(REPORTED),
    "enable_iter_perf_stats": Foreign(REPORTED),
    "enable_iter_req_stats": Foreign(REPORTED),
    "return_perf_metrics": Foreign(REPORTED),
    "perf_metrics_max_requests": Foreign(REPORTED),
    "iter_stats_max_iterations": Foreign(REPORTED),
    "request_stats_max_iterations": Foreign(REPORTED),
    "garbage_collection_gen0_threshold": Foreign("the interpreter's settings are left alone"),
    "num_postprocess_workers": Foreign("text is made in the engine's own thread"),
    "load_format": Foreign("engines have their weights in them"),
    "checkpoint_format": Foreign("the format of a checkpoint is read from it"),
    "fast_build": Foreign("it is a matter of TensorRT's builder"),
    "enable_build_cache": Foreign("edgespec run keeps what it made; edgespec cache lists it"),
    "orchestrator_type": Foreign(ONE_MACHINE),
    "gpus_per_node": Foreign(ONE_MACHINE),
    # What would be missed
    "model": Foreign("the model is TARGET of edgespec run, or --engine-dir", NONE),
    "tokenizer": Foreign("an engine has its tokenizer beside it, from export", NONE),
    "trust_remote_code": Foreign("no code of a checkpoint is ever run", OFF),
    "dtype": Foreign("weights are chosen by edgespec build --weights", (None, "auto")),
    "quant_config": Foreign("checkpoints are quantized by edgespec quantize", NONE),
    "calib_config": Foreign("checkpoints are quantized by edgespec quantize", NONE),
    "build_config": Foreign(BUILT, NONE),
    "max_batch_size": Foreign(
        "an engine runs as many requests as it was built for (build --max-batch-size); fewer at a"
        " time is batch_size",
        NONE,
    ),
    "max_seq_len": Foreign(f"{BUILT}: --max-kv-cache-capacity", NONE),
    "max_input_len": Foreign(f"{BUILT}: --max-input-len", NONE),
    "max_num_tokens": Foreign("a step takes what the lanes need; prompts are read in chunks", None),
    "max_beam_width": Foreign("there is no beam search", ONE),
    "tensor_parallel_size": Foreign(ONE_MACHINE, ONE),
    "pipeline_parallel_size": Foreign(ONE_MACHINE, ONE),
    "context_parallel_size": Foreign(ONE_MACHINE, ONE),
    "moe_tensor_parallel_size": Foreign(ONE_MACHINE, (None, 1, -1)),
    "moe_expert_parallel_size": Foreign(ONE_MACHINE, (None, 1, -1)),
    "moe_cluster_parallel_size": Foreign(ONE_MACHINE, (None, 1, -1)),
    "enable_attention_dp": Foreign(ONE_MACHINE, OFF),
    "enable_lora": Foreign("there are no LoRA adapters", OFF),
    "lora_config": Foreign("there are no LoRA adapters", NONE),
    "peft_cache_config": Foreign("there are no LoRA adapters", NONE),
    "guided_decoding_backend": Foreign("there is no guided decoding", NONE),
    "cache_transceiver_config": Foreign(ONE_MACHINE, NONE),
    "kv_connector_config": Foreign(ONE_MACHINE, NONE),
    "reasoning_parser": Foreign("thoughts are a part of the text", NONE),
    "gather_generation_logits": Foreign("candidates come with num_logprobs", OFF),
    "env_overrides": Foreign("set the environment before the start", NONE),
}

# TensorRT-LLM's names of flags
ALSO_CALLED = {"max_tokens": "max_generate_length", "max_new_tokens": "max_generate_length"}


class Read(NamedTuple):
    """What a file and the overrides say beside flags: the block for the engine, where it stands,
    and notes on keys that mean nothing here."""

    block: Mapping[str, object] | None
    where: str
    notes: tuple[str, ...]


class ConfigCommand(EdgeCommand):
    """A command whose flags have the values of --config FILE as defaults. The command line and
    environment variables come first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the file, then parses the arguments."""
        given = [self.canonical(arg) for arg in until_separator(args)] + rest(args)
        try:
            found, _, _ = self.make_parser(ctx).parse_args(list(given))
        except click.UsageError:
            return super().parse_args(ctx, args)  # says so with a hint
        path, overrides = found.get("config"), found.get("overrides") or ()
        if not ctx.resilient_parsing and (path or overrides):
            source = str(path or "the overrides")
            values = read_config(Path(path) if path else None, overrides)
            ctx.default_map, ctx.meta[META] = divided(values, self.get_params(ctx), source)
        return super().parse_args(ctx, args)


HELP = (
    "YAML with speculative_config, as TensorRT-LLM has it, and with flags of this command by their"
    " names; key=value overrides one of its keys."
)


def config_params() -> list[click.Parameter]:
    """--config and the overrides, for a command of the class ConfigCommand."""
    return [
        click.Argument(["overrides"], metavar="[KEY=VALUE]...", nargs=-1, required=False),
        click.Option(["--config"], type=FILE, metavar="FILE", help=HELP),
    ]


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same as decorators."""
    command = click.option("--config", type=FILE, metavar="FILE", help=HELP)(command)
    return click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, required=False)(command)


def divided(
    values: Mapping[str, Any], params: Iterable[click.Parameter], source: str
) -> tuple[dict[str, Any], Read]:
    """The values of flags by the names of their parameters, and what else a file says.

    Raises RequestError for a key that is neither a flag of the command nor the block, and for one
    of another program that would be missed.
    """
    flags = {flag_name(param): param for param in params if param.name not in OWN}
    defaults: dict[str, Any] = {}
    notes: list[str] = []
    block = values.get(BLOCK)
    if block is not None and not isinstance(block, dict):
        raise RequestError(f"{source}: {BLOCK} is {shown(block)}", "Write keys and values.")
    for key, value in values.items():
        name = kebab(f"--{key}").removeprefix("--").replace("-", "_")
        name = ALSO_CALLED.get(name, name)
        if name == BLOCK:
            continue
        if name in flags:
            param = flags[name]
            assert param.name is not None
            if param.name in defaults:
                raise RequestError(f"{source}: {name} is given twice", f"Remove {key}.")
            if value is not None:
                defaults[param.name] = of_flag(value, param, f"{source}: {key}")
        elif name in FOREIGN:
            notes += foreign(name, value, source)
        else:
            near = nearest(name, [*flags, BLOCK])
            remedy = f"{near}Known keys: {', '.join([BLOCK, *flags])}."
            raise RequestError(f"{source}: {shown(key)} is not a known key", remedy)
    return defaults, Read(block, f"{source}: {BLOCK}", tuple(notes))


def flag_name(param: click.Parameter) -> str:
    """A flag as a file has it: --max-kv-cache-capacity is max_kv_cache_capacity."""
    return max(param.opts, key=len).removeprefix("--").replace("-", "_")


def foreign(name: str, value: object, source: str) -> Iterator[str]:
    """A note on a key of another program. RequestError where its value would be missed."""
    row = FOREIGN[name]
    if row.neutral is None:
        yield f"{source}: {name} means nothing here: {row.why}"
    elif not any(value == known and type(value) is type(known) for known in row.neutral):
        raise RequestError(f"{source}: {name} is not supported: {row.why}", f"Remove {name}.")


def of_flag(value: object, param: click.Parameter, where: str) -> Any:
    """A value as click takes it. Raises RequestError for one of another kind."""
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise RequestError(f"{where} is {shown(value)}", "Write true or false.")
        return value
    if param.multiple or param.nargs != 1:
        items = value if isinstance(value, list) else [value]
        return tuple(one_value(item, param, where) for item in items)
    return one_value(value, param, where)


def one_value(value: object, param: click.Parameter, where: str) -> Any:
    """One value of a flag. Raises RequestError for a list, a mapping, or no number where one is
    wanted."""
    if isinstance(value, dict | list | bool) or value is None:
        raise RequestError(f"{where} is {shown(value)}", "Write one value.")
    if isinstance(param.type, click.types.IntParamType) and type(value) is not int:
        raise RequestError(f"{where} is {shown(value)}", "Write an integer.")
    if isinstance(param.type, click.types.FloatParamType) and isinstance(value, str):
        raise RequestError(f"{where} is {shown(value)}", "Write a number.")
    return value if isinstance(value, int | float) else str(value)


def read_of(ctx: click.Context) -> Read:
    """What --config and the overrides said; nothing where neither was given."""
    found: Read = ctx.meta.get(META, Read(None, BLOCK, ()))
    return found
