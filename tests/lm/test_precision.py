"""The precision lever does what it says, and the probe sees what really happened."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flopwise.lm.precision import apply_fp32_matmul, autocast, fp32_matmul_probe, weights_dtype
from flopwise.spec.recipe import CHOICES, WITH_MASTERS, Recipe


@pytest.fixture(autouse=True)
def _tf32_settings_restored() -> Iterator[None]:
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.parametrize("precision", CHOICES["precision"])
def test_tf32_is_allowed_for_tf32_alone(precision: str) -> None:
    torch.set_float32_matmul_precision("medium" if precision != "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "tf32"
    apply_fp32_matmul(Recipe(precision=precision))
    assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
    # What torch.compile reads: raises if the old and the new interface were mixed.
    assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
    assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")


@pytest.mark.parametrize("precision", CHOICES["precision"])
def test_matmul_dtype_and_weights_dtype(precision: str) -> None:
    recipe = Recipe(precision=precision)
    x = torch.ones(4, 4)
    with autocast(recipe, "cpu"):
        assert (x @ x).dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    assert weights_dtype(recipe) == (torch.bfloat16 if precision in ("bf16-pure", *WITH_MASTERS) else torch.float32)


def keeping_bits(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A matmul that first rounds its inputs to so many bits after the binary point."""

    def round_to(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)

    return lambda a, b: round_to(a) @ round_to(b)


def test_the_probe_tells_the_formats_apart() -> None:
    assert fp32_matmul_probe("cpu", 256, keeping_bits(23)) == "ieee"
    assert fp32_matmul_probe("cpu", 256, keeping_bits(10)) == "tf32"
    assert fp32_matmul_probe("cpu", 256, keeping_bits(7)) == "lower"
    assert fp32_matmul_probe("cpu", 256, lambda a, b: (a.half() @ b.half()).float()) == "lower"
    assert fp32_matmul_probe("cpu", 256, lambda a, b: (a.bfloat16() @ b.bfloat16()).float()) == "lower"


def test_the_probe_reads_fp32_through_autocast() -> None:
    apply_fp32_matmul(Recipe())
    with torch.autocast("cpu", torch.bfloat16):
        assert fp32_matmul_probe("cpu") == "ieee"
