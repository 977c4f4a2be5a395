"""What stands beside a graph: the runtime configuration, the tokenizer, the vocabulary map.

File names and keys are those of TensorRT Edge-LLM where it has them, so that its users find what
they know. Knows nothing of graphs' insides.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from edgespec.artifacts import file_names, hashes
from edgespec.artifacts.graph_quantization import CacheScales, GraphQuantization, SchemeUse
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import all_kv_scales
from edgespec.checkpoint.quantization import Quantization
from edgespec.checkpoint.source import some_of
from edgespec.errors import BundleError, CheckpointError, RequestError
from edgespec.quantization.schemes import SCHEMES


def graph_quantization(
    products: Iterable[tuple[str, str | None, int | None]],
    checkpoint: Checkpoint,
    quantization: Quantization | None,
) -> GraphQuantization | None:
    """What config.json says of quantized weights; None: there are none, and no scales of a cache
    either.

    `products` are the graph's Linears with scheme and block.
    """
    rows = sorted(products, key=lambda row: row[0])
    names = sorted({name for _, name, _ in rows if name})
    kv_cache = quantization.kv_cache if quantization is not None else None
    if not (names or kv_cache):
        return None
    return GraphQuantization(
        # None: a shared lm_head alone
        layout=quantization.layout if quantization is not None else None,
        schemes={name: scheme_use(name, rows) for name in names},
        lm_head=next((scheme for node, scheme, _ in rows if node == "lm_head"), None),
        unquantized=tuple(node for node, scheme, _ in rows if scheme is None),
        kv_cache=CacheScales(type=kv_cache, scales=all_kv_scales(checkpoint)) if kv_cache else None,
        golden=GOLDEN_WEIGHTS,
    )


def scheme_use(name: str, rows: Iterable[tuple[str, str | None, int | None]]) -> SchemeUse:
    """How the Linears `rows` use one scheme."""
    blocks = [block for _, scheme, block in rows if scheme == name]
    activations = SCHEMES[name].activations
    return SchemeUse(
        linears=len(blocks),
        blocks=tuple(sorted({block for block in blocks if block})),
        activations=activations,
        activations_in_graph=not activations.startswith("dynamic"),
    )


# How golden outputs are made of quantized weights: as the canonical graph is, but for the rounding
# of sums
GOLDEN_WEIGHTS = "dequantized weights in float32; activations rounded where the graph does it"


def quantization_notes(quantization: GraphQuantization | None) -> tuple[str, ...]:
    """Notes for the user on quantized weights."""
    if quantization is None:
        return ()
    notes = []
    for name, use in quantization.schemes.items():
        blocks = f" in blocks of {', '.join(map(str, use.blocks))}" if use.blocks else ""
        left = (
            ""
            if use.activations_in_graph
            else "; its activations are quantized by engines that can, not in the graph"
        )
        notes.append(f"{name}{blocks}: {use.linears} Linears{left}")
    if quantization.unquantized:
        notes.append(f"not quantized: {some_of(quantization.unquantized)}")
    if quantization.kv_cache:
        notes.append(
            f"{quantization.kv_cache.type} cache: its scales are recorded and not applied; the"
            " graph's caches are float32"
        )
    return tuple(notes)


def text_identity(checkpoint: Checkpoint) -> str:
    """sha256 over the files with settings and those of the tokenizer, as far as they are there."""
    digest = hashlib.sha256()
    for name in (file_names.CONFIG, "hf_quant_config.json", *file_names.TOKENIZER_FILES):
        path = checkpoint.path / name
        digest.update(f"{name}:{hashes.sha256_file(path) if path.is_file() else None}\n".encode())
    return digest.hexdigest()


def processor_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """Name -> sha256 of the files that say how images are prepared, as far as they are there."""
    paths = (checkpoint.path / name for name in file_names.PROCESSOR_FILES)
    return {path.name: hashes.sha256_file(path) for path in paths if path.is_file()}


def copy_processor(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy the files that say how images are prepared."""
    for name in processor_hashes(checkpoint):
        shutil.copyfile(checkpoint.path / name, directory / name)


def copy_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    """Copy tokenizer and chat template files; a checkpoint with only `tokenizer.model` gets a
    tokenizer.json. CheckpointError for a chat template that cannot be compiled."""
    check_chat_template(checkpoint.path)
    for name in file_names.TOKENIZER_FILES:
        source = checkpoint.path / name
        if source.is_file():
            shutil.copyfile(source, directory / name)
    if (directory / "tokenizer.json").is_file():
        check_tokenizer(checkpoint.path / "tokenizer.json")
        return
    if not (directory / "tokenizer.model").is_file():
        message = f"{checkpoint.place} has neither tokenizer.json nor tokenizer.model"
        raise CheckpointError(message, "Put the model's tokenizer files beside its weights.")
    from edgespec.export.tokenizer_model import convert

    convert(checkpoint.path, directory)
    check_tokenizer(directory / "tokenizer.json")


def check_tokenizer(path: Path) -> None:
    """CheckpointError for a tokenizer.json that no engine would open."""
    from edgespec.prompts.tokenizer_file import read_tokenizer

    try:
        read_tokenizer(path)
    except BundleError as error:
        raise CheckpointError(error.what, error.remedy) from error


def check_chat_template(source: Path) -> None:
    """CheckpointError where the chat template cannot be compiled: each request would fail on it,
    and nothing in an engine directory can be fixed by hand."""
    from edgespec.prompts.template import check_template

    try:
        check_template(source)
    except (BundleError, RequestError) as error:
        message = error.what.replace("The chat template in ", f"the chat template in {source}/")
        remedy = (
            "Fix it there, or remove it: requests then write the complete prompt"
            ' ("apply_chat_template": false).'
        )
        raise CheckpointError(message, remedy) from error
