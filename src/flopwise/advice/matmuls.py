"""Matmul time by precision, and what another precision would leave of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.analysis.explanation import Kernel
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import MATMUL


@dataclass(frozen=True)
class Wide:
    """Matmuls in some precisions."""

    by_precision: Mapping[str, float]  # nanoseconds
    kernels: list[Kernel]
    asked: bool  # by the recipe; the trace is silent, or there is none

    @property
    def ns(self) -> float:
        return sum(self.by_precision.values())

    @property
    def words(self) -> str:
        """'fp32', or 'fp32 and TF32'."""
        return " and ".join(name.upper() if name == "tf32" else name for name in self.by_precision) or "fp32"


def in_precision(facts: Facts, *precisions: str) -> Wide:
    """The matmuls whose kernels' names say one of these; without a trace, whether the recipe asks for one."""

    def precision(kernel: Kernel) -> str:
        found = matmul_precision(kernel.name) if kernel.kind == MATMUL else None
        return found.precision if found is not None else ""

    kernels = measured.kernels(facts, lambda kernel: precision(kernel) in precisions)
    spent: dict[str, float] = {}
    for kernel in kernels:
        spent[precision(kernel)] = spent.get(precision(kernel), 0.0) + kernel.gpu_ns
    recipe = measured.recipe_of(facts)
    asked = facts.explanation is None and recipe is not None and recipe.precision in precisions
    return Wide(by_precision=spent, kernels=kernels, asked=asked)


def slower_ns(facts: Facts, by_precision: Mapping[str, float], wanted: str) -> tuple[float | None, str]:
    """What these matmuls take beyond the same ones in another precision, in proportion to the rates, and the arithmetic.

    None where a rate is not known, or the chip has no such precision."""
    fast = measured.rate(facts, wanted)
    rates = {name: measured.rate(facts, name) for name in by_precision}
    if fast is None or any(slow is None or slow >= fast for slow in rates.values()):
        return None, ""
    parts = {name: ns * (1 - (rates[name] or 0.0) / fast) for name, ns in by_precision.items()}
    told = [
        f"{units.duration(ns)} × (1 − {units.rate(rates[name] or 0.0, 'FLOP/s')} / {units.rate(fast, 'FLOP/s')})"
        for name, ns in by_precision.items()
    ]
    return sum(parts.values()), f"{' + '.join(told) or '0'} = {units.duration(sum(parts.values()))} of GPU time"
