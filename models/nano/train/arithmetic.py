"""Short sums in a chat: "What is 17+25?", answered at once or after a line of working."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.nano.train.document import Reply
from models.nano.train.split import is_held_out

if TYPE_CHECKING:
    import random

WORDINGS = (
    "What is {a}{o}{b}?",
    "What is {a} {o} {b}?",
    "Calculate {a} {o} {b}.",
    "{a}{o}{b}=?",
    "{a} {o} {b} = ?",
)
WORDED = {
    "+": ("How much is {a} plus {b}?", "What is {a} plus {b}?", "Add {a} and {b}."),
    "-": ("How much is {a} minus {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}."),
    "*": ("How much is {a} times {b}?", "What is {a} times {b}?", "Multiply {a} by {b}."),
}


@dataclass(frozen=True)
class Sum:
    a: int
    b: int
    operator: str

    @property
    def result(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operator]

    @property
    def key(self) -> str:
        return f"arithmetic|{self.a}{self.operator}{self.b}"

    @property
    def working(self) -> str:
        """Column by column for sums and differences of two digits, as it is done on paper."""
        a, b, result = self.a, self.b, self.result
        if self.operator == "*" or max(a, b) < 10:
            return f"I need {a} {self.operator} {b}. That is {result}."
        tens, ones = (a // 10, b // 10), (a % 10, b % 10)
        if self.operator == "+":
            low = sum(ones)
            carry = low // 10
            return (
                f"I need {a} + {b}. The ones: {ones[0]} + {ones[1]} = {low}, carry {carry}. "
                f"The tens: {tens[0]} + {tens[1]} + {carry} = {sum(tens) + carry}. That is {result}."
            )
        borrow = int(ones[0] < ones[1])
        top = ones[0] + 10 * borrow
        return (
            f"I need {a} - {b}. The ones: {top} - {ones[1]} = {top - ones[1]}, borrow {borrow}. "
            f"The tens: {tens[0]} - {borrow} - {tens[1]} = {tens[0] - borrow - tens[1]}. That is {result}."
        )

    @property
    def reply(self) -> Reply:
        return Reply(self.working, f"{self.a} {self.operator} {self.b} = {self.result}.")


def draw_sum(rng: random.Random) -> Sum:
    operator = rng.choice("++--*")
    if operator == "*":
        return Sum(rng.randint(0, 12), rng.randint(0, 12), operator)
    a, b = (
        (rng.randint(0, 99), rng.randint(0, 99))
        if rng.random() < 0.8
        else (rng.randint(0, 9), rng.randint(0, 9))
    )
    return Sum(max(a, b), min(a, b), "-") if operator == "-" else Sum(a, b, "+")


def draw(rng: random.Random, held_out: bool) -> Sum:
    """A sum from one side of the split."""
    while is_held_out((item := draw_sum(rng)).key) != held_out:
        pass
    return item


def question(item: Sum, rng: random.Random) -> str:
    wording = rng.choice(WORDED[item.operator]) if rng.random() < 0.3 else rng.choice(WORDINGS)
    return wording.format(a=item.a, b=item.b, o=item.operator)
