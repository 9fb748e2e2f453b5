import pytest
import torch

from flopwise.errors import FlopwiseError
from flopwise.kernels.multiply_add import multiply_adds, multiply_adds_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_every_number_goes_through_the_chain(blocks):
    x = torch.randn(1024 * blocks, device=DEVICE)
    wanted = multiply_adds_reference(x.double(), 1)
    assert multiply_adds(x, 1) == 2 * 16 * 1024 * blocks
    torch.testing.assert_close(x.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("x", [torch.ones(1000), torch.ones(1024, dtype=torch.float64), torch.ones(2, 1024).t()])
def test_what_it_does_not_take_is_refused(x):
    with pytest.raises(FlopwiseError):
        multiply_adds(x.to(DEVICE), 1)
