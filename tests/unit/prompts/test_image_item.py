"""Images in messages: what input.json may say, what stays in order, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

import edgespec
from edgespec.benchmark.prompts import digest
from edgespec.errors import RequestError
from edgespec.prompts import MAX_IMAGES, ImageItem, Message, parse_requests

PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQ"
TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image", "image": "a.png"}


def parsed(*content: object) -> Message:
    raw = {"requests": [{"messages": [{"role": "user", "content": list(content)}]}]}
    return parse_requests(raw, "input.json").requests[0].messages[0]


def refusal(*content: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(*content)
    assert caught.value.what.startswith("input.json: requests[0].messages[0]")
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    "item",
    [
        IMAGE,
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "input_image", "image_url": "a.png", "detail": "auto", "file_id": None},
        {"type": "image", "image": "a.png", "cache_control": None},
    ],
)
def test_an_image_is_read_in_each_form(item: object) -> None:
    found = parsed({"type": "input_text", "text": "Look: "}, item, TEXT)
    assert found.parts == ("Look: ", ImageItem("a.png"), "What is it?")
    assert found.images == (ImageItem("a.png"),)
    assert found.content == "Look: What is it?"


def test_a_message_without_images_is_a_text_as_before() -> None:
    found = parsed(TEXT, {"type": "text", "text": " Say."})
    assert found == Message("user", "What is it? Say.")
    assert (found.parts, found.images) == ((), ())


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("a.png", "path"),
        ("/tmp/a.png", "path"),
        ("../a b/ä.png", "path"),
        ("http.png", "path"),
        ("https:/a.png", "path"),
        ("a:b.png", "path"),
        ("C:\\a.png", "path"),
        (PNG, "data"),
        ("DATA:image/png;base64,AAAA", "data"),
        ("https://host/a.png", "url"),
        ("HTTP://host/a.png", "url"),
    ],
)
def test_kinds_of_sources(source: str, kind: str) -> None:
    assert ImageItem(source).kind == kind


@pytest.mark.parametrize(
    ("item", "place", "said"),
    [
        ({"type": "image"}, ".content[0].image", "is missing"),
        ({"type": "image", "image": None}, ".content[0].image", "is null, not a string"),
        ({"type": "image", "image": ""}, ".content[0].image", "is empty"),
        ({"type": "image", "image": 3}, ".content[0].image", "is 3, not a string"),
        ({"type": "image", "image": ["a.png"]}, ".content[0].image", "not a string"),
        ({"type": "image", "image": "a\0b"}, ".content[0].image", "null character"),
        ({"type": "image", "image": "\udc00"}, ".content[0].image", "unpaired surrogate"),
        ({"type": "image", "image": "a" * 5000}, ".content[0].image", "4096 is the limit"),
        ({"type": "image", "image": "file:///a.png"}, ".content[0].image", "a file: URL"),
        ({"type": "image", "image": "FILE:/a.png"}, ".content[0].image", "a file: URL"),
        ({"type": "image", "image": "ftp://a/b"}, ".content[0].image", 'begins with "ftp"'),
        ({"type": "image", "image": "a.png", "max_pixels": 9}, ".max_pixels", "not a known key"),
        ({"type": "image", "url": "a.png"}, ".content[0].url", "not a known key"),
        ({"type": "image_url"}, ".content[0].image_url", "is missing"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url", "is missing"),
        ({"type": "image_url", "image_url": {"uri": "a"}}, ".image_url.uri", "not a known key"),
        (
            {"type": "image_url", "image_url": {"url": "a", "detail": "fine"}},
            ".image_url.detail",
            'is "fine"',
        ),
        ({"type": "input_image", "file_id": "f1"}, ".file_id", "names a file on a server"),
        ({"type": "input_image", "image_url": "a", "detail": 1}, ".detail", "is 1"),
        ({"type": "picture", "image": "a.png"}, ".content[0].type", 'is "picture"'),
        ({"type": ["image"], "image": "a.png"}, ".content[0].type", "is a list"),
        ({"image": "a.png"}, ".content[0].type", "is null"),
    ],
)
def test_what_is_no_image_is_refused_at_its_place(item: object, place: str, said: str) -> None:
    what = refusal(item).what
    assert place in what
    assert said in what


def test_no_more_than_eight_images_in_a_request() -> None:
    assert len(parsed(*[IMAGE] * MAX_IMAGES).images) == MAX_IMAGES
    turn = {"role": "user", "content": [IMAGE] * 5}
    raw = {"requests": [{"messages": [turn, {"role": "assistant", "content": "Yes"}, turn]}]}
    with pytest.raises(RequestError, match="has 10 images in all, and 8 is the limit"):
        parse_requests(raw, "input.json")


def test_items_of_a_message_are_limited() -> None:
    assert "has 1025 items, and 1024 is the limit" in refusal(IMAGE, *[TEXT] * 1024).what


def test_output_repeats_messages_in_the_form_of_the_input() -> None:
    found = parsed(TEXT, IMAGE, {"type": "image", "image": PNG})
    said = found.to_dict()
    assert said["role"] == "user"
    *first, shortened = json.loads(json.dumps(said["content"]))
    assert first == [TEXT, IMAGE]
    assert shortened["image"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert shortened["image"].endswith(f"... ({len(PNG)} characters)")
    assert len(shortened["image"]) < len(PNG)
    assert Message("user", "Hi").to_dict() == {"role": "user", "content": "Hi"}


def test_messages_show_no_data_of_an_image() -> None:
    item = ImageItem(PNG)
    assert item.shown == '"data:image/png;base64,..."'
    assert ImageItem("data:\x1b[31m,").shown == '"data:\\u001b[31m,..."'
    assert PNG not in repr(Message.of("user", [item]))
    assert ImageItem("a" * 300 + "/ship.png").shown == f'"...{"a" * 151}/ship.png"'
    assert ImageItem(f"{'a' * 100}.png").shown == f'"{"a" * 100}.png"'
    assert ImageItem(f"http://{'a' * 100}").shown == f'"http://{"a" * 49}...'


def test_messages_of_python_are_checked_too() -> None:
    item = edgespec.ImageItem("a.png")
    assert edgespec.Message.of("user", ["A ", item, "B"]).content == "A B"
    assert Message.of("user", ["A ", "B"]) == Message("user", "A B")
    with pytest.raises(RequestError, match="ImageItem: source is empty"):
        ImageItem("")
    with pytest.raises(RequestError, match=r"Message: parts\[0\] is 3, neither"):
        Message.of("user", [3])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="Message: content is not the texts"):
        Message("user", "B", ("A", item))


def test_a_report_tells_requests_with_other_images_apart() -> None:
    def of(source: str) -> str:
        item: dict[str, Any] = {"type": "image", "image": source}
        raw = {"requests": [{"messages": [{"role": "user", "content": [TEXT, item]}]}]}
        return digest(parse_requests(raw, "input.json").requests)

    assert of("a.png") == of("a.png")
    assert len({of("a.png"), of("b.png"), of(PNG), of(f"{PNG}A")}) == 4
