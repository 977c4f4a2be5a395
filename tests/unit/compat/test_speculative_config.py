"""A speculative_config is read by TensorRT-LLM's names, refused by name where it cannot be, and the
same as a Python class, in a file and in a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.compat.decoding import DecodingConfig
from edgespec.compat.speculative_config import (
    class_named,
    config_classes,
    drafts_of,
    keys_as_written,
    of_engine,
    of_request,
    read_config,
    schema,
)
from edgespec.errors import LimitError, OptionError, RequestError
from edgespec.runtime.acceptance.verify import (
    RejectionAcceptance,
    RelaxedAcceptance,
    TypicalAcceptance,
)
from edgespec.runtime.drafters.loading import OwnOptions
from edgespec.runtime.drafters.options import fields_of
from edgespec.runtime.plans.plan import Sizes
from edgespec.runtime.plans.schedules import AcceptanceGate, Gates, Schedule
from edgespec.runtime.trees.tree import DraftPlan

CLASSES = {**config_classes(), "AUTO": DecodingConfig}


def read(**values: Any) -> DecodingConfig:
    config, _ = read_config(values)
    assert config is not None
    return config


# TensorRT-LLM's names -> the class
NAMES = {
    "Eagle3": "Eagle3DecodingConfig",
    "Eagle": "Eagle3DecodingConfig",
    "Eagle1": "Eagle1DecodingConfig",
    "Eagle2": "Eagle1DecodingConfig",
    "MTP": "MTPDecodingConfig",
    "mtp": "MTPDecodingConfig",
    "DFlash": "DFlashDecodingConfig",
    "Medusa": "MedusaDecodingConfig",
    "NGram": "NGramDecodingConfig",
    "Suffix": "SuffixDecodingConfig",
    "DraftTarget": "DraftTargetDecodingConfig",
    "Draft_Target": "DraftTargetDecodingConfig",
    "User_Provided": "UserProvidedDecodingConfig",
    "JetSpec": "JetSpecDecodingConfig",
    "DSpark": "DSparkDecodingConfig",
    "AUTO": "DecodingConfig",
}


@pytest.mark.parametrize("name", NAMES)
def test_decoding_type_names_a_class(name: str) -> None:
    assert type(read(decoding_type=name)).__name__ == NAMES[name]


def test_every_row_with_a_decoding_type_is_one_class_of_tensorrt_llms_name() -> None:
    for name, found in config_classes().items():
        assert found.__name__ == f"{name.replace('_', '')}DecodingConfig"
        assert found.decoding_type == name
        assert type(read(decoding_type=name)) is found


def test_alias_is_noted_and_a_key_without_a_meaning_too() -> None:
    block = {"decoding_type": "Eagle", "max_draft_len": 3, "load_format": "dummy"}
    _, notes = read_config(block | {"eagle3_one_model": False, "allow_advanced_sampling": True})
    assert notes[0] == "decoding_type Eagle is Eagle3, as in TensorRT-LLM; write Eagle3"
    assert [note.split(" means nothing here: ")[0] for note in notes[1:]] == [
        "load_format",
        "allow_advanced_sampling",
        "eagle3_one_model",
    ]
    assert read_config({"decoding_type": "Eagle3", "eagle3_one_model": True})[1] == ()


def test_what_tensorrt_llm_does_otherwise_is_noted() -> None:
    block = {"decoding_type": "Eagle3", "max_draft_len": 3, "dynamic_tree_max_topK": 2}
    _, (note,) = read_config(block)
    assert "want use_dynamic_tree: true beside it" in note
    assert read_config(block | {"use_dynamic_tree": True})[1] == ()
    assert read_config({"decoding_type": "Eagle2", "max_draft_len": 3})[1] == ()
    _, (note,) = read_config({"decoding_type": "Eagle3", "greedy_sampling": False})
    assert note == "greedy_sampling false means nothing without posterior_threshold"
    _, (note,) = read_config({"decoding_type": "Eagle3", "eagle3_model_arch": "llama3"})
    assert note == "eagle3_model_arch means nothing here: it is read from the draft's checkpoint"
    assert read_config({"decoding_type": "MTP", "sa_config": None})[1] == ()


# ---- how much is drafted

SIZES: list[tuple[dict[str, Any], Sizes]] = [
    ({"decoding_type": "MTP"}, Sizes()),
    ({"decoding_type": "MTP", "max_draft_len": 3}, Sizes(1, 3, 4)),
    ({"decoding_type": "MTP", "num_nextn_predict_layers": 2}, Sizes(1, 2, 3)),
    ({"decoding_type": "MTP", "max_draft_len": 3, "max_total_draft_tokens": 3}, Sizes(1, 3, 4)),
    ({"decoding_type": "MTP", "draft_len_schedule": {1: 5, 4: 2}}, Sizes(1, 5, 6)),
    ({"decoding_type": "Eagle3", "max_draft_len": 4}, Sizes(1, 4, 5)),
    ({"decoding_type": "DFlash", "max_draft_len": 7}, Sizes(1, None, 8)),
    ({"decoding_type": "DFlash", "dynamic_tree_max_topK": 3}, Sizes(3, None, None)),
    (
        {"decoding_type": "DFlash", "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 20},
        Sizes(3, None, 21),
    ),
    ({"decoding_type": "JetSpec", "max_draft_len": 15}, Sizes(1, None, 16)),
    (
        {"decoding_type": "JetSpec", "dynamic_tree_max_topK": 7, "max_total_draft_tokens": 127},
        Sizes(7, None, 128),
    ),
    ({"decoding_type": "DSpark", "max_draft_len": 7}, Sizes(1, None, 8)),
    ({"decoding_type": "DSpark"}, Sizes(1, None, None)),
]


@pytest.mark.parametrize(("block", "sizes"), SIZES)
def test_sizes_follow_from_the_keys(block: dict[str, Any], sizes: Sizes) -> None:
    config = read(**block)
    assert (config.sizes, config.tree) == (sizes, None)


TREES: list[tuple[dict[str, Any], DraftPlan]] = [
    # TensorRT-LLM's default number of nodes is width times levels, as far as the base goes
    ({"dynamic_tree_max_topK": 4, "max_draft_len": 3}, DraftPlan(4, 3, 13)),
    (
        {"use_dynamic_tree": True, "dynamic_tree_max_topK": 10, "max_draft_len": 9},
        DraftPlan(10, 9, 64),
    ),
    (
        {"dynamic_tree_max_topK": 4, "max_draft_len": 3, "max_total_draft_tokens": 5},
        DraftPlan(4, 3, 6),
    ),
    ({"decoding_type": "Eagle2", "max_draft_len": 5}, DraftPlan(10, 5, 51)),
    ({"decoding_type": "Eagle2", "dynamic_tree_max_topK": 2}, DraftPlan(2, 4, 9)),
]


@pytest.mark.parametrize(("block", "plan"), TREES)
def test_dynamic_trees_are_sized_as_tensorrt_llm_does(
    block: dict[str, Any], plan: DraftPlan
) -> None:
    tree = read(**({"decoding_type": "Eagle3"} | block)).tree
    assert tree is not None
    assert tree.plan(64) == plan


def test_pool_of_a_schedule_has_drafts_of_its_first_length() -> None:
    config = read(decoding_type="NGram", draft_len_schedule={4: 4, 8: 2})
    assert config.sizes == Sizes(1, 4, 5)
    assert config.options is not None
    assert config.options.max_draft_len == 4  # type: ignore[attr-defined]
    unsized = read(decoding_type="NGram").options
    assert unsized is not None
    assert unsized.max_draft_len == 3  # type: ignore[attr-defined]


def test_static_tree_is_the_one_of_its_choices() -> None:
    block = {"decoding_type": "Eagle1", "eagle_choices": [[0], [1], [0, 0]], "max_draft_len": 2}
    tree = read(**block).tree
    assert tree is not None
    assert tree.plan(64).choices == ((0,), (1,), (0, 0))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "threshold"),
    [
        ({}, None),
        ({"confidence_threshold": 0.25}, 0.25),
        ({"enable_confidence_scheduling": True}, None),
        ({"enable_confidence_scheduling": False}, 0.0),
        ({"enable_confidence_scheduling": False, "confidence_threshold": 0}, 0.0),
    ],
)
def test_confidences_set_the_length_unless_they_are_turned_off(
    keys: dict[str, Any], threshold: float | None
) -> None:
    options = read(decoding_type="DSpark", **keys).options
    assert options is not None
    assert options.confidence_threshold == threshold  # type: ignore[attr-defined]


def test_what_a_draft_was_exported_with_is_noted_where_it_is_given_again() -> None:
    block = {"decoding_type": "DSpark", "markov_rank": 256, "confidence_sts_path": "sts.json"}
    _, notes = read_config(block)
    assert [note.split(" means nothing here: ")[0] for note in notes] == [
        "markov_rank",
        "confidence_sts_path",
    ]


# ---- refused by name

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, r"decoding_type is missing\nAdd one of Eagle1, Eagle3"),
    ({"decoding_type": 3}, "decoding_type is 3\n"),
    ({"decoding_type": "Eagle7"}, r"no decoding_type Eagle7\nDid you mean Eagle"),
    ({"decoding_type": "Lookahead"}, "no decoding_type Lookahead\nFrom the text alone"),
    (
        {"decoding_type": "SaveState"},
        "SaveState: it writes hidden states .*\nDecoding types: Eagle1",
    ),
    ({"decoding_type": "PARD"}, "no decoding_type PARD: its draft fills a row of mask tokens"),
    ({"decoding_type": "ReDrafter"}, "no decoding_type ReDrafter: its draft is recurrent"),
    ({"decoding_type": "P-EAGLE"}, "no decoding_type P-EAGLE: it drafts all positions in one pass"),
    ({"decoding_type": "DFlash2"}, "no decoding_type DFlash2: its layers have convolutions"),
    (
        {"decoding_type": "Eagle3", "sa_config": {"threshold": 4}},
        "sa_config asks for a second drafter, .*\nRemove it. From the text alone draft: Suffix",
    ),
    ({"decoding_type": "x" * 999}, "no decoding_type x{60}\n"),
    (
        {"decoding_type": "MTP", "max_draft_lens": 3},
        r"max_draft_lens .*\nDid you mean max_draft_len\?",
    ),
    (
        {"decoding_type": "MTP", "eagle_choices": []},
        r"is not a key of decoding_type MTP\nIt is one of Eagle",
    ),
    ({"decoding_type": "MTP", "max_draft_len": 0}, "max_draft_len is 0\nGive an integer from 1"),
    ({"decoding_type": "MTP", "max_draft_len": "3"}, "max_draft_len is '3'"),
    ({"decoding_type": "MTP", "max_draft_len": True}, "max_draft_len is True"),
    ({"decoding_type": "MTP", "max_draft_len": 10**5000}, "is a value with thousands of digits"),
    ({"decoding_type": 10**5000}, "decoding_type is a value with thousands of digits"),
    ({"decoding_type": "MTP", "begin_thinking_phase_token": 10**350}, "_phase_token is 1000"),
    ({"decoding_type": "MTP", "draft_len_schedule": {10**5000: 3}}, "thousands of digits"),
    ({"decoding_type": "MTP", "draft_len_schedule": (1,)}, r"draft_len_schedule is \(1,\)"),
    (
        {
            "decoding_type": "MTP",
            "acceptance_window": 2,
            "acceptance_length_threshold": 10**350,
        },
        "acceptance_length_threshold is 1000",
    ),
    ({"decoding_type": "MTP", "max_draft_len": 2, "num_nextn_predict_layers": 3}, "mean the same"),
    ({"decoding_type": "MTP", "use_mtp_vanilla": True}, "use_mtp_vanilla is true"),
    (
        {"decoding_type": "MTP", "max_draft_len": 3, "max_total_draft_tokens": 4},
        "equal for a chain",
    ),
    (
        {"decoding_type": "MTP", "max_total_draft_tokens": 4},
        "max_total_draft_tokens is 4, and max_draft_len None",
    ),
    (
        {"decoding_type": "MTP", "speculative_model": "a", "speculative_model_dir": "b"},
        "is given twice",
    ),
    ({"decoding_type": "MTP", "speculative_model": 3}, "speculative_model is 3"),
    ({"decoding_type": "Eagle1", "eagle_choices": [[0, 0]]}, r"\[0, 0\] has no parent"),
    (
        {"decoding_type": "Eagle1", "eagle_choices": [[0]], "use_dynamic_tree": True},
        "exclude each other",
    ),
    ({"decoding_type": "Eagle3", "use_dynamic_tree": True}, "needs dynamic_tree_max_topK"),
    ({"decoding_type": "Eagle3", "max_non_leaves_per_layer": 3}, "is for trees, and a chain"),
    ({"decoding_type": "Eagle3", "eagle3_layers_to_capture": [1, 1]}, "Name each layer once"),
    (
        {"decoding_type": "Eagle3", "eagle3_layers_to_capture": [-1]},
        "eagle3_layers_to_capture is -1",
    ),
    ({"decoding_type": "DFlash", "dynamic_tree_max_topK": 9}, "from 1 to 8"),
    ({"decoding_type": "DSpark", "dynamic_tree_max_topK": 2}, "is not a key of .* DSpark"),
    ({"decoding_type": "DSpark", "confidence_threshold": 1.5}, "confidence_threshold.*1.5"),
    (
        {
            "decoding_type": "DSpark",
            "confidence_threshold": 0.5,
            "enable_confidence_scheduling": False,
        },
        "enable_confidence_scheduling is false, and confidence_threshold 0.5",
    ),
    (
        {"decoding_type": "DFlash", "dynamic_tree_max_topK": 2, "max_draft_len": 3},
        "as deep as the block",
    ),
    ({"decoding_type": "MTP", "draft_len_schedule": {}}, "draft_len_schedule is {}"),
    ({"decoding_type": "MTP", "draft_len_schedule": {0: 3}}, r"draft_len_schedule\[0\] is 3"),
    ({"decoding_type": "MTP", "draft_len_schedule": {1: -1}}, r"draft_len_schedule\[1\] is -1"),
    ({"decoding_type": "MTP", "draft_len_schedule": {"1": 3, 1: 3}}, "draft_len_schedule"),
    ({"decoding_type": "MTP", "draft_len_schedule": {"one": 3}}, "'one'"),
    ({"decoding_type": "MTP", "draft_len_schedule": {1: 2, 4: 3}}, "goes up to 3"),
    (
        {"decoding_type": "MTP", "max_draft_len": 4, "draft_len_schedule": {2: 3}},
        r"\[2\] is 3, and max_draft_len 4",
    ),
    (
        {"decoding_type": "MTP", "max_concurrency": 2, "draft_len_schedule": {1: 2}},
        "exclude each other",
    ),
    ({"decoding_type": "MTP", "max_concurrency": 0}, "max_concurrency is 0"),
    ({"decoding_type": "MTP", "acceptance_window": 4}, "acceptance_length_threshold is not"),
    ({"decoding_type": "MTP", "acceptance_length_threshold": 0.5}, "acceptance_window is not"),
]


@pytest.mark.parametrize(("block", "said"), REFUSED)
def test_what_cannot_be_is_refused_with_its_key(block: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error:
        read_config(block, "f.yaml: speculative_config")
    assert re.search(said, str(error.value.spelled(keys_as_written())))
    assert error.value.what.startswith("f.yaml: speculative_config: ")
    assert error.value.remedy


@pytest.mark.parametrize("given", ["NGram", 3, [1], [("decoding_type", "MTP")]])
def test_block_that_is_no_mapping_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="no mapping"):
        read_config(given)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([10**20, 10**350, -(10**350), 10**5000]),  # no float, and no text
    st.floats(),
    st.text(max_size=4),
    st.lists(st.lists(st.integers(-1, 3), max_size=3), max_size=4),
    st.dictionaries(st.integers(0, 5) | st.text(max_size=2), st.integers(-1, 5), max_size=3),
)
keys = st.sampled_from([*{name for kind in CLASSES.values() for name in fields_of(kind)}, "other"])


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from([*CLASSES, "Eagle2"]), block=st.dictionaries(keys, values, max_size=4))
def test_any_block_is_a_config_or_an_error_of_ours(name: str, block: dict[str, Any]) -> None:
    with suppress(OptionError):
        config = read(decoding_type=name, **block)
        if config.tree is not None:
            with suppress(LimitError):
                config.tree.plan(64)
        return
    with pytest.raises(OptionError) as error:
        read(decoding_type=name, **block)
    assert error.value.remedy
    assert len(str(error.value)) < 2000


# ---- what is accepted

RULES: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"use_rejection_sampling": True}, RejectionAcceptance()),
    ({"posterior_threshold": 0.09}, TypicalAcceptance(0.09)),
    ({"posterior_threshold": 0.09, "posterior_alpha": 0.3}, TypicalAcceptance(0.09, 0.3)),
    ({"use_relaxed_acceptance_for_thinking": True}, RelaxedAcceptance()),
    (
        {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 5, "relaxed_delta": 0.5},
        RelaxedAcceptance(5, 0.5),
    ),
    (
        {
            "use_relaxed_acceptance_for_thinking": True,
            "begin_thinking_phase_token": 7,
            "end_thinking_phase_token": "</reason>",
        },
        RelaxedAcceptance(10, 0.6, 7, "</reason>"),
    ),
]


@pytest.mark.parametrize(("keys", "rule"), RULES)
@pytest.mark.parametrize("name", ["Eagle3", "MTP", "NGram", "AUTO"])
def test_keys_name_an_accept_rule(name: str, keys: dict[str, Any], rule: Any) -> None:
    assert read(decoding_type=name, **keys).acceptance == rule


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"posterior_alpha": 0.3}, "without posterior_threshold"),
        ({"relaxed_topk": 3}, "without use_relaxed_acceptance_for_thinking"),
        ({"posterior_threshold": 0.0}, "a number above 0"),
        ({"begin_thinking_phase_token": -3}, "the id of a token, or the token itself"),
        ({"end_thinking_phase_token": [3]}, "the id of a token, or the token itself"),
        ({"use_rejection_sampling": True, "posterior_threshold": 0.1}, "two accept rules"),
        ({"posterior_threshold": 0.1, "greedy_sampling": True}, "`greedy_sampling` is true"),
    ],
)
def test_rules_that_contradict_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read(decoding_type="Eagle3", **keys)


# ---- a drafter of the user's own


def test_drafter_is_given_in_python_and_never_in_a_file() -> None:
    drafter, manager = SimpleNamespace(), object()
    made = class_named("UserProvidedDecodingConfig")(
        drafter=drafter, resource_manager=manager, max_draft_len=2, time_budget_ms=5
    )
    assert (made.drafts_by, drafter.resource_manager) == (drafter, manager)
    assert made.options == OwnOptions(time_budget_ms=5)
    assert of_engine(made, None, "DIR") is made
    block = {"decoding_type": "User_Provided", "drafter": "os:system"}
    with pytest.raises(OptionError, match="os:system is code, and a file runs none"):
        read(**block)
    with pytest.raises(RequestError, match="r: the drafter os:system is code"):
        of_request(block, "r", None)
    with pytest.raises(OptionError, match="without a drafter"):
        drafts_of(read(decoding_type="User_Provided"), None, None, None)
    assert drafts_of(read(decoding_type="User_Provided"), None, "a:B", None) == "a:B"
    with pytest.raises(OptionError, match="resource_manager is given without a drafter"):
        class_named("UserProvidedDecodingConfig")(resource_manager=manager)


def test_drafter_is_named_in_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_drafter.py").write_text("class Named:\n    def propose(self, c): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = class_named("UserProvidedDecodingConfig")
    made = kind(drafter="named_drafter:Named")
    assert type(made.drafts_by).__name__ == "Named"
    with pytest.raises(OptionError) as refused:
        kind(drafter="named_drafter.py:Named")
    assert "Write the module without .py: named_drafter:Class" in str(refused.value)


def test_classes_are_found_by_aliases_and_listed() -> None:
    import edgespec

    assert edgespec.EagleDecodingConfig is edgespec.Eagle3DecodingConfig
    assert {"EagleDecodingConfig", "Scheduler"}.isdisjoint(dir(edgespec))
    listed = {f"{name.replace('_', '')}DecodingConfig" for name in config_classes()}
    assert listed | {"AutoDecodingConfig"} <= set(dir(edgespec))
    with pytest.raises(AttributeError, match="From the text alone draft: Suffix, NGram"):
        _ = edgespec.LookaheadDecodingConfig
    with pytest.raises(AttributeError, match=r"write Eagle1DecodingConfig\(use_dynamic_tree=True"):
        _ = edgespec.Eagle2DecodingConfig


def test_alias_of_a_type_stands_beside_its_name() -> None:
    with pytest.raises(OptionError, match=r"decoding_type Eagle1 \(or Eagle2\) was given"):
        of_engine(read(decoding_type="Eagle2"), "eagle3", "DIR")


# ---- the same in Python


@pytest.mark.parametrize(
    "block",
    [
        {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "a/b"},
        {"decoding_type": "Eagle1", "eagle_choices": [[0], [0, 0]]},
        {"decoding_type": "MTP", "num_nextn_predict_layers": 2, "max_concurrency": 4},
        {"decoding_type": "DFlash", "draft_len_schedule": {1: 7, 4: 3}},
        {"decoding_type": "AUTO", "acceptance_window": 3, "acceptance_length_threshold": 0.5},
    ],
)
def test_class_and_block_are_the_same(block: Mapping[str, Any]) -> None:
    own = {key: value for key, value in block.items() if key != "decoding_type"}
    made = CLASSES[block["decoding_type"]](**own)
    assert made == read(**block)
    assert read_config(made) == (made, tuple(made.notes()))
    again = json.loads(json.dumps(block))  # keys of a schedule are texts there
    assert read(**again) == made


def test_unknown_keyword_of_a_class_is_a_type_error_as_pythons_are() -> None:
    with pytest.raises(TypeError, match="max_draft_lens"):
        CLASSES["MTP"](max_draft_lens=3)


# ---- beside an engine


def test_auto_is_what_the_engine_drafts_with() -> None:
    auto = read(decoding_type="AUTO", max_draft_len=3)
    assert of_engine(auto, "mtp", "DIR") == read(decoding_type="MTP", max_draft_len=3)
    assert of_engine(auto, None, "DIR") == auto
    assert of_engine(auto, "dflash", "DIR").sizes == Sizes(1, None, 4)


def test_another_method_than_the_drafts_is_refused_with_its_name() -> None:
    eagle = read(decoding_type="Eagle")
    with pytest.raises(OptionError, match="DIR has an EAGLE-1 draft\nWrite decoding_type: Eagle1"):
        of_engine(eagle, "eagle1", "DIR")
    with pytest.raises(OptionError, match=r"Eagle3 \(or Eagle\) was given, and DIR has no draft"):
        of_engine(eagle, None, "DIR")
    assert of_engine(eagle, "eagle3", "DIR") is eagle


def test_request_has_the_engines_decoding_type_where_it_names_none() -> None:
    assert of_request({"max_draft_len": 2}, "x", "mtp") == read(
        decoding_type="MTP", max_draft_len=2
    )
    for raw, said in (
        ({"max_draft_le": 2}, "r: max_draft_le is not a known key"),
        ({"max_draft_len": 0}, "r: max_draft_len is 0"),
        ({"speculative_model": "a"}, "r: speculative_model is a matter of the engine"),
        (
            {"acceptance_window": 2, "acceptance_length_threshold": 1},
            "acceptance_window is a matter",
        ),
        (["MTP"], "r: is no object"),
        ({"decoding_type": "User_Provided"}, "r: decoding_type User_Provided needs a drafter"),
    ):
        with pytest.raises(RequestError, match=said):
            of_request(raw, "r", "mtp")


# ---- gates


def test_schedule_says_how_deep_by_how_many_run() -> None:
    config = read(decoding_type="MTP", draft_len_schedule={4: 4, 8: 2, 32: 1})
    assert config.schedule is not None
    assert [config.schedule.levels(n) for n in (1, 4, 5, 8, 9, 32, 33)] == [4, 4, 2, 2, 1, 1, 0]
    most = read(decoding_type="MTP", max_draft_len=3, max_concurrency=2).schedule
    assert most is not None
    assert [most.levels(n) for n in (1, 2, 3)] == [3, 3, 0]
    assert read(decoding_type="MTP", max_draft_len=3).schedule is None


def test_gate_closes_once_the_average_of_the_window_is_below_the_threshold() -> None:
    gate = AcceptanceGate(3, 0.6)
    for accepted in ([1, 1], [0, 0], [0, 2]):  # 1, 0, 1 on average: 0.67
        gate.record(accepted)
    gate.record([])  # an answer of one token says nothing
    assert gate.stopped is None
    gate.record([0, 1])  # 0, 1, 0.5
    assert gate.stopped == (
        "drafting stopped at answer 4: the last 3 accepted 0.50 drafts a step, below the"
        " acceptance_length_threshold of 0.6"
    )
    said = gate.stopped
    for _ in range(5):
        gate.record([9, 9])
    assert gate.stopped == said  # for good, as in TensorRT-LLM


def test_gates_count_the_steps_that_drafted() -> None:
    gates = Gates(Schedule(((1, 4),)), AcceptanceGate(1, 1.0))
    assert (gates.levels(1), gates.levels(2), gates.stopped) == (4, 0, False)
    gates.record([3, 0, 3, 0], [1, 0, 1, 0])
    assert not gates.stopped
    gates.record([3, 3], [1, 0])
    assert (gates.levels(1), gates.stopped) == (0, True)


# ---- the schema for editors


def test_schema_has_every_key_of_every_type_and_nothing_else() -> None:
    found = schema()
    titles = {one["title"]: one for one in found["oneOf"]}
    assert titles.keys() == CLASSES.keys()
    for name, kind in CLASSES.items():
        keys = titles[name]["properties"].keys()
        assert keys == {"decoding_type", "speculative_model_dir", *fields_of(kind)}
        assert not titles[name]["additionalProperties"]
        assert all(key["description"] for key in titles[name]["properties"].values())
    assert titles["Eagle3"]["properties"]["decoding_type"]["enum"] == ["Eagle3", "Eagle"]


SCHEMA = Path(__file__).parents[3] / "docs" / "config.schema.json"
