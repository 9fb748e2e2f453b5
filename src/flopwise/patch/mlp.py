"""Activations written out, run as one kernel: GELU and SiLU in modules and functions, and silu(gate) · up in any module."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flopwise.kernels.dispatch import autocast_dtype
from flopwise.lm.own_kernels import needs_triton, own_operation
from flopwise.patch.checked import Forward, Kind, forward_of, only_tensor, put_forward
from flopwise.patch.deferred import Call, Deferred, Fused, Pattern, watch_first_calls
from flopwise.patch.functions import callers, modules_that_use, replace_function, written_functions
from flopwise.patch.patched import Patched
from flopwise.torch_private import real_tensors

Activation = Callable[[Tensor], Tensor]
WORDS = ("gelu", "silu", "swish", "activation")
TORCH: dict[str, Activation] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
TOLERANCE = (
    2e-6  # of values up to 8, float64 against float64 with constants of ten digits: GELU's two forms differ by 5e-4
)


def replace(model: nn.Module, value: str, patched: Patched) -> int:
    """Run activations as one kernel each, torch's or ours. How many were replaced, or may be: gates show at their first call."""
    kernels = dict(TORCH)
    if value == "triton":
        with needs_triton("activation = 'triton'"):
            from flopwise.kernels.gelu import gelu_triton
        kernels["gelu_tanh"] = gelu_triton
    replaced = _replace_modules(model, kernels, patched) + _replace_functions(model, kernels, patched)
    return replaced + (_replace_gates(model, patched) if value == "triton" else 0)


# --- Activations of one tensor.


def _replace_modules(model: nn.Module, kernels: dict[str, Activation], patched: Patched) -> int:
    kinds: dict[Any, tuple[Kind, Forward] | None] = {}
    for module in model.modules():
        if not _may_be_activation(module):
            continue
        settings = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, float | int | str)))
        sort = type(module), settings, tuple(sorted(vars(module)))
        if sort not in kinds:
            original, name = forward_of(module), _recognise(partial(forward_of(module), module))
            kind = Kind("activation", type(module).__name__, "run as one kernel", patched)
            kinds[sort] = (kind, _forward(kind, original, kernels[name])) if name else None
        found = kinds[sort]
        if found is not None:
            put_forward(module, found[1], patched)
            found[0].count()
    return sum(found[0].members for found in kinds.values() if found)


def _may_be_activation(module: nn.Module) -> bool:
    named = any(word in type(module).__name__.lower() for word in WORDS)
    inside = [*module.children(), *module.parameters(), *module.buffers()]
    return named and not inside and not type(module).__module__.startswith("torch.")


def _forward(kind: Kind, original: Forward, kernel: Activation) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = only_tensor(args, kwargs)
        if x is None or not _agrees(kind, x, partial(original, self), kernel):
            return original(self, *args, **kwargs)
        return kernel(x)

    return forward


def _agrees(kind: Kind, x: Tensor, original: Activation, kernel: Activation) -> bool:
    sort = x.dtype, x.device.type, autocast_dtype(x), torch.is_grad_enabled()
    return kind.allows(sort, original, kernel, [x])


def _replace_functions(model: nn.Module, kernels: dict[str, Activation], patched: Patched) -> int:
    replaced = 0
    for file, name, function in written_functions(model):
        modules = callers(model, file, name) if any(word in name.lower() for word in WORDS) else []
        found = _recognise(function) if modules else None
        if found is None:
            continue
        kind = Kind("activation", type(modules[0]).__name__, f"run {name} as one kernel", patched)
        replace_function(file, name, modules, _function(kind, function, kernels[found]), patched)
        for _ in modules:
            kind.count()
        replaced += len(modules)
    return replaced


def _function(kind: Kind, original: Callable[..., Any], kernel: Activation) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        x = only_tensor(args, kwargs)
        return kernel(x) if x is not None and _agrees(kind, x, original, kernel) else original(*args, **kwargs)

    return function


def _recognise(function: Callable[..., Any]) -> str | None:
    """The activation that a function writes out, also in a dry run; None if it is another, or one call of torch."""
    with real_tensors():
        return _activation_of(function)


def _activation_of(function: Callable[..., Any]) -> str | None:
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    given, seen = x.clone(), _Calls()
    try:
        with torch.no_grad(), seen:
            y = function(given)
    except Exception:  # noqa: BLE001  whatever a function that is no activation makes of a tensor
        return None
    if seen.calls <= 1 or not isinstance(y, Tensor) or y.shape != x.shape or not torch.equal(given, x):
        return None
    near = [name for name, kernel in TORCH.items() if float((kernel(x) - y.double()).abs().max()) < TOLERANCE]
    return near[0] if near else None


class _Calls(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


# --- silu(gate) · up.


def _replace_gates(model: nn.Module, patched: Patched) -> int:
    swiglu = own_operation("swiglu", "activation = 'triton'")
    patterns: dict[type, Pattern] = {}

    def pattern_of(module: nn.Module) -> Pattern:
        if type(module) not in patterns:
            kind = Kind("activation", type(module).__name__, "run silu(gate) · up as one kernel", patched)
            patterns[type(module)] = Gated(kind, swiglu)
        return patterns[type(module)]

    return watch_first_calls(modules_that_use(model, "silu", (nn.SiLU,)), pattern_of, patched)


class Gated:
    """silu(gate) · up in the modules of one class."""

    def __init__(self, kind: Kind, swiglu: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.kind, self.swiglu = kind, swiglu

    def running(self, module: nn.Module) -> None:
        """Nothing is kept from call to call."""

    def called(self, call: Call, made: Any) -> None:
        """No other call matters."""

    def begin(self, call: Call) -> "Gate | None":
        gate = call.get(0, "input")
        in_place = call.get(1, "inplace", False)
        fits = call.name == "silu" and isinstance(gate, Tensor) and gate.is_floating_point() and not in_place
        return Gate(self, call, gate) if fits else None


class Gate(Deferred):
    """silu(gate), waiting for `up`."""

    def __init__(self, pattern: Gated, call: Call, gate: Tensor) -> None:
        super().__init__((call,))
        self.pattern, self.gate = pattern, gate
        self.known = {name: getattr(gate, name) for name in ("shape", "ndim", "device", "dtype")}

    def then(self, call: Call) -> Fused | None:
        others = [one for one in call.args if one is not self]
        up = others[0] if len(others) == 1 else None
        if call.name != "mul" or call.in_place or call.kwargs or not isinstance(up, Tensor):
            return None
        gate, swiglu = self.gate, self.pattern.swiglu
        if up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
            return None
        sort = gate.dtype, gate.device.type, gate.is_contiguous(), autocast_dtype(gate), torch.is_grad_enabled()
        agreed = self.pattern.kind.allows(sort, lambda a, b: F.silu(a) * b, swiglu, [gate, up])
        return Fused(lambda: swiglu(gate, up)) if agreed else None
