"""Messages of Python callers are read like those of a file, images included."""

from __future__ import annotations

import pytest

from edgespec.errors import RequestError
from edgespec.prompts import ImageItem, Message
from edgespec.runtime.text.prompt import read_messages, read_prompt

ITEM = {"type": "image_url", "image_url": {"url": "a.png"}}


def test_messages_of_clients_may_have_images() -> None:
    written = {"role": "user", "content": [ITEM, {"type": "text", "text": "What is it?"}]}
    made = Message.of("user", [ImageItem("a.png"), "What is it?"])
    assert read_prompt([written]) == read_prompt([made]) == (made,)


def test_no_more_than_eight_images_in_a_conversation() -> None:
    turn = {"role": "user", "content": [ITEM] * 5}
    with pytest.raises(RequestError, match="prompt has 10 images in all, and 8 is the limit"):
        read_messages([turn, Message("assistant", "Yes"), turn])
