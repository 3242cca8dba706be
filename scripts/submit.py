"""``python scripts/submit.py``: checks the rules, then uploads."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from script import run
from submission.rules import check, gates_rule, offline_rule, parameters_rule, size_rule
from submission.service import Service

from qwen_serve.bench.arguments import comma_separated
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.terminal import Bar, Table
from qwen_serve.convert.progress import BYTES

SETTINGS = {"SUBMIT_URL": "the service's address", "SUBMIT_KEY": "your key", "SUBMIT_TEAM": "your team's id"}
"""Environment variable -> its meaning."""


def submit(
    image: Path,
    /,
    *,
    name: str | None = None,
    model: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    original: str | None = None,
    gates: Path | None = None,
    skip: Annotated[tuple[str, ...], comma_separated(str)] = (),
    start_timeout: float = 600.0,
    check_only: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Check the competition's rules for an image, upload it and submit it.

    - `python scripts/submit.py image.tar.gz --model model.gguf --original Qwen/Qwen3.5-4B --check-only`

    The environment variables SUBMIT_URL, SUBMIT_KEY and SUBMIT_TEAM name the service, your key and your team.
    The same command continues an interrupted upload.

    Parameters
    ----------
    image
        image.tar.gz, from `docker save IMAGE | gzip`.
    name
        Name of the submission (default: the file's).
    model
        GGUF in the image; repeat the option for each one, also for a drafter's.
    original
        Original checkpoint, a folder or a hub id. The GGUFs may have at most as many parameters.
    gates
        Store with the runs of `qwen-bench quality --tasks official`.
    skip
        Rules to leave out: size, gates, parameters, offline.
    start_timeout
        Time limit, in seconds, for the image to become healthy without a network.
    check_only
        Check the rules, but do not upload.
    """
    if not image.is_file():
        raise BenchError(f"{image}: no such file; `docker save IMAGE | gzip > {image}` makes one")
    rules = check(
        {
            "size": lambda: size_rule(image),
            "gates": lambda: gates_rule(gates),
            "parameters": lambda: parameters_rule(model, original),
            "offline": lambda: offline_rule(image, start_timeout),
        },
        skip,
    )
    lines = [[rule.name, "kept" if rule.kept else "broken", rule.found] for rule in rules]
    Table(["rule", "state", "found"], lines, title=f"Rules for {image.name}").print()
    if broken := [rule.name for rule in rules if not rule.kept]:
        raise BenchError(f"{', '.join(broken)}: not kept; nothing was uploaded")
    if check_only:
        return
    if missing := [f"{name} ({what})" for name, what in SETTINGS.items() if not os.environ.get(name)]:
        raise BenchError(f"set {', '.join(missing)} in the environment")
    service = Service(*(os.environ[name] for name in SETTINGS))
    with Bar(image.name, total=image.stat().st_size, unit=BYTES) as bar:
        state = service.hand_in(image, name or image.name, bar.advance)
    print(f"{image.name}: {state}")


if __name__ == "__main__":
    run(submit)
