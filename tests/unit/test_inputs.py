"""An optional input of graphs is named in its own files and in the tables: whatever makes, stores,
feeds or runs a graph goes by rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.contract import INPUTS

PACKAGE = Path(__file__).resolve().parents[2] / "edgespec"
# Input -> the word by which it is found, and the files that name it, with the reason
NAMED: dict[str, tuple[str, dict[str, str]]] = {
    "deepstack_embeds": (
        "deepstack",
        {
            "contract.py": "its row",
            "graphs/optional_inputs.py": "its row among what inputs do in a graph",
            "graphs/deepstack.py": "what it does in a graph",
            "graphs/vision.py": "the encoder's graph gives it",
            "vision/contract.py": "the encoder's contract has it",
            "vision/component.py": "a key of an encoder's config.json",
            "config/values.py": "the encoder's layers that give it",
            "families/qwen3_vision.py": "a key of published configurations",
        },
    ),
    "sliding_attention_mask": (
        "sliding_attention_mask",
        {
            "contract.py": "its row",
            "graphs/assembly.py": "layers with a window read it",
            "graphs/block_draft.py": "layers of a block with a window read it",
        },
    ),
    "local_rope_cos": ("local_rope_cos", {"contract.py": "its row"}),
    "context_cos": (
        "context_cos",
        {
            "contract.py": "its row",
            "backends/call.py": "by it a call has context, and is a block's",
            "graphs/block_draft.py": "the keys of context are turned by it",
        },
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_an_input_is_named_in_its_own_files_and_tables(name: str) -> None:
    assert name in INPUTS
    word, files = NAMED[name]
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if word in path.read_text(encoding="utf-8").lower()
    }
    assert naming == set(files)
