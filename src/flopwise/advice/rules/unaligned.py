"""A vocabulary or another dimension that tensor cores cannot take in whole steps.

Looks for: products in half precision or TF32 with a side that is no multiple of 8 (16 bytes of bf16); of a known model, its
vocabulary, widths and heads.
Saving: the part of the waterfall that unaligned matmuls take, where it is there; else half of these products' time: without
16-byte loads cuBLAS falls back to other kernels, which are assumed to be half as fast.
Mend: round up to a multiple of 64 (50,257 → 50,304) and leave the last tokens unused.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, freed
from flopwise.analysis.product_sizes import Product
from flopwise.predict.machine import Machine
from flopwise.predict.op_time import matmul_shape, op_time
from flopwise.predict.prediction import predict
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import MATMUL_OTHER, MATMUL_SHAPE, MATMUL_UNALIGNED
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import MATMUL, OpWork

STEP_ELEMENTS, WANTED, GONE = 8, 64, 0.5


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    odd = [p for p in (facts.details.products if facts.details is not None else ()) if _on_tensor_cores(p) and _odd(p)]
    spent = sum(product.gpu_ns for product in odd)
    sides = {side for product in odd for side in _odd(product)}
    if not odd:
        spent, sides = _of_model(facts)
    if not sides or not spent:
        return None
    split = facts.waterfall.ns(MATMUL_UNALIGNED) if facts.waterfall is not None else 0.0
    gone = split if split > 0 else GONE * spent
    how = "the waterfall's part" if split > 0 else f"{units.duration(spent)} × {GONE}"
    rounded = ", ".join(f"{side:,} → {_up(side):,}" for side in sorted(sides, reverse=True))
    saving = freed(facts, gone, f"{how} = {units.duration(gone)} of GPU time", MEDIUM if split > 0 else LOW)
    return finding(
        facts,
        __name__,
        f"unaligned dimensions in {units.duration(spent)} of matmuls: {rounded}",
        saving,
        (MATMUL_UNALIGNED, MATMUL_SHAPE, MATMUL_OTHER),
        evidence=tuple(_told(product) for product in odd[:3]),
        code=f"vocab = {WANTED} * math.ceil(vocab / {WANTED})      # {rounded}",
    )


def _up(side: int) -> int:
    return -(-side // WANTED) * WANTED


def _odd(product: Product) -> set[int]:
    return {side for side in (product.m, product.n, product.k) if side > WANTED and side % STEP_ELEMENTS}


def _on_tensor_cores(product: Product) -> bool:
    """fp32 on CUDA cores loads its numbers one by one anyhow."""
    found = matmul_precision(product.kernel)
    return found is not None and found.tensor_cores is not False


def _of_model(facts: Facts) -> tuple[float, set[int]]:
    """From the model's shapes, where the trace has no sizes: the predicted time of the products with an odd weight's side."""
    workload, model = measured.workload_of(facts), measured.model_of(facts)
    if workload is None or model is None or facts.ceilings is None or workload.recipe.precision == "fp32":
        return 0.0, set()
    odd = {side for side in (model.vocab, model.d_model, model.d_ff) if side % STEP_ELEMENTS}
    if not odd:
        return 0.0, set()
    ceilings, ops = facts.ceilings, predict(workload, Machine(gpu=measured.gpu_of(facts))).ops

    def touched(op: OpWork) -> bool:
        return op.kind == MATMUL and bool(odd & set(matmul_shape(op)[1:]))

    return sum(op_time(op, ceilings).ns for op in ops if touched(op)), odd


def _told(product: Product) -> str:
    sizes = f"{product.m} × {product.k} by {product.k} × {product.n}"
    return f"{units.duration(product.gpu_ns)} in {product.count:.0f} × {product.op} {sizes}: {product.kernel[:90]}"
