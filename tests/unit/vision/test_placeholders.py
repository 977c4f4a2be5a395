"""Each image gets its rows in the prompt, and nothing else gets any."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from edgespec.config.values import ImageTokens
from edgespec.errors import RequestError
from edgespec.prompts import ImageItem, Message
from edgespec.vision.placeholders import ExpandedPrompt, expand, refuse_marks

IMAGE, VIDEO, START, END = 90, 91, 92, 93
TOKENS = ImageTokens(image=IMAGE, video=VIDEO, vision_start=START, vision_end=END)


def test_an_image_takes_a_slot_for_each_of_its_rows() -> None:
    ids = [1, START, IMAGE, END, 2, START, IMAGE, END, 3]
    found = expand(ids, TOKENS, [3, 2])
    assert found.tokens == (
        *(1, START, IMAGE, IMAGE, IMAGE, END),
        *(2, START, IMAGE, IMAGE, END, 3),
    )
    assert found.starts == (2, 8)


def test_a_prompt_without_images_stays_as_it_is() -> None:
    assert expand([1, 2, START, 3], TOKENS, []) == ExpandedPrompt((1, 2, START, 3), ())
    assert expand([], TOKENS, []) == ExpandedPrompt((), ())


@settings(deadline=None)
@given(st.lists(st.one_of(st.integers(0, 89), st.just(IMAGE))), st.data())
def test_all_other_tokens_keep_their_order(ids: list[int], data: st.DataObject) -> None:
    num_images = ids.count(IMAGE)
    counts = data.draw(st.lists(st.integers(1, 9), min_size=num_images, max_size=num_images))
    found = expand(ids, TOKENS, counts)
    assert [i for i in found.tokens if i != IMAGE] == [i for i in ids if i != IMAGE]
    assert len(found.tokens) == len(ids) - num_images + sum(counts)
    for start, count in zip(found.starts, counts, strict=True):
        assert found.tokens[start : start + count] == (IMAGE,) * count
    # Between them stands what stood between the image tokens
    cut = [i for s, c in zip(found.starts, counts, strict=True) for i in range(s + 1, s + c)]
    assert [t for i, t in enumerate(found.tokens) if i not in cut] == ids


@pytest.mark.parametrize(
    ("ids", "counts", "said"),
    [
        ([1, IMAGE, IMAGE], [4], "has 2 places for images, and the request has 1 image."),
        ([1, IMAGE], [], "has 1 place for images, and the request has 0 images."),
        ([1], [4, 4], "has 0 places for images, and the request has 2 images."),
    ],
)
def test_places_and_images_must_be_as_many(ids: list[int], counts: list[int], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        expand(ids, TOKENS, counts)


def test_a_place_of_a_video_is_refused() -> None:
    with pytest.raises(RequestError, match="videos are not read") as caught:
        expand([1, START, VIDEO, END], TOKENS, [])
    assert "frames" in caught.value.remedy


MARKS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


@pytest.mark.parametrize(
    ("mark", "meaning"),
    [("<|image_pad|>", "the rows of an image."), ("<|video_pad|>", "the rows of a video.")],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_mark_in_a_text_is_no_place_of_an_image(mark: str, meaning: str, role: str) -> None:
    written = [Message("user", "Hi"), Message(role, f"see <|vision_start|>{mark}")]
    with pytest.raises(RequestError) as caught:
        refuse_marks(written, **MARKS)
    assert mark in caught.value.what
    assert caught.value.what.endswith(meaning)
    assert ("frames" in caught.value.remedy) is ("video" in meaning)
    assert role in caught.value.what
    beside = [Message.of("user", [ImageItem("a.png"), f"and {mark}"])]
    with pytest.raises(RequestError):
        refuse_marks(beside, **MARKS)


def test_a_mark_in_two_pieces_is_found_too() -> None:
    split = Message.of("user", ["<|image", ImageItem("a.png"), "_pad|>"])
    with pytest.raises(RequestError, match="stands for"):
        refuse_marks([split], **MARKS)


def test_what_only_looks_like_a_mark_stays() -> None:
    refuse_marks([Message("user", "<|image|> image_pad <image_pad>")], **MARKS)
    refuse_marks([Message("user", MARKS["video"])], image=MARKS["image"], video=None)


def test_a_tokenizer_takes_a_mark_in_a_text_for_an_image_and_the_count_shows_it() -> None:
    """What `refuse_marks` is for: without it a text gets rows of an image."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<|image_pad|>", special=True)])
    tokens = ImageTokens(image=1, video=2, vision_start=3, vision_end=4)
    ids = tokenizer.encode("user: <|image_pad|> what is it").ids
    with pytest.raises(RequestError, match="has 1 place for images, and the request has 0"):
        expand(ids, tokens, [])
