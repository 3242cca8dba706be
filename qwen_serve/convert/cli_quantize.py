"""llama-quantize's flags: accepts those with the same meaning here, and names the equivalent of others."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.recipes import TENSOR_TYPES, Override, Recipe
from qwen_serve.convert.search.target import parse_size

OTHERS = {
    "--allow-requantize": "a quantized file is refused as a source: give --src the F16, BF16 or F32 file",
    "--leave-output-tensor": "--output-tensor-type F16",
    "--include-weights": "an importance matrix counts for every tensor that it has: --imatrix FILE",
    "--exclude-weights": "an importance matrix counts for every tensor that it has: --imatrix FILE",
    "--tensor-type-file": "--recipe FILE, whose overrides say the same, or --tensor-type several times",
    "--prune-layers": "--recipe FILE with prune in [layers]",
    "--keep-split": "--split-max-size SIZE",
    "--override-kv": "metadata is the checkpoint's; gguf-new-metadata of the package gguf changes it",
    "--outfile": "--out DIR, and --name",
    "--model-name": "--name",
}
"""Flags of llama-quantize and convert_hf_to_gguf.py that this converter lacks."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the group of llama-quantize's flags."""
    group = parser.add_argument_group("flags of llama-quantize; they take precedence over a recipe")
    group.add_argument(
        "--imatrix",
        dest="imatrix_file",
        metavar="FILE",
        type=Path,
        help="use this importance matrix (a GGUF of llama-imatrix or of this converter) instead of a new one",
    )
    group.add_argument(
        "--tensor-type",
        metavar="NAME=TYPE",
        action="append",
        default=[],
        type=_override,
        help="type of the tensors whose names match the regular expression NAME, such as ffn_down=Q6_K; may "
        "be repeated: the first match decides",
    )
    group.add_argument(
        "--output-tensor-type",
        metavar="TYPE",
        type=_type,
        help="type of output.weight, and of an embedding that is also the output head",
    )
    group.add_argument("--token-embedding-type", metavar="TYPE", type=_type, help="type of token_embd.weight")
    group.add_argument(
        "--dry-run", action="store_true", help="print the size of each --quant and write nothing"
    )
    group.add_argument(
        "--split-max-size",
        metavar="SIZE",
        type=_size,
        help="also write each file in parts of at most this size (weights), such as 45GB or 900M: "
        "NAME-00001-of-00003.gguf, like llama-gguf-split",
    )
    group.add_argument(
        "--pure",
        action="store_true",
        help="the same type for all matrices: no mixture, and no overrides except --tensor-type",
    )


def with_flags(recipes: Mapping[str, Recipe], arguments: argparse.Namespace) -> dict[str, Recipe]:
    """The recipes with the types that the flags set.

    Raises:
        ConvertError: flags without a recipe that they could apply to.
    """
    changes = {
        "pure": arguments.pure,
        "output_tensor_type": arguments.output_tensor_type,
        "token_embedding_type": arguments.token_embedding_type,
    }
    given = [*arguments.tensor_type, *filter(None, changes.values())]
    if given and not recipes:
        raise ConvertError(
            "--tensor-type, --output-tensor-type, --token-embedding-type and --pure want a --quant that is "
            "quantized, by name or by --recipe"
        )
    if not given:
        return dict(recipes)
    return {
        name: recipe.model_copy(
            update={
                **{key: value for key, value in changes.items() if value},
                "override": [*arguments.tensor_type, *([] if arguments.pure else recipe.override)],
            }
        )
        for name, recipe in recipes.items()
    }


def unknown(words: Sequence[str]) -> str:
    """The message for unknown arguments, with the equivalent of llama-quantize's flags."""
    for word in words:
        if instead := OTHERS.get(flag := word.partition("=")[0]):
            return f"{flag} is a flag of llama.cpp's tools; here: {instead}"
    return f"unrecognized arguments: {' '.join(words)}"


def _type(text: str) -> str:
    if text.upper() not in TENSOR_TYPES:
        raise argparse.ArgumentTypeError(f"want one of {', '.join(TENSOR_TYPES)}; got {text!r}")
    return text.upper()


def _size(text: str) -> int:
    try:
        return parse_size(f"{text}B" if text[-1:] in "MG" else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _override(text: str) -> Override:
    name, equals, kind = text.rpartition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"want NAME=TYPE, such as ffn_down=Q6_K; got {text!r}")
    try:
        re.compile(name)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{name!r} is not a regular expression ({error})") from None
    return Override(pattern=name.lower(), type=_type(kind), reason="--tensor-type")
