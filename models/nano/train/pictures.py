"""Pictures and questions about them: coloured shapes and digits on a plain ground; an answer is one word."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from math import cos, pi, sin
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from models.nano.train.split import held_out, is_held_out

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 70),
    "blue": (40, 80, 210),
    "yellow": (240, 210, 40),
    "orange": (245, 135, 30),
    "purple": (130, 50, 170),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
GROUNDS = ((250, 250, 250), (20, 20, 20), (128, 128, 128), (200, 215, 230), (225, 215, 195), (60, 70, 80))
SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")
PLURALS = {"cross": "crosses"}
PLACES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1), "middle": (0, 0)}
MOST = 6
"""Shapes to count."""
SIDES = (48, 112)
"""Pixels along either side, at least and at most."""
NEAR = 80
"""How far two colours lie apart that are told apart, as the sum over red, green and blue."""


@dataclass(frozen=True)
class Mark:
    """A shape or a digit: its middle, and the side of the square that it fills, in pixels."""

    name: str
    colour: str
    x: int
    y: int
    side: int


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn."""

    width: int
    height: int
    ground: tuple[int, int, int]
    marks: tuple[Mark, ...]

    def drawn(self) -> Image.Image:
        image = Image.new("RGB", (self.width, self.height), self.ground)
        draw = ImageDraw.Draw(image)
        for mark in self.marks:
            _draw(draw, mark)
        return image

    def data_url(self) -> str:
        """A PNG of few colours: digits alone have more than those of shapes and ground."""
        buffer = BytesIO()
        self.drawn().quantize(32).save(buffer, "PNG", optimize=True)
        return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Item:
    """A picture with a question about it."""

    kind: str
    scene: Scene
    question: str
    answer: str

    @property
    def key(self) -> str:
        return "pictures|" + json.dumps(vars(self.scene) | {"marks": [*map(vars, self.scene.marks)]})


@cache
def _font(size: float) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _draw(draw: ImageDraw.ImageDraw, mark: Mark) -> None:
    x, y, half = mark.x, mark.y, mark.side / 2
    box, fill = (x - half, y - half, x + half, y + half), COLOURS[mark.colour]
    if mark.name == "circle":
        draw.ellipse(box, fill)
    elif mark.name == "ring":
        draw.ellipse(box, outline=fill, width=max(2, mark.side // 5))
    elif mark.name == "square":
        draw.rectangle(box, fill)
    elif mark.name == "triangle":
        draw.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill)
    elif mark.name == "cross":
        arm = half / 3
        draw.rectangle((x - arm, y - half, x + arm, y + half), fill)
        draw.rectangle((x - half, y - arm, x + half, y + arm), fill)
    elif mark.name == "star":
        turns = [(pi * n / 5 - pi / 2, half * (1 if n % 2 == 0 else 0.4)) for n in range(10)]
        draw.polygon([(x + r * cos(a), y + r * sin(a)) for a, r in turns], fill)
    else:
        draw.text((x, y), mark.name, fill, _font(mark.side * 1.3), anchor="mm")


def plural(shape: str) -> str:
    return PLURALS.get(shape, shape + "s")


QUESTIONS = (
    "Which shape is it?",
    "Which digit is it?",
    *(f"Which shape is at the {place}?" for place in PLACES),
    *(f"How many {plural(one)} are there?" for one in SHAPES),
    *(f"What colour are the {plural(one)}?" for one in SHAPES),
    *(f"{start} the {one}?" for start in ("What colour is", "Where is") for one in (*SHAPES, "digit")),
)
ANSWERS = (*SHAPES, *COLOURS, *PLACES, *(str(number) for number in range(10)))


def _ground(rng: random.Random, colours: list[str]) -> tuple[int, int, int]:
    """One that all of the colours stand out from."""
    return rng.choice(
        [
            ground
            for ground in GROUNDS
            if all(
                sum(abs(a - b) for a, b in zip(COLOURS[colour], ground, strict=True)) > NEAR
                for colour in colours
            )
        ]
    )


def _one(rng: random.Random, width: int, height: int, name: str) -> tuple[Scene, str, str]:
    """One mark somewhere; the scene, and its colour and place."""
    small = min(width, height)
    side = rng.randint(small * 2 // 5, small * 3 // 5)
    place = rng.choice(list(PLACES))
    dx, dy = PLACES[place]
    # as far from the middle as fits, less a little
    x = width / 2 + dx * ((width - side) / 2 - rng.randint(0, 3)) + (1 - abs(dx)) * rng.randint(-3, 3)
    y = height / 2 + dy * ((height - side) / 2 - rng.randint(0, 3)) + (1 - abs(dy)) * rng.randint(-3, 3)
    colour = rng.choice(list(COLOURS))
    mark = Mark(name, colour, round(x), round(y), side)
    return Scene(width, height, _ground(rng, [colour]), (mark,)), colour, place


def shape(rng: random.Random, width: int, height: int) -> tuple[Scene, list[tuple[str, str]]]:
    name = rng.choice(SHAPES)
    scene, colour, place = _one(rng, width, height, name)
    return scene, [
        ("Which shape is it?", name),
        (f"What colour is the {name}?", colour),
        (f"Where is the {name}?", place),
    ]


def digit(rng: random.Random, width: int, height: int) -> tuple[Scene, list[tuple[str, str]]]:
    name = str(rng.randrange(10))
    scene, colour, place = _one(rng, width, height, name)
    return scene, [
        ("Which digit is it?", name),
        ("What colour is the digit?", colour),
        ("Where is the digit?", place),
    ]


def count(rng: random.Random, width: int, height: int) -> tuple[Scene, list[tuple[str, str]]]:
    """Marks of one shape and colour, in cells of a grid."""
    many, name, colour = rng.randint(1, MOST), rng.choice(SHAPES), rng.choice(list(COLOURS))
    cell = rng.randint(22, max(22, int((width * height / MOST) ** 0.5 * 0.8)))
    columns, rows = width // cell, height // cell
    cells = rng.sample(range(columns * rows), min(many, columns * rows))
    marks = []
    for at in sorted(cells):
        side = rng.randint(cell * 3 // 5, cell * 4 // 5)
        x, y = (at % columns + 0.5) * width / columns, (at // columns + 0.5) * height / rows
        marks.append(Mark(name, colour, round(x) + rng.randint(-1, 1), round(y) + rng.randint(-1, 1), side))
    scene = Scene(width, height, _ground(rng, [colour]), tuple(marks))
    return scene, [
        (f"How many {plural(name)} are there?", str(len(marks))),
        (f"What colour are the {plural(name)}?", colour),
    ]


def two(rng: random.Random, width: int, height: int) -> tuple[Scene, list[tuple[str, str]]]:
    """Two shapes of different colours, beside or above each other, whichever side is longer."""
    (first, second), colours = rng.sample(SHAPES, 2), rng.sample(list(COLOURS), 2)
    wide = width > height or (width == height and rng.random() < 0.5)
    places = ("left", "right") if wide else ("top", "bottom")
    long, short = (width, height) if wide else (height, width)
    marks = []
    for at, (name, colour) in enumerate(zip((first, second), colours, strict=True)):
        side = rng.randint(min(long // 2, short) // 2, min(long // 2, short) - 8)
        along = round(long * (0.25 + 0.5 * at)) + rng.randint(-2, 2)
        across = round(short / 2) + rng.randint(-2, 2)
        x, y = (along, across) if wide else (across, along)
        marks.append(Mark(name, colour, x, y, side))
    scene = Scene(width, height, _ground(rng, colours), tuple(marks))
    questions = [
        (f"What colour is the {name}?", colour) for name, colour in zip((first, second), colours, strict=True)
    ]
    questions += [
        (f"Where is the {name}?", place) for name, place in zip((first, second), places, strict=True)
    ]
    questions += [
        (f"Which shape is at the {place}?", name) for name, place in zip((first, second), places, strict=True)
    ]
    return scene, questions


KINDS = {"shape": shape, "digit": digit, "count": count, "two": two}


def scene(rng: random.Random, width: int, height: int) -> tuple[str, Scene, list[tuple[str, str]]]:
    """A picture of that size for training: its kind, and every question about it, in some order."""
    while True:
        kind = rng.choice(list(KINDS))
        made, questions = KINDS[kind](rng, width, height)
        if not is_held_out(Item(kind, made, "", "").key):
            rng.shuffle(questions)
            return kind, made, questions


def _draw_item(rng: random.Random) -> Item:
    kind = rng.choice(list(KINDS))
    made, questions = KINDS[kind](rng, rng.randint(*SIDES), rng.randint(*SIDES))
    return Item(kind, made, *rng.choice(questions))


def held_out_items(number: int) -> Iterator[Item]:
    return held_out(_draw_item, 38, number)
