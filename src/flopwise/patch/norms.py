"""Norms written out, run as one kernel: recognised by what they compute, whatever their class is called."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flopwise.kernels.dispatch import autocast_dtype
from flopwise.lm.own_kernels import own_operation
from flopwise.patch.checked import Forward, Kind, can_check, forward_of, holding, only_tensor, put_forward
from flopwise.patch.patched import Patched
from flopwise.torch_private import FakeTensor, buffer_slots, parameter_slots, real_tensors

USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # written into the code of norms that keep none
SCALES = (10.0, 1.0, 1e-2, 1e-3, 1e-4, 1e-5)  # of the rows of a probe: the small ones tell one eps from another
TOLERANCE = 1e-4  # of a row: fp32 against float64
ONE_KERNEL = {"layer_norm", "rms_norm"}


@dataclass(frozen=True)
class Form:
    """What a norm computes: (x − mean) / sqrt(var + eps) · (offset + weight) + bias, an RMSNorm with neither mean nor bias."""

    rms: bool
    eps: float
    offset: float = 0.0
    weight: str = ""  # the parameters' names; '' for none
    bias: str = ""
    one_kernel: bool = False  # as it is written

    def compute(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, rms_norm: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """In x's dtype, by torch's kernels, or by an own one of RMSNorm where it has a weight."""
        if weight is not None and self.offset:
            weight = self.offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if self.rms and rms_norm is not None and weight is not None:
            return rms_norm(x, weight, self.eps)
        wide = torch.promote_types(x.dtype, weight.dtype if weight is not None else x.dtype)
        weight, shape = weight if weight is None else weight.to(wide), x.shape[-1:]
        if self.rms:
            return F.rms_norm(x.to(wide), shape, weight, self.eps).to(x.dtype)
        return F.layer_norm(x.to(wide), shape, weight, bias if bias is None else bias.to(wide), self.eps).to(x.dtype)


def replace(model: nn.Module, value: str, patched: Patched) -> int:
    """Run the model's norms as one kernel each, torch's or ours; how many were replaced."""
    own = own_operation("rms_norm", "norm = 'triton'") if value == "triton" else None
    kinds: dict[Any, tuple[Form | None, Kind, Forward]] = {}
    left: dict[str, list[str]] = {}
    for module in model.modules():
        if not _may_be_norm(module):
            continue
        name, sort = type(module).__name__, _sort(module)
        if sort not in kinds:
            form = _recognise(module)
            kind = Kind("norm", name, "run as one kernel", patched)
            kinds[sort] = form, kind, _forward(kind, form, own, forward_of(module)) if form else forward_of(module)
        form, kind, forward = kinds[sort]
        why = _why_not(form, value)
        if why:
            left.setdefault(why, []).append(name)
            continue
        put_forward(module, forward, patched)
        kind.count()
    for why, names in left.items():
        patched.refused += [f"norm: {names.count(name)} {name}: {why}" for name in dict.fromkeys(names)]
    return sum(kind.members for _, kind, _ in kinds.values())


def _why_not(form: Form | None, value: str) -> str:
    if form is None:
        return "is neither x / rms(x) · weight nor a LayerNorm over the last dimension"
    ours = value == "triton" and form.rms and bool(form.weight)
    return "is one kernel as it is" if form.one_kernel and not ours else ""


def _may_be_norm(module: nn.Module) -> bool:
    """At most two parameters, of one dimension; nothing else inside; and called a norm, or with an eps."""
    named = "norm" in type(module).__name__.lower()
    if type(module).__module__.startswith("torch.") and type(module) not in (nn.LayerNorm, nn.RMSNorm):
        return False
    if isinstance(module, torch.jit.ScriptModule) or [*module.children(), *_present(buffer_slots(module))]:
        return False
    own = list(_present(parameter_slots(module)))
    if any(type(p) not in (nn.Parameter, Tensor, FakeTensor) or p.dim() != 1 or p.shape != own[0].shape for p in own):
        return False
    return len(own) <= 2 and (named or (bool(own) and any("eps" in attribute for attribute in vars(module))))


def _present(slots: dict[str, Any]) -> Iterator[Tensor]:
    return (one for one in slots.values() if one is not None)


def _sort(module: nn.Module) -> Any:
    """Modules that compute alike: of one class, one set of parameters, and the same settings."""
    settings = {name: one for name, one in vars(module).items() if isinstance(one, float | int | str | bool)}
    own = [(name, p is None or p.shape) for name, p in parameter_slots(module).items()]
    return type(module), tuple(own), tuple(sorted((k, v) for k, v in settings.items() if k != "training"))


def _recognise(module: nn.Module) -> Form | None:
    """The form of which a probe with random weights shows the values, also in a dry run; None if there is none."""
    with real_tensors():
        return _form_of(module)


def _form_of(module: nn.Module) -> Form | None:
    names = [name for name, p in parameter_slots(module).items() if p is not None]
    generator = torch.Generator().manual_seed(0)
    columns = len(next(_present(parameter_slots(module)), torch.empty(16)))
    weights = {name: torch.randn(columns, generator=generator) for name in names}
    x = (torch.randn(len(SCALES), columns, generator=generator) + 0.5) * torch.tensor(SCALES)[:, None]
    given, seen = x.clone(), _Names()
    try:
        with holding(module, weights), torch.no_grad(), seen:
            y = forward_of(module)(module, given)
    except Exception:  # noqa: BLE001  whatever a module that is no norm makes of a tensor
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or not torch.equal(given, x):
        return None
    exact = {name: weight.double() for name, weight in weights.items()}
    for form in _forms(module, names, bool(seen.names & ONE_KERNEL)):
        expected = form.compute(x.double(), exact.get(form.weight), exact.get(form.bias))
        if ((y - expected).abs().amax(-1) <= TOLERANCE * expected.abs().amax(-1)).all():
            return form
    return None


def _forms(module: nn.Module, names: list[str], one_kernel: bool) -> Iterator[Form]:
    kept = [one for one in vars(module).values() if isinstance(one, float) and 0 < one < 0.1]
    orders = (
        [("", "")] if not names else [(names[0], "")] if len(names) == 1 else [tuple(names), tuple(reversed(names))]
    )
    if vars(module).get("eps", 0.0) is None:  # torch.nn.RMSNorm's default
        kept.append(torch.finfo(torch.float32).eps)
    for eps in dict.fromkeys((*kept, *USUAL_EPS)):
        for weight, bias in orders:
            for offset in (0.0, 1.0) if weight else (0.0,):
                yield Form(False, eps, offset, weight, bias, one_kernel)
                if not bias:
                    yield Form(True, eps, offset, weight, bias, one_kernel)


class _Names(TorchFunctionMode):
    """The names of the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def _forward(kind: Kind, form: Form, own: Callable[..., Tensor] | None, original: Forward) -> Forward:
    """The forward of the norms of a kind: the kernel, in the dtype that the original gives for such an input."""
    dtypes: dict[Any, torch.dtype] = {}
    names = [name for name in (form.weight, form.bias) if name]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = only_tensor(args, kwargs)
        if x is None or kind.given_up:
            return original(self, *args, **kwargs)
        parameters = [getattr(self, name) for name in names]
        weight_dtype = parameters[0].dtype if parameters else x.dtype
        sort = (x.dtype, weight_dtype, x.shape[-1], x.device.type, autocast_dtype(x), torch.is_grad_enabled())
        if sort not in dtypes and (not can_check() or not _agrees(self, sort, x, parameters)):
            return original(self, *args, **kwargs)
        return compute(dtypes[sort], x, *parameters)

    def compute(dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        x = x.to(torch.promote_types(x.dtype, dtype))
        return form.compute(x, given.get(form.weight), given.get(form.bias), own).to(dtype)

    def _agrees(self: nn.Module, sort: Any, x: Tensor, parameters: list[Tensor]) -> bool:
        def written(x: Tensor, *parameters: Tensor) -> Any:
            with holding(self, dict(zip(names, parameters, strict=True))):
                return original(self, x)

        with torch.no_grad():
            dtype = written(x.detach(), *parameters).dtype
        if kind.allows(sort, written, lambda *tensors: compute(dtype, *tensors), [x, *parameters]):
            dtypes[sort] = dtype
        return sort in dtypes

    return forward
