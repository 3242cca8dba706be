"""The block drafter's distributions in llama.cpp equal those of the module that it was trained with."""

from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp import Context, ContextOptions, Model
from qwen_serve.llamacpp.draft import DraftContext

pytestmark = pytest.mark.reference

NANO = Path(__file__).parents[2] / "models" / "nano"
PROMPT = b"<|im_start|>user\nWhat is 17+25?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_a_block_is_what_the_training_module_makes_of_it(nano_f32: Path, nano_draft_f32: Path) -> None:
    import torch

    from models.nano.train.checkpoint import load_checkpoint
    from models.nano.train.dflash import features, load

    sizes: dict[str, Any] = {"n_ctx": 512, "n_seq": 1, "n_batch": 256, "n_ubatch": 256, "n_outputs": 256}
    options = ContextOptions(
        **sizes, threads=1, threads_batch=1, flash_attn="off", type_k="f32", type_v="f32"
    )
    drafter = load(NANO.with_name("nano-dflash"))
    shape, block = drafter.shape, drafter.shape.block
    layers = [layer + 1 for layer in shape.target_layers]
    model, draft = Model(nano_f32, n_gpu_layers=0), Model(nano_draft_f32, n_gpu_layers=0)
    trunk = Context(model, options)
    context = DraftContext(draft, options, trunk, len(layers) * shape.target.hidden)
    trunk.keep_layers(layers)
    tokens = model.tokenize(PROMPT, special=True)
    n = len(tokens)
    trunk.tokens[:n], trunk.positions[:n], trunk.outputs[:n] = tokens, range(n), 1
    trunk.decode(n)
    newest = int(trunk.logits(n)[-1].argmax())
    given = context.injected[:n] = trunk.layer_inputs(layers, range(n))
    context.positions[:n] = range(n)
    context.inject(n)
    context.tokens[:block], context.tokens[0] = shape.mask, newest
    context.positions[:block], context.outputs[:block] = range(n, n + block), 1
    context.decode(block)
    ours = torch.tensor(context.logits(block)[1:]).log_softmax(-1)
    trainer, _ = load_checkpoint(NANO)
    with torch.no_grad():
        expected, _ = features(trainer, torch.tensor([tokens]), shape.target_layers)
        torch.testing.assert_close(torch.tensor(given), expected[0], atol=1e-4, rtol=1e-4)
        rows = drafter(expected, torch.tensor([[newest]]), torch.tensor([[n]]), trainer, block)[0, 0, 1:]
        theirs = trainer.logits(rows).log_softmax(-1)
    assert (theirs.exp() * (theirs - ours)).sum(-1).max() < 1e-5
    context.close()
    trunk.close()
    draft.close()
    model.close()
