"""The table of families: each row stands alone, and nobody else knows a family by name."""

from __future__ import annotations

import ast
from pathlib import Path

import edgespec
from edgespec.families import FAMILIES, family_names, family_of

PACKAGE = Path(edgespec.__file__).parent
NAMES = {*FAMILIES, *(row.model_type for row in FAMILIES.values())}
# A file that names families, and why
ALLOWED = {
    "methods/jetspec.py": "whether published drafts were trained on answers with thinking",
    "methods/dflash.py": "whether published drafts of a base were trained on answers with thinking",
    "methods/eagle3.py": "EAGLE-3 drafts say this model_type, whatever their base",
    "training/eagle3_keys.py": "ModelOpt's key: eagle_decoder_type",
    "training/blocks.py": "published drafts say this model_type, whatever their base",
    "training/eagle1.py": "EAGLE-1 drafts say this model_type, whatever their base",
    "training/eagle3_modelopt.py": "ModelOpt's key: eagle_decoder_type",
    "training/eagle3.py": "EAGLE-3 drafts say this model_type, whatever their base",
    **{
        f"layouts/{name}.py": "drafts in this layout say this model_type, whatever their base"
        for name in ("eagle", "z_lab", "speculators", "modelopt", "deepspec")
    },
    "checkpoint/gguf/source.py": "a draft's heads are rotated as those of a llama",
    "checkpoint/gguf/tokenizer.py": "GGUF's own words for kinds of tokenizers",
}


def families_named(source: str) -> set[str]:
    constants = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in NAMES}


def test_no_file_outside_the_families_names_one() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "families" and (names := families_named(path.read_text()))
    }
    assert set(found) == set(ALLOWED)


def test_a_planted_name_is_found() -> None:
    assert families_named("if model_type == 'gemma3_text':\n    pass") == {"gemma3_text"}
    assert families_named("kind = 'llama3'") == set()


def test_model_types_are_unique_and_lead_back_to_their_row() -> None:
    assert len({row.model_type for row in FAMILIES.values()}) == len(FAMILIES)
    for name, row in FAMILIES.items():
        assert family_of({"model_type": row.model_type}) is row
        assert family_of({"architectures": [name]}) is row
    assert family_of({"model_type": "gpt2", "architectures": None}) is None


def test_families_are_told_once_each() -> None:
    names = family_names().replace(" and ", ", ").split(", ")
    assert len(names) == len(set(names))
    assert {"Qwen3.5", "Qwen3.5-MoE"} < set(names)
    assert family_names().endswith(" and Gemma-3")
