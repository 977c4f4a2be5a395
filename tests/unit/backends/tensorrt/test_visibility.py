"""What goes to the device of a mask makes that mask, as the kernel makes it."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.backends.call import Attention, Call
from edgespec.backends.masks import attention_mask
from edgespec.backends.tensorrt.visibility import Visibility
from tests.unit.backends.test_masks import call_of, random_lane


def by_the_kernel(call: Call, attention: Attention, slots: int) -> np.ndarray:
    """As kernels/mask.cu says it."""
    of = Visibility.of(call, attention)
    mask = np.zeros((*of.firsts.shape, slots), bool)
    for lane, row, slot in np.ndindex(mask.shape):
        behind = slot - of.lengths[lane]
        if behind < 0:
            mask[lane, row, slot] = slot >= of.firsts[lane, row]
        elif behind < of.visible.shape[2]:
            mask[lane, row, slot] = of.visible[lane, row, behind]
    return mask[:, None]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("context", [None, 0, 3])
def test_a_mask_is_made_of_lengths_and_what_is_visible_behind(
    window: int | None, context: int | None
) -> None:
    rng = np.random.default_rng(0)
    scratch = 0 if context is None else context
    lanes = [random_lane(rng, *sizes) for sizes in ((5, scratch, 4), (9, scratch, 1))]
    attention = Attention(lanes, window)
    call = call_of(attention, [5, 9], context)
    wide = np.zeros((2, 1, call.rows, 24), bool)
    wanted = attention_mask(call, attention, wide)
    np.testing.assert_array_equal(by_the_kernel(call, attention, 24), wanted)
