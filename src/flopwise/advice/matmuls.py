"""Matmul time by precision, and what another precision would leave."""

from collections.abc import Mapping
from dataclasses import dataclass

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.analysis.explanation import Kernel
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import MATMUL


@dataclass(frozen=True)
class Matmuls:
    """Matmuls in some precisions."""

    ns_by_precision: Mapping[str, float]
    kernels: list[Kernel]
    asked: bool  # by the recipe, where there is no trace

    @property
    def ns(self) -> float:
        return sum(self.ns_by_precision.values())

    @property
    def names(self) -> str:
        """'fp32', or 'fp32 and TF32'."""
        return " and ".join(name.upper() if name == "tf32" else name for name in self.ns_by_precision) or "fp32"

    @property
    def amount(self) -> str:
        return f"{units.duration(self.ns)} of matmuls" if self.ns else "matmuls"


def in_precision(facts: Facts, *precisions: str) -> Matmuls | None:
    """The matmuls whose kernels are named after one of these; without a trace, if the recipe asks for one; None for none."""
    spent: dict[str, float] = {}
    kernels = []
    for kernel in facts.kernels(lambda kernel: kernel.kind == MATMUL):
        found = matmul_precision(kernel.name)
        if found is not None and found.precision in precisions:
            kernels.append(kernel)
            spent[found.precision] = spent.get(found.precision, 0.0) + kernel.gpu_ns
    asked = facts.explanation is None and facts.recipe is not None and facts.recipe.precision in precisions
    return Matmuls(spent, kernels, asked) if spent or asked else None


def slower_ns(facts: Facts, matmuls: Matmuls, wanted: str) -> tuple[float | None, str]:
    """What these matmuls take beyond the same ones in another precision, in proportion to the rates, and the arithmetic.

    None where a rate is unknown, or the chip has no such precision."""
    fast = facts.rate(wanted)
    rates = {name: facts.rate(name) or 0.0 for name in matmuls.ns_by_precision}
    if fast is None or any(not 0 < slow < fast for slow in rates.values()):
        return None, ""
    saved = sum(ns * (1 - rates[name] / fast) for name, ns in matmuls.ns_by_precision.items())
    terms = [
        f"{units.duration(ns)} × (1 − {units.rate(rates[name], 'FLOP/s')} / {units.rate(fast, 'FLOP/s')})"
        for name, ns in matmuls.ns_by_precision.items()
    ]
    return saved, f"{' + '.join(terms) or '0'} = {units.duration(saved)} of GPU time"
