"""docs/config.md and docs/config.schema.json, from the keys that the commands read.

Knows the tables of keys and the page's own words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

HEAD = """\
# Configuration files

<!-- Written by scripts/config_page.py. Change the words there or the keys in their tables, then run `make docs`. -->

`edgespec infer`, `chat`, `run` and `eval summarize` take `--config FILE.yaml`. Its block `speculative_config` says what
drafts, how much and when, by the names of TensorRT-LLM's LLM API; its other keys are flags of the command, without the
dashes:

```yaml
# edgespec infer --config ngram.yaml --engine-dir engines --prompt 'Rewrite this: ...'
speculative_config:
  decoding_type: NGram
  max_draft_len: 4
  max_matching_ngram_size: 3
temperature: 0
```

`key=value` on the command line overrides a key: `speculative_config.max_draft_len=6`, `temperature=0.7`. A flag overrides
both, and so does an environment variable for what the file says. The sizes of drafts on the command line
(`--spec-draft-top-k` and the others) replace those of the block.

- `infer` and `chat` draft with what the engine directory holds. A block that names another method than the draft
  engine's is refused, and so is a `speculative_model` that the draft engine was not made from, by the identity of its
  weights.
- `run` downloads, exports and builds `speculative_model`, as `--draft` does.
- `bench` takes the same files, with flags of its own; several values are one text, `batch_size: 1,4`.
- Requests of `input.json` may have a block of their own, `"speculative"`: see [requests.md](requests.md).
- In Python a block is `edgespec.load(engine_dir, speculative_config={"decoding_type": "NGram", ...})`, or an object of
  the class of its decoding type, such as `edgespec.NGramDecodingConfig(max_draft_len=4)`. Such an object is also the
  `plan` of a request.

`recipes/` has a file for each decoding type; the names on the hub in them were not downloaded where edgespec is developed.
Editors that know JSON schemas check a file that begins with
`# yaml-language-server: $schema=PATH/docs/config.schema.json`.

## What is read

Plain YAML of up to 256 KiB: one document, without anchors, aliases, tags, merge keys and duplicate keys. Values are those
of YAML 1.2: `true` and `false` alone are booleans, `1e-5` is a number, `010` is ten, `12:30` and dates are texts. An
unknown key is an error that names the nearest known one.

## speculative_config

| `decoding_type` | drafts | also written |
|---|---|---|
"""

OWN_TITLE = "a drafter of your own, named by `--drafter` or given in Python ([own_drafter.md](own_drafter.md))"
AUTO_TITLE = "whatever the engine directory drafts with"
TYPE = """| `{name}` | {title} | {aliases} |
"""

COMMON = """
Every decoding type has these keys:

| key | default | meaning |
|---|---|---|
"""

OWN = """
`{name}` has these too:

| key | default | meaning |
|---|---|---|
"""

GATES = """
## When drafts pay, and when they do not

These keys say when drafts are made; they change no answer.

- `draft_len_schedule: {4: 4, 8: 2, 32: 1}`: up to 4 drafts a step while up to 4 requests run, 2 while up to 8 do, 1 while
  up to 32 do, and none while more do. The first length is `max_draft_len`. Older versions of TensorRT-LLM read the keys
  as the least number of requests; newer ones read them as here.
- `max_concurrency: 4`: no drafts while more than 4 requests run.
- `acceptance_window: 16` with `acceptance_length_threshold: 0.5`: once the last 16 answers accepted fewer than 0.5 drafts a
  step on average, drafting ends for as long as the engine is open, as in TensorRT-LLM. Steps that drafted nothing do not
  count. `infer` says `drafting stopped at answer N`; `infer --json` has it as `drafting_stopped`, Python as
  `engine.drafting_stopped`.

## Keys of TensorRT-LLM that mean nothing here

A file with one of these runs all the same, and a note says why the key means nothing:

| key | why |
|---|---|
"""

REFUSED = """
These are refused with another value than the given one, because it would be missed:

| key | may be | why |
|---|---|---|
"""


def render() -> str:
    """The page."""
    return "".join(parts())


def parts() -> Iterator[str]:
    from edgespec.compat.config_keys import FOREIGN
    from edgespec.compat.decoding import DecodingConfig
    from edgespec.compat.decoding_types import DECODING_TYPES, OWN_TYPE
    from edgespec.compat.speculative_config import AUTO, config_classes
    from edgespec.methods import METHODS
    from edgespec.runtime.drafters.options import fields_of

    yield HEAD
    for method, row in DECODING_TYPES.items():
        names = ", ".join(f"`{alias.name}`" for alias in row.aliases)
        yield TYPE.format(name=row.name, title=METHODS[method].title, aliases=names)
    yield TYPE.format(name=OWN_TYPE.name, title=OWN_TITLE, aliases="")
    yield TYPE.format(name=AUTO, title=AUTO_TITLE, aliases="")
    yield COMMON
    yield from rows(DecodingConfig, [*fields_of(DecodingConfig)])
    for name, kind in config_classes().items():
        own = [key for key in fields_of(kind) if key not in fields_of(DecodingConfig)]
        if own:
            yield OWN.format(name=name)
            yield from rows(kind, own)
    yield GATES
    keys_of: dict[Any, list[str]] = {}
    for key, foreign in FOREIGN.items():
        keys_of.setdefault(foreign, []).append(f"`{key}`")
    for (why, neutral), keys in keys_of.items():
        if neutral is None:
            yield f"| {', '.join(keys)} | {why} |\n"
    yield REFUSED
    for (why, neutral), keys in keys_of.items():
        if neutral is not None:
            allowed = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
            yield f"| {', '.join(keys)} | {allowed} | {why} |\n"


def rows(kind: Any, keys: list[str]) -> Iterator[str]:
    """The rows of a table of keys."""
    from edgespec.runtime.drafters.options import fields_of

    for key in keys:
        found = fields_of(kind)[key]
        why = found.metadata["unused"]
        text = found.metadata["text"] + (f" It means nothing here: {why}." if why else "")
        default = "" if found.default is None else f"`{json.dumps(found.default)}`"
        yield f"| `{key}` | {default} | {text} |\n"


def schema() -> str:
    """The JSON schema of a file."""
    from edgespec.cli import eval as evaluation
    from edgespec.cli import infer, run
    from edgespec.cli.chat import command as chat
    from edgespec.cli.config_file import schema

    commands = [infer.command, chat.command, run.command, evaluation.summarize]
    return json.dumps(schema(commands), indent=1) + "\n"
