"""The original of a quantized checkpoint, from the manifest.json of `edgespec quantize`.

A draft belongs to the weights that it was trained on; quantization changes the checkpoint's
identity, but not the pair. Knows manifests, and when they do not match the weights beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.artifacts.manifest import QUANTIZE_KIND, QuantizeOrigin
from edgespec.checkpoint.files import Checkpoint
from edgespec.errors import BundleError

_UNKNOWN_ORIGIN = "so it is not known what these weights were quantized from"


@dataclass(frozen=True, slots=True)
class Origin:
    """The original of a quantized checkpoint, as far as it is known."""

    identity: str | None = None  # of the original checkpoint
    recorded: QuantizeOrigin | None = None  # as read, even if it does not match the weights
    doubt: str | None = None  # why the manifest is not trusted


def origin_of(checkpoint: Checkpoint, *, read_weights: bool = True) -> Origin:
    """Returns the origin of a quantized checkpoint.

    Reads all weights, or with `read_weights` False only their sizes. Changes of other files,
    such as a chat template, are ignored.
    """
    if not (checkpoint.path / file_names.MANIFEST).is_file():
        return Origin()
    try:
        if json_files.read_json(checkpoint.path / file_names.MANIFEST).get("kind") != QUANTIZE_KIND:
            return Origin()  # a manifest.json of another program
        recorded = QuantizeOrigin.from_dict(json_files.read_manifest(checkpoint.path))
    except BundleError as error:
        return Origin(doubt=f"{error.what}, {_UNKNOWN_ORIGIN}")
    try:
        identity = _identity(checkpoint, recorded, read_weights)
    except BundleError as error:
        return Origin(recorded=recorded, doubt=f"{error.what}, {_UNKNOWN_ORIGIN}")
    return Origin(identity, recorded)


def _identity(checkpoint: Checkpoint, recorded: QuantizeOrigin, read_weights: bool) -> str:
    where, again = checkpoint.path / file_names.MANIFEST, "Quantize the original again."
    listed = hashes.listed_files(checkpoint.path, recorded.files)
    weights = {info.file.name if info.file else "" for info in checkpoint.tensors.values()}
    if unlisted := sorted(weights - listed.keys()):
        raise BundleError(f"{where} does not list {unlisted[0] or 'pickled weights'}", again)
    entries = {
        name: entry
        for name, entry in listed.items()
        if name in weights or name.endswith(".safetensors")
    }
    for fault in hashes.faults(
        checkpoint.path, entries, read_up_to=math.inf if read_weights else 0
    ):
        raise fault
    if not recorded.identity:
        raise BundleError(f"{where} does not declare its source", again)
    return recorded.identity
