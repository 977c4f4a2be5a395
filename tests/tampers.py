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

CONFIG = "config.json"
ENGINE = "base_config.json"

# key of config.json of an export and of an engine alike -> a value, and what names it
COMPONENT: tuple[tuple[str, Any, str], ...] = (
    ("graph", GONE, "graph"),
    ("graph", 7, "graph"),
    ("graph/role", "draft", "role"),
    ("graph/head_dim", 32, "head_dim"),
    ("graph/head_dim", -16, "head_dim"),
    ("graph/num_kv_heads", 4, "num_kv_heads"),
    ("graph/num_layers", 10**9, "num_layers"),
    ("graph/num_layers", 3, "num_layers"),
    ("graph/vocab_size", 1e10, "vocab_size"),
    ("graph/features", 64.5, "features"),
    ("graph/features", 64, "features"),
    ("graph/recurrent", {"layers": [0]}, "num_key_heads"),
    ("graph/local_rotary_dim", 16, "local_rope"),
    ("rope", GONE, "rope"),
    ("rope", 5, "rope"),
    ("rope/theta", "x", "theta"),
    ("rope/theta", 0.5, "theta"),
    ("rope/kind", "mrope", "kind"),
    ("rope/rotary_dim", 64, "rotary_dim"),
    ("rope/colour", 1, "colour"),
    ("sliding_window", "x", "sliding_window"),
    ("vocab_size", 1e10, "vocab_size"),
    ("vocab_size", 10**10, "vocab_size"),
    ("hidden_size", 63, "hidden_size"),
    ("head_dim", 32, "head_dim"),
    ("num_hidden_layers", 10**9, "num_hidden_layers"),
    ("num_key_value_heads", 3, "num_kv_heads"),
    ("num_attention_heads", 0, "num_attention_heads"),
    ("max_position_embeddings", None, "max_position_embeddings"),
    ("eos_token_id", GONE, "eos_token_id"),
    ("eos_token_id", [-1], "eos_token_id"),
    ("engine_role", "judge", "engine_role"),
    ("engine_role", "llm", "engine_role"),
    ("spec_decode_type", "eagle9", "spec_decode_type"),
    ("eagle_hidden_state_layers", GONE, "eagle_hidden_state_layers"),
    ("eagle_hidden_state_layers", [2, 4, 99], "aux layers"),
    ("identity", 3, "identity"),
    ("quantization", {"schemes": 3}, "schemes"),
)

EXPORT_KEYS: tuple[tuple[str, str, Any, str], ...] = (
    *(("onnx_base", key, value, said) for key, value, said in COMPONENT),
    ("onnx_draft", "pair", GONE, "pair"),
    ("onnx_draft", "pair", [], "pair"),
    ("onnx_draft", "pair/num_taps", 10**9, "num_taps"),
    ("onnx_draft", "pair/num_taps", 2, "num_taps"),
    ("onnx_draft", "pair/target_hidden_size", 32, "base_features"),
    ("onnx_draft", "pair/own_embedding", True, "embedding.safetensors"),
    ("onnx_draft", "draft_vocab_size", 97, "vocab_size"),
    ("onnx_draft", "draft_vocab_size", -1, "draft_vocab_size"),
    ("onnx_draft", "vocab_size", 90, "d2t"),
    ("onnx_draft", "graph/base_features", 64, "base_features"),
)

ENGINE_KEYS: tuple[tuple[str, Any, str], ...] = (
    *COMPONENT,
    ("builder_config", GONE, "builder_config"),
    ("builder_config", [1], "builder_config"),
    ("builder_config/max_batch_size", 0, "max_batch_size"),
    ("builder_config/max_batch_size", 10**6, "max_batch_size"),
    ("builder_config/max_kv_cache_capacity", 10**11, "max_kv_cache_capacity"),
    ("builder_config/max_verify_tree_size", 10**11, "max_verify_tree_size"),
    ("builder_config/max_input_len", "48", "max_input_len"),
    ("weights", 4, "weights"),
    ("weights/scheme", 4, "scheme"),
    ("weights/scheme", "int3", "scheme"),
    ("weights/rounding", "much", "rounding"),
    ("weights/embedding", {"bits": 4}, "block"),
)


def json_rows() -> Iterator[Tamper]:
    for where, key, value, said in EXPORT_KEYS:
        name = f"{where} {key} {shown(value)}"
        yield Tamper(name, where, set_key(CONFIG, key, value), said)
    for key, value, said in ENGINE_KEYS:
        name = f"engine {key} {shown(value)}"
        yield Tamper(name, "engines", set_key(ENGINE, key, value), said)
    for where, file in (("onnx_base", CONFIG), ("engines", ENGINE)):
        for key, value in (("head_dim", 32), ("rope", 5)):  # without the manifest
            change = set_key(file, key, value)
            yield Tamper(f"{where} {key}, hash not rewritten", where, change, file, rewrite=False)
        for text in (
            "",
            "[]",
            "{",
            "null",
            '{"a": ' * 5000,
            "\ud7ff",
            '{"vocab_size": 1' + "0" * 5000 + "}",
        ):
            yield Tamper(f"{where} {file} is {text[:8]!r}", where, set_text(file, text), file)
        yield Tamper(f"{where} {file} is a pipe", where, pipe(file), file, rewrite=False)


def shown(value: Any) -> str:
    return "removed" if value is GONE else f"= {value!r:.30}"


EMBEDDING = "embedding.safetensors"
D2T = "d2t.safetensors"
GOLDEN = "golden.safetensors"


def entry_with(**keys: Any) -> Callable[[dict[str, Any]], None]:
    def edit(entries: dict[str, Any]) -> None:
        next(v for k, v in entries.items() if k != "__metadata__").update(keys)

    return edit


def nested(depth: int) -> bytes:
    text = b'{"a":' * depth
    return len(text).to_bytes(8, "little") + text


HEADERS: tuple[tuple[str, Callable[[str], Change]], ...] = (
    ("nested header", lambda file: set_bytes(file, nested(100_000))),
    ("header of 2^60 bytes", lambda file: set_bytes(file, (2**60).to_bytes(8, "little") + b"{}")),
    ("no bytes", lambda file: set_bytes(file, b"")),
    ("random bytes", lambda file: set_bytes(file, np.random.default_rng(0).bytes(4096))),
    ("header is a list", lambda file: header(file, lambda entries: [1])),
    ("entry is a number", lambda file: header(file, lambda entries: dict.fromkeys(entries, 1))),
    ("negative shape", lambda file: header(file, entry_with(shape=[-256, 64]))),
    ("huge shape", lambda file: header(file, entry_with(shape=[2**62, 2**62]))),
    ("shape of 300,000 dimensions", lambda file: header(file, entry_with(shape=[2**62] * 300_000))),
    ("wrong width", lambda file: header(file, entry_with(shape=[512, 32]))),
    ("unknown type", lambda file: header(file, entry_with(dtype="F128"))),
    ("negative offsets", lambda file: header(file, entry_with(data_offsets=[-8, 0]))),
    ("cut", lambda file: cut(file, 7)),
    ("a pipe", pipe),
    ("a link to a device", lambda file: link(file, "/dev/zero")),
)


def tensor_rows() -> Iterator[Tamper]:
    for where, file in (
        ("onnx_base", EMBEDDING),
        ("onnx_draft", D2T),
        ("onnx_base", GOLDEN),
        ("engines", EMBEDDING),
        ("engines", D2T),
        ("base", "model.safetensors"),
    ):
        for name, make in HEADERS:
            said = "config.json" if (where, name) == ("base", "wrong width") else file
            yield Tamper(f"{where} {file}: {name}", where, make(file), said)
    vocabulary = np.arange(96)
    for name, values in (
        ("out of range", np.full(96, 1000, np.int32)),
        ("negative", np.full(96, -1000, np.int32)),
        ("float", np.zeros(96, np.float32)),
        ("two dimensions", np.zeros((96, 1), np.int32)),
        ("too short", np.zeros(95, np.int32)),
        ("huge", np.full(96, 2**62, np.int64)),
        ("twice the same", np.where(vocabulary == 1, -1, 0).astype(np.int32)),
    ):
        for where in ("onnx_draft", "engines"):
            yield Tamper(f"{where} d2t {name}", where, array(D2T, "d2t", values), "d2t")
    yield Tamper("d2t by another name", "engines", array(D2T, "t2d", vocabulary), "d2t")


def golden_rows() -> Iterator[Tamper]:
    def edit(name: str, values: Callable[[Any], Any]) -> Change:
        return arrays(GOLDEN, lambda found: found.update({name: values(found[name])}))

    changes: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("prompt_positions", lambda a: a + 10**12),
        ("tree_positions", lambda a: a - 100),
        ("prompt_ids", lambda a: a + 10**6),
        ("prompt_logits", lambda a: a[..., :-1]),
        ("prompt_logits", lambda a: a * np.nan),
        ("prompt_logits", lambda a: a + 1),
        ("prompt_attention_mask", lambda a: a[..., :-1]),
        ("tree_attention_mask", lambda a: a & False),
        ("prompt_inputs_embeds", lambda a: a[..., :8]),
        ("prompt_inputs_embeds", lambda a: a.astype(np.float64)),
        ("prompt_hidden_states", lambda a: a[0]),
    )
    for number, (name, values) in enumerate(changes):
        said = "golden" if name == "prompt_logits" else name
        row = Tamper(f"golden {name} ({number})", "onnx_base", edit(name, values), said)
        yield replace(row, by_run=number == 5)
    gone = arrays(GOLDEN, lambda found: found.__delitem__("tree_ids"))
    yield Tamper("golden without tree_ids", "onnx_base", gone, "tree_ids")
    more = arrays(GOLDEN, lambda found: found.update(surprise=np.zeros(3)))
    yield Tamper("golden with an array more", "onnx_base", more, "surprise")


def nodes_of(model: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type]


def append(*nodes: onnx.NodeProto) -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.graph.node.extend(nodes)


def add_constant(model: onnx.ModelProto, name: str, values: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))


def with_constant(values: Any, *nodes: onnx.NodeProto) -> Callable[[onnx.ModelProto], None]:
    def edit(model: onnx.ModelProto) -> None:
        add_constant(model, "planted", values)
        model.graph.node.extend(nodes)

    return edit


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


GRAPHS: tuple[tuple[str, Callable[[onnx.ModelProto], None], str], ...] = (
    (
        "ConstantOfShape of 2^40",
        with_constant(
            np.array([2**40]), helper.make_node("ConstantOfShape", ["planted"], ["c"], "planted")
        ),
        "planted",
    ),
    ("a custom operator", set_op("Add", "Surprise", "evil.com"), "Surprise"),
    ("an operator of the vendor", set_op("Add", "FusedGemm", "com.microsoft"), "FusedGemm"),
    ("an operator that no export has", set_op("Sigmoid", "Tanh"), "Tanh"),
    ("an If that is none", set_op("Sigmoid", "Scan"), "Scan"),
    (
        "another operator set",
        lambda m: m.opset_import[0].__setattr__("version", 25),
        "operator sets",
    ),
    ("a domain more", lambda m: m.opset_import.append(helper.make_opsetid("evil", 1)), "evil"),
    ("attribute axis of Concat", set_attribute("Concat", axis=2**40), "Concat"),
    ("attribute that does not exist", set_attribute("Add", axis=1), "axis"),
    ("attribute perm of Transpose", set_attribute("Transpose", perm=[0, 2**40]), "perm"),
    ("data outside", elsewhere("../base/model.safetensors"), "../base"),
    ("data at an absolute path", elsewhere("/etc/passwd"), "/etc/passwd"),
    ("data in another file", elsewhere("config.json"), "config.json"),
    ("data beyond the end", elsewhere("model.onnx.data", offset=str(2**50)), "model.onnx.data"),
    ("data of another length", elsewhere("model.onnx.data", length="7"), "model.onnx.data"),
    ("data at a negative offset", elsewhere("model.onnx.data", offset="-1"), "model.onnx.data"),
    ("an input less", lambda m: m.graph.input.__delitem__(0), "input"),
    ("an output by another name", lambda m: m.graph.output[0].__setattr__("name", "x"), "logits"),
    (
        "an input of another type",
        lambda m: m.graph.input[0].type.tensor_type.__setattr__("elem_type", TensorProto.DOUBLE),
        "inputs_embeds",
    ),
    (
        "a weight of another shape",
        turned,
        "incompatible dimensions",
    ),
    ("a negative size", lambda m: m.graph.initializer[0].dims.__setitem__(0, -5), "tensor"),
    ("no nodes", lambda m: m.graph.ClearField("node"), "no graph"),
    ("an edge to nothing", lambda m: m.graph.node[5].input.__setitem__(0, "nothing"), "nothing"),
    ("two norms that changed places", swap_weights, "golden"),
)


def graph_rows() -> Iterator[Tamper]:
    for name, edit, said in GRAPHS:
        row = Tamper(f"graph with {name}", "onnx_base", graph(edit), said)
        yield replace(row, by_run=edit is swap_weights)
    noise = np.random.default_rng(1).bytes(5000)
    for where, file in (("onnx_base", "model.onnx"), ("engines", "spec_base.onnx")):
        for change, name in (
            (set_bytes(file, b""), f"{file} is empty"),
            (set_bytes(file, noise), f"{file} is random"),
            (cut(file, 100), f"{file} is cut"),
            (set_bytes(f"{file}.data", b""), f"{file}.data is empty"),
            (remove(f"{file}.data"), f"{file}.data is gone"),
        ):
            yield Tamper(name, where, change, file, by_run=where == "engines")
        yield Tamper(f"{file} is a pipe", where, pipe(file), file, rewrite=False)
    data = "model.onnx.data"
    yield Tamper("weights of zeros", "onnx_base", zeros(data), "golden", by_run=True)
    yield Tamper("weights of zeros, hash kept", "onnx_base", zeros(data), data, rewrite=False)


def zeros(file: str) -> Change:
    def change(directory: Path) -> None:
        path = directory / file
        path.write_bytes(bytes(path.stat().st_size))

    return change


def manifest_rows() -> Iterator[Tamper]:
    for where, data in (("onnx_base", "model.onnx.data"), ("engines", "spec_base.onnx.data")):
        for name, edit, said in (
            ("lists no files", lambda files: files.clear(), "files"),
            ("lacks the data", lambda files, d=data: files.pop(d), data),
            ("lacks the tokenizer", lambda files: files.pop("tokenizer.json"), "tokenizer.json"),
            (
                "has a file outside",
                lambda files: files.update({"../x": dict(files[data_of(files)])}),
                "../x",
            ),
            (
                "has a file that no export has",
                lambda files: files.update({"x.so": dict(files[data_of(files)])}),
                "x.so",
            ),
            ("sha256 is a path", lambda files, d=data: files[d].update(sha256="../../x"), data),
            ("sha256 is a number", lambda files, d=data: files[d].update(sha256=7), data),
            ("sha256 in capitals", lambda files, d=data: files[d].update(sha256="AB" * 32), data),
            ("bytes is text", lambda files, d=data: files[d].update(bytes="4"), data),
            ("bytes is negative", lambda files, d=data: files[d].update(bytes=-4), data),
            ("an entry with a key more", lambda files, d=data: files[d].update(mode=7), data),
            ("an entry is a list", lambda files, d=data: files.update({d: []}), data),
        ):
            change = manifest(lambda raw, edit=edit: edit(files_of(raw)) and None)
            yield Tamper(f"{where}: manifest {name}", where, change, said, rewrite=False)
        for name, text in (("empty", ""), ("a list", "[]"), ("nested", "[" * 100_000)):
            change = set_text("manifest.json", text)
            yield Tamper(f"{where}: manifest is {name}", where, change, "manifest", rewrite=False)
        other = manifest(lambda raw: raw.update(kind="judge"))
        yield Tamper(f"{where}: manifest of another kind", where, other, "judge", rewrite=False)
        newer = manifest(lambda raw: raw.update(format=9))
        yield Tamper(f"{where}: manifest of another format", where, newer, "format", rewrite=False)
    for key, value in (("source", 3), ("options", []), ("role", "draft"), ("files", [1])):
        change = manifest(lambda raw, k=key, v=value: raw.update({k: v}))
        yield Tamper(f"export manifest {key} {value}", "onnx_base", change, key, rewrite=False)
    for key, value in (("backend", 3), ("backend", "gpu9"), ("fingerprint", 1), ("weights", 4)):
        change = manifest(lambda raw, k=key, v=value: raw["engines"]["base"].update({k: v}))
        row = Tamper(f"engine manifest {key} {value}", "engines", change, key, rewrite=False)
        yield replace(row, by_run=value == "gpu9")
    judge = manifest(lambda raw: raw["engines"].update(judge=raw["engines"]["base"]))
    yield Tamper("a role that is no role", "engines", judge, "judge", rewrite=False)
    for where, file in (
        ("engines", "chat_template.jinja"),
        ("onnx_base", "added_tokens.json"),
        ("onnx_draft", EMBEDDING),
        ("engines", "draft_embedding.safetensors"),
    ):
        yield Tamper(f"{where}: {file} is not listed", where, set_text(file, "{}"), file)


def files_of(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = raw["engines"]["base"]["files"] if "engines" in raw else raw["files"]
    return found


def data_of(files: dict[str, Any]) -> str:
    return next(name for name in files if name.endswith(".data"))


def tokenizer_rows() -> Iterator[Tamper]:
    file = "tokenizer.json"
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    four = {"type": "Sequence", "normalizers": [longer] * 4}
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "X", "type_id": 0}}] * 1000,
        "pair": [],
        "special_tokens": {"X": {"id": "X", "ids": [1] * 1000, "tokens": ["a"] * 1000}},
    }
    for key, value, said in (
        ("normalizer", four, "normalizer"),
        ("normalizer", longer | {"pattern": {"Regex": ""}}, "normalizer"),
        ("pre_tokenizer", split | {"pattern": {"Regex": "(a+)+$"}}, "pre_tokenizer"),
        ("pre_tokenizer", {"pattern": {"Regex": "("}} | split, file),
        ("decoder", {"type": "Sequence", "decoders": [longer] * 4}, "decoder"),
        ("post_processor", template, "post_processor"),
        ("model", 5, file),
        ("model", GONE, file),
        ("normalizer", "x", file),
    ):
        change = set_key(file, key, value)
        yield Tamper(f"tokenizer {key} {shown(value)}", "engines", change, said)
    for text in ("", "[]", "{" * 9000):
        yield Tamper(f"tokenizer is {text[:4]!r}", "engines", set_text(file, text), file)
    yield Tamper("tokenizer is a pipe", "engines", pipe(file), file, rewrite=False)
    settings = "tokenizer_config.json"
    yield Tamper("tokenizer_config is a list", "engines", set_text(settings, "[]"), settings)


def checkpoint_rows() -> Iterator[Tamper]:
    for where, key, value, said in (
        ("base", "num_hidden_layers", 10**9, "num_hidden_layers"),
        ("base", "num_hidden_layers", -1, "num_hidden_layers"),
        ("base", "vocab_size", 10**10, "vocab_size"),
        ("base", "hidden_size", 2**31 - 1, "hidden_size"),
        ("base", "num_attention_heads", 0, "num_attention_heads"),
        ("base", "num_key_value_heads", 3, "num_key_value_heads"),
        ("base", "head_dim", 10**6, "head_dim"),
        ("base", "rope_theta", -1, "rope_theta"),
        ("base", "rms_norm_eps", "x", "rms_norm_eps"),
        ("base", "rope_scaling", 5, "rope_scaling"),
        ("base", "architectures", ["Evil"], "Evil"),
        ("base", "eos_token_id", "end", "eos_token_id"),
        ("base", "max_position_embeddings", 0, "max_position_embeddings"),
        ("draft", "hidden_size", 10**9, "hidden_size"),
        ("draft", "draft_vocab_size", 10**10, "draft_vocab_size"),
        ("draft", "head_dim", -4, "head_dim"),
        ("draft", "vocab_size", "x", "vocab_size"),
    ):
        yield Tamper(f"{where} {key} {shown(value)}", where, set_key(CONFIG, key, value), said)
    for where in ("base", "draft"):
        yield Tamper(f"{where} config is a pipe", where, pipe(CONFIG), CONFIG)
        yield Tamper(
            f"{where} weights are a pipe", where, pipe("model.safetensors"), "model.safeten"
        )
        yield Tamper(f"{where} config is a list", where, set_text(CONFIG, "[]"), CONFIG)
    device = link("generation_config.json", "/dev/zero")
    yield Tamper("generation_config is a device", "base", device, "generation_config.json")


TAMPERS: tuple[Tamper, ...] = (
    *json_rows(),
    *tensor_rows(),
    *golden_rows(),
    *graph_rows(),
    *manifest_rows(),
    *tokenizer_rows(),
    *checkpoint_rows(),
)
