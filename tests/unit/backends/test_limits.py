"""Claims about the limits of backends/build.py: a size that cannot be is refused by its flag."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.backends.build import check_limits
from edgespec.contract import Limits
from edgespec.errors import LimitError

LIMITS = Limits(max_input_len=48, max_kv_cache_capacity=64)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_input_len", 0, ["`max_input_len` is 0"]),
        ("max_input_len", 65, ["`max_input_len` 65", "`max_kv_cache_capacity` 64"]),
        ("max_kv_cache_capacity", -3, ["`max_kv_cache_capacity` is -3"]),
        ("max_batch_size", 17, ["`max_batch_size` 17", "exceeds 16"]),
        ("max_verify_tree_size", 0, ["`max_verify_tree_size` is 0"]),
        ("max_draft_tree_size", 0, ["`max_draft_tree_size` is 0"]),
    ],
)
def test_limit_that_cannot_be(name: str, value: int, words: list[str]) -> None:
    with pytest.raises(LimitError) as caught:
        check_limits(replace(LIMITS, **{name: value}))
    for word in words:
        assert word in caught.value.what
    assert caught.value.remedy


def test_limits_at_their_edge_are_taken() -> None:
    check_limits(replace(LIMITS, max_input_len=64, max_batch_size=16, max_verify_tree_size=1))
