"""Images in a chat: they go with the next turn, stay what they were, and can be taken back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.chat.loop import Chat
from edgespec.errors import EdgeSpecError
from edgespec.prompts.parse import read_requests
from tests.unit.cli.test_chat import Event, chat_of, saying, talk
from tests.unit.images.counting import MARK, Counting, images_of
from tests.unit.images.samples import png


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "cat.png"
    path.write_bytes(png(84, 56))
    return path


def seeing(*answers: list[Event], encoder: Any = None, place: Path = Path("/")) -> Chat:
    """A chat with an image encoder, whose rules allow nothing of the tests' files."""
    chat = chat_of(*answers)
    chat.engine.images = images_of(place, encoder)
    return chat


def shown(chat: Chat) -> list[list[int]]:
    """The images of each message of each request."""
    engine: Any = chat.engine
    return [[len(message.images) for message in messages] for messages in engine.asked]


def sources(chat: Chat) -> list[str]:
    """Of the images of the last request."""
    engine: Any = chat.engine
    return [image.source for message in engine.asked[-1] for image in message.images]


def test_image_needs_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(chat_of(), "/image cat.png") == 5
    said = capsys.readouterr().err
    assert "there is no image encoder" in said
    assert "--multimodal-engine-dir" in said


def test_images_go_with_the_next_turn_and_wait_where_it_fails(
    cat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = seeing([EdgeSpecError("not now", "Try again.")], saying("a cat"), saying("yes"))
    assert talk(chat, f"/image {cat}", "What is it?", "What is it?", "Is it?") == 5
    assert shown(chat) == [[1], [1], [1, 0, 0]]
    said = " ".join(capsys.readouterr().err.split())
    assert "cat.png: 6 tokens" in said
    assert "Try again. 1 image of the turn will go with the next one; /image without a name" in said


@pytest.mark.parametrize("line", ["/image", "/reset", "/undo"])
def test_images_that_wait_can_be_dropped(
    cat: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = seeing(saying("hello"))
    assert talk(chat, f"/image {cat}", f"/image {cat}", line, "Hello.") == 0
    assert shown(chat) == [[0]]
    assert "[2 images dropped]" in capsys.readouterr().err


def test_a_typed_path_that_is_not_there_is_no_path_of_an_input_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(seeing(), f"/image {tmp_path}/x.png") == 5
    said = capsys.readouterr().err
    assert "is not there" in said
    assert "Write its path as seen from the directory where the chat was started." in said


def test_image_without_a_name_says_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(seeing(), "/image") == 5
    assert "no image waits for a turn" in capsys.readouterr().err


def test_images_of_all_turns_are_counted_as_they_are_attached(
    cat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = seeing(saying("many"), saying("again"))
    assert talk(chat, *[f"/image {cat}"] * 3, "How many?", *[f"/image {cat}"] * 6, "And now?") == 5
    assert shown(chat) == [[3], [3, 0, 5]]
    assert capsys.readouterr().err.count("the conversation has 8 images") == 1


def test_an_image_stays_what_it_was_when_it_was_typed(cat: Path) -> None:
    encoder, chat = Counting(), seeing(saying("a cat"), saying("yes"))
    chat.engine.images = images_of(Path("/"), encoder)
    talk(chat, f"/image {cat}", "What is it?")
    before = sources(chat)
    cat.write_bytes(png(56, 84, seed=1))
    talk(chat, "Is it?")
    assert sources(chat) == before
    cat.unlink()
    images = chat.engine.images
    assert images is not None
    assert len(images.prompt(MARK, chat.conversation.images)) == 8


def test_stats_say_how_many_images_were_encoded(
    cat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = seeing(saying("a cat"), saying("hello"))
    assert talk(chat, f"/image {cat}", f"/image {cat}", "What is it?", "/stats") == 0
    assert "[images: 1 encoded in" in capsys.readouterr().err
    assert talk(seeing(saying("hello")), "Hello.", "/stats") == 0
    assert "images" not in capsys.readouterr().err


# Files


def test_a_saved_conversation_has_its_images(cat: Path, tmp_path: Path) -> None:
    chat, path = seeing(saying("a cat")), tmp_path / "talk.json"
    assert talk(chat, f"/image {cat}", "What is it?", f"/save {path}") == 0
    cat.unlink()
    again = seeing(saying("yes"))
    assert talk(again, f"/load {path}", "Is it?") == 0
    assert sources(again) == sources(chat)
    (request,) = read_requests(path).requests
    assert [len(message.images) for message in request.messages] == [1, 0]


def write_talk(path: Path, *names: str, role: str = "user") -> Path:
    looks = [{"type": "image", "image": name} for name in names]
    said = {"role": role, "content": [*looks, {"type": "text", "text": "Look."}]}
    rest = [{"role": "user", "content": "Well?"}] if role == "system" else []
    talked = [said, *rest, {"role": "assistant", "content": "Yes."}]
    path.write_text(json.dumps({"messages": talked}))
    return path


def test_images_of_a_file_are_in_its_directory(
    cat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "cat.png").write_bytes(png(56, 56, seed=2))
    monkeypatch.chdir(tmp_path / "elsewhere")
    chat = seeing(saying("yes"))
    chat.engine.images = images_of(tmp_path / "elsewhere")
    write_talk(tmp_path / "talk.json", "cat.png")
    assert talk(chat, "/load ../talk.json", f"/image {cat}", "Is it?") == 0
    loaded, typed = sources(chat)
    assert loaded == typed


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.png", "is not there"),
        ("../secret.png", "outside"),
        ("torn.png", "damaged"),
        ("https://host/a.png", "URLs are not fetched"),
    ],
)
def test_a_file_with_an_image_that_cannot_be_read_changes_nothing(
    tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "deep" / "torn.png").write_bytes(png()[:-40])
    path = write_talk(tmp_path / "deep" / "talk.json", name)
    chat = seeing(saying("one"))
    assert talk(chat, "First?", f"/load {path}") == 5
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert "input file" not in shown
    assert len(chat.conversation.exchanges) == 1
    assert chat.conversation.images == []


def test_an_image_of_a_system_message_is_refused_by_its_place(
    cat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_talk(tmp_path / "talk.json", "cat.png", role="system")
    assert talk(seeing(), f"/load {path}") == 5
    assert "messages[0] has an image" in " ".join(capsys.readouterr().err.split())


def test_more_images_than_a_file_may_have_are_not_saved(
    cat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgespec.cli.chat.conversation.MAX_FILE_BYTES", 4 * 2**20 + 10)
    chat, path = seeing(saying("a cat")), tmp_path / "talk.json"
    assert talk(chat, f"/image {cat}", "What is it?", f"/save {path}") == 5
    assert "would not be read again" in " ".join(capsys.readouterr().err.split())
    assert not path.exists()


def test_a_chat_without_an_encoder_reads_no_conversation_with_images(
    cat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_talk(tmp_path / "talk.json", "cat.png")
    assert talk(chat_of(), f"/load {path}") == 5
    assert "there is no image encoder" in capsys.readouterr().err
