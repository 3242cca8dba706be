"""What is known of a move of the queue (bump.py), in Markdown."""

from __future__ import annotations

from typing import Any


def report(state: dict[str, Any], title: str) -> str:
    """What is known of a move, in Markdown."""
    patches = state["patches"]
    conflicts = sum(sum(known["conflicts"].values()) for known in patches.values())
    by_hand = sum(known["seconds"] for known in patches.values())
    machine = sum(step["seconds"] for step in state["steps"].values())
    lines = [
        f"# {title}",
        "",
        f"{conflicts} conflicting hunks in {sum(bool(known['conflicts']) for known in patches.values())} of "
        f"{len(patches)} patches; {by_hand / 3600:.2f} hours by hand, {machine / 3600:.2f} of the machine.",
        "",
        "| topic | patch | outcome | lines, before | after | conflicts | minutes by hand |",
        "|---|---|---|---|---|---|--:|",
    ]
    for name, known in patches.items():
        topic, title = (name[:2], name[3:]) if name[:2].isdigit() else ("", name)
        before, after = (f"+{add} -{remove}" for add, remove in known.get("lines", [[0, 0], [0, 0]]))
        files = ", ".join(f"{path}: {n}" for path, n in sorted(known["conflicts"].items()))
        outcome = known["outcome"] or "**to be solved**"
        lines.append(
            f"| {topic} | {title} | {outcome} | {before} | {after} | {files} | {known['seconds'] / 60:.0f} |"
        )
    lines += ["", "| step | outcome | seconds |", "|---|---|--:|"]
    lines += [f"| {name} | {step['outcome']} | {step['seconds']} |" for name, step in state["steps"].items()]
    if state.get("inside"):
        lines += ["", "What Python leans on:", "", *(f"- {line}" for line in state["inside"])]
    return "\n".join(lines) + "\n"
