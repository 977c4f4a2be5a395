"""An engine directory: base and draft together, with what the runtime needs beside them.

Knows file names, roles, pairing, and how a built engine gets in without ever looking finished when
it is not. Knows no engine library: each backend writes its own engine files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.config import RopeConfig
from edgespec.contract import MAX_BATCH_SIZE, GraphShape, Limits, Role
from edgespec.errors import BundleError, LimitError, PairingError
from edgespec.methods import dflash
from edgespec.methods.aux_layers import default_aux_layers
from edgespec.rope import rope_from_dict

STEMS = {Role.LLM: "llm", Role.BASE: "spec_base", Role.DRAFT: "spec_draft"}
CONFIGS = {Role.LLM: "config.json", Role.BASE: "base_config.json", Role.DRAFT: "draft_config.json"}
DRAFT_EMBEDDING = "draft_embedding.safetensors"
SPEC_DECODE_TYPES = ("none", "eagle3", "mtp", "dflash")
ELSEWHERE = "use another engine directory"
OTHER_DRAFT = f"Take a draft that was trained for this base, or {ELSEWHERE}."
COMPONENTS = ("llm", "mtp_draft", "dflash_draft")  # where export puts what it makes


@dataclass(frozen=True, slots=True)
class OnnxDir:
    """An exported component as `build` reads it: role from its config.json, files checked against
    its manifest."""

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    role: Role


def open_onnx_dir(path: Path, *, spec_base: bool, spec_draft: bool) -> OnnxDir:
    """Read and check an exported directory; the flags, where given, must say what its config.json
    says."""
    if spec_base and spec_draft:
        raise BundleError(
            "--spec-base and --spec-draft exclude each other",
            "Build base and draft one after the other.",
        )
    if not path.is_dir():
        raise BundleError(
            f"--onnx-dir {path} is not a directory", "Give a directory that edgespec export wrote."
        )
    inside = [path / name for name in COMPONENTS if (path / name / bundle.CONFIG).is_file()]
    if inside and not (path / bundle.CONFIG).is_file():
        raise BundleError(
            f"{path} holds no config.json", f"Give the component itself: --onnx-dir {inside[0]}"
        )
    config, manifest = bundle.read_json(path / bundle.CONFIG), bundle.read_manifest(path)
    role = role_of(config, path)
    asked = Role.BASE if spec_base else Role.DRAFT if spec_draft else role
    if asked is not role:
        remedy = f"Leave the flag out, or give the directory of the {asked.value}."
        raise BundleError(
            f"{path} is exported as {role.value}, the flag says {asked.value}", remedy
        )
    bundle.check_files(path, manifest.get("files"))
    return OnnxDir(path, config, manifest, role)


def role_of(config: Mapping[str, Any], path: Path) -> Role:
    kind, role = config.get("spec_decode_type"), config.get("engine_role")
    if kind not in SPEC_DECODE_TYPES or role not in {r.value for r in Role}:
        what = f"{path / bundle.CONFIG}: spec_decode_type {kind!r} with engine_role {role!r}"
        raise BundleError(
            what,
            f"This version builds: {', '.join(SPEC_DECODE_TYPES)}. Export the checkpoint again.",
        )
    if (kind == "none") != (role == Role.LLM.value):
        raise BundleError(
            f"{path / bundle.CONFIG}: role {role} contradicts spec_decode_type {kind}",
            "Export the checkpoint again.",
        )
    return Role(role)


def check_limits(limits: Limits) -> None:
    for name, value in asdict(limits).items():
        if value < 1:
            raise LimitError(f"--{name.replace('_', '-')} is {value}", "It must be at least 1.")
    if limits.max_input_len > limits.max_kv_cache_capacity:
        raise LimitError(
            f"--max-input-len {limits.max_input_len} exceeds --max-kv-cache-capacity"
            f" {limits.max_kv_cache_capacity}",
            "Raise the capacity or lower the input length.",
        )
    if limits.max_batch_size > MAX_BATCH_SIZE:
        raise LimitError(
            f"--max-batch-size {limits.max_batch_size} exceeds {MAX_BATCH_SIZE}: with so many"
            " sequences a step takes longer in proportion, and nobody is served sooner",
            f"Build with --max-batch-size {MAX_BATCH_SIZE} at most.",
        )


def check_block_limit(onnx: OnnxDir, limits: Limits) -> None:
    """A draft that makes blocks writes a whole one in a call."""
    if not shape_of(onnx.config).block:
        return
    size = onnx.config["dflash_config"]["block_size"]
    if limits.max_draft_tree_size < size:
        what = (
            f"--max-draft-tree-size {limits.max_draft_tree_size}: the draft makes blocks of {size}"
        )
        raise LimitError(what, f"Build with --max-draft-tree-size {size} or more.")


def check_pairing(
    base: Mapping[str, Any], draft: Mapping[str, Any], built: Role | None = None
) -> None:
    """Refuse a base and a draft, by their configs, that do not belong together.

    `built` is the one that is being built beside the other; None where both are there.
    """
    check_kinds(base["spec_decode_type"], draft["spec_decode_type"], built)
    pair, layers = draft["pair"], base["num_hidden_layers"]
    if pair["base_identity"] not in (None, base["identity"]) and draft_root(pair) != root_of(base):
        raise PairingError(*another_base(draft["spec_decode_type"], built))
    if draft["vocab_size"] != base["vocab_size"]:
        what = (
            f"the draft was made for a vocabulary of {draft['vocab_size']}, the base has"
            f" {base['vocab_size']}"
        )
        raise PairingError(what, OTHER_DRAFT)
    if pair["target_hidden_size"] != base["hidden_size"]:
        what = (
            f"the draft reads features {pair['target_hidden_size']} wide, the base's are"
            f" {base['hidden_size']}"
        )
        raise PairingError(what, OTHER_DRAFT)
    if not pair["own_embedding"] and draft["hidden_size"] != base["hidden_size"]:
        what = (
            f"the draft shares the base's embedding but is {draft['hidden_size']} wide, not"
            f" {base['hidden_size']}"
        )
        raise PairingError(what, OTHER_DRAFT)
    if draft["spec_decode_type"] == "mtp":
        return
    if draft["spec_decode_type"] == dflash.NAME:
        return check_block_pair(base, draft)
    wanted, emitted = (
        list(pair["tap_ids"] or default_aux_layers(layers)),
        base["eagle_hidden_state_layers"],
    )
    if wanted != emitted:
        flag = ",".join(map(str, wanted))
        what = f"the base emits hidden_states {emitted}, the draft was trained on {wanted}"
        raise PairingError(
            what, f"Export the base again with --eagle-base --aux-layers {flag}, or {ELSEWHERE}."
        )
    if draft["graph"]["base_features"] != base["graph"]["features"]:
        what = (
            f"the draft reads {pair['num_taps']} taps, the base emits"
            f" {len(base['eagle_hidden_state_layers'])}"
        )
        remedy = (
            "Export the base again with --aux-layers naming as many as the draft was trained on,"
            f" or {ELSEWHERE}."
        )
        raise PairingError(what, remedy)


def another_base(kind: str, built: Role | None) -> tuple[str, str]:
    """What and remedy where the draft was exported for other weights; each side keeps the other
    out, so it can be mended here only where the base is to stay and the draft can be exported
    anew.
    """
    if kind == "mtp":
        what = "the MTP head and the base were exported from different checkpoints"
        return what, f"Export both at once (edgespec export MODEL OUT --mtp), and {ELSEWHERE}."
    what = (
        "the draft was exported for another base checkpoint than the one in this engine directory"
    )
    if built is Role.BASE:
        what = (
            "the draft in this engine directory was exported for another base checkpoint than"
            " this one"
        )
        return what, f"{ELSEWHERE.capitalize()} for this base and a draft of its own."
    return what, f"Export the draft again with --base-model-dir naming the base, or {ELSEWHERE}."


def check_kinds(base: str, draft: str, built: Role | None = None) -> None:
    """Refuse a base that emits what another kind of draft reads."""
    if base == draft:
        return
    what = f"the draft is {KINDS[draft].name}, the base was exported for {KINDS[base].name}"
    again = f"xport the base again for that draft: edgespec export MODEL OUT {KINDS[draft].flag}"
    if built is Role.BASE:
        raise PairingError(
            what, f"{ELSEWHERE.capitalize()} for this base and its own draft, or e{again}."
        )
    raise PairingError(what, f"E{again}, or {ELSEWHERE}.")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of draft: as it follows "for", and the flag that exports its base."""

    name: str
    flag: str


KINDS = {
    "eagle3": Kind("an EAGLE-3 draft", "--eagle-base"),
    "mtp": Kind("an MTP head", "--mtp"),
    "dflash": Kind("a DFlash draft", "--dflash-base --dflash-draft-dir DRAFT"),
}


def check_block_pair(base: Mapping[str, Any], draft: Mapping[str, Any]) -> None:
    """What is a DFlash pair's own: the layers read, and a mask token that the base knows."""
    pair, again = (
        draft["pair"],
        f"Export the base again with {KINDS['dflash'].flag}, or {ELSEWHERE}.",
    )
    depth, layers = pair["num_target_layers"], base["num_hidden_layers"]
    if depth not in (None, layers):
        what = f"the draft was trained for a base of {depth} layers, this one has {layers}"
        raise PairingError(what, OTHER_DRAFT)
    wanted, emitted = (config["dflash_config"]["target_layer_ids"] for config in (draft, base))
    if wanted != emitted:
        what = (
            f"the base emits the outputs of layers {emitted}, the draft was trained on those of"
            f" {wanted}"
        )
        raise PairingError(what, again)
    if draft["graph"]["base_features"] != base["graph"]["features"]:
        what = (
            f"the draft reads features {draft['graph']['base_features']} wide, the base emits "
            f"{base['graph']['features']}"
        )
        raise PairingError(what, again)


def root_of(base: Mapping[str, Any]) -> str:
    """The identity of the weights that a base stems from: those that it was quantised from, where
    that is known."""
    root: str = base.get("quantized_from") or base["identity"]
    return root


def draft_root(pair: Mapping[str, Any]) -> str | None:
    """The same of the base that a draft was exported for; None where it was exported without
    one."""
    root: str | None = pair.get("base_quantized_from") or pair["base_identity"]
    return root


def check_against_other(engine_dir: Path, built: OnnxDir) -> None:
    """Check what is built against what the engine directory already holds: the pairing, and one
    model a directory."""
    there = read_engines(engine_dir)
    twin = {Role.BASE: Role.LLM, Role.LLM: Role.BASE}.get(built.role)
    if twin is not None and twin.value in there:
        identity = bundle.read_json(engine_dir / CONFIGS[twin])["identity"]
        if identity != built.config["identity"]:
            what = (
                f"{engine_dir} holds the {twin.value} engine of another model; both would share one"
                " tokenizer"
            )
            raise BundleError(what, "Choose another --engine-dir.")
    other = {Role.BASE: Role.DRAFT, Role.DRAFT: Role.BASE}.get(built.role)
    if other is None or other.value not in there:
        return
    partner = bundle.read_json(engine_dir / CONFIGS[other])
    base, draft = (built.config, partner) if built.role is Role.BASE else (partner, built.config)
    check_pairing(base, draft, built.role)


def engine_config(onnx: OnnxDir, limits: Limits) -> dict[str, Any]:
    """The engine's config: the export's, and the limits that it is built for under the mirrored
    tool's keys."""
    builder = asdict(limits) | {
        "spec_base": onnx.role is Role.BASE,
        "spec_draft": onnx.role is Role.DRAFT,
    }
    # a plain engine verifies the drafts of methods that need no engine
    del builder["max_verify_tree_size" if onnx.role is Role.DRAFT else "max_draft_tree_size"]
    return dict(onnx.config) | {"builder_config": builder}


def shape_of(config: Mapping[str, Any]) -> GraphShape:
    return GraphShape.from_dict(config["graph"])


def local_rope_of(config: Mapping[str, Any]) -> RopeConfig | None:
    """Of the layers that read the second rotary table; None: there is one table."""
    return rope_from_dict(config["local_rope"]) if "local_rope" in config else None


def ropes_of(config: Mapping[str, Any]) -> tuple[RopeConfig, ...]:
    """The rotary embeddings of the graph's tables, one or two."""
    local = local_rope_of(config)
    return (rope_of(config),) if local is None else (rope_of(config), local)


def rope_of(config: Mapping[str, Any]) -> RopeConfig:
    return rope_from_dict(config["rope"])


def sidecars(onnx: OnnxDir) -> dict[str, Path]:
    """Engine file name -> exported file that is copied to it."""
    if onnx.role is Role.DRAFT:
        wanted = {bundle.D2T: bundle.D2T, DRAFT_EMBEDDING: bundle.EMBEDDING}
    else:
        wanted = {name: name for name in (bundle.EMBEDDING, *bundle.TOKENIZER_FILES)}
    return {new: onnx.path / old for new, old in wanted.items() if (onnx.path / old).is_file()}


def install(staging: Path, engine_dir: Path, role: Role, entry: dict[str, Any]) -> None:
    """Move a finished engine's files from `staging` into `engine_dir`.

    The manifest is without the role while files move, and gains it last: a run killed between
    leaves a directory that says that this engine is not there.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(staging.iterdir()):
        stat = path.stat()
        files[path.name] = {
            "bytes": stat.st_size,
            "sha256": bundle.sha256_file(path),
            "mtime_ns": stat.st_mtime_ns,
        }
    with locked(engine_dir):
        engines = read_engines(engine_dir)
        old = engines.pop(role.value, None)
        if old is not None:
            write_engines(engine_dir, engines)
            for name in set(old["files"]) - names_of(engines.values()):
                bundle.contained(engine_dir, name).unlink(missing_ok=True)
        try:
            for name in files:
                (staging / name).replace(engine_dir / name)
            write_engines(engine_dir, engines | {role.value: entry | {"files": files}})
        except BaseException:
            for name in set(files) - names_of(engines.values()):
                (engine_dir / name).unlink(missing_ok=True)
            raise


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, so that a base and a draft built at the same time both get in."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def names_of(engines: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for engine in engines for name in engine["files"]}


def read_engines(engine_dir: Path) -> dict[str, dict[str, Any]]:
    """The finished engines of a directory by role; none where there is no manifest yet."""
    if not (engine_dir / bundle.MANIFEST).exists():
        return {}
    manifest = bundle.read_manifest(engine_dir)
    if manifest.get("kind") != "engine":
        what = f"{engine_dir} is no engine directory (its manifest says {manifest.get('kind')!r})"
        raise BundleError(what, "Choose another --engine-dir.")
    engines = manifest.get("engines")
    entries = engines.values() if isinstance(engines, dict) else (None,)
    if not isinstance(engines, dict) or not all(
        isinstance(e, dict) and {"files", "fingerprint"} <= e.keys() for e in entries
    ):
        what = f"{engine_dir / bundle.MANIFEST} does not describe engines"
        raise BundleError(
            what, "Choose another --engine-dir, or remove this one and build its engines again."
        )
    return engines


def write_engines(engine_dir: Path, engines: dict[str, dict[str, Any]]) -> None:
    value = {
        "format": bundle.MANIFEST_FORMAT,
        "kind": "engine",
        **bundle.provenance(),
        "engines": engines,
    }
    bundle.write_json(engine_dir / bundle.MANIFEST, value)


def open_engine(engine_dir: Path, role: Role) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, manifest entry) of a finished engine, its files checked; BundleError with the remedy
    otherwise."""
    engines = read_engines(engine_dir) if engine_dir.is_dir() else {}
    if role.value not in engines:
        there = ", ".join(engines) or "no engine"
        raise BundleError(
            f"{engine_dir} has no {role.value} engine (it has: {there})", missing_remedy(role)
        )
    entry = engines[role.value]
    bundle.check_files(engine_dir, entry["files"], trust_unchanged=True)
    return bundle.read_json(engine_dir / CONFIGS[role]), entry


def missing_remedy(role: Role) -> str:
    flags = " or ".join(kind.flag for kind in KINDS.values())
    made = {
        Role.LLM: "edgespec export MODEL OUT",
        Role.BASE: f"edgespec export MODEL OUT with {flags}",
    }
    export = made.get(role, "edgespec export DRAFT OUT")
    return f"Run {export}, then edgespec build with --engine-dir naming this directory."


def copy_sidecars(onnx: OnnxDir, staging: Path, skip: tuple[str, ...] = ()) -> None:
    for name, source in sidecars(onnx).items():
        if name in skip:
            continue
        shutil.copyfile(source, staging / name)
