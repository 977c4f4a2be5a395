"""Pictures that are drawn, and questions about them with their answers: what the demo's
vision-language model learns and is asked.

Knows shapes, colours and sentences. Knows no model: a picture is a Pillow image, a question and an
answer are texts. The same seed draws the same pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 112  # pixels
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 200, 40),
    "purple": (150, 60, 170),
    "orange": (240, 130, 30),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = tuple("0123456789")
PLACES = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = ("no things", "one thing", "two things", "three things", "four things")
BACKGROUND = (245, 245, 245)


@dataclass(frozen=True)
class Thing:
    """A coloured shape or digit in one quarter of a picture."""

    colour: str
    kind: str  # of SHAPES or DIGITS

    @property
    def words(self) -> str:
        """Its kind in a sentence."""
        return f"digit {self.kind}" if self.kind in DIGITS else self.kind

    def __str__(self) -> str:
        article = "an" if self.colour == "orange" else "a"
        return f"{article} {self.colour} {self.words}"


@dataclass(frozen=True)
class Scene:
    """What a picture shows: in each quarter a thing or nothing, in the order of PLACES."""

    things: tuple[Thing | None, ...]

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Scene:
        """A scene of one to four things, no two of one kind."""
        count = int(rng.integers(1, len(PLACES) + 1))
        places = set(rng.permutation(len(PLACES))[:count].tolist())
        kinds = iter(rng.permutation([*SHAPES, *DIGITS]).tolist())
        colours = [*COLOURS]
        return cls(
            tuple(
                Thing(colours[rng.integers(len(colours))], next(kinds)) if i in places else None
                for i in range(len(PLACES))
            )
        )

    def picture(self, side: int = SIDE) -> Image.Image:
        """The scene as an RGB image of `side` by `side` pixels."""
        image = Image.new("RGB", (side, side), BACKGROUND)
        pen, half = ImageDraw.Draw(image), side // 2
        for place, thing in enumerate(self.things):
            if thing is not None:
                draw(pen, thing, (place % 2 * half, place // 2 * half), half)
        return image

    def questions(self) -> list[tuple[str, str]]:
        """All questions with their answers."""
        there = [(place, thing) for place, thing in zip(PLACES, self.things, strict=True) if thing]
        told = " ".join(f"At the {place} is {thing}." for place, thing in there)
        number = NUMBERS[len(there)]
        found = [
            ("What is in the picture?", f"The picture shows {number}. {told}"),
            ("How many things are there?", f"There {verb(len(there))} {number} in the picture."),
        ]
        for place, thing in zip(PLACES, self.things, strict=True):
            found.append((f"What is at the {place}?", f"At the {place} is {thing or 'nothing'}."))
        for place, thing in there:
            asked = f"What colour is the {thing.words}?"
            found.append((asked, f"The {thing.words} is {thing.colour}, at the {place}."))
        return found


def verb(count: int) -> str:
    """Of a sentence about so many things."""
    return "is" if count == 1 else "are"


def draw(pen: ImageDraw.ImageDraw, thing: Thing, corner: tuple[int, int], side: int) -> None:
    """Draw a thing into a square whose top left is `corner`."""
    (x, y), gap, colour = corner, side // 7, COLOURS[thing.colour]
    box = (x + gap, y + gap, x + side - gap, y + side - gap)
    if thing.kind == "circle":
        pen.ellipse(box, colour)
    elif thing.kind == "square":
        pen.rectangle(box, colour)
    elif thing.kind == "triangle":
        pen.polygon([(x + side // 2, box[1]), (box[0], box[3]), (box[2], box[3])], colour)
    elif thing.kind == "cross":
        pen.line((box[0], box[1], box[2], box[3]), colour, side // 6)
        pen.line((box[0], box[3], box[2], box[1]), colour, side // 6)
    else:
        middle = (x + side // 2, y + side // 2)
        font = ImageFont.load_default(side - gap)
        pen.text(middle, thing.kind, colour, font, anchor="mm")


def told(scene: Scene) -> str:
    """A scene in words, as a question has it."""
    return " ".join(
        f"{place}: {thing or 'nothing'}." for place, thing in zip(PLACES, scene.things, strict=True)
    )


def scenes(count: int, seed: int) -> list[Scene]:
    """So many scenes."""
    rng = np.random.default_rng(seed)
    return [Scene.drawn(rng) for _ in range(count)]
