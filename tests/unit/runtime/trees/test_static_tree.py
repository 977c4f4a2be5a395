"""Static trees are what their choices say: each node below the node that its path names, whatever
stands between; what is no tree is refused by its node."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.errors import OptionError
from edgespec.runtime.trees.static_tree import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_RANK,
    NAMED,
    StaticPlan,
    choices_of,
    num_non_leaves,
    parents_of,
    parse_choices,
    read_choices,
)

# As the README of TensorRT-LLM's EAGLE example prints it
PRINTED = (
    "[[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0],"
    " [0, 5], [0, 0, 1], [5], [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2],"
    " [3, 0], [0, 9], [8], [9], [1, 0, 0], [0, 2, 0], [1, 2], [0, 0, 3], [4, 0], [2, 1],"
    " [0, 0, 4], [0, 0, 5], [0, 0, 0, 0], [0, 1, 1], [0, 0, 6], [0, 3, 0], [5, 0], [1, 3],"
    " [0, 0, 7], [0, 0, 8], [0, 0, 9], [6, 0], [0, 4, 0], [1, 4], [7, 0], [0, 1, 2], [2, 0, 0],"
    " [3, 1], [2, 2], [8, 0], [0, 5, 0], [1, 5], [1, 0, 1], [0, 2, 1], [9, 0], [0, 6, 0],"
    " [0, 0, 0, 1], [1, 6], [0, 7, 0]]"
)


def test_the_tree_of_63_nodes_is_the_one_that_tensorrt_llm_prints() -> None:
    choices = NAMED["mc_sim_7b_63"]
    assert parse_choices(PRINTED) == choices == parse_choices("mc_sim_7b_63")
    assert [len(node) for node in choices] == [1] * 10 + [2] * 28 + [3] * 23 + [4] * 2
    assert num_non_leaves(choices) == (1, 10, 10, 1)
    plan = StaticPlan.of(choices)
    assert (plan.top_k, plan.steps, plan.verify_size) == (10, 4, 64)


def test_the_tree_of_25_nodes_is_safe_ai_labs() -> None:
    choices = NAMED["mc_sim_7b_25"]
    assert [len(node) for node in choices] == [1] * 4 + [2] * 8 + [3] * 8 + [4] * 3 + [5] * 2
    assert num_non_leaves(choices) == (1, 4, 4, 1, 1)
    plan = StaticPlan.of(choices)
    assert (plan.top_k, plan.steps, plan.verify_size) == (4, 5, 26)


def test_a_node_whose_earlier_sibling_has_no_children_keeps_its_parent() -> None:
    """SafeAILab's first version counts parents by those of the siblings before that have children,
    and puts [1, 0] and [2, 1] below the wrong nodes."""
    choices = choices_of([[0], [1], [2], [1, 0], [2, 1], [2, 1, 0]])
    #                     1    2    3    4       5       6
    assert parents_of(choices) == (-1, 0, 0, 0, 2, 3, 5)
    tree = StaticPlan.of(choices).tree(9, [10, 11, 12, 20, 21, 30])
    assert tree.tokens.tolist() == [9, 10, 11, 12, 20, 21, 30]
    assert tree.depths.tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert np.flatnonzero(tree.mask[6]).tolist() == [0, 3, 5, 6]


def test_order_and_form_of_a_list_do_not_matter() -> None:
    assert choices_of([(0, 1), [1], (0,), [0, 0]]) == ((0,), (1,), (0, 0), (0, 1))
    assert StaticPlan.of([[0, 0], [0]]) == StaticPlan.of(((0,), (0, 0)))


trees = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12).map(
    lambda paths: sorted({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})
)


@settings(max_examples=80, deadline=None)
@given(paths=trees, levels=st.integers(0, 6), nodes=st.integers(0, 40))
def test_a_plan_cut_down_is_the_whole_tree_up_to_there(
    paths: list[tuple[int, ...]], levels: int, nodes: int
) -> None:
    plan = StaticPlan.of(paths)
    cut = plan.within(levels, nodes)
    kept = set(cut.choices)
    assert kept <= set(plan.choices)
    assert all(node[:-1] in kept or len(node) == 1 for node in kept)
    assert max(map(len, kept), default=0) == cut.steps <= levels
    assert len(kept) + 1 == cut.verify_size
    shallow = sum(len(node) <= levels for node in plan.choices)
    assert len(kept) == min(shallow, max(0, nodes - 1))


@settings(max_examples=80, deadline=None)
@given(paths=trees)
def test_levels_within_counts_the_rows_of_nodes_that_go_on(paths: list[tuple[int, ...]]) -> None:
    plan = StaticPlan.of(paths)
    for rows in range(len(paths) + 1):
        levels = plan.levels_within(rows)
        run = {node[:-1] for node in paths if len(node) <= levels} - {()}
        more = {node[:-1] for node in paths if len(node) <= levels + 1} - {()}
        assert len(run) <= rows
        assert levels == plan.steps or len(more) > rows


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([[0], [0]], "[0] is there twice"),
        ([[0], [1, 0]], "the node [1, 0] has no parent: [1] is not in the tree"),
        ([[0], [0, 0, 0]], "[0, 0] is not in the tree"),
        ([[0], []], "[] is not a node"),
        ([[0], 1], "1 is not a node"),
        ([[0], "1"], "'1' is not a node"),
        ([[-1]], "the rank -1"),
        ([[True]], "the rank True"),
        ([[0.0]], "the rank 0.0"),
        ([[MAX_RANK + 1]], f"the rank {MAX_RANK + 1}"),
        ([[0] * (MAX_DEPTH + 1)], f"depth {MAX_DEPTH + 1}"),
        ([[0]] * (MAX_NODES + 1), f"{MAX_NODES + 1} nodes"),
        ([], "[] is not a tree"),
        ({"a": 1}, "is not a tree"),
        ("[[0]]", "is not a tree"),
        (None, "None is not a tree"),
    ],
)
def test_what_is_no_tree_is_refused_by_the_node(paths: object, said: str) -> None:
    with pytest.raises(OptionError) as found:
        choices_of(paths, "eagle_choices")
    assert said in found.value.what
    assert found.value.what.startswith("eagle_choices")
    assert found.value.remedy


def test_bounds_are_taken() -> None:
    deep = [[0] * depth for depth in range(1, MAX_DEPTH + 1)]
    assert StaticPlan.of([*deep, [MAX_RANK]]).steps == MAX_DEPTH


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tree.json", "[[0], [1], [0, 0]]"),
        ("tree.yaml", "- [0]\n- [1]\n- [0, 0]\n"),
        ("tree.yml", "[[0], [1], [0, 0]]"),
        ("tree.txt", "[[0], [1], [0, 0]]"),
    ],
)
def test_choices_stand_in_a_file_as_well(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_choices(str(tmp_path / name)) == ((0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tree.json", b"[[0], ", "is not JSON"),
        ("tree.json", b"[" * 100000, "is not JSON"),
        ("tree.yaml", b"[[0], ", "no YAML"),
        ("tree.yaml", b"!!python/object/apply:os.getcwd []", "no YAML"),
        ("tree.yaml", b"a: 1", "is not a tree"),
        ("tree.json", b"\xff\xfe", "not UTF-8"),
        ("tree.json", b" " * (2**20 + 1), "cannot be read"),
        ("tree.json", None, "cannot be read: No such file"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError) as found:
        read_choices(str(tmp_path / name))
    assert said in found.value.what
    assert str(tmp_path / name) in found.value.what


def test_a_text_that_is_nothing_of_all_names_the_trees() -> None:
    with pytest.raises(OptionError) as found:
        read_choices("mc_sim_7b_64")
    assert "mc_sim_7b_64" in found.value.what
    assert all(name in found.value.remedy for name in NAMED)
    with pytest.raises(OptionError, match="is not JSON"):
        parse_choices("[[0],")


def test_a_list_as_python_writes_it_is_json_too() -> None:
    paths = [[0], [1], [0, 0]]
    assert parse_choices(str(paths)) == parse_choices(json.dumps(paths))


def test_only_a_command_line_reads_files(tmp_path: Path) -> None:
    """Options of requests must not open what they name."""
    (tmp_path / "tree.json").write_text("[[0]]")
    with pytest.raises(OptionError, match="neither a list nor the name of a tree"):
        parse_choices(str(tmp_path / "tree.json"))


def test_a_plan_is_made_of_paths_or_of_a_name_and_not_of_sizes() -> None:
    assert edgespec.StaticPlan is StaticPlan
    plan = edgespec.StaticPlan.of([[0, 0], [1], [0]])
    assert (plan.top_k, plan.steps, plan.verify_size) == (2, 2, 4)
    assert plan == StaticPlan.of([0, 0][:i] or [1] for i in range(3))
    assert edgespec.StaticPlan.of("mc_sim_7b_63").verify_size == 64
    for wrong in (5, "mc_sim", [[1, 0]]):
        with pytest.raises(OptionError):
            edgespec.StaticPlan.of(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"StaticPlan\.of"):
        edgespec.StaticPlan(2, 2, 4)
