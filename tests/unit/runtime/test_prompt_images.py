"""The images of prompts: cheap refusals come before the encoder, each image is encoded once, and
what one prompt meets harms no other. The encoder here counts what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import EngineClosed, EnvironmentProblem, LimitError, RequestError
from edgespec.images import ImageProcessor, ImageReader, ImageRules, PreparedImage
from edgespec.prompts import ImageItem
from edgespec.runtime.vision import image_prompts
from edgespec.runtime.vision.image_prompts import ImagePrompts, RunStopped
from edgespec.runtime.vision.image_stats import ImageStats
from tests.unit.images.counting import MARK, TOKENS, Counting, images_of
from tests.unit.images.samples import png


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with three images."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(84, 56 + number))
    return tmp_path


@pytest.fixture
def encoder() -> Counting:
    return Counting()


@pytest.fixture
def images(place: Path, encoder: Any) -> ImagePrompts:
    return images_of(place, encoder)


def items(*names: str) -> list[ImageItem]:
    return [ImageItem(name) for name in names]


def test_an_image_has_its_slots_and_is_encoded_once(
    images: ImagePrompts, encoder: Counting
) -> None:
    for _ in range(2):
        prompt = images.prompt([*MARK, *MARK], items("0.png", "1.png"))
        assert [slots.start for slots in prompt.images] == [1, 9]
        assert len(prompt) == 2 * (TOKENS + 2)
    assert encoder.asked == ['"0.png"', '"1.png"']
    assert (images.stats.images, images.stats.tokens) == (4, 4 * TOKENS)
    assert (images.stats.encoded, images.stats.encoded_tokens) == (2, 2 * TOKENS)


@pytest.mark.parametrize(
    ("ids", "names", "error"),
    [
        (MARK * 4, ["0.png", "1.png", "2.png", "0.png"], LimitError),  # too many tokens in all
        ([1, 2], ["0.png"], RequestError),  # no place for it
        (MARK, ["0.png", "1.png"], RequestError),
        (MARK * 2, ["0.png", "none.png"], RequestError),
    ],
)
def test_what_is_refused_is_refused_before_an_image_is_encoded(
    images: ImagePrompts,
    encoder: Counting,
    ids: Sequence[int],
    names: list[str],
    error: type[Exception],
) -> None:
    with pytest.raises(error):
        images.prompt(ids, items(*names))
    assert encoder.asked == []


def test_a_prompt_that_is_too_long_is_refused_before_an_image_is_encoded(
    images: ImagePrompts, encoder: Counting
) -> None:
    def check(tokens: Sequence[int]) -> None:
        raise LimitError(f"{len(tokens)} tokens", "Shorten it.")

    with pytest.raises(LimitError, match=f"{TOKENS + 2} tokens"):
        images.prompt(MARK, items("0.png"), check=check)
    assert encoder.asked == []


def test_memory_that_ends_is_an_error_of_that_prompt(
    images: ImagePrompts, encoder: Counting
) -> None:
    def full() -> None:
        raise MemoryError

    encoder.meanwhile = full
    with pytest.raises(EnvironmentProblem, match="not enough memory for the images"):
        images.prompt(MARK, items("0.png"))
    encoder.meanwhile = lambda: None
    assert len(images.prompt(MARK, items("0.png"))) == TOKENS + 2


def test_a_stop_is_heard_between_two_images(images: ImagePrompts, encoder: Counting) -> None:
    asked: list[int] = []

    def third() -> bool:
        asked.append(len(asked))
        return len(asked) == 4  # two are read, the first is encoded

    with pytest.raises(RunStopped):
        images.prompt(MARK * 2, items("0.png", "1.png"), stopping=third)
    assert encoder.asked == ['"0.png"']


def test_reading_and_encoding_have_times_of_their_own(
    images: ImagePrompts, encoder: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, real = [0.0], ImageReader.read

    def read(self: ImageReader, *args: Any) -> PreparedImage:
        now[0] += 5
        return real(self, *args)

    def encode() -> None:
        now[0] += 7

    monkeypatch.setattr(ImageReader, "read", read)
    monkeypatch.setattr(image_prompts.time, "perf_counter", lambda: now[0])
    encoder.meanwhile = encode
    before = images.stats
    images.prompt(MARK * 2, items("0.png", "0.png"))
    assert images.stats - before == ImageStats(2, 2 * TOKENS, 10.0, 1, TOKENS, 7.0)


# ---- images that the user named by hand


def test_a_typed_image_may_be_read_wherever_it_is_and_stays_what_it_is(
    images: ImagePrompts, place: Path
) -> None:
    (place / "deep").mkdir()
    images.reader = ImageReader(ImageRules(directory=place / "deep"), ImageProcessor())
    item, num_tokens = images.typed(place / "0.png")
    (place / "0.png").write_bytes(b"another file")
    assert num_tokens == TOKENS
    assert len(images.prompt(MARK, [item])) == TOKENS + 2
    assert item.echo == str(place / "0.png")


def test_what_was_typed_allows_nothing_else(images: ImagePrompts, place: Path) -> None:
    other = place / "deep"
    other.mkdir()
    images.reader = ImageReader(ImageRules(directory=other), ImageProcessor())
    rules = images.reader.rules
    with pytest.raises(RequestError, match="not a regular file"):
        images.typed(place)
    images.typed(place / "0.png")
    assert images.reader.rules == rules
    with pytest.raises(RequestError, match="outside"):
        images.prompt(MARK, items(str(place / "0.png")))


def test_a_typed_image_of_too_many_tokens_is_refused_unencoded(
    images: ImagePrompts, encoder: Counting, place: Path
) -> None:
    (place / "large.png").write_bytes(png(280, 280))
    with pytest.raises(LimitError, match="have 100 tokens, the image encoder takes 20"):
        images.typed(place / "large.png")
    assert encoder.asked == []


# ---- the end


def test_a_closed_encoder_is_not_asked(images: ImagePrompts, encoder: Counting) -> None:
    images.close()
    images.close()
    with pytest.raises(EngineClosed):
        images.prompt(MARK, items("0.png"))
    assert encoder.asked == []


def test_a_close_waits_for_the_image_that_is_encoded(
    images: ImagePrompts, encoder: Counting
) -> None:
    closer = threading.Thread(target=images.close)

    def meanwhile() -> None:
        closer.start()
        closer.join(0.2)
        assert closer.is_alive()

    encoder.meanwhile = meanwhile
    images.prompt(MARK, items("0.png"))
    closer.join()
    assert encoder.closed
