"""A drafting method is named in its own files and in the tables, and nowhere else: adding one
touches no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from edgespec.methods import METHODS, find_method
from edgespec.methods.sides import PLAIN_METHOD

PACKAGE = Path(__file__).resolve().parents[2] / "edgespec"

# What is looked for -> the stem of its own files: "eagle3" is also found as "EAGLE"
NAMES = {name.rstrip("0123456789"): name.rstrip("0123456789") for name in METHODS}
# A name that is a word of its own, such as the end of a file's name -> what it is as a method
WORDS = {
    "suffix": (
        r"suffix (decod|draft|match|automat)|[\"']suffix[\"']|drafters.*import.*suffix"
        r"|(?-i:Suffix[A-Z])"
    ),
}
TABLES = ("table.py", "registry.py")  # one row per method
# File -> why it names a method all the same.
EXCEPTIONS = {
    "checkpoint/pickled.py": "a name of published files: medusa_lm_head.pt",
    "checkpoint/names.py": "the root of prediction heads on disk is `mtp.`",
    "checkpoint/unsupported.py": "kinds that are detected and refused by name",
    "cli/accept_flags.py": "a flag of TensorRT-LLM: --eagle-posterior-threshold",
    "cli/build.py": "flags of TensorRT Edge-LLM",
    "cli/check.py": "the flag --mtp, and examples in the help",
    "cli/draft_flags.py": "other names of flags, as TensorRT Edge-LLM has them",
    "cli/export.py": "the flags of each method, and examples in the help",
    "cli/spellings.py": "parameters of export and of trees, whose messages name them",
    "compat/edgellm.py": "flags of TensorRT Edge-LLM that are refused by name",
    "compat/decoding_types.py": "a table with one row per method, by TensorRT-LLM's names",
    "compat/speculative_config.py": "methods of TensorRT-LLM that are refused by name",
    "compat/trtllm.py": "flags of TensorRT-LLM's scripts",
    "cli/export_draft.py": "names of layouts: eagle, medusa",
    "cli/data/hidden_states.py": "an example in the help",
    "cli/infer.py": "the default without a draft, and an example in the help",
    "cli/quantize.py": "examples in the help",
    "cli/run.py": "an example in the help, and what drafts without --draft",
    "cli/serve.py": "an example in the help",
    "cli/train.py": "examples in the help",
    "cli/train_group.py": "examples in the help",
    "config/values.py": "a base's config.json declares its MTP layers",
    "families/base.py": "a family's config.json declares its MTP layers",
    "families/parse.py": "a family's config.json declares its MTP layers",
    "families/qwen3_5.py": "its config.json declares its MTP layers, its tensors are `mtp.*`",
    "families/qwen3_5_moe.py": "its config.json declares its MTP layers",
    "layouts/deepspec.py": "keys and classes of published configs",
    "layouts/modelopt.py": "keys and classes of published configs",
    "layouts/sglang.py": "keys and classes of published configs",
    "layouts/speculators.py": "keys and classes of published configs",
    "layouts/z_lab.py": "keys and classes of published configs",
    "methods/block_draft.py": "a key of published configs: eagle_aux_hidden_state_layer_ids",
    "methods/block_variants.py": "relatives that are refused by name",
    "methods/dspark.py": "layouts with the section of published configs: dflash_config",
    "methods/eagle1.py": "a key of published configs: use_mtp_layernorm",
    "methods/eagle3.py": "a key of published configs: use_mtp_layernorm",
    "methods/jetspec.py": "the section of published configs: dflash_config",
    "prompts/template.py": "a key of named templates: suffix",
    "safe_read/tokenizer.py": "a key of tokenizer.json: suffix",
    "serve/openai_completions.py": "a field of OpenAI: suffix",
    "runtime/drafters/suffix.py": "a key of TensorRT-LLM: max_matching_ngram_size",
    "runtime/acceptance/typical.py": "whose paper defines the rule",
    "runtime/requests/profile.py": "a key of TensorRT Edge-LLM's profile",
    "training/dspark_keys.py": "the section of ModelOpt's recipes: dflash",
    "training/jetspec.py": "the class of published configs: DFlashDraftModel",
    "training/jetspec_keys.py": "the section of ModelOpt's recipes: dflash",
    "training/eagle3.py": "a key of published configs: use_mtp_layernorm",
}


def is_own(path: Path, stem: str) -> bool:
    """Whether a file belongs to the method: dflash.py, dflash_variants.py, eagle3.py."""
    return path.stem.startswith(stem)


def naming(package: Path, files: Iterable[Path]) -> dict[str, set[str]]:
    """File below the package -> the methods that it names without being theirs or a table."""
    found: dict[str, set[str]] = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        names = {
            name
            for name, stem in NAMES.items()
            if re.search(WORDS.get(name, name), text, re.IGNORECASE) and not is_own(path, stem)
        }
        if names and path.name not in TABLES:
            found[path.relative_to(package).as_posix()] = names
    return found


def test_every_method_is_looked_for() -> None:
    assert all(any(name in method for name in NAMES) for method in METHODS)


def test_no_file_names_a_method_that_is_not_its_own() -> None:
    found = naming(PACKAGE, PACKAGE.rglob("*.py"))
    strangers = {file: names for file, names in found.items() if file not in EXCEPTIONS}
    assert strangers == {}


def test_every_exception_is_one() -> None:
    found = naming(PACKAGE, PACKAGE.rglob("*.py"))
    assert sorted(set(EXCEPTIONS) - set(found)) == []


@pytest.mark.parametrize(
    ("file", "source", "named"),
    [
        ("runtime/engine.py", "class DFlashDrafter: ...", {"dflash"}),
        ("runtime/engine.py", "# as MTP does", {"mtp"}),
        ("runtime/engine.py", 'if self.method == "suffix": ...', {"suffix"}),
        ("runtime/engine.py", "from edgespec.runtime.drafters import suffix", {"suffix"}),
        ("runtime/engine.py", "# as N-grams do, and NgramOptions", {"ngram"}),
        ("export/mtp.py", "from edgespec.methods import eagle3", {"eagle"}),
        ("export/resolve.py", 'if method == "eagle3" or isinstance(x, MtpDraft): ...', None),
    ],
)
def test_planted_name_is_found(
    tmp_path: Path, file: str, source: str, named: set[str] | None
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert naming(tmp_path, [path]) == {file: named or {"eagle", "mtp"}}


def test_own_files_and_tables_may_name_it(tmp_path: Path) -> None:
    for name in ("eagle3.py", "dflash_variants.py", "registry.py", "table.py"):
        (tmp_path / name).write_text("eagle3 = 1" if name != "dflash_variants.py" else "dflash = 1")
    assert naming(tmp_path, tmp_path.iterdir()) == {}


def test_rows_are_known_by_name_and_alias() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert name != PLAIN_METHOD
        assert all(find_method(word) is method for word in (name, name.upper(), *method.aliases))
    assert find_method("no such method") is None
