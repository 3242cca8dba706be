"""python -m models.nano.train VERB: everything it takes to make the checkpoint in models/nano."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from models.nano.train.heldout import FAMILIES
from models.nano.train.shape import Shape

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

NANO = Path(__file__).resolve().parents[1]


def sizes(text: str) -> Shape:
    """--shape."""
    try:
        return Shape().with_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_tokenizer(args: argparse.Namespace) -> None:
    from models.nano.train.corpus import corpus
    from models.nano.train.tokenizer import BPE_SIZE, save_tokenizer, train_tokenizer

    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(corpus(), BPE_SIZE), args.out)


def make_heldout(args: argparse.Namespace) -> None:
    from models.nano.train.heldout import write

    write(args.out / "heldout")


def write_text(args: argparse.Namespace) -> None:
    from tokenizers import Tokenizer

    from models.nano.train.mixture import text

    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    args.out.write_text(text(args.seed, tokenizer, args.tokens), encoding="utf-8")


def given(settings: type[S], args: argparse.Namespace, **more: Any) -> S:
    """Those settings, each by the flag of its name."""
    named = {one.name: getattr(args, one.name) for one in fields(settings) if one.name not in more}
    return settings(**named, **more)


def run_fit(args: argparse.Namespace) -> None:
    from models.nano.train.fit import FitSettings, fit

    fit(given(FitSettings, args))


def run_fit_draft(args: argparse.Namespace) -> None:
    from models.nano.train.fit_draft import DraftSettings, fit_draft

    fit_draft(given(DraftSettings, args, tokenizer=args.target / "tokenizer.json"))


def run_fit_vision(args: argparse.Namespace) -> None:
    from models.nano.train.fit_vision import VisionSettings, fit_vision

    fit_vision(given(VisionSettings, args, tokenizer=args.model / "tokenizer.json"))


def run_put_tower(args: argparse.Namespace) -> None:
    from models.nano.train.checkpoint import load_tower, put_tower

    put_tower(args.model, load_tower(args.tower))


def run_generate(args: argparse.Namespace) -> None:
    from models.nano.train.evaluate import generate

    generate(args.model, args.heldout, args.replies, args.families, args.limit, args.batch_tokens)


def run_see(args: argparse.Namespace) -> None:
    from models.nano.train.see import see

    see(args.model, args.heldout, args.out)


def run_score(args: argparse.Namespace) -> None:
    from models.nano.train.score import score

    print(score(args.heldout, args.replies))


def write_reference(args: argparse.Namespace) -> None:
    from models.nano.train import reference

    reference.write_reference(args.heldout, args.replies, args.out)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m models.nano.train", description=__doc__)
    verbs = top.add_subparsers(required=True, metavar="VERB")

    training = argparse.ArgumentParser(add_help=False)
    training.add_argument("--batch-tokens", type=int, default=32_768)
    training.add_argument("--rate", type=float, default=1.0, help="factor on the learning rates")
    training.add_argument("--seed", type=int, default=1)

    verb = verbs.add_parser("tokenizer", help="train the tokenizer")
    verb.add_argument("--out", type=Path, default=NANO)
    verb.set_defaults(run=make_tokenizer)

    verb = verbs.add_parser("heldout", help="write the held-out files")
    verb.add_argument("--out", type=Path, default=NANO)
    verb.set_defaults(run=make_heldout)

    verb = verbs.add_parser("text", help="write text of the training mixture, to calibrate on")
    verb.add_argument("--tokenizer", type=Path, default=NANO / "tokenizer.json")
    verb.add_argument("--out", type=Path, required=True, help="file to write")
    verb.add_argument("--tokens", type=int, default=66_000, help="at least so many")
    verb.add_argument("--seed", type=int, default=11)
    verb.set_defaults(run=write_text)

    verb = verbs.add_parser("fit", parents=[training], help="train trunk and draft head")
    verb.add_argument("--tokenizer", type=Path, default=NANO / "tokenizer.json")
    verb.add_argument("--heldout", type=Path, default=NANO / "heldout", help="to probe along the way")
    verb.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and log.json")
    verb.add_argument(
        "--minutes", type=float, default=8.0, help="training time, data and compilation not counted"
    )
    begin = verb.add_mutually_exclusive_group()
    begin.add_argument(
        "--start-from", type=Path, help="a checkpoint to go on from, instead of random weights"
    )
    begin.add_argument(
        "--shape",
        type=sizes,
        default=Shape(),
        metavar="SIZE=NUMBER,...",
        help="another shape than nano's: hidden=512,layers=4,ffn=1024,heads=8",
    )
    verb.add_argument("--accumulate", type=int, default=2, help="batches a step")
    verb.add_argument("--workers", type=int, default=14, help="processes that draw documents")
    verb.add_argument(
        "--probe-every", type=float, default=60.0, help="seconds between looks at held-out items"
    )
    verb.add_argument("--compile", dest="compiled", action="store_true", help="torch.compile the layers")
    verb.set_defaults(run=run_fit)

    verb = verbs.add_parser("fit-draft", parents=[training], help="train the block drafter of a trunk")
    verb.add_argument("--target", type=Path, default=NANO, help="checkpoint that it drafts for")
    verb.add_argument("--out", type=Path, required=True, help="folder for its checkpoint and log.json")
    verb.add_argument("--minutes", type=float, default=3.0, help="training time")
    verb.add_argument("--rows", type=int, default=32_768, help="rows of blocks in a batch")
    verb.add_argument("--workers", type=int, default=14, help="processes that draw documents")
    verb.set_defaults(run=run_fit_draft)

    verb = verbs.add_parser("fit-vision", parents=[training], help="train the vision tower of a text model")
    verb.add_argument("--model", type=Path, default=NANO, help="checkpoint whose text model it is for")
    verb.add_argument("--out", type=Path, required=True, help="folder for the tower's tensors and log.json")
    verb.add_argument("--start-from", type=Path, help="tower.safetensors of an earlier run to go on from")
    verb.add_argument("--minutes", type=float, default=2.0, help="training time")
    verb.add_argument("--workers", type=int, default=14, help="processes that draw pictures")
    verb.add_argument(
        "--no-graphs", dest="graphs", action="store_false", help="launch every kernel anew on a GPU"
    )
    verb.set_defaults(run=run_fit_vision)

    verb = verbs.add_parser("put-tower", help="replace a checkpoint's vision tower")
    verb.add_argument("--model", type=Path, default=NANO, help="checkpoint to change")
    verb.add_argument("--tower", type=Path, required=True, help="tower.safetensors of fit-vision")
    verb.set_defaults(run=run_put_tower)

    verb = verbs.add_parser(
        "generate", help="greedy replies to the held-out items, by transformers in float32"
    )
    verb.add_argument("--model", type=Path, default=NANO)
    verb.add_argument("--heldout", type=Path, default=NANO / "heldout")
    verb.add_argument("--replies", type=Path, required=True, help="JSON lines to write")
    verb.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    verb.add_argument("--limit", type=int, default=0, help="items a family; 0: all")
    verb.add_argument("--batch-tokens", type=int, default=131_072, help="prompt tokens at once")
    verb.set_defaults(run=run_generate)

    verb = verbs.add_parser("see", help="the same for pictures, into reference.json")
    verb.add_argument("--model", type=Path, default=NANO)
    verb.add_argument("--heldout", type=Path, default=NANO / "heldout")
    verb.add_argument("--out", type=Path, default=NANO / "reference.json", help="reference to add them to")
    verb.set_defaults(run=run_see)

    verb = verbs.add_parser("score", help="the table of accuracies for such replies")
    verb.add_argument("--heldout", type=Path, default=NANO / "heldout")
    verb.add_argument("--replies", type=Path, required=True)
    verb.set_defaults(run=run_score)

    verb = verbs.add_parser("reference", help="write reference.json: which items such replies got right")
    verb.add_argument("--heldout", type=Path, default=NANO / "heldout")
    verb.add_argument("--replies", type=Path, required=True)
    verb.add_argument("--out", type=Path, default=NANO / "reference.json")
    verb.set_defaults(run=write_reference)
    return top


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.run(arguments)
