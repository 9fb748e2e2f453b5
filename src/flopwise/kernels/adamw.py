"""AdamW over all tensors of a group in one launch, with gradient clipping in the same pass.

With g the gradient (scaled down when its norm over all parameters exceeds `max_grad_norm`), at step t:

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    p ← (1 − lr · decay) p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

Per fp32 parameter 16 bytes are read and 12 written: nothing can beat 28 bytes at the memory's bandwidth. A small model
has hundreds of small tensors and would be launch-bound, so a step is two launches, three with clipping: the norm, a
one-program kernel that turns step counts, learning rate and norm into each tensor's coefficients, and the update. The
update finds its tensors through a table of addresses in device memory. Nothing is read back to the host.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flopwise.errors import Unsupported
from flopwise.kernels.adamw_kernels import CLIP_EPS, LOW, NORM_PROGRAMS, Bucket, as_scalar
from flopwise.kernels.dispatch import FLOATS, runs_triton
from flopwise.torch_private import takes_scaled_gradients

_STATES = ("exp_avg", "exp_avg_sq", "step")  # torch.optim's names


def adamw_reference(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    group: dict[str, Any],
    factor: Tensor | float = 1.0,
    low: Tensor | None = None,
) -> None:
    """Update one parameter and its moments in place, in fp32; `step` counts this step already, `factor` scales g.

    `low` is what a bf16 parameter lacks of its fp32 weight, see `joined`.

    >>> p, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    >>> adamw_reference(p, torch.tensor([3.0, -0.01]), m, v, torch.tensor(1.0), group)
    >>> p  # the first step goes by the learning rate, whatever the size of the gradient
    tensor([0.9000, 1.1000])
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    wide, gradient = p.float() if low is None else joined(p, low), g.float() * factor
    first = torch.lerp(m.float(), gradient, 1 - beta1)
    second = v.float() * beta2 + gradient * gradient * (1 - beta2)
    # 1 − βᵗ of the first steps is a small difference of two large numbers: expm1 keeps its digits.
    correction1 = -torch.expm1(step * math.log(beta1)) if beta1 else 1.0
    correction2 = -torch.expm1(step * math.log(beta2)) if beta2 else torch.ones_like(step)
    denominator = second.sqrt() / correction2.sqrt() + group["eps"]
    wide = wide * (1 - lr * group["weight_decay"]) - lr / correction1 * first / denominator
    if low is None:
        p.copy_(wide)
    else:
        split(wide, p, low)
    m.copy_(first)
    v.copy_(second)


def joined(p: Tensor, low: Tensor) -> Tensor:
    """The fp32 weight of which a bf16 parameter is the upper half; `low` is the difference, in units of fp32's last place.

    >>> p, low = torch.empty(2, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int16)
    >>> split(torch.tensor([1.001, -0.3]), p, low)
    >>> p.float(), joined(p, low)
    (tensor([ 1.0000, -0.3008]), tensor([ 1.0010, -0.3000]))

    A parameter that was set from outside meets an old difference, less than its own last place. Zero and infinity have no
    place below them to take it from: they are themselves.
    """
    wide = p.float()
    wide.view(torch.int32).add_(low * p.div(p).eq(1))
    return wide


def split(weight: Tensor, p: Tensor, low: Tensor) -> None:
    """Write an fp32 weight as a bf16 parameter, rounded to nearest, and the difference."""
    p.copy_(weight)
    # A tie is one more than 16 bits hold; of what is not finite, nothing is kept.
    difference = (weight.view(torch.int32) - (p.view(torch.int16).int() << 16)).clamp(max=32767)
    low.copy_(torch.where(torch.isfinite(p), difference, 0))


@torch.library.custom_op("flopwise::adamw_", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "steps", "lows"))
def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lows: list[Tensor],
    factor: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The step of one group by the reference, tensor by tensor."""
    if found_inf is not None and bool(found_inf):
        return
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    halves: list[Tensor] | list[None] = lows or [None] * len(params)
    for p, g, m, v, step, low in zip(params, grads, exp_avgs, exp_avg_sqs, steps, halves, strict=True):
        step.add_(1)
        adamw_reference(p, g, m, v, step, group, 1.0 if factor is None else factor, low)


@_adamw.register_fake
def _(*arguments: Any) -> None:
    """All it does is change its arguments."""


class _Placed(NamedTuple):
    """A group's buckets, and what they are of."""

    group: dict[str, Any]
    addresses: list[int]  # of the parameters that have gradients
    buckets: list[Bucket]


@takes_scaled_gradients
class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with torch.optim.AdamW's arguments, states and results, in two launches a group.

    Always capturable: step counts live on the device; a 0-dim tensor `lr` on the device is read anew by a replayed CUDA
    graph. Run one step before capturing, as torch's own guide does: it builds the tables.

    `max_grad_norm` clips by the norm over all parameters, as torch.nn.utils.clip_grad_norm_ does, while updating: the
    gradients themselves stay as they are; `grad_norm` is their norm before clipping.

    `state_dtype=torch.bfloat16` halves the states' memory and is an approximation: m and v are rounded to nearest. Give it
    a β₂ of 0.99 or less, as in betas=(0.9, 0.95): with the default of 0.999 a step takes less from v than half of bf16's
    last place, so that v never decays, and steps stay small after one large gradient. States are fp32 otherwise, for bf16
    parameters too.

    `master=True` keeps an fp32 weight of every bf16 parameter: the parameter is its upper half, rounded to nearest, and the
    state holds the difference in 16 bits, so that small updates add up. fp32 parameters have no need of it.

    A GradScaler's scale and its verdict are read on the device (fp16); gradients are not unscaled in place.
    States are replaced through `load_state_dict` alone. Sparse gradients are refused.
    """

    steps_on_device = True
    grad_norm: Tensor | None = None  # of the last step with max_grad_norm, 0-dim

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        state_dtype: torch.dtype = torch.float32,
        master: bool = False,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, got {max_grad_norm}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype}")
        self.max_grad_norm, self.state_dtype, self.master = max_grad_norm, state_dtype, master
        self._buckets: list[_Placed] = []  # of each group
        self._captured: list[Bucket] = []  # what CUDA graphs point at
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with what the group asks for checked."""
        _check_options({**self.defaults, **param_group})
        whole = [name for name in ("max_grad_norm", "state_dtype", "master") if name in param_group]
        if whole:
            raise Unsupported(f"{whole[0]} is of the whole AdamW, not of one group of parameters: give it beside lr")
        super().add_param_group(param_group)
        if self.master and any(p.dtype == torch.float16 for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise Unsupported("AdamW(master=True) keeps fp32 weights of bf16 parameters, not of fp16: use bf16 or fp32")

    def __getstate__(self) -> dict[str, Any]:
        own = {"max_grad_norm": self.max_grad_norm, "state_dtype": self.state_dtype, "master": self.master}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets = []
        self.__dict__.setdefault("_captured", [])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this optimizer or of torch.optim.AdamW. torch would round the moments to the parameters' dtype."""
        saved = [n for group in state_dict["param_groups"] for n in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        _check_saved(state_dict, zip(saved, own, strict=False))
        super().load_state_dict(state_dict)
        for number, p in zip(saved, own, strict=True):
            if isinstance(self.state.get(p, {}).get("step"), Tensor):
                self.state[p]["step"] = self.state[p]["step"].clone()  # torch takes it as it is: both would count it
            for name in ("exp_avg", "exp_avg_sq", LOW):
                if name in state_dict["state"].get(number, {}):
                    kept = state_dict["state"][number][name]
                    dtype = torch.int16 if name == LOW else self.state_dtype
                    self.state[p][name] = torch.zeros_like(p, dtype=dtype).copy_(kept)
            if not self.master or p.dtype != torch.bfloat16:
                self.state.get(p, {}).pop(LOW, None)
        self._buckets = []

    @torch.no_grad()
    def set_masters(self, weights: Mapping[Tensor, Tensor]) -> None:
        """The fp32 weights of bf16 parameters, before the first step. Without them a master begins at its parameter's value,
        in the middle of a place of bf16, and the first small updates do not show in the parameter.

        >>> weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        >>> AdamW([weight], master=True).set_masters({weight: torch.tensor([1.001])})
        >>> weight.item()
        1.0
        """
        if not self.master:
            raise Unsupported("AdamW(master=False) keeps no fp32 weights")
        for p, weight in weights.items():
            low = self.state[p].setdefault(LOW, torch.zeros_like(p, dtype=torch.int16))
            split(weight.to(p.device, torch.float32), p, low)

    @torch.compiler.disable  # addresses are no part of a graph
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        trained = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        devices = {p.device for params in trained for p in params}
        if len(devices) > 1:
            raise Unsupported("AdamW updates parameters of one device: make one optimizer per device")
        placed = list(zip(self.param_groups, trained, strict=True))
        if any(params and runs_triton(params[0]) for params in trained):
            before = self._buckets + [None] * (len(placed) - len(self._buckets))
            self._buckets = [self._place(*now, old) for now, old in zip(placed, before, strict=False)]
            self._launch([bucket for found in self._buckets for bucket in found.buckets], scale, inf)
        else:
            self._buckets = []
            for group, params in placed:
                self._initialise(params, group)
            self._step_eager(placed, scale, inf)
        return loss

    def _place(self, group: dict[str, Any], params: list[Tensor], before: "_Placed | None") -> "_Placed":
        """The group's buckets, made anew if other parameters have gradients or parameters have moved."""
        addresses = [p.data_ptr() for p in params]
        if before is not None and before.group is group and before.addresses == addresses:
            return before
        if not params:
            return _Placed(group, [], [])
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported("run one optimizer step with the same parameters before capturing a CUDA graph of it")
        self._initialise(params, group)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for p in params:
            if p.numel():
                by_dtype.setdefault(p.dtype, []).append(p)
        buckets = [Bucket(same, [self.state[p] for p in same], group) for same in by_dtype.values()]
        return _Placed(group, addresses, buckets)

    def _initialise(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Check what is asked for and make the states that are missing."""
        if group.get("amsgrad") or group.get("maximize"):
            raise Unsupported("AdamW of flopwise has no amsgrad and no maximize")
        for p in params:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise Unsupported("AdamW does not take sparse gradients: use torch.optim.SparseAdam for them")
            if p.dtype not in FLOATS or (runs_triton(p) and not _dense(p)):
                raise Unsupported(
                    f"AdamW takes fp32, bf16 and fp16 parameters without gaps, not {p.dtype} {p.stride()}"
                )
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)  # torch.optim's names
                state["exp_avg"] = torch.zeros_like(p, dtype=self.state_dtype)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
            if self.master and p.dtype == torch.bfloat16 and LOW not in state:
                state[LOW] = torch.zeros_like(p, dtype=torch.int16)

    def _launch(self, buckets: list[Bucket], scale: Tensor | None, inf: Tensor | None) -> None:
        if not buckets:
            return
        device = buckets[0].table.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for bucket in buckets:
            bucket.point_at_gradients(capturing)
            if capturing:
                self._captured.append(bucket)
        partials = None
        if self.max_grad_norm is not None:
            shares = [min(bucket.blocks, NORM_PROGRAMS) for bucket in buckets]
            partials = torch.empty(sum(shares), dtype=torch.float32, device=device)
            self.grad_norm = torch.empty((), dtype=torch.float32, device=device)
            for bucket, share in zip(buckets, partials.split(shares), strict=True):
                bucket.add_squares(share)
        for bucket in buckets:
            bucket.update(partials, self.max_grad_norm or 0.0, self.grad_norm, scale, inf)

    def _step_eager(
        self, placed: list[tuple[dict[str, Any], list[Tensor]]], scale: Tensor | None, inf: Tensor | None
    ) -> None:
        """The same step on the CPU: one op over all tensors of a group, as it is on a GPU."""
        factor = None if scale is None else 1 / scale
        gradients = [p.grad for _, params in placed for p in params if p.grad is not None]
        if self.max_grad_norm is not None and gradients:
            norms = torch.stack([torch.linalg.vector_norm(gradient.float()) for gradient in gradients])
            self.grad_norm = torch.linalg.vector_norm(norms) * (1.0 if factor is None else factor)
            clip = (self.max_grad_norm / (self.grad_norm + CLIP_EPS)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        for group, trained in placed:
            for master in (False, True):
                if params := [p for p in trained if (LOW in self.state[p]) == master]:
                    self._update_eager(params, group, factor, inf, master)

    def _update_eager(
        self, params: list[Tensor], group: dict[str, Any], factor: Tensor | None, inf: Tensor | None, master: bool
    ) -> None:
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not isinstance(state["step"], Tensor) or state["step"].dim():
                state["step"] = as_scalar(state["step"], p.device)
        lows = [s[LOW] for s in states] if master else []
        rates = (float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"])
        moments = ([s[name] for s in states] for name in _STATES)
        _adamw(params, [p.grad for p in params], *moments, lows, factor, inf, *rates)


def _check_options(group: dict[str, Any]) -> None:
    """torch's own checks. A tensor's value stays where it is."""
    lr, betas = group["lr"], group["betas"]
    if lr.numel() != 1 if isinstance(lr, Tensor) else not lr >= 0:
        raise ValueError(f"lr must be one number, at least 0, got {lr}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two, at least 0 and below 1, got {betas}")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must be at least 0, got {group[name]}")


def _check_saved(state_dict: dict[str, Any], pairs: Iterable[tuple[int, Tensor]]) -> None:
    """What torch would load without a word: another algorithm's states, or those of other parameters."""
    if any(group.get("decoupled_weight_decay") is False for group in state_dict["param_groups"]):
        raise Unsupported(
            "this is the state of torch.optim.Adam, whose decay goes through the moments: AdamW's is needed"
        )
    for number, p in pairs:
        for name, kept in state_dict["state"].get(number, {}).items():
            if name in ("exp_avg", "exp_avg_sq", LOW) and kept.shape != p.shape:
                raise ValueError(f"{name} of parameter {number} is {list(kept.shape)}, the parameter {list(p.shape)}")


def _dense(p: Tensor) -> bool:
    """Whether a tensor covers its memory without gaps: only then does a tensor like it have its strides."""
    return p.is_contiguous() or torch.empty_like(p).stride() == p.stride()
