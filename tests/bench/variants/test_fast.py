"""The claims in the file of `fast` hold for the current predictions and records."""

from qwen_serve.bench.analysis.cards import CARDS
from qwen_serve.bench.analysis.geometry import Geometry
from qwen_serve.bench.variants.catalogue import (
    kv_bytes,
    paired,
    predicted,
    published,
    read_recorded,
    recorded_gates,
    tensors_of,
)
from qwen_serve.bench.variants.variant import of_quants, read_variant
from qwen_serve.convert.recipes import known_recipes
from qwen_serve.server.variant import Variant, known_variants

KERNELS = {"Q4_K", "Q5_K", "Q6_K"}
"""Types that the patches' kernels for 3 to 16 rows, by which drafts are verified, are for."""


def times(variant: Variant) -> float:
    """Predicted milliseconds on an A10G, summed over all categories."""
    return sum(predicted(Geometry(tensors_of(variant), kv_bytes=kv_bytes(variant)), CARDS["A10G"]).values())


def passes(variant: Variant) -> bool:
    """Whether the variant passes all gates that were recorded with its current file, without a significant
    loss; false without records."""
    gates = recorded_gates(variant, [read_recorded(path) for path in published()])
    loss = paired(gates)
    return bool(gates) and all(gate.verdict == "pass" for gate in gates) and not (loss and loss.worse)


def is_verified_fast(variant: Variant) -> bool:
    """Whether nearly all of its bytes have such kernels."""
    sizes = {tensor.name: (tensor.type_name, tensor.n_bytes) for tensor in tensors_of(variant)}
    return sum(n for kind, n in sizes.values() if kind in KERNELS) > 0.99 * sum(n for _, n in sizes.values())


def test_it_passes_the_gates() -> None:
    assert passes(read_variant("fast"))


def test_nothing_like_it_that_passes_is_predicted_to_be_faster() -> None:
    fast = read_variant("fast")
    assert is_verified_fast(fast)
    alike = [one for one in of_quants(known_recipes()) if is_verified_fast(one)]
    assert fast.level in {one.level for one in alike if passes(one)}
    assert not [one.level for one in alike if times(one) < times(fast) and passes(one)]
    assert all(times(read_variant(name)) >= times(fast) for name in known_variants())
