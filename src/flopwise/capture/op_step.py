"""Single operations as steps: matmul, the lecture's MLP, attention, GeLU, softmax."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.capture.model_step import check_supported, compiled, dtype_name, inductor_cache_hits
from flopwise.capture.step import Step
from flopwise.lm.attention import attention_function, sdpa_backend_name
from flopwise.lm.layers import gelu_eager, softmax_eager
from flopwise.lm.precision import apply_fp32_matmul, autocast, fp32_matmul_probe
from flopwise.records import STEP, Ran
from flopwise.spec.workload import OpSpec, Workload

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16-pure": torch.bfloat16,
    "fp16": torch.float16,
}


def op_step(workload: Workload, device: torch.device) -> Step:
    """Inputs are random numbers: zeros run faster than real data."""
    recipe, dims = workload.recipe, cast(OpSpec, workload.subject).dims
    check_supported(recipe, device)
    apply_fp32_matmul(recipe)
    dtype = _DTYPES[recipe.precision]

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype, requires_grad=workload.phase == "backward")

    match cast(OpSpec, workload.subject).name:
        case "mlp":
            return _mlp_step(workload, device)
        case "matmul":
            return _single(torch.matmul, (random(dims["m"], dims["k"]), random(dims["k"], dims["n"])), workload, device)
        case "attention":
            sizes = (workload.batch, workload.context, dims["dim"])
            function = attention_function(recipe.attention, compiled_elsewhere=recipe.compile != "off")
            inputs = (random(*sizes), random(*sizes), random(*sizes))
            backend = f"sdpa: {sdpa_backend_name(*inputs)}" if recipe.attention == "sdpa" else recipe.attention
            return _single(function, inputs, workload, device, attention=backend)
        case "gelu":
            gelu = gelu_eager if recipe.activation == "eager" else lambda x: F.gelu(x, approximate="tanh")
            return _single(gelu, (random(dims["rows"], dims["cols"]),), workload, device)
        case _:  # softmax: the spec admits no other
            softmax = softmax_eager if recipe.norm == "eager" else lambda x: torch.softmax(x, dim=-1)
            return _single(softmax, (random(dims["rows"], dims["cols"]),), workload, device)


def _single(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    workload: Workload,
    device: torch.device,
    attention: str = "",
) -> Step:
    run = compiled(function, workload.recipe)
    output: list[Tensor] = []
    gradient = torch.randn_like(function(*(x.detach() for x in inputs))) if workload.phase == "backward" else None

    def forward() -> None:
        output.clear()
        for x in inputs:
            x.grad = None
        output.append(run(*inputs))

    def backward() -> None:
        output.pop().backward(gradient)

    phases: dict[str, Callable[[], object]] = {"forward": forward}
    if gradient is not None:
        phases["backward"] = backward
    return Step(phases=phases, ran=lambda: _ran(inputs[0], device, attention), single_op=True)


def _mlp_step(workload: Workload, device: torch.device) -> Step:
    """Linear and GeLU, `layers` times; `steps` forward (and backward) passes over one batch make one step."""
    dims, recipe = cast(OpSpec, workload.subject).dims, workload.recipe
    activation = gelu_eager if recipe.activation == "eager" else F.gelu
    with torch.device(device):
        layers = nn.ModuleList([nn.Linear(dims["dim"], dims["dim"]) for _ in range(dims["layers"])])
        if recipe.precision == "bf16-pure":
            layers = layers.to(torch.bfloat16)
        x = torch.randn(workload.batch, dims["dim"], dtype=next(layers.parameters()).dtype)

    def network(h: Tensor) -> Tensor:
        for layer in layers:
            h = activation(layer(h))
        return h

    run = compiled(network, recipe)

    def forward() -> None:
        with torch.no_grad(), autocast(recipe, device.type):
            for _ in range(dims["steps"]):
                run(x)

    def forward_and_backward() -> None:
        layers.zero_grad(set_to_none=True)
        for _ in range(dims["steps"]):
            with autocast(recipe, device.type):
                loss = run(x).float().mean()
            loss.backward()

    phases: dict[str, Callable[[], object]] = {STEP: forward if workload.phase == "forward" else forward_and_backward}
    return Step(phases=phases, ran=lambda: _ran(next(layers.parameters()), device, ""))


def _ran(tensor: Tensor, device: torch.device, attention: str) -> Ran:
    return Ran(
        device=str(device),
        weights=dtype_name(tensor.dtype),
        compute=dtype_name(tensor.dtype),
        fp32_matmul=fp32_matmul_probe(device),
        attention=attention,
        inductor_cache_hits=inductor_cache_hits(),
    )
