"""What the two tasks ask; imported by lm-eval, in the client's own environment."""

from typing import Any


def questions(**_: Any) -> dict[str, Any]:
    """Sums, each with its answer among four."""
    from datasets import Dataset  # type: ignore[import-untyped]

    made = []
    for a, b in ((2, 2), (3, 5), (7, 1), (4, 5)):
        choices = [str(a + b + wrong) for wrong in (0, 1, 2, 3)]
        made.append({"question": f"What is {a}+{b}?", "answer": choices[0], "choices": choices})
    return {"test": Dataset.from_list(made)}
