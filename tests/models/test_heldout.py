"""The held-out files: reproduced by their generators, in the benchmarks' fields, and apart from training."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from models.nano.train import continuation, heldout, instructions, knowledge, mixture, reasoning
from models.nano.train.document import Document, prompt_text
from models.nano.train.split import is_held_out
from models.nano.train.world import facts

HELD_OUT = Path(__file__).parents[2] / "models" / "nano" / "heldout"
DRAWN = 4_000


def text_of(document: Document) -> str:
    return "".join(segment.text for segment in document)


def user_message(text: str) -> str:
    """The last user message of a rendered chat."""
    return text.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0]


@pytest.mark.parametrize("name", heldout.FAMILIES)
def test_each_family_has_enough_items_and_its_generator_still_writes_them(name: str) -> None:
    rows = heldout.read(HELD_OUT, name)
    assert len(rows) >= 300
    assert rows == list(heldout.rows(name))


def test_knowledge_rows_name_the_right_option() -> None:
    for row in heldout.read(HELD_OUT, "knowledge") + heldout.read(HELD_OUT, heldout.SHOTS_FILE):
        assert len(set(row["options"])) == len(row["options"]) == 10
        assert knowledge.LETTERS[row["answer_index"]] == row["answer"]
        assert row["options"][row["answer_index"]] in row["cot_content"]
        assert row["cot_content"].endswith(f"The answer is ({row['answer']}).")


def test_reasoning_rows_have_four_choices_and_end_in_the_right_one() -> None:
    for row in heldout.read(HELD_OUT, "reasoning"):
        choices = [row[f"choice{n}"] for n in range(1, 5)]
        right = choices["ABCD".index(row["answer"][1])]
        assert len(set(choices)) == 4
        assert row["reasoning"].endswith(f"The result is {right}. That is choice {row['answer'][1]}.")


def test_every_level_has_as_many_items_as_any_other() -> None:
    for name, levels in (
        ("knowledge", [*knowledge.Level]),
        ("reasoning", [*reasoning.Level]),
        ("instructions", [f"{n} constraints" for n in instructions.HELD_OUT_CONSTRAINTS]),
    ):
        found = Counter(row["level"] for row in heldout.read(HELD_OUT, name))
        assert found == dict.fromkeys(levels, found.total() // len(levels))


def test_no_story_before_a_question_tells_the_answer() -> None:
    for row in heldout.read(HELD_OUT, "knowledge"):
        statement = row["cot_content"].split("step by step. ")[1].split(" The answer is")[0]
        assert statement not in row["question"]


def test_instructions_cover_a_dozen_ids() -> None:
    rows = heldout.read(HELD_OUT, "instructions")
    assert len({i for row in rows for i in row["instruction_id_list"]}) >= 12
    assert all(len(row["instruction_id_list"]) == len(row["kwargs"]) for row in rows)


def test_continuation_answers_go_on_with_the_prompt() -> None:
    rows = heldout.read(HELD_OUT, "continuation")
    assert {row["kind"] for row in rows} == {"arithmetic", "repeat", "filler"}
    for row in rows:
        if row["kind"] == "filler":
            assert row["prompt"] + row["answer"] == continuation.FILLER * (
                (len(row["prompt"]) + len(row["answer"])) // len(continuation.FILLER)
            )


def test_training_never_draws_a_held_out_knowledge_wording() -> None:
    asked = {row["question"] for row in heldout.read(HELD_OUT, "knowledge")}
    trained = {
        wording.format(s=fact.subject)
        for pairs in knowledge.wordings(False).values()
        for fact, wording in pairs
    }
    assert asked and trained and not asked & trained


def test_training_has_no_rare_wording_of_any_fact() -> None:
    trained = {wording for pairs in knowledge.wordings(False).values() for _, wording in pairs}
    assert not trained & {wording for fact in facts() for wording in fact.relation.rare}


def test_every_fact_is_learnt_from_some_wording() -> None:
    learnt = {fact.statement for pairs in knowledge.wordings(False).values() for fact, _ in pairs}
    assert all(fact.statement in learnt for pairs in knowledge.wordings(True).values() for fact, _ in pairs)


def test_training_never_draws_a_held_out_request() -> None:
    prompts = {row["prompt"] for row in heldout.read(HELD_OUT, "instructions")}
    assert all(is_held_out("instructions|" + prompt) for prompt in prompts)
    rng = random.Random(1)
    drawn = {user_message(text_of(instructions.training_document(rng))) for _ in range(DRAWN)}
    assert not prompts & drawn
    assert not any(is_held_out("instructions|" + prompt) for prompt in drawn)


def test_training_never_draws_a_held_out_problem() -> None:
    questions = {row["Question"] for row in heldout.read(HELD_OUT, "reasoning")}
    assert all(is_held_out("reasoning|" + question) for question in questions)
    rng = random.Random(2)
    for _ in range(DRAWN):
        shown = user_message(text_of(reasoning.training_document(rng)))
        question = shown.split("this question:", 1)[1].split("\nChoices:", 1)[0]
        assert not is_held_out("reasoning|" + question)


def test_training_never_draws_a_held_out_sum_or_repetition() -> None:
    rows = heldout.read(HELD_OUT, "continuation")
    sums = {prompt_text(row["messages"], row["thinking"]) for row in rows if row["kind"] == "arithmetic"}
    repeats = {row["prompt"] for row in rows if row["kind"] == "repeat"}
    fillers = {row["prompt"] for row in rows if row["kind"] == "filler"}
    stream = mixture.documents(seed=3)
    for _ in range(DRAWN):
        document = next(stream)
        text = text_of(document)
        assert not any(text.startswith(prompt) for prompt in sums | repeats)
        assert document[0].text not in fillers
