"""From a checkpoint to an exported directory: `export` decides what the checkpoint is and writes
its component.

Knows the order of the work and what is refused. How a graph looks stands in `graphs`, how files
look in `sidecars`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from edgespec import bundle
from edgespec.checkpoint.detect import detect, read_d2t
from edgespec.checkpoint.files import Checkpoint, TensorInfo, open_checkpoint
from edgespec.checkpoint.mtp import layer_config, refuse_other_forms
from edgespec.checkpoint.names import EMBEDDING, stored_name, text_stack
from edgespec.checkpoint.origin import Origin, origin_of
from edgespec.config import ModelConfig, RopeConfig
from edgespec.errors import ContractError, PairingError, UnsupportedModel
from edgespec.export import dflash, sidecars, writer
from edgespec.export.golden import make_golden
from edgespec.graphs import builder, decoder, eagle, mtp
from edgespec.graphs import dflash as block_graph
from edgespec.graphs.assembly import DecoderGraph, whole
from edgespec.graphs.builder import Weight, WeightPlan, save
from edgespec.graphs.linear import products
from edgespec.methods.aux_layers import default_aux_layers, resolve_aux_layers
from edgespec.methods.dflash import DFlashConfig
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.methods.table import METHODS

LLM, MTP_DRAFT, DFLASH_DRAFT = "llm", "mtp_draft", "dflash_draft"  # directories of components


class Progress(Protocol):
    """Told how far the work is: `start` names a stage and its total (bytes or pieces)."""

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...


class Silent:
    def start(self, stage: str, total: int) -> None:
        del stage, total

    def advance(self, amount: int) -> None:
        del amount


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The flags of `edgespec export`. `aux_layers` are hidden_states indices."""

    eagle_base: bool = False
    base_model_dir: str | None = None
    aux_layers: tuple[int, ...] | None = None
    allow_pickle: bool = False
    golden: bool = True
    mtp: bool = False
    dflash_base: bool = False
    dflash_draft: bool = False
    dflash_draft_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the component's directory and role, remarks for the user, and what was
    written beside it."""

    directory: Path
    role: str
    files: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    beside: tuple[Exported, ...] = ()


def export(
    model: str, out: Path, options: ExportOptions, progress: Progress | None = None
) -> Exported:
    """Write OUT/llm, with `mtp` OUT/mtp_draft too, or OUT/dflash_draft, from a checkpoint directory
    or hub id; nothing is left behind when it fails.

    Raises CheckpointError, UnsupportedModel, PairingError or OutputError before anything is written
    under its name.
    """
    model, options = with_draft_as_model(model, options)
    checkpoint = open_checkpoint(model, allow_pickle=options.allow_pickle)
    if options.mtp:
        refuse_other_forms(checkpoint)
    found = detect(checkpoint)
    target = out / (DFLASH_DRAFT if isinstance(found, DFlashConfig) else LLM)
    if isinstance(found, Eagle3Config | DFlashConfig) and options.base_model_dir is None:
        options = replace(options, base_model_dir=recorded_base(found))
    origin = base_origin(checkpoint, found, options)
    request = request_of(checkpoint, options, origin)
    if options.mtp:
        done = export_mtp(checkpoint, found, out, options, request, progress or Silent())
        return replace(done, notes=(*done.notes, origin.doubt)) if origin.doubt else done
    bundle.remove_dead_staging(target.parent, target.name)
    if (there := already_there(target, request)) is not None:
        return there
    bundle.refuse_occupied(target)
    if isinstance(found, Eagle3Config):
        done = export_draft(checkpoint, found, target, options, request, progress or Silent())
    elif isinstance(found, DFlashConfig):
        done = export_dflash_draft(
            checkpoint, found, target, options, request, progress or Silent()
        )
    else:
        done = export_base(checkpoint, found, target, options, request, progress or Silent())
    return replace(done, notes=(*done.notes, origin.doubt)) if origin.doubt else done


def with_draft_as_model(model: str, options: ExportOptions) -> tuple[str, ExportOptions]:
    """The mirrored tool's way to export a DFlash draft, base first and draft by a flag, turned into
    ours."""
    asked = (
        "--dflash-draft"
        if options.dflash_draft
        else "--dflash-base"
        if options.dflash_base
        else None
    )
    if options.dflash_draft_dir is None:
        if asked:
            what = f"{asked} needs --dflash-draft-dir: the draft says which layers it reads"
            raise PairingError(
                what, "Pass --dflash-draft-dir with the directory or hub id of the draft."
            )
        return model, options
    if asked is None or (options.dflash_draft and options.dflash_base):
        what = "--dflash-draft-dir goes with one of --dflash-base and --dflash-draft"
        raise PairingError(what, "Pass the one whose component is to be written.")
    if options.base_model_dir or options.aux_layers or options.eagle_base:
        what = (
            f"{asked} goes with --dflash-draft-dir alone: MODEL is the base, and the draft names"
            " its layers"
        )
        raise PairingError(what, "Leave --base-model-dir, --aux-layers and --eagle-base out.")
    if options.dflash_base:
        return model, options
    dflash.open_draft(options.dflash_draft_dir, allow_pickle=options.allow_pickle)
    return options.dflash_draft_dir, replace(
        options, dflash_draft=False, dflash_draft_dir=None, base_model_dir=model
    )


def recorded_base(config: Eagle3Config | DFlashConfig) -> str | None:
    """The base that the draft's own config names, where it is a directory here.

    A name of the hub is not followed: it would fetch a whole model that nobody asked for.
    """
    name = config.base_name
    return name if name and Path(name).is_dir() else None


def base_origin(
    checkpoint: Checkpoint, found: ModelConfig | Eagle3Config | DFlashConfig, options: ExportOptions
) -> Origin:
    """What the base was quantised from: this checkpoint, or the one that a draft is exported
    for."""
    if isinstance(found, ModelConfig):
        return origin_of(checkpoint)
    if options.base_model_dir is None:
        return Origin()
    return origin_of(open_checkpoint(options.base_model_dir, allow_pickle=options.allow_pickle))


def request_of(checkpoint: Checkpoint, options: ExportOptions, origin: Origin) -> dict[str, Any]:
    """What was asked for, as the manifest records it."""
    named = options.base_model_dir
    base = open_checkpoint(named, allow_pickle=options.allow_pickle).identity() if named else None
    source = {
        "name": checkpoint.path.name,
        "identity": checkpoint.identity(),
        "texts": sidecars.text_identity(checkpoint),
        "base_identity": base,
    }
    if origin.identity:
        source["base_quantized_from" if named else "quantized_from"] = origin.identity
    asked: dict[str, Any] = {
        "eagle_base": options.eagle_base,
        "aux_layers": options.aux_layers,
        "golden": options.golden,
    }
    if options.mtp:
        asked["mtp"] = True
    if options.dflash_draft_dir:
        _, draft = dflash.open_draft(options.dflash_draft_dir, allow_pickle=options.allow_pickle)
        asked["dflash_base"] = dflash.block_keys(draft)
    return {"source": source, "options": asked}


def already_there(target: Path, request: dict[str, Any]) -> Exported | None:
    """What an earlier run of the same request wrote, if all of it is still there and unchanged."""
    if not (target / bundle.MANIFEST).is_file():
        return None
    manifest = bundle.read_manifest(target)
    wanted = json.loads(json.dumps(request)) | {"edgespec": bundle.installed_version("edgespec")}
    if any(manifest.get(key) != value for key, value in wanted.items()):
        return None
    bundle.check_files(target, manifest.get("files"))
    return Exported(
        target,
        manifest["role"],
        manifest["files"],
        ("already there and unchanged: nothing was written",),
    )


def export_base(
    checkpoint: Checkpoint,
    config: ModelConfig,
    target: Path,
    options: ExportOptions,
    request: dict[str, Any],
    progress: Progress,
) -> Exported:
    if options.base_model_dir:
        what = (
            f"{checkpoint.path} is a base model; --base-model-dir belongs to the export of a draft"
        )
        raise PairingError(
            what, "Leave --base-model-dir out, or give the draft's directory as MODEL."
        )
    if options.aux_layers and not options.eagle_base:
        raise PairingError(
            "--aux-layers needs --eagle-base", "Without it the graph emits no hidden states."
        )
    block = reading_draft(checkpoint, config, options)
    aux_layers = (
        block.aux_layer_ids
        if block
        else aux_layers_of_base(config, options)
        if options.eagle_base
        else ()
    )
    graph = decoder.Decoder.open(checkpoint, config, aux_layers)
    with bundle.staged_directory(target) as staging:
        kind = METHODS["dflash"].name if block else METHODS["eagle3"].name if aux_layers else None
        done = write_base(graph, kind, staging, options, request, progress, block)
    return replace(done, directory=target)


def write_base(
    graph: decoder.Decoder,
    kind: str | None,
    staging: Path,
    options: ExportOptions,
    request: dict[str, Any],
    progress: Progress,
    block: DFlashConfig | None = None,
) -> Exported:
    """The files of a base for drafts of a kind, or of a plain decoder, in `staging`."""
    checkpoint, config, info = graph.table.checkpoint, graph.config, embedding_of(graph)
    sidecars.copy_tokenizer(checkpoint, staging)
    plan = WeightPlan(bundle.MODEL_DATA)
    if config.tied_head:
        plan.point(
            "lm_head.weight", Weight(checkpoint, info, bundle.EMBEDDING, builder.ALIGN_BYTES)
        )
    origin = request["source"].get("quantized_from")
    text = sidecars.base_config(checkpoint, config, graph.shape, kind, graph.aux_layers, origin)
    if block:
        text = dflash.base_config(text, block)
    job = Job(graph, plan, staging, progress)
    hashes = job.write(text, (checkpoint, info))
    if options.golden:
        job.golden(rows_of(checkpoint, info), config.decoder.ropes, config.vocab_size)
    files = job.manifest(request, hashes)
    notes = [emitted_note(graph), *sidecars.quantization_notes(text.get("quantization"))]
    if not config.eos_token_ids:
        notes.append("the checkpoint names no eos_token_id: answers end by length alone")
    return Exported(staging, text["engine_role"], files, tuple(notes))


def emitted_note(graph: decoder.Decoder) -> str:
    if graph.emits_final:
        return "base of an MTP head: it emits the state after its last norm"
    return (
        f"taps: hidden_states {', '.join(map(str, graph.aux_layers))}"
        if graph.aux_layers
        else "plain decoder: no taps"
    )


def reading_draft(
    checkpoint: Checkpoint, config: ModelConfig, options: ExportOptions
) -> DFlashConfig | None:
    """The DFlash draft that a base is exported for."""
    if options.dflash_draft_dir is None:
        return None
    _, block = dflash.open_draft(options.dflash_draft_dir, allow_pickle=options.allow_pickle)
    dflash.check_pair(block, config, checkpoint)
    return block


def aux_layers_of_base(config: ModelConfig, options: ExportOptions) -> tuple[int, ...]:
    """The taps of an EAGLE-3 base, as hidden_states indices."""
    layers = config.decoder.num_layers
    aux_layers = options.aux_layers or default_aux_layers(layers)
    if any(not 1 <= layer <= layers for layer in aux_layers) or list(aux_layers) != sorted(
        set(aux_layers)
    ):
        what = f"taps {', '.join(map(str, aux_layers))} do not fit a base of {layers} layers"
        raise PairingError(
            what, f"Pass --aux-layers with ascending hidden_states indices from 1 to {layers}."
        )
    return aux_layers


def export_draft(
    checkpoint: Checkpoint,
    config: Eagle3Config,
    target: Path,
    options: ExportOptions,
    request: dict[str, Any],
    progress: Progress,
) -> Exported:
    if options.eagle_base or options.dflash_base:
        flag = "--eagle-base" if options.eagle_base else "--dflash-base"
        what = f"{checkpoint.path} is an EAGLE-3 draft; {flag} belongs to the export of its base"
        raise UnsupportedModel(what, f"Leave {flag} out: a draft is recognised by itself.")
    base, base_model = open_base(config, options)
    aux_layers = aux_layers_of_draft(config, base_model, options)
    offsets = read_d2t(checkpoint, config)
    graph = eagle.Eagle3Draft.open(checkpoint, config, lending_base(base, base_model))
    own = (
        eagle.stored_names({eagle.EMBEDDING: ()}, checkpoint)[eagle.EMBEDDING]
        if config.own_embedding
        else None
    )
    with bundle.staged_directory(target) as staging:
        text = sidecars.draft_config(
            checkpoint,
            config,
            graph.shape,
            aux_layers,
            base,
            request["source"].get("base_quantized_from"),
        )
        job = Job(graph, WeightPlan(bundle.MODEL_DATA), staging, progress)
        hashes = job.write(text, (checkpoint, checkpoint.tensors[own]) if own else None)
        writer.write_small({"d2t": vocabulary_map(offsets, config)}, staging / bundle.D2T)
        if options.golden:
            job.golden(
                draft_rows(checkpoint, config, own, base), config.decoder.ropes, config.vocab_size
            )
        files = job.manifest(request, hashes)
    notes = (
        *draft_notes(config, aux_layers, base),
        *sidecars.quantization_notes(text.get("quantization")),
    )
    return Exported(target, text["engine_role"], files, notes)


def export_mtp(
    checkpoint: Checkpoint,
    config: ModelConfig | Eagle3Config | DFlashConfig,
    out: Path,
    options: ExportOptions,
    request: dict[str, Any],
    progress: Progress,
) -> Exported:
    """Write OUT/llm and OUT/mtp_draft from one checkpoint: in the end both are there, or neither
    was written."""
    if not isinstance(config, ModelConfig):
        kind = "a DFlash" if isinstance(config, DFlashConfig) else "an EAGLE-3"
        what = (
            f"{checkpoint.path} is {kind} draft; --mtp belongs to the export of a base that has an"
            " MTP head"
        )
        raise UnsupportedModel(what, "Leave --mtp out: a draft is recognised by itself.")
    refuse_beside_mtp(options)
    head = mtp.MtpDraft.open(checkpoint, config)
    base = decoder.Decoder.open(checkpoint, config, emits_final=True)
    parts: dict[Path, Callable[[Path], Exported]] = {
        out / LLM: lambda staging: write_base(
            base, METHODS["mtp"].name, staging, options, request, progress
        ),
        out / MTP_DRAFT: lambda staging: write_mtp(
            head, embedding_of(base), staging, options, request, progress
        ),
    }
    for target in parts:
        bundle.remove_dead_staging(target.parent, target.name)
    done = {
        target: found for target in parts if (found := already_there(target, request)) is not None
    }
    missing = [target for target in parts if target not in done]
    with bundle.staged_directories(*missing) as stagings:
        for target, staging in zip(missing, stagings, strict=True):
            with bundle.writing(target):  # which of them it is that has no room
                done[target] = replace(parts[target](staging), directory=target)
    return replace(done[out / LLM], beside=(done[out / MTP_DRAFT],))


def refuse_beside_mtp(options: ExportOptions) -> None:
    """Flags that contradict --mtp."""
    if options.eagle_base or options.dflash_base:
        flag = "--eagle-base" if options.eagle_base else "--dflash-base"
        what = f"--mtp and {flag} exclude each other: a base emits what one kind of draft reads"
        raise PairingError(what, "Export once for each kind, to different OUT directories.")
    if options.aux_layers:
        what = (
            "--aux-layers means nothing with --mtp: the head reads the state after the base's last"
            " norm"
        )
        raise PairingError(what, "Leave --aux-layers out.")
    if options.base_model_dir:
        what = (
            "--base-model-dir means nothing with --mtp: the head stands in the checkpoint of its"
            " base"
        )
        raise PairingError(what, "Leave --base-model-dir out, and give the base as MODEL.")


def write_mtp(
    graph: mtp.MtpDraft,
    embedding: TensorInfo,
    staging: Path,
    options: ExportOptions,
    request: dict[str, Any],
    progress: Progress,
) -> Exported:
    """The files of a head in `staging`. The embedding stays with the base."""
    checkpoint, layer = graph.table.checkpoint, layer_config(graph.config)
    text = sidecars.mtp_config(
        checkpoint, graph.config, layer, graph.shape, request["source"].get("quantized_from")
    )
    job = Job(graph, WeightPlan(bundle.MODEL_DATA), staging, progress)
    hashes = job.write(text, None)
    if options.golden:
        job.golden(rows_of(checkpoint, embedding), layer.ropes, graph.config.vocab_size)
    files = job.manifest(request, hashes)
    notes = (
        "MTP head: one layer, used again for each step",
        *sidecars.quantization_notes(text.get("quantization")),
    )
    return Exported(staging, text["engine_role"], files, notes)


def export_dflash_draft(
    checkpoint: Checkpoint,
    config: DFlashConfig,
    target: Path,
    options: ExportOptions,
    request: dict[str, Any],
    progress: Progress,
) -> Exported:
    if options.eagle_base or options.dflash_base or options.aux_layers:
        what = f"{checkpoint.path} is a DFlash draft, and names the layers that it reads"
        raise UnsupportedModel(
            what, "Leave --eagle-base, --dflash-base and --aux-layers out; they belong to a base."
        )
    base, base_model = open_base(config, options)
    offsets = read_d2t(checkpoint, config)
    graph = block_graph.DFlashDraft.open(checkpoint, config, lending_base(base, base_model))
    own = block_graph.EMBEDDING if config.own_embedding else None
    named, quantized_from = graph.table.checkpoint, request["source"].get("base_quantized_from")
    with bundle.staged_directory(target) as staging:
        text = dflash.draft_config(
            checkpoint, config, graph.shape, base, base_model, quantized_from
        )
        job = Job(graph, WeightPlan(bundle.MODEL_DATA), staging, progress)
        hashes = job.write(text, (named, named.tensors[own]) if own else None)
        if offsets is not None:
            writer.write_small({"d2t": offsets.astype(np.int32)}, staging / bundle.D2T)
        if options.golden:
            job.golden(
                draft_rows(named, config, own, base), config.decoder.ropes, config.vocab_size
            )
        files = job.manifest(request, hashes)
    notes = (
        *dflash.draft_notes(config, base),
        *sidecars.quantization_notes(text.get("quantization")),
    )
    return Exported(target, text["engine_role"], files, notes)


def open_base(
    config: Eagle3Config | DFlashConfig, options: ExportOptions
) -> tuple[Checkpoint | None, ModelConfig | None]:
    """The base named by the flag; it must be one that the draft could have been made for."""
    if options.base_model_dir is None:
        refuse_headless(config)
        return None, None
    base = open_checkpoint(options.base_model_dir, allow_pickle=options.allow_pickle)
    model = detect(base)
    if not isinstance(model, ModelConfig):
        raise PairingError(
            f"--base-model-dir {base.path} is itself a draft", "Name the base model's directory."
        )
    if isinstance(config, DFlashConfig):
        dflash.check_pair(config, model, base)
    else:
        check_pair(config, model, base)
    return base, model


def refuse_headless(config: Eagle3Config | DFlashConfig) -> None:
    """A draft without a head of its own cannot be exported alone."""
    if config.own_head:
        return
    name = config.base_name
    named = (
        f"; its config.json names {name!r} as its base, which is no directory here" if name else ""
    )
    what = f"this draft has no lm_head of its own and borrows its base's{named}"
    raise PairingError(
        what,
        "Pass --base-model-dir with the directory or hub id of the base that it was trained for.",
    )


def check_pair(config: Eagle3Config, model: ModelConfig, base: Checkpoint) -> None:
    """Refuse what cannot be a pair: other vocabulary, other width."""
    remedy = "Pass --base-model-dir with the base that this draft was trained for."
    if config.vocab_size != model.vocab_size:
        what = (
            f"the draft's vocabulary has {config.vocab_size} tokens, the one of {base.path}"
            f" {model.vocab_size}"
        )
        raise PairingError(what, remedy)
    if config.target_hidden_size != model.decoder.hidden_size:
        what = (
            f"the draft reads taps {config.target_hidden_size} wide, the hidden size of {base.path}"
            f" is {model.decoder.hidden_size}"
        )
        raise PairingError(what, remedy)
    if not config.own_embedding and config.decoder.hidden_size != model.decoder.hidden_size:
        what = (
            f"the draft borrows the base's embedding, {model.decoder.hidden_size} wide, and is"
            f" itself {config.decoder.hidden_size} wide"
        )
        raise PairingError(
            what,
            "This draft's checkpoint lacks its own embed_tokens.weight; get the whole checkpoint.",
        )


def aux_layers_of_draft(
    config: Eagle3Config, model: ModelConfig | None, options: ExportOptions
) -> tuple[int, ...] | None:
    """The taps as far as they can be known here: without the base's depth a draft's default stays
    open."""
    if model is not None:
        return resolve_aux_layers(config, model.decoder.num_layers, options.aux_layers)
    if options.aux_layers:
        check_count(options.aux_layers, config)
        return options.aux_layers
    if config.aux_layer_ids is None and config.num_aux_layers != len(default_aux_layers(0)):
        what = f"the draft reads {config.num_aux_layers} taps and does not say which"
        raise PairingError(what, "Pass --aux-layers with their hidden_states indices.")
    if config.aux_layer_ids is None or config.aux_layer_convention == "hs":
        return config.aux_layer_ids
    what = (
        f"the draft names its taps {list(config.aux_layer_ids)} in a numbering that only its base's"
        " depth can settle"
    )
    raise PairingError(what, "Pass --base-model-dir, or --aux-layers with hidden_states indices.")


def check_count(aux_layers: tuple[int, ...], config: Eagle3Config) -> None:
    if len(aux_layers) != config.num_aux_layers or list(aux_layers) != sorted(set(aux_layers)):
        what = (
            f"--aux-layers {','.join(map(str, aux_layers))}: the draft reads"
            f" {config.num_aux_layers} taps"
        )
        raise PairingError(what, f"Give {config.num_aux_layers} ascending hidden_states indices.")


def lending_base(base: Checkpoint | None, model: ModelConfig | None) -> decoder.Decoder | None:
    return None if base is None or model is None else decoder.Decoder.open(base, model)


def vocabulary_map(offsets: NDArray[np.int64] | None, config: Eagle3Config) -> NDArray[np.int32]:
    """Offsets [Vd] as int32, the stored form; zeros where draft and base share the vocabulary."""
    return (np.zeros(config.draft_vocab_size, np.int64) if offsets is None else offsets).astype(
        np.int32
    )


def draft_notes(
    config: Eagle3Config, aux_layers: tuple[int, ...] | None, base: Checkpoint | None
) -> tuple[str, ...]:
    notes = [f"EAGLE-3 draft, {config.layout} layout"]
    if config.base_name:
        notes.append(f"it says that it was made for {config.base_name}")
    if aux_layers:
        notes.append(f"taps: hidden_states {', '.join(map(str, aux_layers))}")
    else:
        notes.append(
            "taps: the draft names none; EAGLE-3's default for the base's depth, checked at build"
        )
    if base is None:
        notes.append(
            "no --base-model-dir: the pairing is checked by its shapes at build, not by the base's"
            " identity"
        )
    return tuple(notes)


def embedding_of(graph: decoder.Decoder) -> TensorInfo:
    """The embedding table of a base, as its checkpoint has it."""
    checkpoint, name = graph.table.source(EMBEDDING)
    return checkpoint.tensors[name]


def rows_of(checkpoint: Checkpoint, info: TensorInfo) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """ids [S] -> float32 rows [S, H] of a table, read when asked."""
    return lambda ids: checkpoint.read(info.name)[ids].astype(np.float32)


def draft_rows(
    checkpoint: Checkpoint,
    config: Eagle3Config | DFlashConfig,
    own: str | None,
    base: Checkpoint | None,
) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Embedding rows for a draft's golden inputs; made-up ones where the base's table is not at
    hand."""
    if own:
        return rows_of(checkpoint, checkpoint.tensors[own])
    if base:
        return rows_of(base, base.tensors[stored_name(EMBEDDING, text_stack(base))])
    width = config.decoder.hidden_size
    return lambda ids: np.stack(
        [np.random.default_rng(int(i)).standard_normal(width, np.float32) for i in ids]
    )


@dataclass
class Job:
    """The files of one component in its staging directory."""

    graph: DecoderGraph
    plan: WeightPlan
    staging: Path
    progress: Progress
    quantization: dict[str, Any] | None = None  # as config.json has it, once written

    def write(
        self, config: dict[str, Any], embedding: tuple[Checkpoint, TensorInfo] | None
    ) -> dict[str, str]:
        """Graph, weights, embedding and config.json; returns the hashes made on the way.

        What only the graph tells of its quantised weights is added to `config`.
        """
        model, _ = whole(self.graph, self.plan)
        table = self.graph.table
        keys = sidecars.quantization_keys(products(model), table.checkpoint, table.quantization)
        if keys is not None:
            config["quantization"] = self.quantization = keys
        total = self.plan.size_bytes + (embedding[1].num_bytes if embedding else 0)
        self.progress.start("weights", total)
        hashes = {}
        if embedding:
            path = self.staging / bundle.EMBEDDING
            hashes[path.name], _ = writer.write_embedding(*embedding, path, self.progress.advance)
        path = self.staging / bundle.MODEL_DATA
        hashes[path.name] = writer.write_weights(self.plan, path, self.progress.advance)
        save(model, self.staging / bundle.MODEL)
        check_graph(self.staging / bundle.MODEL)
        bundle.write_json(self.staging / bundle.CONFIG, config)
        return hashes

    def golden(
        self,
        embed: Callable[[NDArray[Any]], NDArray[Any]],
        ropes: Sequence[RopeConfig],
        vocab_size: int,
    ) -> None:
        self.progress.start("golden", self.graph.shape.num_layers + 2)
        arrays = make_golden(
            self.graph,
            self.plan,
            self.staging,
            embed,
            ropes,
            vocab_size,
            lambda: self.progress.advance(1),
        )
        writer.write_small(arrays, self.staging / bundle.GOLDEN)

    def manifest(
        self, request: dict[str, Any], hashes: dict[str, str]
    ) -> dict[str, dict[str, Any]]:
        files = bundle.file_entries(self.staging, hashes)
        value = {
            "format": bundle.MANIFEST_FORMAT,
            "kind": "export",
            "role": self.graph.shape.role.value,
            **request,
            **bundle.provenance(),
            **({"quantization": self.quantization["schemes"]} if self.quantization else {}),
            "files": files,
        }
        bundle.write_json(self.staging / bundle.MANIFEST, value)
        return files


def check_graph(path: Path) -> None:
    """The checker with full shape inference; a graph that fails is a fault of ours."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ContractError(
            f"the graph written is not valid ONNX: {error}", "Please report this."
        ) from error
