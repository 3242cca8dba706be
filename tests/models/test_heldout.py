"""The held-out items that gates ask: as many a level, each with its right answer in it."""

from __future__ import annotations

from collections import Counter

from tests import heldout


def test_each_family_has_as_many_items_of_any_level() -> None:
    for family in heldout.FAMILIES[:3]:
        found = Counter(row["level"] for row in heldout.read(family))
        assert found.total() >= 300
        assert len(set(found.values())) == 1, found


def test_knowledge_items_name_the_right_option() -> None:
    for row in heldout.read("knowledge") + heldout.read(heldout.SHOTS):
        assert len(set(row["options"])) == len(row["options"]) == 10
        assert heldout.LETTERS[row["answer_index"]] == row["answer"]
        assert row["options"][row["answer_index"]] in row["cot_content"]
        assert row["cot_content"].endswith(f"The answer is ({row['answer']}).")


def test_reasoning_items_have_four_choices_and_end_in_the_right_one() -> None:
    for row in heldout.read("reasoning"):
        choices = [row[f"choice{n}"] for n in range(1, 5)]
        right = choices["ABCD".index(row["answer"][1])]
        assert len(set(choices)) == 4
        assert row["reasoning"].endswith(f"The result is {right}. That is choice {row['answer'][1]}.")


def test_instructions_have_arguments_for_each_of_a_dozen_ids() -> None:
    rows = heldout.read("instructions")
    assert len({name for row in rows for name in row["instruction_id_list"]}) >= 12
    assert all(len(row["instruction_id_list"]) == len(row["kwargs"]) for row in rows)
