"""What `qwen-serve serve MODEL` names: a GGUF, here or on the hub, or a checkpoint, which is converted once.

A checkpoint is a folder, a hub id such as Qwen/Qwen3.5-4B, or `nano`, the tiny model that the package
brings. The converter is a program of its own and runs as one, in a process that ends with this one: what it
held in memory is free again before anything is served.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import sys
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_serve.common.children import end_with_parent
from qwen_serve.server.about import cache_folder, data_folder
from qwen_serve.server.hub_files import DEFAULT_QUANT, HubError

if TYPE_CHECKING:
    from qwen_serve.server.variant import Variant

NANO = "nano"

CONVERTING = ("gguf", "scipy")
"""What the extra `convert` installs, by the names of imports."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.gguf)")
"""What a model on the Hugging Face hub is called: owner/name."""


HUB_GGUF = re.compile(
    rf"(?:(hf:|(?:https://)?(?:hf\.co|huggingface\.co)/))?({HUB_ID.pattern})(?::([\w./-]+))?", re.IGNORECASE
)
"""A finished GGUF there: hf:owner/name or hf.co/owner/name, and after a colon its quant or file."""


class WeightsError(Exception):
    """What was named cannot be served; the message says what can."""


def resolve(model: str, quant: str | None, variant: Variant | None = None, *, vision: bool = True) -> Path:
    """The GGUF, or a folder with one, for `model`: fetches one from the hub, with `vision` its tower, too,
    or converts a checkpoint to `quant`, else to what `variant` says, if that was not done yet. A GGUF is
    served as it is, whatever the variant's weights are.

    Raises:
        WeightsError: nothing of that name, a quant for what is a GGUF already, or a fetch or conversion that
            failed.
    """
    path = Path(model).expanduser()
    if path.exists() and not (path / "config.json").is_file():
        if quant is not None:
            raise WeightsError(f"--quant {quant}: {model} is no checkpoint; a GGUF is served as it is")
        return path
    if not path.exists():
        if (named := HUB_GGUF.fullmatch(model)) and (named[1] or named[2].upper().endswith("-GGUF")):
            wanted = _one(model, named[3], quant) or (variant.quant if variant else None)
            return _fetched(named[2], wanted, vision)
        name, _, level = model.partition(":")
        if level and (name == NANO or HUB_ID.fullmatch(name)):  # as `qwen-serve list` has them
            model, quant = name, _one(model, level, quant)
    weights = ("--quant", quant or DEFAULT_QUANT)
    if variant is not None and quant is None:
        weights = ("--quant", variant.quant) if variant.quant else ("--recipe", str(variant.recipe))
    if path.exists():
        place = f"{path.resolve().name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
        return _converted(model, path.resolve().name, place, weights)
    if model == NANO:
        nano = data_folder("models/nano")
        # its own prompts calibrate it well enough; the text that a large model would write takes minutes
        prompts = data_folder("convert/calibration") / "prompts.toml"
        return _converted(str(nano), NANO, NANO, weights, "--calibration", str(prompts))
    if HUB_ID.fullmatch(model):
        return _converted(model, model.rpartition("/")[2], model.replace("/", "--"), weights)
    raise WeightsError(
        f"{model}: no such file or folder, not a hub id such as Qwen/Qwen3.5-4B or "
        f"hf:unsloth/Qwen3.5-4B-GGUF:Q4_K_M, and not {NANO}, the model that comes with the package"
    )


def _one(model: str, level: str | None, quant: str | None) -> str | None:
    """The quant that MODEL names behind a colon, or --quant. Raises WeightsError where both do."""
    if level and quant:
        raise WeightsError(f"--quant {quant}: {model} says which already")
    return level or quant


def _fetched(repo: str, quant: str | None, vision: bool) -> Path:
    from qwen_serve.llamacpp.vision import has_vision
    from qwen_serve.server.hub import fetch  # its client takes a while to import

    try:
        return fetch(repo, quant, vision=vision and has_vision())
    except HubError as error:
        raise WeightsError(str(error)) from None


def _converted(source: str, name: str, place: str, weights: tuple[str, str], *arguments: str) -> Path:
    """The GGUF in the folder `place` of the cache. A hub's model that is there needs no network again.

    `weights`: the converter's option and its value, a level by name or a recipe's file.
    """
    folder = cache_folder() / "models" / place
    level = Path(weights[1]).stem if weights[0] == "--recipe" else weights[1]
    wanted = f"{name}-{level}.gguf"
    if HUB_ID.fullmatch(source) and (target := _file(folder, wanted)):
        return target
    if missing := [name for name in CONVERTING if find_spec(name) is None]:
        raise WeightsError(
            f"{source} is a checkpoint, and what converts it is not installed ({', '.join(missing)}): "
            "pip install 'qwen-serve[convert]', or name a GGUF"
        )
    flags = ("--src", source, "--name", name, "--no-kld", *weights, "--out", str(folder), *arguments)
    status = _convert([*flags])
    target = _file(folder, wanted)
    if status != 0 or target is None:
        raise WeightsError(f"{source} could not be converted to {level}")
    return target


def _convert(flags: list[str]) -> int | None:
    """Runs the converter; its exit status."""
    child = get_context("spawn").Process(target=_converter, args=(flags,))
    child.start()
    try:
        child.join()
    except BaseException:
        child.terminate()
        child.join()
        raise
    return child.exitcode


def _converter(flags: list[str]) -> None:
    """The child: `qwen-convert`, without its tables; progress is on stderr."""
    end_with_parent()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.argv = ["qwen-convert", *flags]
    runpy.run_module("qwen_serve.convert", run_name="__main__", alter_sys=True)


def _file(folder: Path, name: str) -> Path | None:
    """A file of that name, however it is capitalized: the converter knows q4_k_m as Q4_K_M."""
    return next((path for path in folder.glob("*.gguf") if path.name.lower() == name.lower()), None)
