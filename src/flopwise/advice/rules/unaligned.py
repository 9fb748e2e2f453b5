"""A vocabulary or another dimension that tensor cores cannot take in whole steps.

Looks for: products in half precision or TF32 with a side that is no multiple of {ALIGNED_ELEMENTS} (16 bytes of bf16); of a known
model, its vocabulary and widths.
Saving: the part of the waterfall that unaligned matmuls take, where it has one; else of these products' time what the kernels
without 16-byte loads take longer: on an H200 they reach a sixth of the rate with odd sides, a third with even ones.
Fix: round up to a multiple of {ROUND_UP_TO} (50,257 → 50,304) and leave the last tokens unused.
"""

from flopwise import units
from flopwise.advice.constants import ALIGNED_ELEMENTS, ROUND_UP_TO
from flopwise.advice.facts import Evidence, Facts, shortened
from flopwise.advice.predicted import products_ns
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.analysis.product_sizes import Product
from flopwise.predict.constants import UNALIGNED_SHARES
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import MATMUL_OTHER, MATMUL_SHAPE, MATMUL_UNALIGNED
from flopwise.work.matmul_precision import matmul_precision

PARTS = (MATMUL_UNALIGNED, MATMUL_SHAPE, MATMUL_OTHER)


def check(facts: Facts) -> Finding | None:
    odd = [p for p in facts.details.products if _odd_sides(p) and _on_tensor_cores(p)]
    sides = {side for product in odd for side in _odd_sides(product)} if odd else _of_model(facts)
    spent = sum(product.gpu_ns for product in odd) if odd else products_ns(facts, sides)
    if not sides or not spent:
        return None
    split = facts.part_ns(MATMUL_UNALIGNED)
    lost = 1 - UNALIGNED_SHARES[2 if any(side % 2 for side in sides) else 4]
    saved, how, confidence = lost * spent, f"{units.duration(spent)} × {lost:.2f}", LOW
    if split > 0:
        saved, how, confidence = split, "the waterfall's part", MEDIUM
    rounded = ", ".join(f"{side:,} → {_round_up(side):,}" for side in sorted(sides, reverse=True))
    title = f"unaligned dimensions in {units.duration(spent)} of matmuls: {rounded}"
    saving = gpu_time_saved(facts, saved, f"{how} = {units.duration(saved)} of GPU time", confidence)
    rule = Rule(__name__, PARTS, code=f"vocab = {ROUND_UP_TO} * math.ceil(vocab / {ROUND_UP_TO})      # {rounded}")
    return rule.finding(facts, title, saving, map(_describe, odd[:3]), evidence_ns=spent, spent_ns=spent)


def _round_up(side: int) -> int:
    return -(-side // ROUND_UP_TO) * ROUND_UP_TO


def _odd_sides(product: Product) -> set[int]:
    return {side for side in (product.m, product.n, product.k) if side > ROUND_UP_TO and side % ALIGNED_ELEMENTS}


def _on_tensor_cores(product: Product) -> bool:
    """fp32 on CUDA cores loads its numbers one by one anyway; nvjet's kernels run only where rows are aligned."""
    found = matmul_precision(product.kernel)
    return found is not None and found.tensor_cores is not False and not product.kernel.startswith("nvjet")


def _of_model(facts: Facts) -> set[int]:
    """The unaligned sides of a known model's weights, where the trace has no sizes."""
    if facts.model is None or facts.ceilings is None or facts.recipe is None or facts.recipe.precision == "fp32":
        return set()
    return {side for side in (facts.model.vocab, facts.model.d_model, facts.model.d_ff) if side % ALIGNED_ELEMENTS}


def _describe(product: Product) -> Evidence:
    sizes = f"{product.m} × {product.k} by {product.k} × {product.n}"
    text = (
        f"{units.duration(product.gpu_ns)} in {product.count:.0f} × {product.op} {sizes}: {shortened(product.kernel)}"
    )
    return Evidence(text, product.kernel)
