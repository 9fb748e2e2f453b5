"""Whether attention's Gluon kernels may be used: on the chip they are written for, with a Triton that they are known with, and
once they have been right there. Gluon is an experiment of Triton's, so its first result is held against the definition.
"""

import functools
import warnings
from typing import Any

import torch
import triton
from torch import Tensor

from flopwise.errors import one_line
from flopwise.kernels.attention import tiled_backward, tiled_forward
from flopwise.kernels.attention_tiles import Problem, architecture

LIMIT = 0.02  # of the error's norm, relative; bf16 has 0.003
_SHAPE = 2, 2, 200  # batches, heads and tokens of the trial: whole tiles and broken ones
_tried: dict[tuple[torch.device, torch.dtype, int, bool], bool] = {}


@functools.cache
def gluon_kernels() -> Any:
    """`attention_hopper_backward` and with it `attention_hopper`, or None where this Triton's Gluon is not known to do."""
    if not triton.__version__.startswith(("3.6.", "3.7.")):
        return None
    try:
        from flopwise.kernels import attention_hopper_backward
    except (ImportError, AttributeError):
        return None
    return attention_hopper_backward


def gluon_on(x: Tensor) -> Any:
    """The same, for a tensor on the one chip they are written for; else None."""
    return gluon_kernels() if x.is_cuda and architecture(x) == 90 else None


def trusted(kernels: Any, q: Tensor, causal: bool) -> bool:
    """The kernels' first results for such tensors on this device were right; if not, a warning says why they are not used."""
    kind = q.device, q.dtype, q.shape[-1], causal
    if kind not in _tried:
        if torch.cuda.is_current_stream_capturing():
            return False  # nothing can be compared while a graph is captured
        try:
            off = _first_error(kernels, *kind)
            wrong = f"their first result is {off:.2g} off" if not off < LIMIT else ""
        except Exception as error:  # noqa: BLE001 whatever an experiment raises
            wrong = one_line(str(error) or type(error).__name__)
        if wrong:
            warnings.warn(f"attention's kernels for this GPU are not used, slower ones are: {wrong}", stacklevel=2)
        _tried[kind] = not wrong
    return _tried[kind]


def _first_error(kernels: Any, device: torch.device, dtype: torch.dtype, head_dim: int, causal: bool) -> float:
    """The largest relative error of the results of a small problem."""
    problem = Problem(causal, None, head_dim**-0.5)
    source = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (torch.randn(*_SHAPE, head_dim, device=device, generator=source).to(dtype) for _ in range(4))
    output, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
    kernels.forward.forward_call(q, k, v, output, logsumexp, problem).launch()
    found: tuple[Tensor, ...] = output, logsumexp
    wide = [x.float() for x in (q, k, v)]
    right: tuple[Tensor, ...] = tiled_forward(wide[0], wide[1], wide[2], causal, None, problem.scale)
    if head_dim in kernels.BACKWARD:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        kernels.launch(grad, q, k, v, output, logsumexp, grads, problem)
        found += grads
        right += tiled_backward(
            grad.float(), wide[0], wide[1], wide[2], right[0], right[1], causal, None, problem.scale
        )
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(found, right, strict=True)]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())
