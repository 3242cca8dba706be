"""The files that a run would write and their sizes, without reading a weight."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.gguf_file import write_header
from qwen_serve.convert.options import Options
from qwen_serve.convert.progress import size
from qwen_serve.convert.prune import kept_layers
from qwen_serve.convert.prune_vocab import kept_tokens
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import FloatType, plan_tensors
from qwen_serve.convert.vocab import Vocab
from qwen_serve.convert.whole_model import UnquantizedFile
from qwen_serve.llamacpp.gguf import ALIGNMENT, read_header
from qwen_serve.llamacpp.quantize import quantized_types


def print_plan(source: Source, model: Checkpoint | UnquantizedFile, options: Options) -> None:
    """Prints the size of each requested file; llama.cpp chooses the types, as in a real run.

    Raises:
        ConvertError: the checkpoint or a recipe's layers cannot be used.
        LlamaError: llama.cpp cannot make such a file.
    """
    asked: dict[str, Recipe | None] = {**dict.fromkeys(options.float_types), **options.recipes}
    width = max(len(name) for name in asked)
    print(f"{'quant':<{width}}  {'size':>9}  {'bits':>6}")
    for name, recipe in asked.items():
        n_bytes, bits = _planned(source, model, options, name, recipe)
        print(f"{name:<{width}}  {size(n_bytes):>9}  {bits:6.3f}")
    print("nothing was written")


def _planned(
    source: Source, model: Checkpoint | UnquantizedFile, options: Options, name: str, recipe: Recipe | None
) -> tuple[int, float]:
    """Bytes of the file, and bits a weight. The size of the metadata is that of the unquantized model's."""
    with ExitStack() as stack:
        path = source.path
        if isinstance(model, Checkpoint):
            float_type = next((kind for kind in options.float_types if kind == name), options.outtype)
            path = Path(stack.enter_context(TemporaryDirectory())) / "header.gguf"
            _write(path, source, model, options, recipe, float_type)
        tensors = list((header := read_header(path)).tensors.values())
        if recipe is not None:
            types = quantized_types(
                path,
                file_type=recipe.file_type,
                overrides=recipe.overrides,
                mixture=recipe.mixture,
                weighted=options.use_imatrix and recipe.uses_imatrix,
            )
            tensors = [replace(tensor, type=types[tensor.name]) for tensor in tensors]
    begin = min(tensor.offset for tensor in header.tensors.values())
    n_bytes = sum(-(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
    n_elements = sum(tensor.n_elements for tensor in tensors)
    return begin + n_bytes, 8 * sum(tensor.n_bytes for tensor in tensors) / n_elements


def _write(
    path: Path,
    source: Source,
    model: Checkpoint,
    options: Options,
    recipe: Recipe | None,
    float_type: FloatType,
) -> None:
    """Writes the unquantized model's file without the weights."""
    layers = kept_layers(model.config, recipe.layers if recipe else ())
    count = (recipe.keep_vocab if recipe else None) or options.keep_vocab
    tokens = kept_tokens(Vocab.load(model.folder, model.config), count) if count else None
    write_header(path, model, source, plan_tensors(model, float_type, layers, tokens), layers, float_type)
