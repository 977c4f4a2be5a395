"""The same toy pair built twice: for one sequence and for four.

Knows how engines are made. What the one for a single sequence says plainly is the reference for
whatever the other one does in batches; on ONNX Runtime's kernels it runs others (decision 0005).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import edgespec
from edgespec.backends.base import BuildOptions
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions
from edgespec.runtime.engine import Engine
from tests import made, shared, toys
from tests.lossless.pairs import LIMITS, Family, make_base

LANES = 4


@dataclass(frozen=True)
class Engines:
    one: Engine
    four: Engine


def make_engines(
    path: Path,
    family: Family = "llama",
    *,
    sliding_window: int | None = None,
    vocab: int = 256,
    eos: list[int] | None = None,
    chat_template: str = toys.CHAT_TEMPLATE,
    limits: Limits = LIMITS,
    options: BuildOptions | None = None,
) -> Path:
    """Engine directories `one` and `four` below `path`, of a base and its draft of the `eagle`
    layout; `options` are those of their build."""
    base = make_base(path / "base", family, sliding_window=sliding_window, vocab=vocab, eos=eos)
    if chat_template != toys.CHAT_TEMPLATE:
        config = base / "tokenizer_config.json"
        settings = json.loads(config.read_text()) | {"chat_template": chat_template}
        config.write_text(json.dumps(settings))
    draft = toys.make_draft(path / "draft", base, "eagle")
    return write_engines(
        path,
        made.exported(base, ExportOptions(base_for="eagle3")) / "llm",
        made.exported(draft, ExportOptions(base_model_dir=str(base))) / "llm",
        limits=limits,
        options=options,
    )


def write_engines(
    path: Path,
    *components: Path,
    limits: Limits = LIMITS,
    options: BuildOptions | None = None,
) -> Path:
    """Engine directories `one` and `four` below `path`, of exported components."""
    for name, lanes in (("one", 1), ("four", LANES)):
        own = replace(limits, max_batch_size=lanes)
        engines = made.built(own, *components, options=options)
        shutil.copytree(engines, path / name)
    return path


def api_engines() -> Path:
    """The two directories for tests of the Python API; their answers seldom end by themselves."""
    return shared.made_once("api", lambda path: make_engines(path, eos=[0]))


@contextmanager
def opened(path: Path) -> Iterator[Engines]:
    with edgespec.load(path / "one") as one, edgespec.load(path / "four") as four:
        yield Engines(one, four)
