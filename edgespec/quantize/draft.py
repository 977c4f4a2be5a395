"""From an EAGLE-3 draft to its quantised directory, calibrated on what the base really feeds it.

Knows the order of the work. `fc` stays as it is, as the mirrored tool has it for DFlash: what all else is made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec import bundle
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.config import DFlashConfig, DraftConfig, ModelConfig, resolve_taps
from edgespec.errors import BuildError, PairingError, UnsupportedModel
from edgespec.quantize import calibration, modelopt, work
from edgespec.quantize import check as checking
from edgespec.quantize.base import EMBEDDING, HEAD, base_config, refuse_quantised
from edgespec.quantize.layerwise import Progress
from edgespec.quantize.llm import (
    Options,
    Quantized,
    already_there,
    notes_of,
    prepare,
    read_all,
    request_of,
    tokenizer_of,
    write_manifest,
    write_sidecars,
)
from edgespec.quantize.plan import Plan, make_plan, refuse_full_disk, size_bytes
from edgespec.quantize.tensors import Piece, array_piece, copied, to_numpy, to_torch, write_safetensors

Pair = tuple[Any, Any]  # features [S, taps * Ht] of tokens t, embeddings [S, H] of tokens t + 1


def quantize_draft(
    base_dir: str, draft_dir: str, out: Path, options: Options, progress: Progress, log: modelopt.Log
) -> Quantized:
    """Write the quantised draft to `out`; nothing is left behind when it fails.

    Raises as `quantize_llm` does, and PairingError where base and draft do not belong together.
    """
    if options.fp8_cache:
        raise UnsupportedModel("--kv-cache-quantization: a draft's cache stays as it is.", "Leave the flag out.")
    draft = open_checkpoint(draft_dir, allow_pickle=options.allow_pickle)
    refuse_quantised(draft)
    config = detect(draft)
    if isinstance(config, DFlashConfig):
        raise UnsupportedModel(f"{draft.path} is a DFlash draft; this version quantises EAGLE-3 drafts.")
    if not isinstance(config, DraftConfig):
        raise UnsupportedModel(f"{draft.path} is a base model, not a draft.", "edgespec quantize llm takes it.")
    base = open_checkpoint(base_dir, allow_pickle=options.allow_pickle)
    model = base_config(base)
    check_pair(config, model, base)
    taps = resolve_taps(config, model.decoder.num_layers)
    names = stored_names(draft, config)
    plan = plan_draft(draft, names, options)
    texts = calibration.read_texts(options.calib_data, options.samples)
    request = request_of(draft, options, texts)
    request["base"] = {"name": base.path.resolve().name, "identity": base.identity(), "taps": list(taps)}
    if (there := already_there(out, request, {"source": draft, "base": base}, progress)) is not None:
        return there
    bundle.refuse_occupied(out)
    modelopt.check_installed()
    work.refuse_unfinished(out, request)
    bundle.remove_dead_staging(out.parent, out.name)
    refuse_full_disk(out, size_bytes(draft, plan, lambda module: stored(names, module)))
    digests = {"source": read_all(draft, progress), "base": read_all(base, progress)}
    prepare(options, progress, log, with_modelopt=True)
    windows = calibration.cut(texts, tokenizer_of(base, log), options.samples, min(options.seq_len, model.max_position))
    with bundle.staged_directory(out) as staging:
        progress.start("features", len(windows.calibration) + len(windows.held_out))
        table = embedding(draft, base, names)
        pairs = pairs_of(base, table, taps, windows, options, progress, log)
        weights = read_weights(draft, base, names, config)
        packed, beside, inside = calibrated(config, weights, plan, pairs[0], options, progress, log)
        progress.start("export", size_bytes(draft, plan, lambda module: stored(names, module)))
        pieces = written_pieces(draft, names, plan, packed)
        write_safetensors(staging / "model.safetensors", pieces, progress.advance)
        beside, inside = (modelopt.renamed(one, partial(on_disk, names)) for one in (beside, inside))
        write_sidecars(draft, staging, beside, inside, more=recorded_base(draft, base, base_dir))
        report = compare(config, weights, Checkpoint(staging), names, plan, pairs[1], progress)
        checking.refuse_broken(report, plan)
        manifest = write_manifest(staging, request, digests, plan, windows, report.as_json())
    notes = (*notes_of(plan, windows, options, texts), f"fc is left as it is; made for {request['base']['name']}")
    return Quantized(out, manifest, notes)


def check_pair(config: DraftConfig, model: ModelConfig, base: Checkpoint) -> None:
    remedy = "Pass --base-model-dir with the base that this draft was trained for."
    for what, ours, theirs in (
        ("vocabulary", config.vocab_size, model.vocab_size),
        ("tap width", config.target_hidden_size, model.decoder.hidden_size),
    ):
        if ours != theirs:
            raise PairingError(f"the draft's {what} is {ours}, that of {base.path} {theirs}.", remedy)


def stored_names(draft: Checkpoint, config: DraftConfig) -> dict[str, str]:
    """Own name -> name on disk of each tensor of the graph."""
    from edgespec.checkpoint.detect import check_tensors
    from edgespec.graphs import eagle

    expected = eagle.expected_tensors(config)
    names = eagle.stored_names(expected, draft)
    maps = [name for name in draft.tensors if name.removeprefix("model.") in eagle.MAPS]
    check_tensors({names[own]: shape for own, shape in expected.items()}, draft, maps)
    return names


def stored(names: Mapping[str, str], module: str) -> str:
    return names[f"{module}.weight"].removesuffix(".weight")


def plan_draft(draft: Checkpoint, names: Mapping[str, str], options: Options) -> Plan:
    """The Linears of the layers and, if asked for, the draft's own head."""
    shapes = {}
    for own, name in names.items():
        shape = draft.tensors[name].shape
        module = own.removesuffix(".weight")
        if len(shape) == 2 and (module.endswith("_proj") or (module == HEAD and options.lm_head_quantization)):
            shapes[module] = (shape[0], shape[1])
    if options.lm_head_quantization and HEAD not in shapes:
        raise UnsupportedModel(
            f"--lm-head-quantization: {draft.path} has no lm_head of its own, it uses the base's.",
            "Leave the flag out, and quantise the base's head with the base.",
        )
    plan = make_plan(shapes, options.quantization, options.lm_head_quantization, options.exclude)
    return Plan(plan.layers, ("fc", *plan.left_out), plan.body, plan.head)


# Calibration


def embedding(draft: Checkpoint, base: Checkpoint, names: Mapping[str, str]) -> Any:
    own = names.get("embed_tokens.weight")
    return to_torch(draft.read(own) if own else base.read(f"{EMBEDDING}.weight"))


def pairs_of(
    base: Checkpoint, table: Any, taps: tuple[int, ...], windows: calibration.Windows, options: Options,
    progress: Progress, log: modelopt.Log,
) -> tuple[list[Pair], list[Pair]]:  # fmt: skip
    """What the base feeds the draft: for calibration, and held out. The base is let go after that."""
    import torch

    from edgespec.quantize.eagle import features_of

    model = load_model(base, options.device, log)

    def pair(window: Sequence[int]) -> Pair:
        ids = torch.tensor([window], device=options.device)
        with modelopt.captured(log):
            features = features_of(model, taps, ids)[:-1].cpu()
        progress.advance(1)
        return features, table[ids[0, 1:].cpu()]

    return [pair(window) for window in windows.calibration], [pair(window) for window in windows.held_out]


def load_model(checkpoint: Checkpoint, device: str, log: modelopt.Log) -> Any:
    with modelopt.captured(log):
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype="auto", trust_remote_code=False)
        return model.eval().to(device)


def read_weights(draft: Checkpoint, base: Checkpoint, names: Mapping[str, str], config: DraftConfig) -> dict[str, Any]:
    """Own name -> tensor in its own type; the head is the base's where the draft has none."""
    weights = {own: to_torch(draft.read(name)) for own, name in names.items() if own != "embed_tokens.weight"}
    if not config.own_head:
        lent = f"{HEAD}.weight"
        weights[lent] = to_torch(base.read(lent if lent in base.tensors else f"{EMBEDDING}.weight"))
    return weights


def calibrated(
    config: DraftConfig, weights: Mapping[str, Any], plan: Plan, pairs: Sequence[Pair], options: Options,
    progress: Progress, log: modelopt.Log,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    from edgespec.quantize.eagle import Eagle3

    dtype = weights["fc.weight"].dtype
    module = Eagle3(config).to(dtype).eval()
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    module.to(options.device)
    inputs = [tuple(part.to(options.device, dtype) for part in pair) for pair in pairs]
    progress.start("calibrate", modelopt.steps(plan, len(inputs)))
    settings = modelopt.insert_quantizers(module, plan, plan.left_out, log)
    modelopt.calibrate(module, plan, inputs, lambda pair: module(*pair), progress.advance, log)
    few = tuple(part[:2] for part in inputs[0])
    return modelopt.pack(module, lambda: module(*few), dtype, log), *settings


# What is written


def written_pieces(draft: Checkpoint, names: Mapping[str, str], plan: Plan, packed: Mapping[str, Any]) -> list[Piece]:
    """The draft's tensors byte for byte, those of quantised Linears replaced by what stands for them."""
    modules = {names[f"{module}.weight"]: module for module in plan.layers}
    pieces = []
    for name in draft.tensors:
        if name not in modules:
            pieces.append(copied(draft, name))
            continue
        module, prefix = modules[name], name.removesuffix("weight")
        parts = {
            own.removeprefix(f"{module}."): tensor for own, tensor in packed.items() if own.startswith(f"{module}.")
        }
        for part in ("weight", *sorted(parts.keys() - {"weight", "bias"})):
            pieces.append(array_piece(prefix + part, to_numpy(parts[part])))
    return pieces


def on_disk(names: Mapping[str, str], name: str) -> str:
    """The name on disk of one of our Linears; any other string as it is."""
    return stored(names, name) if f"{name}.weight" in names else name


def recorded_base(draft: Checkpoint, base: Checkpoint, base_dir: str) -> dict[str, Any]:
    """So that `export` finds the base: where published configurations have its name."""
    name = str(base.path.resolve()) if Path(base_dir).is_dir() else base_dir
    speculators = draft.config.get("speculators_config")
    if isinstance(speculators, dict) and isinstance(speculators.get("verifier"), dict):
        return {"speculators_config": speculators | {"verifier": speculators["verifier"] | {"name_or_path": name}}}
    return {"base_model_name_or_path": name}


# The check


def compare(
    config: DraftConfig, weights: Mapping[str, Any], written: Checkpoint, names: Mapping[str, str], plan: Plan,
    pairs: Sequence[Pair], progress: Progress,
) -> checking.Report:  # fmt: skip
    """The draft before and after, on pairs that were held out; in float32."""
    import torch

    from edgespec.quantize.eagle import Eagle3

    with checking.read_back():
        quantization = read_quantization(written)
    assert quantization is not None
    progress.start("check", len(pairs))
    original = {name: tensor.float() for name, tensor in weights.items()}
    quantised, errors = dict(original), {}
    for module, scheme in plan.layers.items():
        with checking.read_back():
            weight = read_weight(written, quantization, stored(names, module))
        if weight is None or weight.scheme is not scheme:
            raise BuildError(f"{module} was not written as {scheme.name}.", "Please report this.")
        quantised[f"{module}.weight"], errors[module] = checking.effective(weight, original[f"{module}.weight"])
    for own, name in names.items():
        if own.removesuffix(".weight") not in plan.layers and own in original:
            assert np.array_equal(to_numpy(original[own]), written.read(name).astype(np.float32))
    before, after = Eagle3(config).eval(), Eagle3(config).eval()
    before.load_state_dict(original)
    after.load_state_dict(quantised)
    sums = checking.Sums()
    with torch.no_grad():
        for features, embeds in pairs:
            sums.add(before(features.float(), embeds.float()), after(features.float(), embeds.float()))
            progress.advance(1)
    return sums.report(errors)
