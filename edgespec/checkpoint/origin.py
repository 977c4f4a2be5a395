"""What a checkpoint was quantized from, as the manifest.json says that `edgespec quantize` wrote
beside its weights.

A pair belongs together by the weights that its draft was trained on; quantizing them changes the
checkpoint's identity and not the pair. Knows when such a manifest is not to be believed: copied
beside other weights, say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec import bundle
from edgespec.checkpoint.files import Checkpoint
from edgespec.errors import BundleError

_DISBELIEVED = "so it is not known what these weights were quantized from"


@dataclass(frozen=True, slots=True)
class Origin:
    """`identity` is the original checkpoint's, None where it is not known; `doubt` says why a
    manifest is not believed.

    `manifest` is what was read, believed or not; None where quantize wrote none.
    """

    identity: str | None = None
    manifest: Mapping[str, Any] | None = None
    doubt: str | None = None


def origin_of(checkpoint: Checkpoint, *, hashes: bool = True) -> Origin:
    """The origin of a quantized checkpoint. Reads all of its weights, or with `hashes` False their
    sizes alone.

    Texts beside the weights (a chat template, say) may be changed without another origin.
    """
    if not (checkpoint.path / bundle.MANIFEST).is_file():
        return Origin()
    try:
        manifest = bundle.read_json(checkpoint.path / bundle.MANIFEST)
        if manifest.get("kind") != "quantize":
            return Origin()  # anybody's manifest.json
        manifest = bundle.read_manifest(checkpoint.path)
    except BundleError as error:
        return Origin(doubt=f"{error.what}, {_DISBELIEVED}")
    try:
        identity = _identity(checkpoint, manifest, hashes)
    except BundleError as error:
        return Origin(manifest=manifest, doubt=f"{error.what}, {_DISBELIEVED}")
    return Origin(identity, manifest)


def _identity(checkpoint: Checkpoint, manifest: Mapping[str, Any], hashes: bool) -> str:
    where, again = checkpoint.path / bundle.MANIFEST, "Quantize the original again."
    listed = bundle.listed_files(checkpoint.path, manifest.get("files"))
    weights = {info.file.name if info.file else "" for info in checkpoint.tensors.values()}
    if strange := sorted(weights - listed.keys()):
        raise BundleError(f"{where} does not list {strange[0] or 'pickled weights'}", again)
    entries = {
        name: entry
        for name, entry in listed.items()
        if name in weights or name.endswith(".safetensors")
    }
    for fault in bundle.faults(checkpoint.path, entries, read_up_to=math.inf if hashes else 0):
        raise fault
    source = manifest.get("source")
    identity = source.get("identity") if isinstance(source, dict) else None
    if not isinstance(identity, str) or not identity:
        raise BundleError(f"{where} does not tell its source", again)
    return identity
