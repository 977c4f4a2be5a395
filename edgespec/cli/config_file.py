"""`--config FILE.yaml` and `key=value`: a file's keys become the defaults of a command's flags, and
its `speculative_config` goes to the engine.

Knows flags, and which keys of TensorRT-LLM's files mean nothing here, and why. How YAML is read
stands in `edgespec.pipeline.recipe`, what the block means in `runtime.speculative_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from edgespec.cli.draft_flags import KEY_NAMES, TREE_NAMES
from edgespec.cli.flags import EdgeCommand, kebab, rest, until_separator
from edgespec.cli.paths import FILE
from edgespec.errors import RequestError, in_words, replaced
from edgespec.pipeline.recipe import nearest, read_config, shown

if TYPE_CHECKING:
    from edgespec.runtime.drafters.decoding import DecodingConfig

BLOCK = "speculative_config"
META = f"{__name__}.read"  # in a context's meta: what the file and the overrides say
OWN = (
    "config",
    "key_values",
    "help",
    "help_all",
    "drafter",
)  # parameters that a file does not give
SIZES = ("spec_draft_top_k", "spec_draft_step", "spec_verify_size")


class Foreign(NamedTuple):
    """A key of TensorRT-LLM's files: why it means nothing here. `neutral` None: a file may have it
    with any value, and a note says why; else only with these, as another would be missed."""

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
OF_IMAGES = "images are encoded as the engine in `visual` was built"
NO_CODE = "a file runs no code"

FOREIGN: dict[str, Foreign] = {
    "kv_cache_config": Foreign(
        "a KV cache is as large as the engine was built for (build --max-kv-cache-capacity), and"
        " prefixes are reused within --prefix-cache-mb"
    ),
    "backend": Foreign(IN_THE_ENGINE),
    "cuda_graph_config": Foreign(OF_GPUS),
    "use_cuda_graph": Foreign(OF_GPUS),
    "encoder_cuda_graph_config": Foreign(OF_GPUS),
    "prefill_cuda_graph_backend": Foreign(OF_GPUS),
    "prefill_capture_num_tokens": Foreign(OF_GPUS),
    "enable_in_graph_sampling": Foreign(OF_GPUS),
    "enable_low_latency_host_dispatch": Foreign(OF_GPUS),
    "enable_min_latency": Foreign(OF_GPUS),
    "enable_layerwise_nvtx_marker": Foreign(OF_GPUS),
    "use_fine_grained_sync": Foreign(OF_GPUS),
    "use_cute_dsl_blockscaling_mm": Foreign(OF_GPUS),
    "use_cute_dsl_blockscaling_bmm": Foreign(OF_GPUS),
    "use_cute_dsl_bf16_bmm": Foreign(OF_GPUS),
    "use_cute_dsl_bf16_gemm": Foreign(OF_GPUS),
    "torch_compile_config": Foreign("engines are no torch programs"),
    "enable_autotuner": Foreign(OF_GPUS),
    "attn_backend": Foreign(IN_THE_ENGINE),
    "moe_config": Foreign(IN_THE_ENGINE),
    "nvfp4_gemm_config": Foreign(OF_GPUS),
    "allreduce_strategy": Foreign(ONE_MACHINE),
    "attention_dp_config": Foreign(ONE_MACHINE),
    "ray_worker_extension_cls": Foreign(ONE_MACHINE),
    "ray_placement_config": Foreign(ONE_MACHINE),
    "ray_worker_nsight_options": Foreign(ONE_MACHINE),
    "disable_overlap_scheduler": Foreign("a step ends before the next one begins"),
    "scheduler_config": Foreign("requests run in the order in which they came"),
    "reorder_policy_config": Foreign("requests run in the order in which they came"),
    "enable_chunked_prefill": Foreign("prompts are always read in chunks"),
    "batch_wait_timeout_ms": Foreign("requests that arrive together run together"),
    "batch_wait_timeout_iters": Foreign("requests that arrive together run together"),
    "batch_wait_max_tokens_ratio": Foreign("requests that arrive together run together"),
    "stream_interval": Foreign("each step's text streams at once"),
    "enable_early_first_token_response": Foreign("each step's text streams at once"),
    "sampler_force_async_worker": Foreign("there is one sampler, in the thread of the engine"),
    "sampler_type": Foreign("there is one sampler, the same with and without drafts"),
    "print_iter_log": Foreign(REPORTED),
    "enable_iter_perf_stats": Foreign(REPORTED),
    "enable_iter_req_stats": Foreign(REPORTED),
    "return_perf_metrics": Foreign(REPORTED),
    "perf_metrics_max_requests": Foreign(REPORTED),
    "iter_stats_max_iterations": Foreign(REPORTED),
    "request_stats_max_iterations": Foreign(REPORTED),
    "max_stats_len": Foreign(REPORTED),
    "prometheus_metrics_config": Foreign(REPORTED),
    "telemetry_config": Foreign("nothing is sent anywhere"),
    "layer_wise_benchmarks_config": Foreign("it is a matter of TensorRT-LLM's own benchmarks"),
    "garbage_collection_gen0_threshold": Foreign("the interpreter's settings are left alone"),
    "num_postprocess_workers": Foreign("text is made in the engine's own thread"),
    "load_format": Foreign("engines have their weights in them"),
    "checkpoint_format": Foreign("the format of a checkpoint is read from it"),
    "checkpoint_io_policy": Foreign("engines have their weights in them"),
    "mx_config": Foreign("engines have their weights in them"),
    "gms_config": Foreign("engines have their weights in them"),
    "enable_resource_governor": Foreign("one process alone has the KV cache"),
    "sleep_config": Foreign("an engine holds its memory until it is closed"),
    "multimodal_config": Foreign(OF_IMAGES),
    "disable_mm_encoder": Foreign(OF_IMAGES),
    "encoder_max_batch_size": Foreign(OF_IMAGES),
    "encoder_max_num_tokens": Foreign(OF_IMAGES),
    "fast_build": Foreign("it is a matter of TensorRT's builder"),
    "enable_build_cache": Foreign("edgespec run keeps what it made; edgespec cache lists it"),
    "orchestrator_type": Foreign(ONE_MACHINE),
    "gpus_per_node": Foreign(ONE_MACHINE),
    # What would be missed
    "model": Foreign("the model is TARGET of edgespec run, or --engine-dir", NONE),
    "tokenizer": Foreign("an engine has its tokenizer beside it, from export", NONE),
    "tokenizer_mode": Foreign("an engine has its tokenizer beside it", (None, "auto")),
    "custom_tokenizer": Foreign(NO_CODE, NONE),
    "tokenizer_revision": Foreign("an engine has its tokenizer beside it, from export", NONE),
    "postprocess_tokenizer_dir": Foreign("an engine has its tokenizer beside it", NONE),
    "skip_tokenizer_init": Foreign("requests and answers are texts", OFF),
    "post_processor_hook": Foreign(NO_CODE, NONE),
    "batched_logits_processor": Foreign(NO_CODE, NONE),
    "checkpoint_loader": Foreign(NO_CODE, NONE),
    "revision": Foreign("the model is what was exported, or TARGET of edgespec run", NONE),
    "model_kwargs": Foreign("a model is exported as its own config.json says", NONE),
    "decoding_config": Foreign("its successor is speculative_config", NONE),
    "encode_only": Foreign("engines generate text", OFF),
    "mm_encoder_only": Foreign(OF_IMAGES, OFF),
    "sparse_attention_config": Foreign("attention reads all of the context", NONE),
    "kv_cache_compression_config": Foreign("attention reads all of the context", NONE),
    "enable_mla_skip_correction": Foreign("attention is computed as it is defined", OFF),
    "force_dynamic_quantization": Foreign("checkpoints are quantized by edgespec quantize", OFF),
    "num_serve_frontends": Foreign(ONE_MACHINE, ONE),
    "otlp_traces_endpoint": Foreign("no traces are sent", NONE),
    "perf_metrics_output_dir": Foreign("metrics are in the output file", NONE),
    "enable_energy_metrics": Foreign("energy is not measured", OFF),
    "enable_lm_head_tp_in_adp": Foreign(ONE_MACHINE, OFF),
    "pp_partition": Foreign(ONE_MACHINE, NONE),
    "cp_config": Foreign(ONE_MACHINE, NONE),
    "dwdp_config": Foreign(ONE_MACHINE, NONE),
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
        # click has a marker of its own for what was not given
        path, given_keys = found.get("config"), found.get("key_values")
        path = path if isinstance(path, str) else None
        overrides = given_keys if isinstance(given_keys, tuple) else ()
        if not ctx.resilient_parsing and (path or overrides):
            source = path or "command line"
            values = read_config(Path(path) if path else None, overrides)
            ctx.default_map, ctx.meta[META] = divided(values, self.get_params(ctx), source)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs it. Errors name what the file says by its keys, and keys that flags gave by
        flags."""
        names: dict[str, str] = {}
        for param in self.get_params(ctx):
            source, key = ctx.get_parameter_source(param.name or ""), flag_name(param)
            flag = f"--{key.replace('_', '-')}"
            if source is ParameterSource.DEFAULT_MAP:
                names[flag] = key
            elif source is ParameterSource.COMMANDLINE and key in (*TREE_NAMES, *KEY_NAMES):
                names[key] = flag
        try:
            with in_words(names):
                return super().invoke(ctx)
        except click.UsageError as error:
            if not names:
                raise
            message = replaced(names, error.format_message())
            raise click.UsageError(message, error.ctx) from error


HELP = (
    "YAML with speculative_config, as TensorRT-LLM has it, and with flags of this command;"
    " key=value overrides a key."
)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--config and key=value, for a command of the class ConfigCommand, which alone reads them."""
    option = click.option("--config", type=FILE, metavar="FILE", help=HELP, expose_value=False)
    argument = click.argument(
        "key_values", metavar="[KEY=VALUE]...", nargs=-1, required=False, expose_value=False
    )
    return argument(option(command))


def divided(
    values: Mapping[str, Any], params: Iterable[click.Parameter], source: str
) -> tuple[dict[str, Any], Read]:
    """The values of flags by the names of their parameters, and what else a file says.

    Raises RequestError for a key that is neither a flag of the command nor the block, and for one
    of another program that would be missed.
    """
    flags = {flag_name(param): param for param in params if is_of_files(param)}
    defaults: dict[str, Any] = {}
    notes = [] if values else [f"{source} has no keys, so it changes nothing"]
    block = values.get(BLOCK)
    if block is not None and not isinstance(block, dict):
        raise RequestError(f"{source}: {BLOCK} is {shown(block)}", "Write keys and values.")
    for key, value in values.items():
        name = kebab(f"--{key}").removeprefix("--").replace("-", "_")
        name = str(key) if str(key) in FOREIGN else ALSO_CALLED.get(name, name)
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
            remedy = f"{nearest(name, [*flags, BLOCK])}Known keys: {', '.join([BLOCK, *flags])}."
            if is_of_block(name):
                remedy = f"Write it below {BLOCK}:, indented with the block's other keys."
            raise RequestError(f"{source}: {shown(key)} is not a known key", remedy)
    return defaults, Read(block, f"{source}: {BLOCK}", tuple(notes))


def is_of_block(name: str) -> bool:
    """Whether a key is one of a speculative_config."""
    from edgespec.runtime.drafters.options import fields_of
    from edgespec.runtime.opening.speculative_config import TYPE_KEY, config_classes

    return name == TYPE_KEY or any(name in fields_of(kind) for kind in config_classes().values())


def is_of_files(param: click.Parameter) -> bool:
    """Whether a file may give a flag: all that --help lists, but those that say how to draft, for
    which there is the block."""
    hidden = isinstance(param, click.Option) and param.hidden
    not_of_files = {*OWN, *SIZES, *TREE_NAMES, *KEY_NAMES}
    return not hidden and not {param.name, flag_name(param)} & not_of_files


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
    """One value of a flag. Raises RequestError for a list, a mapping, half a character, or no
    number where one is wanted."""
    if isinstance(value, dict | list | bool) or value is None:
        raise RequestError(f"{where} is {shown(value)}", "Write one value.")
    if isinstance(param.type, click.types.IntParamType) and type(value) is not int:
        raise RequestError(f"{where} is {shown(value)}", "Write an integer.")
    if isinstance(param.type, click.types.FloatParamType):
        from edgespec.prompts.checks import is_finite

        if not isinstance(value, int | float) or not is_finite(value):
            raise RequestError(f"{where} is {shown(value)}", "Write a number.")
        return value
    if isinstance(param.type, click.types.IntParamType):
        return value
    text = str(value)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(f"{where} has half a surrogate pair", "Write the character itself.")
    return text


# ---- speculative_config, for the commands


def configured(ctx: click.Context) -> tuple[DecodingConfig | None, tuple[str, ...]]:
    """The speculative_config of a command line, None where there is none, and notes for its user
    that the engine does not have. Raises OptionError that names the file and the key."""
    read = ctx.meta.get(META)
    if read is None:
        return None, ()
    if read.block is None:
        return None, read.notes
    from edgespec.runtime.opening.speculative_config import read_config as read_block

    config, notes = read_block(read.block, read.where)
    assert config is not None
    of_engine = tuple(config.notes())
    return config, (*read.notes, *(note for note in notes if note not in of_engine))


# ---- a JSON schema for editors


def schema(commands: Iterable[click.Command]) -> dict[str, Any]:
    """The JSON schema of a file for any of these commands."""
    from edgespec.runtime.opening.speculative_config import schema as of_block

    flags: dict[str, dict[str, Any]] = {}
    for command in commands:
        for param in command.get_params(click.Context(command)):
            if isinstance(param, click.Option) and is_of_files(param):
                flags.setdefault(flag_name(param), schema_of_flag(param))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "edgespec --config",
        "type": "object",
        "properties": {
            BLOCK: of_block(),
            **flags,
            **{name: schema_of_foreign(row) for name, row in FOREIGN.items() if name not in flags},
        },
        "additionalProperties": False,
    }


def schema_of_flag(param: click.Option) -> dict[str, Any]:
    """The schema of a flag's value."""
    kinds = {click.types.IntParamType: "integer", click.types.FloatParamType: "number"}
    one: dict[str, Any] = {
        "type": next((k for t, k in kinds.items() if isinstance(param.type, t)), "string")
    }
    if (kinds_of_own := getattr(param.type, "schema", None)) is not None:
        one["type"] = [*kinds_of_own]
    if isinstance(param.type, click.Choice):
        one["enum"] = [*param.type.choices]
    if param.is_flag:
        one = {"type": "boolean"}
    found = {"type": "array", "items": one} if param.multiple else one
    return {**found, "description": " ".join((param.help or "").split())}


def schema_of_foreign(row: Foreign) -> dict[str, Any]:
    """The schema of a key of TensorRT-LLM that means nothing here."""
    found: dict[str, Any] = {
        "description": f"It means nothing here: {row.why}.",
        "deprecated": True,
    }
    return found if row.neutral is None else found | {"enum": [*row.neutral]}
