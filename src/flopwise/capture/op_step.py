"""Single operations as steps: matmul, an MLP, and those that come in several implementations."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwise.capture.model_step import check_supported, compiled
from flopwise.capture.op_impl import BOUNDS, check_close, check_result, op_function, op_inputs
from flopwise.capture.step import Step
from flopwise.errors import Unsupported
from flopwise.lm.attention import attention_function, sdpa_backend_name
from flopwise.lm.layers import SOFTMAX, gelu_function
from flopwise.lm.optimizer import make_optimizer
from flopwise.lm.own_kernels import own_levers, own_operation, written_out
from flopwise.lm.precision import apply_fp32_matmul, autocast, fp32_matmul_probe, on_fake_tensors, torch_dtype
from flopwise.records.run import STEP, Ran
from flopwise.spec.dtypes import dtype_name
from flopwise.spec.operations import OpSpec
from flopwise.spec.recipe import OWN_OPTIMIZERS, Recipe
from flopwise.spec.workload import Workload
from flopwise.torch_private import compile_cache_hits

_OWN = {"attention": ("flash",), "cross_entropy": ("fused",), "adamw": OWN_OPTIMIZERS}  # for other operations: triton


def op_step(workload: Workload, device: torch.device) -> Step:
    """Inputs are random numbers: zeros run faster than real data."""
    recipe, op = workload.recipe, cast(OpSpec, workload.subject)
    check_supported(recipe, device)
    apply_fp32_matmul(recipe)
    dtype = torch_dtype(recipe.precision)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype, requires_grad=workload.phase == "backward")

    if op.name == "adamw":
        return _adamw_step(workload, device, dtype)
    if op.name == "mlp":
        return _mlp_step(workload, device)
    if op.impl in ("cuda", "sdpa-cudnn") and device.type != "cuda" and not on_fake_tensors():
        raise Unsupported(f"impl = '{op.impl}' needs an NVIDIA GPU; this device is '{device.type}'", "choose another")
    inputs = op_inputs(workload, random, device)
    function = op_function(op, op.impl) if op.impl else _by_recipe(op, recipe)
    attention = ""
    if op.name == "attention":
        chosen = op.impl or recipe.attention
        attention = (
            f"sdpa: {sdpa_backend_name(*inputs, causal=op.causal)}" if chosen == "sdpa" and not op.impl else chosen
        )
    return _single(function, inputs, workload, device, attention, checked=bool(op.impl))


def _by_recipe(op: OpSpec, recipe: Recipe) -> Callable[..., Tensor]:
    """The operation as the recipe's levers choose it."""
    if op.name == "matmul":
        return torch.matmul
    if op.name == "attention":
        return attention_function(recipe.attention, compiled_elsewhere=recipe.compile != "off", causal=op.causal)
    if op.name == "gelu":
        return gelu_function(recipe.activation)
    if recipe.norm == "triton":  # softmax: the spec admits no other
        return own_operation("softmax", "norm = 'triton'")
    return SOFTMAX[recipe.norm]


def _single(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    workload: Workload,
    device: torch.device,
    attention: str = "",
    checked: bool = False,
) -> Step:
    run = compiled(function, workload.recipe)
    output: list[Tensor] = []
    gradient = None
    if workload.phase == "backward":
        result = function(*(x.detach() for x in inputs))
        gradient = torch.randn_like(result) if result.dim() else torch.ones_like(result)  # of a loss: 1
        del result
    if checked:
        check_result(workload, function, inputs, gradient)

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
    return Step(phases=phases, ran=lambda: _ran(inputs[0], device, attention, workload), single_op=True)


def _adamw_step(workload: Workload, device: torch.device, dtype: torch.dtype) -> Step:
    """One update of many weights; the first is compared with the algorithm written out, in fp32."""
    op = cast(OpSpec, workload.subject)
    count, rows, cols = (op.dims[d] for d in ("tensors", "rows", "cols"))
    params = [nn.Parameter(torch.randn(rows, cols, device=device, dtype=dtype)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    graph = workload.recipe.graph == "on"
    precision = workload.recipe.precision
    optimizer = make_optimizer(params, Recipe(optimizer=op.impl, precision=precision), lr=0.1, graph=graph)
    truth = nn.Parameter(params[0].detach().float().clone())
    truth.grad = params[0].grad.float()  # type: ignore[union-attr]
    optimizer.step()
    if not on_fake_tensors():
        make_optimizer([truth], Recipe(optimizer="adamw-loop"), lr=0.1, graph=False).step()
        check_close(op, "the update", params[0].detach(), truth.detach(), BOUNDS[workload.recipe.precision])

    def ran() -> Ran:
        return _ran(params[0], device, "", workload)

    return Step(phases={"optimizer": optimizer.step}, ran=ran, single_op=True)


def _mlp_step(workload: Workload, device: torch.device) -> Step:
    """Linear and GeLU, `layers` times; `steps` forward (and backward) passes over one batch make one step."""
    dims, recipe = cast(OpSpec, workload.subject).dims, workload.recipe
    activation = F.gelu if recipe.activation == "torch" else gelu_function(recipe.activation)
    with torch.device(device):
        layers = nn.ModuleList([nn.Linear(dims["dim"], dims["dim"]) for _ in range(dims["layers"])])
        if recipe.weights == "bf16":
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
    return Step(phases=phases, ran=lambda: _ran(next(layers.parameters()), device, "", workload))


def _ran(tensor: Tensor, device: torch.device, attention: str, workload: Workload) -> Ran:
    op = cast(OpSpec, workload.subject)
    own = _OWN.get(op.name, ("triton",))
    names = ((op.impl,) if op.impl in own else ()) if op.impl else own_levers(workload.recipe)
    return Ran(
        device=str(device),
        weights=dtype_name(tensor.dtype),
        compute=dtype_name(tensor.dtype),
        fp32_matmul=fp32_matmul_probe(device),
        attention=attention,
        kernels=written_out(device.type, names),
        inductor_cache_hits=compile_cache_hits(),
    )
