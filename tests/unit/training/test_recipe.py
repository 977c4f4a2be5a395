"""Training recipes: ModelOpt's own files and schema, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.train import FLAG_KEYS, recipe_of
from edgespec.errors import EdgeSpecError
from edgespec.pipeline.recipe import overridden, read_config
from edgespec.training.keys import Key
from edgespec.training.recipe import read_recipe
from edgespec.training.table import TRAINABLE

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes" / "training").glob("*.yaml"))
SHIPPED = "modelopt_recipes"


def shipped(name: str) -> Path:
    spec = find_spec(SHIPPED)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("ModelOpt's recipes are not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    return root / "general" / "speculative_decoding" / f"{name}.yaml"


@pytest.mark.parametrize(("method", "rate"), [("eagle3", 1e-4), ("dflash", 6e-4), ("dspark", 6e-4)])
def test_modelopt_s_recipe_works_unchanged(method: str, rate: float) -> None:
    recipe = read_recipe(read_config(shipped(method)), method)
    assert recipe.method == method
    assert recipe["training.learning_rate"] == rate
    assert any(note.startswith("training.tf32 changes nothing: ") for note in recipe.notes)
    if method == "eagle3":
        assert any("eagle_export_rope_scaling" in note for note in recipe.notes)
    elif method == "dspark":
        names = ("block_size", "loss_decay_factor", "confidence_head_alpha")
        assert [recipe.section(name) for name in names] == [16, 7.0, 1.0]
    else:
        assert recipe.section("self_logit_distillation") is True


def test_another_draft_is_refused_by_name() -> None:
    with pytest.raises(EdgeSpecError, match="projector_type domino"):
        read_recipe(read_config(shipped("domino")), "domino")


def test_an_eagle_section_without_aux_layers_is_of_the_first_eagle() -> None:
    values = overridden({"metadata": {"recipe_type": "speculative_eagle"}}, [])
    assert read_recipe(values, "recipe").method == "eagle3"
    values["eagle"] = {"eagle_architecture_config": {"use_aux_hidden_state": False}}
    assert read_recipe(values, "recipe").method == "eagle1"


@pytest.mark.parametrize(
    ("method", "schema"),
    [
        ("eagle3", "Eagle"),
        ("dspark", "DFlash"),
        ("jetspec", "DFlash"),
        ("dflash", "DFlash"),
        ("medusa", "Medusa"),
    ],
)
def test_each_key_of_modelopt_s_schema_has_a_row(method: str, schema: str) -> None:
    recipes: Any = pytest.importorskip("modelopt.recipe")
    model = getattr(recipes, f"ModelOpt{schema}Recipe")
    for section in ("metadata", "model", "data", "training", TRAINABLE[method].section):
        keys = model.model_fields[section].annotation.model_fields
        assert {f"{section}.{key}" for key in keys} <= TRAINABLE[method].all_keys.keys()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["training.learning_rat=1"], "training.learning_rat is not.*nearest is training.learning"),
        (["traning.seed=1"], "traning.seed is not a known key"),
        (["training.seed=x"], "training.seed is x.*Write a whole number, at least 0"),
        (["training.bf16=1"], "training.bf16 is 1.*Write true or false"),
        (["training.loss=mse"], "training.loss is mse.*Write kl or ce or lk"),
        (["eagle.eagle_base_lora=true"], "eagle_base_lora is true: the base is never trained"),
        (["data.streaming_server_url=x"], "streams none.*Remove it"),
        (["dflash.dflash_block_size=8"], "dflash.dflash_block_size is not a known key"),
        (["metadata.recipe_type=speculative_ngram"], "is of the type speculative_ngram"),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused(keys: list[str], said: str) -> None:
    values = overridden({"metadata": {"recipe_type": TRAINABLE["eagle3"].recipe_type}}, keys)
    with pytest.raises(EdgeSpecError, match=f"(?s){said}"):
        read_recipe(values, "recipe")


def test_flags_come_before_keys_and_keys_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "metadata: {recipe_type: speculative_eagle}\ndata: {data_path: a}\n"
        "training: {minutes: 1, seed: 3, output_dir: o}\n"
    )
    flags = {"base_model": "b", "data": None, "output_dir": None, "minutes": 2.0}
    recipe = recipe_of(str(path), ("training.seed=4", "training.minutes=9"), flags)
    assert (recipe["training.minutes"], recipe["training.seed"]) == (2.0, 4)
    assert (recipe["model.model_name_or_path"], recipe["data.data_path"]) == ("b", "a")
    with pytest.raises(EdgeSpecError, match="neither a method"):
        recipe_of("ngram", (), flags)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_committed_recipe_is_read_without_a_note(path: Path) -> None:
    recipe = recipe_of(str(path), (), dict.fromkeys(FLAG_KEYS))
    assert recipe.notes == ()
    assert f"edgespec train recipes/training/{path.name}" in path.read_text()


def test_the_page_names_each_key_that_means_something() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    keys = {k for m in TRAINABLE.values() for k, row in m.all_keys.items() if isinstance(row, Key)}
    assert {key for key in keys if f"`{key.partition('.')[2]}`" not in page} == set()
