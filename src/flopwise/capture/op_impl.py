"""Single operations by implementation: the same function of the same tensors, unfused, torch's own, compiled, ours.

An implementation is compared with a reference in fp32 before it is timed: a wrong result is not timed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flopwise.errors import WrongResult
from flopwise.lm import layers
from flopwise.lm.attention import attention_function
from flopwise.lm.loss import hidden_loss, loss_full
from flopwise.lm.own_kernels import needs_triton, own_operation
from flopwise.lm.precision import on_fake_tensors
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import Workload

Function = Callable[..., Tensor]

EPS = 1e-5  # of the norm
# Largest relative error in the 2-norm; for TF32, which keeps 10 bits, as for fp16.
BOUNDS = {"fp32": 1e-4, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2, "bf16-pure": 2e-2, "bf16-master": 2e-2}


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return layers.silu_eager(gate) * up


def _swiglu_torch(gate: Tensor, up: Tensor) -> Tensor:
    return layers.silu_torch(gate) * up


def _full_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return loss_full(hidden @ weight.T, targets)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return layers.rms_norm_eager(x, weight, EPS)


def _rms_norm_torch(x: Tensor, weight: Tensor) -> Tensor:
    return layers.rms_norm_torch(x, weight, EPS)


UNFUSED: dict[str, Function] = {
    "gelu": layers.gelu_eager,
    "softmax": layers.softmax_eager,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "rope": layers.rope,
    "cross_entropy": _full_loss,
}
_TORCH: dict[str, Function] = {
    "gelu": layers.gelu_torch,
    "softmax": layers.softmax_torch,
    "rms_norm": _rms_norm_torch,
    "swiglu": _swiglu_torch,
}


def op_function(op: OpSpec, impl: str) -> Function:
    """One operation in one implementation.

    >>> op_function(OpSpec(name="swiglu", dims={}), "torch")(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.4621])
    """
    name, asked = op.name, f"impl = '{impl}'"
    if name == "attention":
        if impl == "tiled":
            with needs_triton(asked):
                from flopwise.kernels.attention import FlashAttention
            return lambda q, k, v: cast(Tensor, FlashAttention.apply(q, k, v, op.causal))  # type: ignore[no-untyped-call]
        return attention_function(impl, compiled_elsewhere=False, causal=op.causal)
    if impl in ("manual", "full"):
        return UNFUSED[name]
    if impl == "compile":
        return torch.compile(UNFUSED[name], dynamic=False)
    if impl == "torch":
        return _TORCH[name]
    if name == "gelu":
        return layers.gelu_function(impl)
    if name == "cross_entropy":
        return hidden_loss(impl)
    function: Function = own_operation(name, asked)
    return functools.partial(function, eps=EPS) if name == "rms_norm" else function


def op_inputs(workload: Workload, random: Callable[..., Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """The operation's tensors, with random numbers."""
    op = cast(OpSpec, workload.subject)
    d = op.dims
    match op.name:
        case "matmul":
            return random(d["m"], d["k"]), random(d["k"], d["n"])
        case "attention":
            sizes = (workload.batch, workload.context, d["dim"])
            return random(*sizes), random(*sizes), random(*sizes)
        case "rms_norm":
            return random(d["rows"], d["cols"]), random(d["cols"])
        case "swiglu":
            return random(d["rows"], d["cols"]), random(d["rows"], d["cols"])
        case "rope":
            angles = layers.rope_angles(workload.context, d["dim"], 10_000.0, device)
            return random(workload.batch, d["heads"], workload.context, d["dim"]), *angles
        case "cross_entropy":
            targets = torch.randint(d["vocab"], (d["rows"],), device=device)
            with torch.no_grad():
                weight = random(d["vocab"], d["dim"]).mul_(0.02)
            return random(d["rows"], d["dim"]), weight, targets
        case _:
            return (random(d["rows"], d["cols"]),)


def check_result(workload: Workload, function: Function, inputs: Sequence[Tensor], gradient: Tensor | None) -> None:
    """Raise if the function's result, or a gradient, is not the reference's in fp32. A dry run has no values to check."""
    if on_fake_tensors():
        return
    op, bound = cast(OpSpec, workload.subject), BOUNDS[workload.recipe.precision]
    results = _results(function, inputs, gradient)
    wide = [x.float() if x.is_floating_point() else x for x in inputs]
    references = _results(_reference(op), wide, gradient)
    for number, (result, reference) in enumerate(zip(results, references, strict=True)):
        check_close(op, "the result" if not number else f"gradient {number}", result, reference, bound)


def _reference(op: OpSpec) -> Function:
    if op.name == "attention":  # fused: the definition's scores need not fit into memory
        return attention_function("sdpa", compiled_elsewhere=False, causal=op.causal)
    return UNFUSED[op.name]


def check_close(op: OpSpec, what: str, result: Tensor, reference: Tensor, bound: float) -> None:
    """Raise unless the two are close."""
    error = float((result.float() - reference.float()).norm() / reference.float().norm().clamp_min(1e-30))
    if not error <= bound:
        text = f"{what} of op:{op.name} by {op.impl} has a relative error of {error:.1e}; {bound:.0e} is allowed"
        raise WrongResult(text, "it was not timed: please report it with this machine's `flopwise doctor`")


def _results(function: Function, inputs: Sequence[Tensor], gradient: Tensor | None) -> list[Tensor]:
    own: list[Any] = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    result = function(*own)
    if gradient is None:
        return [result.detach()]
    result.backward(gradient.to(result.dtype))
    return [result.detach(), *(x.grad for x in own if x.requires_grad)]
