"""The converter's command line: flags to `Options`, errors to one line."""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from qwen_serve.convert.adapter import convert_adapter, is_adapter
from qwen_serve.convert.cards import BANDWIDTH
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.cli_quantize import add_flags, unknown, with_flags
from qwen_serve.convert.cli_values import MOST_DISTILL_STEPS, card, number, positive, size, steps
from qwen_serve.convert.draft import DraftCheckpoint, is_draft
from qwen_serve.convert.draft_pipeline import DraftPipeline
from qwen_serve.convert.dry_run import print_plan
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.options import METHODS, Options
from qwen_serve.convert.pipeline import Pipeline
from qwen_serve.convert.recipes import Recipe, known_recipes, load_recipe
from qwen_serve.convert.search import Target
from qwen_serve.convert.search.target import spell_size
from qwen_serve.convert.source import Source, resolve
from qwen_serve.convert.tensors import FLOAT_TYPES, FloatType
from qwen_serve.convert.vision import VISION_TYPES
from qwen_serve.convert.whole_model import UnquantizedFile
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.evaluation import Runtime

DEFAULT_SOURCE = "Qwen/Qwen3.5-4B"
DEFAULT_QUANT = "Q4_K_M"
DEFAULT_OUTTYPE: FloatType = "F16"
AUTO = "auto"
INTERRUPTED, TERMINATED, FAILED = 130, 143, 1
DISTILL_STEPS = 60

DESCRIPTION = """\
Converts a Qwen3.5 checkpoint to GGUF, with its MTP head, and quantizes it by an importance matrix.
--src may also be an unquantized GGUF, which then takes the place of <name>-F16.gguf.

A model:
  qwen-convert --src Qwen/Qwen3.5-4B --quant Q4_K_M --out models
  qwen-convert --src Qwen3.5-4B-BF16.gguf --quant Q4_K_M,Q2_K
  qwen-convert --src ./my-finetune --quant F16
  qwen-convert --src models/nano --quant Q2_K --method compensated
  qwen-convert --src models/nano --quant Q2_K --method compensated --distill
  qwen-convert --src Qwen/Qwen3.5-4B --quant Q4_K_M --keep-vocab 131072

Types of your own:
  qwen-convert --src ./my-finetune --recipe my_recipe.toml --calibration my_text.txt
  qwen-convert --src ./my-finetune --quant Q4_K_M --imatrix its.gguf --tensor-type ffn_down=Q6_K

Types found by a search:
  qwen-convert --src models/nano --quant auto --target-size 4.0MB
  qwen-convert --src Qwen/Qwen3.5-4B --quant auto --target-kld 0.01
  qwen-convert --src Qwen/Qwen3.5-4B --quant auto --target-ms 4.5 --for A10G

A LoRA adapter (PEFT), a block drafter (DFlash):
  qwen-convert --src ./my-adapter --base Qwen/Qwen3.5-4B
  qwen-convert --src z-lab/Qwen3.5-4B-DFlash --target Qwen/Qwen3.5-4B --quant Q4_K_M
"""

FILES = """\
Files in --out; a file gets its final name when it is complete:
  <name>-F16.gguf           the unquantized model, from which everything else is made
  <name>.calibration.txt    text that the model wrote itself, for the importance matrix
  <name>.evaluation.txt     the same from other prompts, for the KL divergence
  <name>.prose.txt, .code.txt, .chat.txt  texts unlike these, for the same
  <name>.imatrix.gguf       the importance matrix, in llama.cpp's format
  <name>-<QUANT>.gguf       a quantized model, one for each --quant
  <name>-<QUANT>.json       its size, bits per weight, types, method, sha256, and KL divergence
  mmproj-<name>-F16.gguf    the vision tower, if the checkpoint has one
  <name>-auto-<TARGET>.*    a model with searched types (--quant auto): GGUF, report, recipe (TOML)
  <name>.search.txt, .json  the text that a search measures on, and its measurements
  <name>.stages.json        finished stages, what each was made from, and how long it took
A LoRA adapter (PEFT) gives only <name>-F32.gguf, for the server's --lora.
A block drafter (DFlash) gives only its GGUFs and their reports.
With --keep-vocab N all names but those of the texts begin with <name>-vN, and the divergence covers
the kept tokens.
To finish an interrupted run, repeat the command: it makes only what is missing or out of date.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the converter; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("llama.cpp").setLevel(logging.CRITICAL)  # the error itself reports why a run ended
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # replaces __main__'s handler for the imports
    try:
        arguments, rest = (parsing := parser()).parse_known_args(argv)
        if rest:
            parsing.error(unknown(rest))
        _convert(arguments)
    except (ConvertError, LlamaError, OSError) as error:  # OSError: such as a full disk
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    return 0


def _convert(arguments: argparse.Namespace) -> None:
    # checked before any download
    search = select_target(arguments)
    quants = [name for name in arguments.quant or [DEFAULT_QUANT] if name != AUTO]
    float_types: tuple[FloatType, ...] = ()
    recipes: dict[str, Recipe] = {}
    if quants or arguments.recipe is not None:
        float_types, recipes = select_quants(quants if arguments.quant else None, arguments.recipe)
    recipes = with_flags(recipes, arguments)
    if arguments.dry_run and search is not None:
        raise ConvertError("--dry-run: what --quant auto finds is not known before it has searched")
    if arguments.imatrix_file is not None and not arguments.imatrix:
        raise ConvertError("--imatrix FILE and --no-imatrix contradict each other: give one of them")
    if arguments.method != METHODS[0] and not recipes and search is None:
        raise ConvertError(f"--method {arguments.method} wants a --quant that is quantized, not a float type")
    if arguments.distill:
        check_distillation(quantized=bool(recipes) or search is not None)
    source = resolve(arguments.src, arguments.revision)
    if is_adapter(source.path):
        _convert_adapter(source, arguments)
        return
    if arguments.base is not None:
        raise ConvertError(f"--base is for LoRA adapters (PEFT), and {arguments.src} is none")
    whole = UnquantizedFile.open(source.path) if source.is_gguf else None
    options = Options(
        out=arguments.out,
        name=arguments.name or source.name,
        float_types=float_types,
        recipes=recipes,
        search=search,
        command=search_command(search, source.title, arguments),
        outtype=(outtype := arguments.outtype or (whole.type if whole is not None else DEFAULT_OUTTYPE)),
        vision=(arguments.mmproj_outtype or outtype) if arguments.vision else None,
        calibration=arguments.calibration,
        imatrix_file=arguments.imatrix_file,
        method=arguments.method,
        distill=arguments.distill or 0,
        keep_vocab=arguments.keep_vocab,
        use_imatrix=arguments.imatrix,
        measure=arguments.kld,
        show_tensors=arguments.show_tensors,
        split_max_size=arguments.split_max_size,
        force=arguments.force,
        runtime=Runtime(threads=arguments.threads, n_gpu_layers=arguments.gpu_layers),
    )
    if whole is not None or not is_draft(source.path):
        if arguments.target is not None:
            raise ConvertError(f"--target is for block drafters, and {arguments.src} is none")
        model = whole or _opened(source.path)
        if arguments.dry_run:
            print_plan(source, model, options)
            return
        if options.distill and model.used_experts is not None:
            raise ConvertError(f"--distill is for dense models, and {arguments.src} has experts")
        Pipeline(source, model, options).run()
        return
    if arguments.target is None:
        raise ConvertError(f"{arguments.src} is a block drafter: give --target, the model that it drafts for")
    if arguments.imatrix_file is not None or arguments.split_max_size is not None or arguments.dry_run:
        raise ConvertError(
            f"--imatrix, --split-max-size and --dry-run are for models; {arguments.src} is a block drafter"
        )
    if search is not None:
        raise ConvertError(f"--quant auto searches a recipe for a model; {arguments.src} is a block drafter")
    target_source = resolve(arguments.target)
    if target_source.is_gguf:
        raise ConvertError(f"--target {arguments.target}: is a file; want the checkpoint that it drafts for")
    target = _opened(target_source.path)
    DraftPipeline(source, DraftCheckpoint.open(source.path, target), options).run()


def _convert_adapter(source: Source, arguments: argparse.Namespace) -> None:
    """Converts an adapter. Raises ConvertError also for flags that do not apply to adapters."""
    untouched = parser().parse_args([])
    others = ["quant", "recipe", "target", "mmproj_outtype", "keep_vocab", "method", "distill", "calibration"]
    others += ["imatrix_file", "tensor_type", "output_tensor_type", "token_embedding_type", "pure"]
    others += ["split_max_size", "dry_run"]
    if given := [name for name in others if getattr(arguments, name) != getattr(untouched, name)]:
        raise ConvertError(
            f"--{given[0].replace('_', '-')}: {arguments.src} is a LoRA adapter, which is converted as it is "
            "(--outtype, F32 unless given); convert its model apart"
        )
    outtype: FloatType = arguments.outtype or "F32"
    name = arguments.name or source.name
    convert_adapter(source, arguments.base, arguments.out, name, outtype, force=arguments.force)


def select_target(arguments: argparse.Namespace) -> Target | None:
    """The target of `--quant auto`; None without it.

    Raises:
        ConvertError: there are targets without it, none with it, or some that cannot be combined; or scipy is
            missing.
    """
    target = Target(
        n_bytes=arguments.target_size,
        bits_per_weight=arguments.target_bpw,
        milliseconds=arguments.target_ms,
        divergence=arguments.target_kld,
        card=arguments.card,
    )
    if AUTO not in (arguments.quant or ()):
        if target != Target():
            raise ConvertError(
                "--target-size, --target-bpw, --target-kld, --target-ms and --for want --quant auto"
            )
        return None
    if arguments.recipe is not None:
        raise ConvertError("--recipe says what a quant means, --quant auto searches for it: give one of them")
    if (problem := target.problem()) is not None:
        raise ConvertError(problem)
    if find_spec("scipy") is None:
        raise ConvertError("--quant auto needs scipy: pip install 'qwen-serve[search]'")
    return target


def check_distillation(*, quantized: bool) -> None:
    """Raises ConvertError if there is nothing to distill, or a package is missing."""
    if not quantized:
        raise ConvertError("--distill wants a --quant that is quantized, not a float type")
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise ConvertError(f"--distill needs {' and '.join(missing)}: pip install 'qwen-serve[distill]'")


def _opened(folder: Path) -> Checkpoint:
    """The checkpoint, after its remarks were printed."""
    checkpoint = Checkpoint.open(folder)
    for remark in checkpoint.config.remarks:
        print(remark, file=sys.stderr)
    return checkpoint


def search_command(target: Target | None, source: str, arguments: argparse.Namespace) -> str:
    """The command that makes a searched recipe again, for its evidence."""
    if target is None:
        return ""
    flags = {
        "--target-size": spell_size(target.n_bytes) if target.n_bytes is not None else None,
        "--target-bpw": target.bits_per_weight,
        "--target-kld": target.divergence,
        "--target-ms": target.milliseconds,
        "--for": target.card,
        "--method": arguments.method if arguments.method != METHODS[0] else None,
        "--distill": arguments.distill,
        "--keep-vocab": arguments.keep_vocab,
        "--calibration": arguments.calibration.name if arguments.calibration else None,
        "--imatrix": arguments.imatrix_file.name if arguments.imatrix_file else None,
    }
    words = [f"qwen-convert --src {source} --quant auto"]
    words += [f"{flag} {value}" for flag, value in flags.items() if value is not None]
    return " ".join([*words, *([] if arguments.imatrix else ["--no-imatrix"])])


def select_quants(
    quants: Sequence[str] | None, recipe_file: Path | None
) -> tuple[tuple[FloatType, ...], dict[str, Recipe]]:
    """Sorts what --quant and --recipe ask for into float types and recipes by output name.

    Raises:
        ConvertError: an unknown quant, or a recipe file beside several quants.
    """
    if recipe_file is not None:
        if quants is not None and len(quants) != 1:
            raise ConvertError("--recipe says what one quant means: give it with one --quant, or with none")
        return (), {quants[0] if quants else recipe_file.stem: load_recipe(recipe_file)}
    names = list(dict.fromkeys(quants or [DEFAULT_QUANT]))
    known = known_recipes()
    if unknown := [name for name in names if name not in known and name not in FLOAT_TYPES]:
        raise ConvertError(
            f"--quant {','.join(unknown)}: unknown; known are {', '.join([*FLOAT_TYPES, *known])} "
            "(or give a recipe file with --recipe)"
        )
    float_types = tuple(float_type for float_type in FLOAT_TYPES if float_type in names)
    return float_types, {name: load_recipe(name) for name in names if name in known}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen-convert",
        usage="%(prog)s [--src SRC] [--quant A,B] [--out DIR] [--FLAG VALUE ...]",
        description=DESCRIPTION,
        epilog=FILES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to convert, to what")
    what.add_argument(
        "--src",
        metavar="SRC",
        default=DEFAULT_SOURCE,
        help="a checkpoint folder, a hub id, a LoRA adapter's folder (PEFT), or a GGUF in F16, BF16 or F32 "
        "(%(default)s)",
    )
    what.add_argument(
        "--target",
        metavar="SRC",
        help="where --src is a block drafter (DFlash): the checkpoint that it drafts for, folder or hub id",
    )
    what.add_argument(
        "--base",
        metavar="SRC",
        help="where --src is a LoRA adapter (PEFT): the checkpoint that it was trained for, a folder with "
        "its config.json, or a hub id (the one that adapter_config.json names)",
    )
    what.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id (main)")
    what.add_argument(
        "--quant",
        metavar="A,B",
        type=_quant_list,
        help=f"one or more of {', '.join([*FLOAT_TYPES, *known_recipes(), AUTO])} ({DEFAULT_QUANT}); {AUTO} "
        "searches for each tensor's type, given a target",
    )
    what.add_argument(
        "--recipe",
        metavar="FILE",
        type=Path,
        help="a recipe of your own (TOML, see quant_recipes/) in place of --quant's; without --quant the "
        "output is named after the file",
    )
    what.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("models"), help="folder for the results (%(default)s)"
    )
    what.add_argument(
        "--name",
        help="first part of the output names (the last part of --src, without -F16.gguf and the like)",
    )
    auto = parser.add_argument_group(f"targets of --quant {AUTO} (with several, all are met)")
    auto.add_argument(
        "--target-size", metavar="SIZE", type=size, help="largest file, such as 2.4GB or 900MiB"
    )
    auto.add_argument(
        "--target-bpw", metavar="BITS", type=number, help="most bits per weight, over all tensors"
    )
    auto.add_argument(
        "--target-kld",
        metavar="NATS",
        type=number,
        help="largest mean KL divergence from the unquantized model, on text that it writes; finds the "
        "smallest file (with --for the fastest)",
    )
    auto.add_argument(
        "--target-ms",
        metavar="MS",
        type=number,
        help="longest time in which --for's card reads the weights that one token needs, in milliseconds",
    )
    auto.add_argument(
        "--for",
        dest="card",
        metavar="CARD",
        type=card,
        help=f"count the bytes that each token reads, not the file's: {', '.join(BANDWIDTH)}",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--outtype",
        type=str.upper,
        choices=FLOAT_TYPES,
        help="type of the unquantized file, from which the rest is made "
        f"({DEFAULT_OUTTYPE}; a GGUF has its own; F32 for an adapter)",
    )
    how.add_argument(
        "--mmproj-outtype",
        metavar="TYPE",
        type=str.upper,
        choices=VISION_TYPES,
        help=f"type of the vision tower's matrices: {', '.join(VISION_TYPES)} (--outtype's)",
    )
    how.add_argument(
        "--no-vision", dest="vision", action="store_false", help="do not convert the vision tower"
    )
    how.add_argument(
        "--keep-vocab",
        metavar="N",
        type=positive,
        help="keep the first N regular tokens and all special ones, for a smaller embedding and output head "
        "(all tokens); other text is then split into smaller tokens; for checkpoints only",
    )
    how.add_argument(
        "--method",
        choices=METHODS,
        default=METHODS[0],
        help="nearest rounds each weight by itself; compensated lets other columns compensate for "
        "each column's error (GPTQ): slower, with a smaller divergence on text like --calibration's "
        "(%(default)s)",
    )
    how.add_argument(
        "--distill",
        metavar="STEPS",
        nargs="?",
        const=DISTILL_STEPS,
        type=steps,
        help="then train scales and norms by the KL divergence from the unquantized model, on the "
        f"calibration text, for STEPS steps ({DISTILL_STEPS}), at most {MOST_DISTILL_STEPS}; dense models "
        "only; needs torch and transformers, and for a large model a GPU",
    )
    how.add_argument(
        "--calibration",
        metavar="FILE",
        type=Path,
        help="UTF-8 text for the importance matrix, compensation and distillation (text that the model "
        "writes itself, from prompts in the package)",
    )
    how.add_argument(
        "--no-imatrix", dest="imatrix", action="store_false", help="quantize without an importance matrix"
    )
    how.add_argument(
        "--no-kld", dest="kld", action="store_false", help="do not measure the KL divergence afterwards"
    )
    how.add_argument(
        "--show-tensors",
        action="store_true",
        help="print each file's types by tensor group, digest and full divergence (also in its .json)",
    )
    how.add_argument(
        "--force",
        action="store_true",
        help="make everything again, and overwrite files that other programs made",
    )
    add_flags(parser)
    where = parser.add_argument_group("where llama.cpp runs")
    where.add_argument("--threads", metavar="N", type=positive, help="CPU threads (all)")
    where.add_argument(
        "--gpu-layers", metavar="N", type=int, default=-1, help="layers on the GPU, -1 for all (%(default)s)"
    )
    return parser


def _quant_list(text: str) -> list[str]:
    known = {name.upper(): name for name in (*FLOAT_TYPES, *known_recipes(), AUTO)}
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("at least one name is needed")
    return [known.get(name.upper(), name.upper()) for name in names]


def _terminate(*_: Any) -> NoReturn:
    raise SystemExit(TERMINATED)  # unwinds the stack, so that temporary files are removed
