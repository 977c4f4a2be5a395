"""Checkpoints, exports and engines that somebody changed, as a table: what is changed, and what the
refusal must name.

Each row is applied to a copy of a sound directory. With `rewrite` the manifest is written anew, so
that sizes and hashes fit what was changed. Knows formats on disk; `scripts/tamper.py` runs all rows
through the command line, the tests a part of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgespec.contract import INPUT_SCALE

GONE = object()  # the key is removed
Change = Callable[[Path], None]


@dataclass(frozen=True)
class Tamper:
    """`change` is done to a copy of `where`; the refusal must contain `said`. `by_run`: it shows
    only when the engine library runs."""

    name: str
    where: str  # base, draft: checkpoints; onnx_base, onnx_draft: exports; engines
    change: Change
    said: str
    rewrite: bool = True
    by_run: bool = False


# ---- changes


def set_key(file: str, path: str, value: Any) -> Change:
    """The value at a dotted path of a JSON file; GONE removes the key."""

    def change(directory: Path) -> None:
        raw = json.loads((directory / file).read_text())
        place = raw
        *parents, last = path.split("/")
        for key in parents:
            place = place[int(key) if isinstance(place, list) else key]
        if value is GONE:
            del place[last]
        else:
            place[last] = value
        (directory / file).write_text(json.dumps(raw))

    return change


def set_bytes(file: str, data: bytes) -> Change:
    return lambda directory: (directory / file).write_bytes(data) and None


def set_text(file: str, text: str) -> Change:
    return lambda directory: (directory / file).write_text(text) and None


def remove(file: str) -> Change:
    return lambda directory: (directory / file).unlink()


def cut(file: str, count: int) -> Change:
    """The last bytes are gone."""

    def change(directory: Path) -> None:
        data = (directory / file).read_bytes()
        (directory / file).write_bytes(data[:-count])

    return change


def pipe(file: str) -> Change:
    def change(directory: Path) -> None:
        (directory / file).unlink(missing_ok=True)
        os.mkfifo(directory / file)

    return change


def link(file: str, target: str) -> Change:
    def change(directory: Path) -> None:
        (directory / file).unlink(missing_ok=True)
        (directory / file).symlink_to(target)

    return change


def header(file: str, edit: Callable[[dict[str, Any]], Any]) -> Change:
    """The header of a safetensors file is what `edit` returns, or what it made of its argument."""

    def change(directory: Path) -> None:
        data = (directory / file).read_bytes()
        size = int.from_bytes(data[:8], "little")
        entries = json.loads(data[8 : 8 + size])
        made = edit(entries)
        text = json.dumps(entries if made is None else made).encode()
        text += b" " * (-len(text) % 8)
        (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return change


def array(file: str, name: str, values: Any) -> Change:
    """A safetensors file with this one array."""

    def change(directory: Path) -> None:
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(values)}, directory / file)

    return change


def arrays(file: str, edit: Callable[[dict[str, Any]], None]) -> Change:
    """A safetensors file with its arrays edited."""

    def change(directory: Path) -> None:
        from safetensors.numpy import load_file, save_file

        found = load_file(directory / file)
        edit(found)
        save_file({k: np.ascontiguousarray(v) for k, v in found.items()}, directory / file)

    return change


def graph(edit: Callable[[onnx.ModelProto], None], file: str = "model.onnx") -> Change:
    def change(directory: Path) -> None:
        model = onnx.load(directory / file, load_external_data=False)
        edit(model)
        (directory / file).write_bytes(model.SerializeToString())

    return change


def manifest(edit: Callable[[dict[str, Any]], None]) -> Change:
    def change(directory: Path) -> None:
        raw = json.loads((directory / "manifest.json").read_text())
        edit(raw)
        (directory / "manifest.json").write_text(json.dumps(raw))

    return change


def apply(tamper: Tamper, directory: Path) -> None:
    """Change a copy of the directory; with `rewrite` the manifest agrees afterwards."""
    tamper.change(directory)
    path = directory / "manifest.json"
    if not tamper.rewrite or not path.is_file():
        return
    raw = json.loads(path.read_text())
    for entry in raw["engines"].values() if "engines" in raw else [raw]:
        for name in list(entry["files"]):
            file = directory / name
            if file.is_file():
                data = file.read_bytes()
                digest = hashlib.sha256(data).hexdigest()
                entry["files"][name] = {"bytes": len(data), "sha256": digest}
            elif not file.exists():
                del entry["files"][name]
    path.write_text(json.dumps(raw))


# ---- rows

CONFIG, ENGINE = "config.json", "base_config.json"
EMBEDDING, D2T, GOLDEN = "embedding.safetensors", "d2t.safetensors", "golden.safetensors"
MODEL, DATA, WEIGHTS = "model.onnx", "model.onnx.data", "model.safetensors"

# key of config.json of an export and of an engine alike -> a value, and what names it
COMPONENT: tuple[tuple[str, Any, str], ...] = (
    ("graph", GONE, "graph"),
    ("graph", 7, "graph"),
    ("graph/role", "draft", "role"),
    ("graph/head_dim", -16, "head_dim"),
    ("graph/num_kv_heads", 4, "num_kv_heads"),
    ("graph/num_layers", 10**9, "num_layers"),
    ("graph/vocab_size", 1e10, "vocab_size"),
    ("graph/features", 64.5, "features"),
    ("graph/recurrent", {"layers": [0]}, "num_key_heads"),
    ("rope", 5, "rope"),
    ("rope/theta", 0.5, "theta"),
    ("rope/kind", "mrope", "kind"),
    ("rope/colour", 1, "colour"),
    ("vocab_size", 10**10, "vocab_size"),
    ("num_hidden_layers", 10**9, "num_hidden_layers"),
    ("eos_token_id", [-1], "eos_token_id"),
    ("engine_role", "judge", "engine_role"),
    ("eagle_hidden_state_layers", [2, 4, 99], "aux layers"),
    ("quantization", {"schemes": 3}, "schemes"),
)
# directory, file, and a key of it as above
KEYS: tuple[tuple[str, str, str, Any, str], ...] = (
    *(("onnx_base", CONFIG, *row) for row in COMPONENT),
    *(("engines", ENGINE, *row) for row in COMPONENT),
    ("onnx_draft", CONFIG, "pair", [], "pair"),
    ("onnx_draft", CONFIG, "pair/num_taps", 2, "num_taps"),
    ("onnx_draft", CONFIG, "pair/own_embedding", True, EMBEDDING),
    ("onnx_draft", CONFIG, "draft_vocab_size", 97, "vocab_size"),
    ("onnx_draft", CONFIG, "vocab_size", 90, "d2t"),
    ("engines", ENGINE, "builder_config", [1], "builder_config"),
    ("engines", ENGINE, "builder_config/max_batch_size", 10**6, "max_batch_size"),
    ("engines", ENGINE, "builder_config/max_input_len", "48", "max_input_len"),
    ("engines", ENGINE, "weights/scheme", "int3", "scheme"),
    ("engines", ENGINE, "weights/embedding", {"bits": 4}, "block"),
    ("base", CONFIG, "num_hidden_layers", 10**9, "num_hidden_layers"),
    ("base", CONFIG, "hidden_size", 2**31 - 1, "hidden_size"),
    ("base", CONFIG, "num_attention_heads", 0, "num_attention_heads"),
    ("base", CONFIG, "rope_theta", -1, "rope_theta"),
    ("base", CONFIG, "rms_norm_eps", "x", "rms_norm_eps"),
    ("base", CONFIG, "architectures", ["Evil"], "Evil"),
    ("draft", CONFIG, "draft_vocab_size", 10**10, "draft_vocab_size"),
    ("draft", CONFIG, "head_dim", -4, "head_dim"),
    ("engines", "tokenizer.json", "model", 5, "tokenizer.json"),
)


def json_rows() -> Iterator[Tamper]:
    for where, file, key, value, said in KEYS:
        how = "removed" if value is GONE else f"= {value!r:.30}"
        yield Tamper(f"{where} {file} {key} {how}", where, set_key(file, key, value), said)
    for where, file in (
        *(("onnx_base", CONFIG), ("engines", ENGINE), ("base", CONFIG)),
        ("engines", "tokenizer.json"),
    ):
        for text in ("", "[]", "{", '{"a": ' * 5000):
            yield Tamper(f"{where} {file} is {text[:8]!r}", where, set_text(file, text), file)
        yield Tamper(f"{where} {file} is a pipe", where, pipe(file), file, rewrite=False)
    change = set_key(CONFIG, "head_dim", 32)
    yield Tamper("head_dim, hash not rewritten", "onnx_base", change, CONFIG, rewrite=False)
    text = '{"vocab_size": 1' + "0" * 5000 + "}"
    yield Tamper("a number of 5,000 digits", "onnx_base", set_text(CONFIG, text), CONFIG)
    device = link("generation_config.json", "/dev/zero")
    yield Tamper("generation_config is a device", "base", device, "generation_config.json")


def entry_with(**keys: Any) -> Callable[[str], Change]:
    def edit(entries: dict[str, Any]) -> None:
        next(v for k, v in entries.items() if k != "__metadata__").update(keys)

    return lambda file: header(file, edit)


NESTED = (600_000).to_bytes(8, "little") + b'{"a":' * 100_000
HEADERS: dict[str, Callable[[str], Change]] = {
    "nested header": lambda file: set_bytes(file, NESTED),
    "header of 2^60 bytes": lambda file: set_bytes(file, (2**60).to_bytes(8, "little") + b"{}"),
    "random bytes": lambda file: set_bytes(file, np.random.default_rng(0).bytes(4096)),
    "header is a list": lambda file: header(file, lambda entries: [1]),
    "entry is a number": lambda file: header(file, lambda entries: dict.fromkeys(entries, 1)),
    "negative shape": entry_with(shape=[-256, 64]),
    "huge shape": entry_with(shape=[2**62, 2**62]),
    "wrong width": entry_with(shape=[512, 32]),
    "unknown type": entry_with(dtype="F128"),
    "negative offsets": entry_with(data_offsets=[-8, 0]),
    "cut": lambda file: cut(file, 7),
    "a pipe": pipe,
    "a link to a device": lambda file: link(file, "/dev/zero"),
}
D2TS: dict[str, Any] = {
    "out of range": np.full(96, 1000, np.int32),
    "negative": np.full(96, -1000, np.int32),
    "float": np.zeros(96, np.float32),
    "too short": np.zeros(95, np.int32),
    "twice the same": np.where(np.arange(96) == 1, -1, 0).astype(np.int32),
}
GOLDENS: dict[str, Callable[[Any], Any]] = {
    "prompt_positions": lambda a: a + 10**12,
    "prompt_ids": lambda a: a + 10**6,
    "prompt_attention_mask": lambda a: a[..., :-1],
    "tree_attention_mask": lambda a: a & False,
    "prompt_inputs_embeds": lambda a: a.astype(np.float64),
    "prompt_hidden_states": lambda a: a[0],
}


def tensor_rows() -> Iterator[Tamper]:
    for where, file in (
        *(("onnx_base", EMBEDDING), ("onnx_base", GOLDEN), ("engines", EMBEDDING)),
        *(("engines", D2T), ("base", WEIGHTS)),
    ):
        for name, make in HEADERS.items():
            said = CONFIG if (where, name) == ("base", "wrong width") else file
            yield Tamper(f"{where} {file}: {name}", where, make(file), said)
    for name, values in D2TS.items():
        for where in ("onnx_draft", "engines"):
            yield Tamper(f"{where} d2t {name}", where, array(D2T, "d2t", values), "d2t")
    for name, edit in GOLDENS.items():
        change = arrays(GOLDEN, lambda old, n=name, e=edit: old.update({n: e(old[n])}))  # type: ignore[misc]
        yield Tamper(f"golden {name}", "onnx_base", change, name)
    shifted = arrays(GOLDEN, lambda old: old.update(prompt_logits=old["prompt_logits"] + 1))
    yield Tamper("golden logits", "onnx_base", shifted, "golden", by_run=True)
    gone = arrays(GOLDEN, lambda old: old.__delitem__("tree_ids"))
    yield Tamper("golden without tree_ids", "onnx_base", gone, "tree_ids")
    more = arrays(GOLDEN, lambda old: old.update(surprise=np.zeros(3)))
    yield Tamper("golden with an array more", "onnx_base", more, "surprise")


def nodes_of(model: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]


def constant_of_shape(model: onnx.ModelProto) -> None:
    """2^40 values of a few bytes of a file."""
    model.graph.initializer.append(numpy_helper.from_array(np.array([2**40]), "planted"))
    node = helper.make_node("ConstantOfShape", ["planted"], ["c"], "planted")
    model.graph.node.append(node)


def elsewhere(location: str, **keys: str) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.external_data)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
            entry.value = keys.get(entry.key, entry.value)

    return edit


def set_attribute(op_type: str, **values: Any) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node = nodes_of(model, op_type)[0]
        kept = [a for a in node.attribute if a.name not in values]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in values.items())

    return edit


def set_op(old: str, new: str, domain: str = "") -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        node = nodes_of(model, old)[0]
        node.op_type, node.domain = new, domain

    return edit


def turned(model: onnx.ModelProto) -> None:
    """A weight has as many elements as before, and they are said to be other rows."""
    tensor = next(t for t in model.graph.initializer if len(set(t.dims)) == 2)
    tensor.dims[:] = list(reversed(tensor.dims))


def swap_weights(model: onnx.ModelProto) -> None:
    """Two weights of one shape change places: nothing but the numbers differ."""
    nodes = [n for n in nodes_of(model, "RMSNormalization") if n.input[1].endswith("weight")]
    first, last = nodes[0], nodes[-1]
    first.input[1], last.input[1] = last.input[1], first.input[1]


def input_of_doubles(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE


def other_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 25


def bad_scale(model: onnx.ModelProto) -> None:
    model.graph.node[0].metadata_props.add(key=INPUT_SCALE, value="-1")


def long_constant(model: onnx.ModelProto) -> None:
    next(t for t in model.graph.initializer if t.raw_data).raw_data += b"more"


GRAPHS: tuple[tuple[str, Callable[[onnx.ModelProto], None], str], ...] = (
    ("ConstantOfShape of 2^40", constant_of_shape, "planted"),
    ("a custom operator", set_op("Add", "Surprise", "evil.com"), "Surprise"),
    ("an operator of the vendor", set_op("Add", "FusedGemm", "com.microsoft"), "FusedGemm"),
    ("an operator that no export has", set_op("Sigmoid", "Tanh"), "Tanh"),
    ("another operator set", other_opset, "operator sets"),
    ("a domain more", lambda m: m.opset_import.append(helper.make_opsetid("evil", 1)), "evil"),
    ("attribute axis of Concat", set_attribute("Concat", axis=2**40), "Concat"),
    ("attribute that does not exist", set_attribute("Add", axis=1), "axis"),
    ("data outside", elsewhere("../base/model.safetensors"), "../base"),
    ("data at an absolute path", elsewhere("/etc/passwd"), "/etc/passwd"),
    ("data in another file", elsewhere(CONFIG), CONFIG),
    ("data beyond the end", elsewhere(DATA, offset=str(2**50)), DATA),
    ("data of another length", elsewhere(DATA, length="7"), DATA),
    ("data at a negative offset", elsewhere(DATA, offset="-1"), DATA),
    ("an input less", lambda m: m.graph.input.__delitem__(0), "input"),
    ("an output by another name", lambda m: m.graph.output[0].__setattr__("name", "x"), "logits"),
    ("an input of another type", input_of_doubles, "inputs_embeds"),
    ("a weight of another shape", turned, "incompatible dimensions"),
    ("a negative size", lambda m: m.graph.initializer[0].dims.__setitem__(0, -5), "tensor"),
    ("a negative scale of activations", bad_scale, "input scale"),
    ("a constant that is too long", long_constant, "bytes"),
    ("no nodes", lambda m: m.graph.ClearField("node"), "no graph"),
    ("an edge to nothing", lambda m: m.graph.node[5].input.__setitem__(0, "nothing"), "nothing"),
    ("two norms that changed places", swap_weights, "golden"),
)


def graph_rows() -> Iterator[Tamper]:
    for name, edit, said in GRAPHS:
        row = Tamper(f"graph with {name}", "onnx_base", graph(edit), said)
        yield replace(row, by_run=edit is swap_weights)
    for where, file in (("onnx_base", MODEL), ("engines", "spec_base.onnx")):
        for change, name in (
            (set_bytes(file, np.random.default_rng(1).bytes(5000)), "is random"),
            (cut(file, 100), "is cut"),
            (remove(f"{file}.data"), "has no data"),
        ):
            yield Tamper(f"{file} {name}", where, change, file, by_run=where == "engines")
        yield Tamper(f"{file} is a pipe", where, pipe(file), file, rewrite=False)
    yield Tamper("weights of zeros", "onnx_base", zeros(DATA), "golden", by_run=True)
    yield Tamper("weights of zeros, hash kept", "onnx_base", zeros(DATA), DATA, rewrite=False)


def zeros(file: str) -> Change:
    def change(directory: Path) -> None:
        path = directory / file
        path.write_bytes(bytes(path.stat().st_size))

    return change


Files = dict[str, Any]
LISTED: dict[str, tuple[Callable[[Files, str], object], str]] = {  # what becomes of the list
    "lists no files": (lambda files, data: files.clear(), "files"),
    "lacks the data": (lambda files, data: files.pop(data), ".data"),
    "lacks the tokenizer": (lambda files, data: files.pop("tokenizer.json"), "tokenizer.json"),
    "has a file outside": (lambda files, data: files.update({"../x": files[data]}), "../x"),
    "has a library": (lambda files, data: files.update({"x.so": files[data]}), "x.so"),
    "sha256 is a path": (lambda files, data: files[data].update(sha256="../../x"), ".data"),
    "bytes is negative": (lambda files, data: files[data].update(bytes=-4), ".data"),
    "an entry is a list": (lambda files, data: files.update({data: []}), ".data"),
}


def manifest_rows() -> Iterator[Tamper]:
    def listed(edit: Callable[[Files, str], object]) -> Change:
        def change(raw: dict[str, Any]) -> None:
            files = (raw["engines"]["base"] if "engines" in raw else raw)["files"]
            edit(files, next(name for name in files if name.endswith(".data")))

        return manifest(change)

    for where in ("onnx_base", "engines"):
        rows = [(name, listed(edit), said) for name, (edit, said) in LISTED.items()]
        for text in ("", "[]", "[" * 100_000):
            rows.append((f"is {text[:2]!r}", set_text("manifest.json", text), "manifest"))
        rows.append(("of another kind", manifest(lambda raw: raw.update(kind="judge")), "judge"))
        rows.append(("of another format", manifest(lambda raw: raw.update(format=9)), "format"))
        for name, change, said in rows:
            yield Tamper(f"{where}: manifest {name}", where, change, said, rewrite=False)
    gpu9 = manifest(lambda raw: raw["engines"]["base"].update(backend="gpu9"))
    yield Tamper("an unknown backend", "engines", gpu9, "backend", rewrite=False, by_run=True)
    judge = manifest(lambda raw: raw["engines"].update(judge=raw["engines"]["base"]))
    yield Tamper("a role that is no role", "engines", judge, "judge", rewrite=False)
    for where, file in (("engines", "chat_template.jinja"), ("onnx_draft", EMBEDDING)):
        yield Tamper(f"{where}: {file} is not listed", where, set_text(file, "{}"), file)


def tokenizer_rows() -> Iterator[Tamper]:
    """What would grow a text without end."""
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    four = {"type": "Sequence", "normalizers": [longer] * 4}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    for key, value in (
        ("normalizer", four),
        ("pre_tokenizer", split | {"pattern": {"Regex": "(a+)+$"}}),
        ("decoder", {"type": "Sequence", "decoders": [longer] * 4}),
    ):
        yield Tamper(f"tokenizer {key}", "engines", set_key("tokenizer.json", key, value), key)


TAMPERS: tuple[Tamper, ...] = (
    *json_rows(),
    *tensor_rows(),
    *graph_rows(),
    *manifest_rows(),
    *tokenizer_rows(),
)
