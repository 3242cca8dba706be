"""Makes `golden.npz`: what transformers answers for models/nano, for tests that run without torch.

    python tests/reference/golden.py            # after `make test-reference` has installed torch

64 sequences of 256 tokens: 48 that the model samples itself, 16 of random ids. The whole distribution is
compared wherever torch is at hand (tests/reference/test_logits.py); the file keeps it at every 64th position,
as float16 log-probabilities: exact to 2**-11 of their size, far below what a KL divergence of 1e-6 needs.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "models/nano"
GOLDEN = Path(__file__).with_name("golden.npz")

SAMPLED, RANDOM, LENGTH = 48, 16, 256
KEPT = np.arange(63, LENGTH, 64)


def load_reference(checkpoint: Path = CHECKPOINT) -> Any:
    """The checkpoint in transformers, float32, on the CPU."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


def make_sequences(model: Any, vocabulary: int, seed: int = 0) -> NDArray[np.int32]:
    """[64, 256] token ids below `vocabulary`, the tokenizer's own count."""
    import torch

    torch.manual_seed(seed)
    start = torch.randint(vocabulary, (SAMPLED, 1))
    with torch.inference_mode():
        sampled = model.generate(
            input_ids=start,
            attention_mask=torch.ones_like(start),
            max_length=LENGTH,
            min_length=LENGTH,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            suppress_tokens=list(range(vocabulary, model.config.text_config.vocab_size)),
        )
    random = torch.randint(vocabulary, (RANDOM, LENGTH))
    return torch.cat([sampled, random]).numpy().astype(np.int32)


def log_probabilities(model: Any, sequences: NDArray[np.int32]) -> NDArray[np.float32]:
    """[sequences, tokens, vocabulary] natural-log probabilities of each next token."""
    import torch

    with torch.inference_mode():
        rows = [
            torch.log_softmax(model(input_ids=torch.from_numpy(part.astype(np.int64))).logits, -1)
            for part in np.array_split(sequences, len(sequences) // 8)
        ]
    return torch.cat(rows).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write transformers' answers for models/nano.")
    parser.add_argument("--out", type=Path, default=GOLDEN, help="default: golden.npz beside this script")
    out: Path = parser.parse_args().out
    from transformers import AutoTokenizer

    model = load_reference()
    sequences = make_sequences(model, len(AutoTokenizer.from_pretrained(CHECKPOINT)))
    kept = log_probabilities(model, sequences)[:, KEPT].astype(np.float16)
    part = out.with_suffix(".part.npz")
    np.savez_compressed(part, sequences=sequences, positions=KEPT, log_probabilities=kept)
    part.replace(out)
    print(f"{out}: {kept.shape[0]} sequences, {kept.shape[1]} positions, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
