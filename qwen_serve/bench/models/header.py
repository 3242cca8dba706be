"""A model without its weights: sizes and types of its tensors by recipe, and a GGUF with only a header.

For what depends on nothing else: predictions, memory plans. Such a file is sparse: as long as the whole one,
and a few megabytes on disk.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.vocab import make_vocab
from qwen_serve.bench.models.weights import SHARED
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.metadata import add_hyperparameters, add_tokenizer
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.tensors import FloatType, TensorPlan, expected_tensors
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.gguf import ALIGNMENT, TensorInfo
from qwen_serve.llamacpp.quantize import quantized_types


def float_tensors(config: ModelConfig, outtype: FloatType = "F16") -> list[TensorInfo]:
    """The tensors of the whole model, MTP block included, with matrices as `outtype`."""
    made = []
    for _, name, rule in expected_tensors(config, "", range(config.n_layers), has_mtp=True):
        if not name.endswith(SHARED):
            shape = rule.target_shape(config)
            kind = "F32" if len(shape) == 1 or rule.keep_f32 else outtype
            made.append(TensorInfo(name, shape[::-1], GGMLQuantizationType[kind]))
    return made


def quantized_tensors(config: ModelConfig, recipe: Recipe) -> list[TensorInfo]:
    """The same tensors with a recipe's types, as llama.cpp chooses them. Raises BenchError."""
    whole = float_tensors(config)
    if recipe.layers or recipe.keep_vocab:
        raise BenchError("a recipe that prunes: the tensors that are left are not known without the model")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        write_header(path, config, whole, vocab=False)
        try:
            types = quantized_types(
                path, file_type=recipe.file_type, overrides=recipe.overrides, mixture=recipe.mixture
            )
        except (ConvertError, LlamaError) as error:
            raise BenchError(str(error)) from error
    return [TensorInfo(tensor.name, tensor.shape, types[tensor.name]) for tensor in whole]


def write_header(
    path: Path, config: ModelConfig, tensors: Sequence[TensorInfo], *, vocab: bool = True
) -> None:
    """Writes a GGUF with these tensors, without their data, and with a made-up vocabulary of the model's
    size.

    `vocab`: writing it takes half a second; llama_model_quantize does not read it.
    """
    writer = gguf.GGUFWriter(path=None, arch=config.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    blocks = TensorPlan((), n_blocks=config.n_layers + 1, n_mtp_layers=1)
    add_hyperparameters(writer, config, blocks, tuple(range(config.n_layers)), "F16")
    if vocab:
        add_tokenizer(writer, make_vocab(config.vocab_size, np.random.default_rng(0)).vocab)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.shape[::-1],
            np.dtype(np.float16),
            tensor.n_bytes,
            raw_dtype=GGMLQuantizationType(tensor.type),
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    sizes = [path.stat().st_size, *(tensor.n_bytes for tensor in tensors)]
    os.truncate(path, sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
