"""What a workload must be for linear layers in fp8."""

from collections.abc import Iterator

from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe

SINCE = (8, 9)  # the first compute capability with fp8 tensor cores
GPU = f"an NVIDIA GPU of compute capability {SINCE[0]}.{SINCE[1]} or higher"
MULTIPLE = 16  # sizes of matrices that fp8 tensor cores take


def fp8_rules(
    spec: ModelSpec, recipe: Recipe, tokens: int, phase: str, implementation: str
) -> Iterator[tuple[object, str, str]]:
    """Whether it is refused, why, and what to do."""
    asked = f"precision = '{recipe.precision}'"
    yield (
        implementation != "flopwise",
        f"{asked} is for flopwise's own model, not that of {implementation}",
        "allowed: precision = bf16-master, bf16",
    )
    yield (
        phase in ("prefill", "decode"),
        f"{asked} is for training, and phase = '{phase}' generates",
        "allowed: precision = bf16-master, bf16",
    )
    yield (
        recipe.parallel != "off",
        f"{asked} with parallel = '{recipe.parallel}' is not allowed",
        "allowed: precision = bf16; or parallel = off",
    )
    sizes = {"d_model": spec.d_model, "d_ff": spec.d_ff, "n_heads x head_dim": spec.n_heads * spec.head_dim}
    sizes |= {"n_kv_heads x head_dim": spec.n_kv_heads * spec.head_dim, "batch x context": tokens}
    for name, size in sizes.items():
        yield (
            size % MULTIPLE,
            f"{asked} needs sizes that are multiples of {MULTIPLE}, and {name} = {size}",
            "allowed: precision = bf16-master; or other sizes",
        )
