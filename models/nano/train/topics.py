"""What the instruction family writes about: topics, and the sentences that are said of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Topic:
    """A topic and the words its sentences are made of."""

    name: str
    adjectives: tuple[str, str]
    nouns: tuple[str, str, str]
    people: str
    act: str


def _topic(line: str) -> Topic:
    name, adjectives, nouns, people, act = (part.strip() for part in line.split("|"))
    first, second = adjectives.split()
    one, two, three = nouns.split()
    return Topic(name, (first, second), (one, two, three), people, act)


TOPICS = tuple(
    map(
        _topic,
        """
        the sea | deep blue | waves fish boats | sailors | watch the water
        the forest | green quiet | trees birds paths | walkers | breathe the fresh air
        the market | busy loud | apples bread cheese | cooks | buy their food
        the library | calm large | books desks lamps | students | read for hours
        the garden | sunny small | roses bees benches | neighbours | rest in the shade
        the kitchen | warm bright | pots knives spoons | families | cook together
        the city | old crowded | streets shops towers | visitors | walk in the evening
        the mountain | high cold | rocks snow goats | climbers | look for the top
        the river | wide slow | bridges ducks stones | fishers | wait in silence
        the school | new friendly | teachers books games | children | learn to read
        the train | fast long | seats windows doors | travellers | look at the land
        the winter | white dark | snow ice fires | people | stay at home
        the summer | hot long | beaches flowers storms | children | play outside
        the farm | quiet old | cows hens fields | farmers | get up early
        the museum | famous cool | paintings statues maps | guests | learn about the past
        the harbour | grey windy | ships ropes gulls | workers | load the ships
        the moon | round pale | craters dust shadows | poets | write at night
        the football | round light | goals players fans | teams | train every week
        the computer | fast useful | keys screens cables | engineers | solve problems
        the music | soft happy | songs drums voices | dancers | move all night
        the hospital | clean busy | doctors nurses beds | patients | get well again
        the bakery | warm sweet | cakes rolls pies | customers | come every morning
        the desert | dry wide | sand snakes stars | nomads | travel by night
        the island | green lonely | palms shells caves | sailors | look for water
        the theatre | grand red | actors stages lights | crowds | laugh and cry
        the castle | old strong | walls gates towers | kings | feel safe
        the village | small friendly | houses barns wells | families | know each other
        the airport | modern huge | planes gates bags | pilots | work day and night
        the zoo | lively green | lions bears monkeys | children | see wild animals
        the rain | cold grey | clouds drops puddles | gardeners | save the water
        the bicycle | light cheap | wheels pedals bells | riders | go to work
        the tea | hot green | cups leaves pots | friends | talk for a while
        the letter | short kind | words stamps lines | grandparents | remember the past
        the clock | old exact | hands numbers bells | people | know the time
        the painting | bright famous | colours lines frames | artists | show their ideas
        the bridge | long narrow | stones ropes lamps | drivers | cross the river
        the night | dark calm | stars owls dreams | guards | stay awake
        the festival | loud colourful | songs masks lights | visitors | dance in the street
        the storm | wild dark | winds clouds flashes | fishers | stay in the harbour
        the park | open green | benches trees lakes | runners | enjoy the morning
        """.strip().split("\n"),
    )
)


@cache
def sentences(topic: Topic, commas: bool) -> tuple[str, ...]:
    """What there is to say about a topic, in the order in which it is said; without commas where asked."""
    one, two, three = topic.nouns
    listed = f"{one}, {two} and {three}" if commas else f"{one} and {two} and {three}"
    comma = "," if commas else ""
    name = topic.name
    said = [
        f"{name[0].upper()}{name[1:]} is {topic.adjectives[0]} and {topic.adjectives[1]}.",
        f"If you look closely{comma} you can find the {listed}.",
        f"Many {topic.people} like {name} because they can {topic.act}.",
        f"In my opinion{comma} the {one} are the best part of {name}.",
        f"Every day{comma} some {topic.people} come to see the {two}.",
        f"I would like to know more about {name} and the {three}.",
    ]
    turn = TOPICS.index(topic) % 3
    return tuple(said[turn:3] + said[:turn] + said[3:])


@cache
def vocabulary() -> tuple[str, ...]:
    """Words that may be asked for: the nouns and adjectives of all topics."""
    return tuple(sorted({word for topic in TOPICS for word in (*topic.nouns, *topic.adjectives)}))
