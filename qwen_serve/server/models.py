"""`qwen-serve list` and `qwen-serve rm`: the models in the caches, converted here or fetched from the hub.

The files themselves are the only record: a converted model is in a folder of its source in QWEN_SERVE_CACHE,
a fetched one in the hub client's cache. Names are those that `qwen-serve serve` takes.
"""

import argparse
import fcntl
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from qwen_serve.server.about import cache_folder
from qwen_serve.server.hub_files import files_below, models_of, snapshots_of
from qwen_serve.server.names import nearest

OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Cached:
    """A cached model: its files, and its source's folder, which is removed with the last of its models."""

    name: str
    files: tuple[Path, ...]
    home: Path

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def modified(self) -> float:
        """Time of the last change, in seconds since 1970."""
        return max(file.stat().st_mtime for file in self.files)


def main(arguments: Sequence[str], prog: str) -> int:
    """Runs `list` or `rm NAME ...`; returns the exit status."""
    parser = argparse.ArgumentParser(prog=prog)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list cached models with their sizes")
    remove = commands.add_parser("rm", help="remove cached models")
    remove.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="name in `qwen-serve list`; without :QUANT all of that source",
    )
    options = parser.parse_args(arguments)
    models = cached_models()
    if options.command == "list":
        show(models)
        return 0
    chosen = {name: [model for model in models if _is_meant(model, name)] for name in options.names}
    for name in (name for name, found in chosen.items() if not found):
        spelt = {model.name.lower(): model.name for model in models}
        near = nearest(name, spelt)
        hint = f"did you mean {spelt[near]}?" if near else "`qwen-serve list` has the names"
        print(f"error: {name}: no such model in the caches; {hint}", file=sys.stderr)
        return 1
    for model in dict.fromkeys(model for found in chosen.values() for model in found):
        n_bytes = model.n_bytes
        try:
            with _unused(model.home):
                remove_model(model, [other for other in cached_models() if other.home == model.home])
        except BlockingIOError:
            print(f"error: {model.name}: a conversion is writing beside it", file=sys.stderr)
            return 1
        print(f"removed {model.name}, {size(n_bytes)}")
    return 0


def cached_models() -> list[Cached]:
    """All cached models, by name."""
    return sorted([*_converted(), *_fetched()], key=lambda model: model.name.lower())


def _converted() -> Iterator[Cached]:
    for home in (cache_folder() / "models").glob("*"):
        source = home.name.replace("--", "/", 1)
        for weights in models_of([path.name for path in home.glob("*.gguf")]):
            yield Cached(f"{source}:{weights.quant}", tuple(home / name for name in weights.files), home)


def _fetched() -> Iterator[Cached]:
    """Models in the hub's cache: GGUFs, and Qwen3.5 checkpoints to convert."""
    for home in Path(constants.HF_HUB_CACHE).glob("models--*--*"):
        repo = home.name.removeprefix("models--").replace("--", "/", 1)
        found: dict[str, tuple[Path, ...]] = {}
        for snapshot in snapshots_of(home):  # the newest first
            names = files_below(snapshot)
            for weights in models_of(names):
                found.setdefault(f"hf:{repo}:{weights.quant}", tuple(snapshot / n for n in weights.files))
            shards = tuple(snapshot / name for name in names if name.endswith(".safetensors"))
            if shards and _is_qwen(snapshot / "config.json"):
                found.setdefault(repo, shards)
        for name, files in found.items():
            yield Cached(name, files, home)


def _is_qwen(config: Path) -> bool:
    with suppress(OSError, UnicodeDecodeError):
        return '"Qwen3_5' in config.read_text(encoding="utf-8")
    return False


def show(models: Sequence[Cached]) -> None:
    """Prints a table of name, size on disk in bytes and time written, and the folders."""
    width = max([len(model.name) for model in models] + [len("NAME")])
    print(f"{'NAME':<{width}}  {'SIZE':>9}  MODIFIED")
    for model in models:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified))
        print(f"{model.name:<{width}}  {size(model.n_bytes):>9}  {when}")
    places = f"{cache_folder() / 'models'} (converted) and {constants.HF_HUB_CACHE} (the hub's)"
    print(f"{size(sum(model.n_bytes for model in models))} in {places}", file=sys.stderr)


def remove_model(model: Cached, beside: Sequence[Cached]) -> None:
    """Removes a model's files. Also removes the rest of its folder, unless one of `beside` is in it or the
    folder has weights of other programs."""
    if all(other == model for other in beside) and not _others_weights(model):
        shutil.rmtree(model.home)
        return
    for file in model.files:
        for path in {file, *_same_name(model, file)}:
            path.resolve().unlink(missing_ok=True)  # a blob of the hub's cache
            path.unlink(missing_ok=True)
        for ending in (".json", ".toml"):  # a report, a searched recipe
            file.with_suffix(ending).unlink(missing_ok=True)


def _others_weights(model: Cached) -> bool:
    """Whether the folder in the hub's cache has weights other than this model's files."""
    own = {file.relative_to(model.home).parts[2:] for file in model.files}
    return any(
        Path(name).suffix in OTHER_WEIGHTS and Path(name).parts not in own
        for snapshot in snapshots_of(model.home)
        for name in files_below(snapshot)
    )


def _same_name(model: Cached, file: Path) -> list[Path]:
    """The same file in other snapshots of the hub's cache."""
    parts = file.relative_to(model.home).parts
    if parts[0] != "snapshots":
        return []
    others = (snapshot.joinpath(*parts[2:]) for snapshot in snapshots_of(model.home))
    return [path for path in others if path.is_symlink() or path.exists()]


def _is_meant(model: Cached, name: str) -> bool:
    return name.lower() in (model.name.lower(), model.name.rpartition(":")[0].lower())


@contextmanager
def _unused(home: Path) -> Iterator[None]:
    """Holds the lock of a conversion. Raises BlockingIOError if one is running."""
    lock = home / ".convert.lock"
    if not lock.exists():
        yield
        return
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def size(n_bytes: int) -> str:
    """A size in decimal units: 2.71 GB."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
