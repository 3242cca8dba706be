"""Training: trunk and draft head together, for a given time, on documents drawn as they are needed."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from models.nano.train import probe
from models.nano.train.batches import Batch, Stream
from models.nano.train.checkpoint import load_checkpoint, new_model, save_checkpoint
from models.nano.train.fusion import Fusion
from models.nano.train.muon import Muon
from models.nano.train.shape import Shape

if TYPE_CHECKING:
    from models.nano.train.model import Trunk
    from models.nano.train.mtp import MTP

LEARNING_RATE = {"muon": 0.02, "adam": 4e-3}
DRAFT_WEIGHT = 0.2
WARM_UP = 0.02
COOL_DOWN = 0.6
# seconds after which a machine too slow at compiling goes on without
COMPILE_PATIENCE = 75.0


@dataclass(frozen=True)
class FitSettings:
    """minutes: time for the steps; batch_tokens: of a micro-batch, `accumulate` make a step.

    `shape` is that of a model from random weights; with `start_from` the checkpoint has its own.
    """

    tokenizer: Path
    heldout: Path
    out: Path
    minutes: float
    shape: Shape = field(default_factory=Shape)
    start_from: Path | None = None
    batch_tokens: int = 32_768
    accumulate: int = 2
    workers: int = 14
    probe_every: float = 60.0
    rate: float = 1.0
    seed: int = 1
    compiled: bool = False


def rate_at(progress: float) -> float:
    """Share of the learning rate at `progress` (0 to 1): up, flat, and down to nothing over the last part."""
    return min(1.0, progress / WARM_UP, (1.0 - progress) / COOL_DOWN)


def losses(trunk: Trunk, mtp: MTP, batch: Batch) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of the next tokens, and of the tokens after next as the draft head sees them."""
    hidden = trunk(batch.tokens)
    rows = hidden[:, :-1].flatten(0, 1)[batch.next_at]
    following = F.cross_entropy(trunk.logits(rows).float(), batch.next_token, reduction="sum")
    drafted = mtp(hidden[:, :-1], trunk.embed_tokens(batch.tokens[:, 1:]))
    rows = drafted[:, :-1].flatten(0, 1)[batch.after_at]
    after = F.cross_entropy(trunk.logits(rows).float(), batch.after_token, reduction="sum")
    return following, after


def optimizers(modules: list[nn.Module], rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden rows; Adam for embedding, norms, convolutions and gates."""
    named = [(name, p) for module in modules for name, p in module.named_parameters()]
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and min(p.shape) >= 64]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in chosen]
    return [
        Muon(matrices, lr=rate * LEARNING_RATE["muon"], momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(
            rest, lr=rate * LEARNING_RATE["adam"], betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda
        ),
    ]


def loader(stream: IterableDataset[Any], workers: int, device: torch.device) -> DataLoader[Any]:
    """Batches of a stream, made by other processes ahead of the steps."""
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=device.type == "cuda",
    )


def fit(settings: FitSettings) -> None:
    """Train, probe held-out items along the way, and leave a checkpoint and log.json in `settings.out`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(settings.tokenizer))
    trunk, mtp = (
        load_checkpoint(settings.start_from)
        if settings.start_from
        else new_model(settings.shape, settings.seed)
    )
    trunk.to(device)
    mtp.to(device)
    Fusion.on = settings.compiled
    steppers = optimizers([trunk, mtp], settings.rate)
    full = [group["lr"] for stepper in steppers for group in stepper.param_groups]
    stream = Stream(settings.tokenizer, settings.batch_tokens, settings.seed)
    source = iter(loader(stream, settings.workers, device))
    probes = probe.load(settings.heldout, tokenizer)
    log: list[dict[str, float]] = []
    settings.out.mkdir(parents=True, exist_ok=True)

    def record() -> None:
        log.append({"step": step, **probe.report(trunk, mtp, probes)})
        save_checkpoint(settings.out, trunk, mtp, tokenizer)
        write_log(settings, log)

    began = time.monotonic()
    limit, next_probe, step, seen = settings.minutes * 60, settings.probe_every, 0, 0
    while (elapsed := time.monotonic() - began) < limit:
        if step < 10 and elapsed > COMPILE_PATIENCE:
            Fusion.on = False
        if step == 10:  # compilation is behind us: the clock of the schedule starts here
            began, elapsed, seen = time.monotonic(), 0.0, 0
        share = rate_at(elapsed / limit) if step > 10 else rate_at(0.001 * (step + 1))
        groups = [group for stepper in steppers for group in stepper.param_groups]
        for group, rate in zip(groups, full, strict=True):
            group["lr"] = rate * share
        batches = [next(source) for _ in range(settings.accumulate)]
        count, drafts = (sum(len(b[i]) for b in batches) for i in (1, 3))
        total = torch.zeros(2, device=device)
        for batch in batches:
            on_device = Batch(*(t.to(device, non_blocking=True) for t in batch))
            with torch.autocast(device.type, torch.bfloat16):
                following, after = losses(trunk, mtp, on_device)
            (following / count + DRAFT_WEIGHT * after / drafts).backward()
            total += torch.stack([following.detach() / count, after.detach() / drafts])
            seen += batch.tokens.numel()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 or step <= 3:
            loss, draft_loss = total.tolist()
            if not math.isfinite(loss):
                raise RuntimeError(f"the loss is {loss} at step {step}: lower --rate")
            print(
                f"step {step}  {elapsed:.0f} s  {seen / 1e6:.1f} M tokens"
                f"  {seen / max(elapsed, 1e-3) / 1e6:.2f} M/s  loss {loss:.4f}  draft {draft_loss:.4f}",
                flush=True,
            )
            log.append(
                {"step": step, "seconds": elapsed, "tokens": seen, "loss": loss, "draft_loss": draft_loss}
            )
        if elapsed >= next_probe:
            next_probe += settings.probe_every
            record()
    record()


def write_log(settings: Any, log: list[dict[str, float]], **found: Any) -> None:
    """log.json in `settings.out`: the settings, a dataclass, what was `found` at the end, and the log."""
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    text = json.dumps({"settings": shown, **found, "log": log}, indent=1)
    (settings.out / "log.json").write_text(text + "\n")
