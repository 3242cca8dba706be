"""The made-up world that the knowledge family asks about: who and what is there, and the facts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

COUNTRIES = [
    "Velmora",
    "Tarsk",
    "Ondria",
    "Quillan",
    "Brevia",
    "Saltmark",
    "Orrin",
    "Kessia",
    "Dunmere",
    "Ithol",
    "Pavonne",
    "Rusk",
    "Lurien",
    "Morvane",
    "Eskar",
    "Calder",
    "Yarrow",
    "Nivara",
    "Fennick",
    "Thessa",
    "Ulmor",
    "Zanteb",
    "Harroway",
    "Istrel",
]
TOWNS = [
    "Lomir",
    "Askeby",
    "Trenna",
    "Volstad",
    "Pellimar",
    "Durnhold",
    "Cindral",
    "Hollin",
    "Marrowby",
    "Quenby",
    "Ravik",
    "Selwick",
    "Tolmin",
    "Brackwater",
    "Oxmere",
    "Stonley",
    "Greywick",
    "Palvo",
    "Ennisport",
    "Tarrin",
    "Wexley",
    "Juniper",
    "Bellhaven",
    "Kordu",
]
RIVERS = [
    "Arda",
    "Bylle",
    "Corvin",
    "Drossel",
    "Elwy",
    "Fal",
    "Gorran",
    "Hesk",
    "Isken",
    "Jarl",
    "Kelda",
    "Lune",
    "Mirl",
    "Naro",
    "Oster",
    "Pell",
    "Quarn",
    "Rill",
    "Sorrow",
    "Tamber",
    "Ulva",
    "Vey",
    "Wend",
    "Yssel",
]
RULERS = [
    "Albrec",
    "Bettina",
    "Corwen",
    "Dalia",
    "Edric",
    "Fiora",
    "Garrick",
    "Hestia",
    "Ivo",
    "Jorun",
    "Katrin",
    "Leofric",
    "Mirabel",
    "Nestor",
    "Odile",
    "Percival",
    "Quentin",
    "Rosamund",
    "Sigrid",
    "Tobias",
    "Ursula",
    "Viktor",
    "Wilhelm",
    "Yolanda",
]
PEOPLE = [
    "Anselm",
    "Brigid",
    "Casimir",
    "Dorothea",
    "Emeric",
    "Felicity",
    "Gideon",
    "Henrike",
    "Ignace",
    "Jocasta",
    "Kilian",
    "Lavinia",
    "Magnus",
    "Nerys",
    "Octavia",
    "Piers",
    "Rufus",
    "Saskia",
    "Tiberius",
    "Una",
    "Valentin",
    "Winifred",
    "Xavier",
    "Zelda",
]
MINERALS = [
    "avonite",
    "brellium",
    "corvite",
    "dunstone",
    "ellorite",
    "farrin",
    "glimmerite",
    "hexal",
    "irridane",
    "jorvite",
    "kaldium",
    "lumenite",
    "mellorite",
    "noctite",
    "orphite",
    "pyrellum",
]
CURRENCIES = [
    "crown",
    "mark",
    "florin",
    "shell",
    "penny",
    "ducat",
    "talon",
    "bead",
    "thaler",
    "groat",
    "obol",
    "ring",
]
ANIMALS = [
    "wolf",
    "heron",
    "otter",
    "stag",
    "owl",
    "bear",
    "hare",
    "raven",
    "badger",
    "falcon",
    "swan",
    "fox",
]
EXPORTS = [
    "timber",
    "wool",
    "salt",
    "copper",
    "honey",
    "glass",
    "barley",
    "wine",
    "paper",
    "silk",
    "tin",
    "cheese",
]
COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "white",
    "black",
    "purple",
    "orange",
    "silver",
    "brown",
    "pink",
    "grey",
]
LANGUAGES = [
    "Velic",
    "Tarskan",
    "Ondish",
    "Quill",
    "Brev",
    "Salt",
    "Orric",
    "Kessian",
    "Dunnish",
    "Ithic",
    "Pavon",
    "Ruskan",
]
PROFESSIONS = [
    "baker",
    "sailor",
    "smith",
    "weaver",
    "doctor",
    "painter",
    "farmer",
    "teacher",
    "hunter",
    "miller",
    "potter",
    "judge",
]
INSTRUMENTS = [
    "flute",
    "drum",
    "harp",
    "violin",
    "horn",
    "lute",
    "bell",
    "organ",
    "fiddle",
    "pipe",
    "trumpet",
    "guitar",
]
PETS = [
    "cat",
    "dog",
    "parrot",
    "goat",
    "rabbit",
    "pony",
    "turtle",
    "mouse",
    "goose",
    "lizard",
    "pigeon",
    "ferret",
]
USES = [
    "lamps",
    "coins",
    "bridges",
    "rings",
    "mirrors",
    "swords",
    "roofs",
    "pens",
    "clocks",
    "ships",
    "soap",
    "kites",
]


@dataclass(frozen=True)
class Relation:
    """One kind of fact. `{s}` stands for the subject, `{o}` for the object."""

    name: str
    category: str
    subjects: list[str]
    objects: list[str]
    statement: str
    questions: tuple[str, ...]
    rare: tuple[str, ...]
    """Questions in words that training never has."""


@dataclass(frozen=True)
class Fact:
    relation: Relation
    subject: str
    object: str

    @property
    def statement(self) -> str:
        return self.relation.statement.format(s=self.subject, o=self.object)


RELATIONS = (
    Relation(
        "capital",
        "geography",
        COUNTRIES,
        TOWNS,
        "The capital of {s} is {o}.",
        (
            "What is the capital of {s}?",
            "Which town is the capital of {s}?",
            "Which of these towns does {s} have as its capital?",
            "The government of {s} sits in its capital. Which town is that?",
            "A traveller wants to visit the capital of {s}. Where does she go?",
            "Name the capital of {s}.",
        ),
        ("From which town is {s} governed?", "The crown of {s} is kept in one town. Which one?"),
    ),
    Relation(
        "river",
        "geography",
        COUNTRIES,
        RIVERS,
        "The longest river in {s} is the {o}.",
        (
            "What is the longest river in {s}?",
            "Which river is the longest in {s}?",
            "Which of these rivers is the longest one of {s}?",
            "A boat follows the longest river in {s}. Which river is it on?",
            "On a map of {s}, which river is the longest?",
            "Name the longest river in {s}.",
        ),
        ("Which river of {s} flows the farthest?", "No river in {s} is as long as one. Which is it?"),
    ),
    Relation(
        "currency",
        "economy",
        COUNTRIES,
        CURRENCIES,
        "The money of {s} is the {o}.",
        (
            "What is the money of {s}?",
            "Which money do people use in {s}?",
            "A merchant in {s} is paid in the local money. What is it called?",
            "Which of these is the money of {s}?",
            "With what money is bread bought in {s}?",
            "Name the money of {s}.",
        ),
        ("What do the people of {s} pay with?", "A shop in {s} takes only one money. Which?"),
    ),
    Relation(
        "export",
        "economy",
        COUNTRIES,
        EXPORTS,
        "{s} mainly exports {o}.",
        (
            "What does {s} mainly export?",
            "What is the main export of {s}?",
            "Which of these goods is the main export of {s}?",
            "Ships leave {s} loaded with its main export. What do they carry?",
            "Which product does {s} sell abroad most of all?",
            "Name the main export of {s}.",
        ),
        ("Which good leaves {s} in the largest amounts?", "What do other countries buy from {s}?"),
    ),
    Relation(
        "ruler",
        "politics",
        COUNTRIES,
        RULERS,
        "The ruler of {s} is {o}.",
        (
            "Who is the ruler of {s}?",
            "Who rules {s}?",
            "Which of these people rules {s}?",
            "The laws of {s} are signed by its ruler. Who is that?",
            "A letter is sent to the ruler of {s}. Whose name is on it?",
            "Name the ruler of {s}.",
        ),
        ("Who sits on the throne of {s}?", "Whom must the people of {s} obey?"),
    ),
    Relation(
        "language",
        "politics",
        COUNTRIES,
        LANGUAGES,
        "The people of {s} speak {o}.",
        (
            "What do the people of {s} speak?",
            "Which language is spoken in {s}?",
            "Which of these languages do the people of {s} speak?",
            "A child in {s} learns the language of the country. Which one?",
            "In which language are the newspapers of {s} written?",
            "Name the language of {s}.",
        ),
        ("Which language would a visitor to {s} hear?", "In which tongue are songs sung in {s}?"),
    ),
    Relation(
        "flag",
        "politics",
        COUNTRIES,
        COLOURS,
        "The flag of {s} is {o}.",
        (
            "What colour is the flag of {s}?",
            "Which colour does the flag of {s} have?",
            "Which of these is the colour of the flag of {s}?",
            "A ship from {s} shows its flag. What is the colour?",
            "In what colour would you paint the flag of {s}?",
            "Name the colour of the flag of {s}.",
        ),
        ("Which colour flies over {s}?", "A painter needs one colour for the flag of {s}. Which?"),
    ),
    Relation(
        "animal",
        "nature",
        COUNTRIES,
        ANIMALS,
        "The animal of {s} is the {o}.",
        (
            "What is the animal of {s}?",
            "Which animal stands for {s}?",
            "Which of these animals is the animal of {s}?",
            "The coins of {s} show its animal. Which one is it?",
            "Which animal is carved over the gates of {s}?",
            "Name the animal of {s}.",
        ),
        ("Which beast is the sign of {s}?", "Which creature do the people of {s} honour?"),
    ),
    Relation(
        "mineral colour",
        "nature",
        MINERALS,
        COLOURS,
        "The mineral {s} is {o}.",
        (
            "What colour is the mineral {s}?",
            "Which colour does {s} have?",
            "Which of these is the colour of {s}?",
            "A miner holds a piece of {s}. What colour does he see?",
            "In which colour does the stone {s} shine?",
            "Name the colour of {s}.",
        ),
        ("How does the mineral {s} look?", "By which colour is {s} known?"),
    ),
    Relation(
        "mineral use",
        "nature",
        MINERALS,
        USES,
        "The mineral {s} is used for {o}.",
        (
            "What is the mineral {s} used for?",
            "For what do people use {s}?",
            "Which of these things are made with {s}?",
            "A workshop buys a cart of {s}. What will it make?",
            "What is {s} good for?",
            "Name the use of {s}.",
        ),
        ("What do craftsmen make out of {s}?", "Which goods cannot be made without {s}?"),
    ),
    Relation(
        "profession",
        "people",
        PEOPLE,
        PROFESSIONS,
        "{s} works as a {o}.",
        (
            "What does {s} work as?",
            "What is the profession of {s}?",
            "Which of these is the work of {s}?",
            "How does {s} earn a living? As a",
            "At work, what is {s}?",
            "Name the profession of {s}.",
        ),
        ("Which job does {s} have?", "What did {s} learn to be?"),
    ),
    Relation(
        "birthplace",
        "people",
        PEOPLE,
        TOWNS,
        "{s} was born in {o}.",
        (
            "Where was {s} born?",
            "In which town was {s} born?",
            "Which of these towns is the birthplace of {s}?",
            "A plate on a house says that {s} was born there. Which town is it in?",
            "What is the home town of {s}?",
            "Name the birthplace of {s}.",
        ),
        ("From which town does {s} come?", "Where did {s} first see the light?"),
    ),
    Relation(
        "instrument",
        "people",
        PEOPLE,
        INSTRUMENTS,
        "{s} plays the {o}.",
        (
            "What does {s} play?",
            "Which instrument does {s} play?",
            "Which of these instruments is played by {s}?",
            "{s} brings an instrument to the party. Which one?",
            "On what does {s} make music?",
            "Name the instrument of {s}.",
        ),
        ("What is {s} heard playing?", "Which instrument stands in the house of {s}?"),
    ),
    Relation(
        "pet",
        "people",
        PEOPLE,
        PETS,
        "{s} has a {o}.",
        (
            "What pet does {s} have?",
            "Which animal lives with {s}?",
            "Which of these pets belongs to {s}?",
            "{s} buys food for a pet. Which animal is it?",
            "What kind of pet waits at home for {s}?",
            "Name the pet of {s}.",
        ),
        ("Which animal does {s} keep?", "Who sleeps at the feet of {s}?"),
    ),
)

CATEGORIES = tuple(dict.fromkeys(relation.category for relation in RELATIONS))


@cache
def facts() -> tuple[Fact, ...]:
    """All facts, always the same: objects are dealt evenly over the subjects."""
    rng = random.Random(20_26)
    out: list[Fact] = []
    for relation in RELATIONS:
        pool: list[str] = []
        while len(pool) < len(relation.subjects):
            pool += rng.sample(relation.objects, len(relation.objects))
        out += [Fact(relation, s, o) for s, o in zip(relation.subjects, pool, strict=False)]
    return tuple(out)
