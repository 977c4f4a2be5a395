"""What lies at a path: a checkpoint, an exported directory, an engine directory, a safetensors
file, or nothing known.

Knows by which files these are distinguished. What is shown of each stands in the package that
knows it. Nothing is run, and of weights only the headers are read, unless hashes are compared.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, directories, file_names, json_files
from edgespec.artifacts.directories import DirectoryKind
from edgespec.backends.engine_dir import holds_encoder
from edgespec.backends.registry import engine_file_names
from edgespec.backends.summary import (
    EnginesSummary,
    ExportSummary,
    engines_summary,
    export_summary,
)
from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.gguf import source as gguf
from edgespec.checkpoint.pickled import PICKLED
from edgespec.checkpoint.source import some_of
from edgespec.checkpoint.summary import (
    CheckpointSummary,
    FileSummary,
    summarize_checkpoint,
    summarize_file,
)
from edgespec.config import DraftConfig, ModelConfig
from edgespec.contract import Role
from edgespec.errors import BundleError, EdgeSpecError, UnsupportedModel, noted
from edgespec.runtime.costs.cost_profile import (
    CostProfile,
    StoredProfile,
    find_profile,
    read_profiles,
)
from edgespec.runtime.measuring import cost_description

SMALL_BYTES = 1 << 20  # files up to this size are compared by their hash in any case
_STAGING = re.compile(r"\.(.+)\.tmp-(\d+)")
_UNFINISHED = re.compile(r"\.(.+)\.quantize")
_TAKES = (
    "edgespec inspect takes a checkpoint, a .gguf or .safetensors file, or what export or build"
    " wrote."
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is at a path. `problems` are what is wrong, each with its remedy; `notes` what is
    not."""

    path: Path
    summary: CheckpointSummary | FileSummary | ExportSummary | EnginesSummary
    problems: tuple[EdgeSpecError, ...]
    notes: tuple[str, ...]
    costs: tuple[CostProfile, ...] = ()  # of engines, measured on this device

    def to_dict(self) -> dict[str, Any]:
        """What --json prints of it, without problems and notes."""
        out = self.summary.to_dict()
        if isinstance(self.summary, EnginesSummary):
            out["costs"] = [cost_description.to_dict(profile) for profile in self.costs]
        return out


def inspect(path: Path, *, verify: bool = False) -> Inspection:
    """Look at a path; with `verify` every file is hashed that a manifest lists.

    Raises BundleError where nothing known is there, CheckpointError where nothing at all can be
    read of it.
    """
    problems: list[EdgeSpecError] = []
    read_up_to = math.inf if verify else SMALL_BYTES
    kind = kind_of(path)
    if kind == "gguf":
        looked = inspect(gguf.directory_of(path), verify=verify)
        return replace(looked, path=path)
    notes = notes_of_directory(path)
    if kind == "safetensors":
        return Inspection(path, summarize_file(path), (), notes)
    if kind == "checkpoint":
        summary = look_at_checkpoint(path, problems, read_up_to)
        return Inspection(path, summary, tuple(problems), (*notes_of(summary), *notes))
    look_at = export_summary if kind == "export" else engines_summary
    directory_summary = look_at(path, problems, read_up_to)
    if directory_summary.not_in_manifest:
        notes = (*notes, f"not in the manifest: {some_of(directory_summary.not_in_manifest)}")
    visual = Role.VISUAL.value
    if holds_encoder(path / visual, Role.VISUAL):
        notes = (*notes, f"{visual}/ holds an image encoder: edgespec inspect {path / visual}")
    costs = look_at_costs(path) if isinstance(directory_summary, EnginesSummary) else []
    why = sorted({f"costs: {one.why}" for one in costs if one.why is not None})
    profiles = tuple(one.profile for one in costs if one.profile is not None)
    return Inspection(path, directory_summary, tuple(problems), (*notes, *why), profiles)


def look_at_costs(path: Path) -> list[StoredProfile]:
    """The cost profiles of a directory of engines: each one, or why it is not used here."""
    try:
        kept = list(read_profiles(path))
    except BundleError as error:
        return [StoredProfile(None, error.what)]
    return [
        find_profile(path, one.role, one.method, has_engine=one.method is not None) for one in kept
    ]


def kind_of(path: Path) -> str:
    """`checkpoint`, `export`, `engines`, `safetensors` or `gguf`. Raises BundleError for anything
    else, and for what an unfinished run left."""
    directory_kind = directories.kind_of(path)
    if directory_kind is DirectoryKind.FILE:
        return kind_of_file(path)
    if directory_kind is DirectoryKind.MISSING:
        raise BundleError(
            f"{path} does not exist", "Give a directory or a .safetensors file that is there."
        )
    refuse_staging(path)
    names = {file.name for file in path.iterdir()}
    if directory_kind is DirectoryKind.EMPTY:
        raise BundleError(f"{path} is empty", "If a run was to fill it, run it again.")
    kind = manifest_kind(path) if file_names.MANIFEST in names else None
    if kind is DirectoryKind.EMITTED:
        raise BundleError(f"{path} is {kind.value}", directories.import_remedy(path))
    if kind is not None:
        return {
            DirectoryKind.CHECKPOINT: "checkpoint",
            DirectoryKind.EXPORT: "export",
            DirectoryKind.ENGINES: "engines",
        }[kind]
    refuse_without_manifest(path, names)
    if file_names.CONFIG in names or any(name.endswith(".safetensors") for name in names):
        return "checkpoint"
    raise nothing_known(path)


def kind_of_file(path: Path) -> str:
    """`safetensors` or `gguf`, by the suffix. Raises BundleError for any other file."""
    if (suffix := path.suffix.lower()) in (".safetensors", gguf.SUFFIX):
        return suffix[1:]
    remedy = (
        f"Give its directory: {path.parent}"
        if path.suffix in (".json", ".data", *directories.GRAPHS)
        else _TAKES
    )
    raise BundleError(f"{path} is a file of another kind", remedy)


def manifest_kind(path: Path) -> DirectoryKind | None:
    """What the manifest says that the directory is; None where it is somebody else's. Raises
    BundleError for a damaged one."""
    json_files.read_json(path / file_names.MANIFEST)
    return directories.manifest_kind(path)


def refuse_staging(path: Path) -> None:
    """Raises BundleError for what a run has not finished yet, or never will."""
    if _UNFINISHED.fullmatch(path.absolute().name) and (path / "progress.json").is_file():
        message = f"{path} is an unfinished run of edgespec quantize"
        raise BundleError(message, "Run its command again: it goes on at the layer where it was.")
    match = _STAGING.fullmatch(path.absolute().name)
    if match is None:
        return
    if atomic.is_held(path):
        raise BundleError(
            f"{path} is being written by process {match[2]}",
            f"Wait for it: {match[1]} will be there.",
        )
    raise BundleError(
        f"{path} was left unfinished by a run that was killed",
        "Remove it, and run the command again.",
    )


def refuse_without_manifest(path: Path, names: set[str]) -> None:
    """Raises BundleError where the graph or an engine is there without a manifest."""
    for files, command in (([file_names.MODEL], "export"), (engine_file_names(), "build")):
        if missing := [name for name in files if name in names]:
            message = (
                f"{path} has {missing[0]} and no {file_names.MANIFEST} of edgespec: it is"
                " half-written, or part of a copy"
            )
            raise BundleError(
                message, f"Copy the whole directory, or run edgespec {command} again."
            )


def nothing_known(path: Path) -> BundleError:
    """The error for a directory of no known kind; its remedy names those below it that are."""
    names = [
        f"{depth}{name}"
        for depth in ("*/", "*/*/", "*/*/*/")
        for name in (file_names.MANIFEST, file_names.CONFIG)
    ]
    marks = sorted({file.parent for name in names for file in path.glob(name)})
    shown = [
        str(mark) for mark in marks if not any(_STAGING.fullmatch(part) for part in mark.parts)
    ]
    if shown:
        return BundleError(
            f"{path} holds nothing known itself", f"Look at one of these: {some_of(shown)}"
        )
    if files := sorted(path.glob(f"*{gguf.SUFFIX}")):
        return BundleError(f"{path} has {some_of(f.name for f in files)}", f"Give {files[0]}")
    if any(path.glob("*.bin")):
        return BundleError(
            f"{path} has weights and no config.json", "Download the whole checkpoint."
        )
    return BundleError(
        f"{path} holds nothing known: {some_of(sorted(file.name for file in path.iterdir()))}",
        _TAKES,
    )


# A checkpoint


def look_at_checkpoint(
    path: Path, problems: list[EdgeSpecError], read_up_to: float
) -> CheckpointSummary:
    """Its summary; what is wrong with its tensors and its vocabulary map is added to `problems`."""
    checkpoint = Checkpoint(path)
    if (pickled := only_pickled(path)) is not None:
        config = checkpoint.config
        return CheckpointSummary(
            architectures=config.get("architectures"),
            model_type=config.get("model_type"),
            pickled=pickled,
        )
    summary = summarize_checkpoint(checkpoint, problems, read_up_to)
    model = summary.config
    if model is None:
        return summary
    from edgespec.graphs.completeness import check_complete, check_vision

    with noted(problems):
        check_complete(checkpoint, model)
        if isinstance(model, ModelConfig):
            summary = replace(summary, heads=heads_of(checkpoint, model))
    if isinstance(model, ModelConfig):
        with noted(problems):
            check_vision(checkpoint, model)
    if isinstance(model, DraftConfig) and read_up_to == math.inf:
        with noted(problems):
            read_d2t(checkpoint, model)
    return summary


def heads_of(checkpoint: Checkpoint, model: ModelConfig) -> dict[str, str | None]:
    """The drafts in a base's checkpoint: method -> why it cannot be used, None where it can.

    Raises CheckpointError where one is damaged.
    """
    from edgespec.graphs.decoder import Decoder
    from edgespec.graphs.draft import DraftSource
    from edgespec.graphs.registry import DRAFTS

    heads: dict[str, str | None] = {}
    for method, row in DRAFTS.items():
        if row.in_base is None or not row.in_base(checkpoint, model):
            continue
        try:
            row.open(DraftSource(Decoder.open(checkpoint, model)))
            heads[method] = None
        except UnsupportedModel as error:
            heads[method] = f"{error.what} {error.remedy}"
    return heads


def only_pickled(path: Path) -> str | None:
    """The name of the pickled weights where there are no others; None else. They are not read: that
    would take torch, and all of them."""
    pickled = [name for name in (*PICKLED, f"{PICKLED[0]}.index.json") if (path / name).is_file()]
    return pickled[0] if pickled and not any(path.glob("*.safetensors*")) else None


def notes_of(summary: CheckpointSummary) -> tuple[str, ...]:
    """What a user should know of a checkpoint and is not wrong."""
    notes = [why for why in summary.heads.values() if why]
    if summary.pickled:
        notes.append(
            f"{summary.pickled}: pickled weights are not looked into; export reads them with"
            " `allow_pickle`"
        )
    return tuple(notes)


def notes_of_directory(path: Path) -> tuple[str, ...]:
    """What runs have left in a directory."""
    if not path.is_dir():
        return ()
    left = sorted(file.name for file in path.iterdir() if _STAGING.fullmatch(file.name))
    return tuple(f"{name} is of a run that was killed, or is not over" for name in left)
