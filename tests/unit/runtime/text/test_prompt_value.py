"""A prompt is its tokens, and rows of images in the place of some of them."""

from __future__ import annotations

import numpy as np

from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue
from edgespec.vision.rows import ImageRows

IMAGE, WIDTH = 9, 2


def rows(key: str = "a", height: int = 4, width: int = 6, first: float = 0.0) -> ImageRows:
    count = height * width // 4
    embeds = first + np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)
    return ImageRows(embeds, {"more": 10 * embeds}, (1, height, width), key)


def prompt(*keys: str) -> PromptValue:
    """Three tokens of text before each image of six rows, and two behind the last."""
    tokens: list[int] = []
    images = []
    for key in keys:
        tokens += [1, 2, 3]
        images.append(ImageSlots(len(tokens), rows(key)))
        tokens += [IMAGE] * 6
    return PromptValue.with_images([*tokens, 4, 5], images, 2)


def test_text_is_its_tokens() -> None:
    text = PromptValue.of([3, 1, 2])
    assert (list(text), len(text), text[1:]) == ([3, 1, 2], 3, (1, 2))
    assert (text.cache_key, text.positions, text.position_offset) == ((3, 1, 2), None, 0)
    assert PromptValue.of(text) is text
    assert PromptValue.with_images([3, 1], [], 2).positions is None
    assert PromptValue.of(np.array([3, 1])).tokens == (3, 1)


def test_the_key_of_a_slot_is_the_image_s_content_and_the_row() -> None:
    one, same, other = prompt("a", "b"), prompt("a", "b"), prompt("a", "c")
    assert one.cache_key == same.cache_key
    assert one.cache_key[:12] == other.cache_key[:12]
    assert one.cache_key[12] != other.cache_key[12]
    of_image = one.cache_key[3:9]
    assert len({*of_image, *one.cache_key[12:18]}) == 12
    assert max(of_image) < 0  # no token id is
    assert one.cache_key[:3] == (1, 2, 3)


def test_a_part_has_what_of_an_image_is_in_it() -> None:
    whole = prompt("a", "b")
    (image,) = whole.images_of(5, 8)
    assert (image.start, image.end) == (0, 3)
    np.testing.assert_array_equal(image.rows.embeds, rows().embeds[2:5])
    np.testing.assert_array_equal(image.rows.extras["more"], 10 * rows().embeds[2:5])
    assert whole.images_of(0, 3) == ()
    first, second = whole.images_of(8, 13)
    assert (first.start, first.end, second.start, second.end) == (0, 1, 4, 5)
    np.testing.assert_array_equal(first.rows.embeds, rows().embeds[5:])


def test_what_follows_goes_on_behind_the_longer_side() -> None:
    one = prompt("a")
    assert one.positions is not None
    assert one.positions[2].tolist() == [2, 2, 2]
    assert one.positions[3].tolist() == [3, 3, 3]
    assert one.positions[8].tolist() == [3, 4, 5]  # two rows of three
    assert one.positions[9].tolist() == [6, 6, 6]
    assert (len(one), one.position_offset) == (11, -3)
    longer = one.then([7, 8])
    assert longer.positions is not None
    assert longer.positions[-1].tolist() == [9, 9, 9]
    assert (longer[11:], longer.cache_key[11:], longer.position_offset) == ((7, 8), (7, 8), -3)
