"""AdamW over all tensors of a group in one launch, with gradient clipping in the same pass.

With g the gradient (scaled down when its norm over all parameters exceeds `max_grad_norm`), at step t:

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    p ← (1 − lr · decay) p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

Per fp32 parameter 16 bytes are read and 12 written: nothing can beat 28 bytes at the memory's bandwidth. A small model
has hundreds of small tensors and would be launch-bound, so a step is two launches, three with clipping: the norm, a
one-program kernel that turns step counts, learning rate and norm into each tensor's coefficients, and the update. The
update finds its tensors through a table of addresses in device memory. Nothing is read back to the host.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.optim import Optimizer

from flopwise.errors import Unsupported
from flopwise.kernels.dispatch import runs_triton
from flopwise.kernels.resources import Case

BLOCK = 1024  # elements of a program: 8 a thread, two 16-byte loads of each tensor; with 16 the masked end takes 208 registers
WARPS = 4
NORM_PROGRAMS = 1056  # 8 on each of an H200's 132 SMs: the partial sums then fit one program
PREPARE_BLOCK = 1024
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_STATES = ("exp_avg", "exp_avg_sq", "step")  # torch.optim's names
_COLUMNS = 5  # of the table: the addresses of p, m and v, the number of elements, the first block


def adamw_reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, group: dict[str, Any], factor: Tensor | float = 1.0
) -> None:
    """Update one parameter and its moments in place, in fp32; `step` counts this step already, `factor` scales g.

    >>> p, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
    >>> group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    >>> adamw_reference(p, torch.tensor([3.0, -0.01]), m, v, torch.tensor(1.0), group)
    >>> p  # the first step goes by the learning rate, whatever the size of the gradient
    tensor([0.9000, 1.1000])
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    wide, gradient = p.float(), g.float() * factor
    first = torch.lerp(m.float(), gradient, 1 - beta1)
    second = v.float() * beta2 + gradient * gradient * (1 - beta2)
    # 1 − βᵗ of the first steps is a small difference of two large numbers: expm1 keeps its digits.
    correction1 = -torch.expm1(step * math.log(beta1)) if beta1 else 1.0
    correction2 = -torch.expm1(step * math.log(beta2)) if beta2 else torch.ones_like(step)
    denominator = second.sqrt() / correction2.sqrt() + group["eps"]
    wide = wide * (1 - lr * group["weight_decay"]) - lr / correction1 * first / denominator
    p.copy_(wide)
    m.copy_(first)
    v.copy_(second)


@torch.library.custom_op("flopwise::adamw_", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "steps"))
def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
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
    for p, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        step.add_(1)
        adamw_reference(p, g, m, v, step, group, 1.0 if factor is None else factor)


@_adamw.register_fake
def _(*arguments: Any) -> None:
    """All it does is change its arguments."""


@triton.jit
def _pointers(address, start, lanes, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address from the table as pointers. The hint is what keeps loads 16 bytes wide: the compiler cannot see it."""
    pointers = (address.to(tl.pointer_type(DTYPE)) + start) + lanes  # one 64-bit address, small offsets to it
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _square_sum(address, start, lanes, numel, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    pointers = _pointers(address, start, lanes, DTYPE, ALIGNED)
    if MASKED:
        gradient = tl.load(pointers, mask=lanes < numel - start, other=0.0).to(tl.float32)
    else:
        gradient = tl.load(pointers).to(tl.float32)
    return gradient * gradient


@triton.jit
def _adamw_norm_kernel(
    table,
    gradients,
    block_tensor,
    blocks,
    partials,
    COLUMNS: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program's share of the sum of squares of every gradient, in an order that does not vary from run to run."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tensor = tl.load(block_tensor + block)
        row = table + tensor * COLUMNS
        address = tl.load(gradients + tensor)
        numel = tl.load(row + 3)
        start = (block - tl.load(row + 4)) * BLOCK
        if start + BLOCK <= numel:
            total += _square_sum(address, start, lanes, numel, GRAD, ALIGNED, False)
        else:
            total += _square_sum(address, start, lanes, numel, GRAD, ALIGNED, True)
    tl.store(partials + tl.program_id(0), tl.sum(total))


@triton.jit
def _adamw_prepare_kernel(
    steps,
    coefficients,
    tensors,
    lr,
    weight_decay,
    partials,
    n_partials,
    max_norm,
    norm,
    grad_scale,
    found_inf,
    LN_BETA1: tl.constexpr,
    LN_BETA2: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program. Counts each tensor's step and writes its row of coefficients: lr/(1 − β₁ᵗ), 1/√(1 − β₂ᵗ),
    1 − lr · decay, and what gradients are multiplied by. The corrections are differences of nearly equal numbers in
    the first steps, hence fp64.
    """
    lanes = tl.arange(0, BLOCK)
    factor = 1.0
    if grad_scale is not None:
        factor = 1.0 / tl.load(grad_scale).to(tl.float32)
    if partials is not None:
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, n_partials, BLOCK):
            squares += tl.load(partials + start + lanes, mask=start + lanes < n_partials, other=0.0)
        length = tl.sqrt(tl.sum(squares)) * factor
        tl.store(norm, length)
        ratio = max_norm / (length + 1e-6)
        factor = factor * tl.where(ratio > 1.0, 1.0, ratio)  # not minimum(): a NaN has to arrive at the parameters
    counted = 1.0
    if found_inf is not None:
        counted = tl.where(tl.load(found_inf) != 0, 0.0, 1.0)  # the step is skipped, and not counted
    rate = lr
    if LR_ON_DEVICE:
        rate = tl.load(lr).to(tl.float32)
    for start in range(0, tensors, BLOCK):
        tensor = start + lanes
        mask = tensor < tensors
        step = tl.load(steps + tensor, mask=mask, other=1.0) + counted
        tl.store(steps + tensor, step, mask=mask)
        wide = step.to(tl.float64)
        correction1 = 1.0 - tl.exp(wide * LN_BETA1)
        correction2 = 1.0 - tl.exp(wide * LN_BETA2)
        row = coefficients + tensor * 4
        tl.store(row, (rate / correction1).to(tl.float32), mask=mask)
        tl.store(row + 1, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=mask)
        tl.store(row + 2, tl.zeros([BLOCK], tl.float32) + (1.0 - rate * weight_decay), mask=mask)
        tl.store(row + 3, tl.zeros([BLOCK], tl.float32) + factor, mask=mask)


@triton.jit
def _update(
    p_address,
    g_address,
    m_address,
    v_address,
    coefficients,
    start,
    lanes,
    numel,
    beta1_rest,
    beta2,
    beta2_rest,
    eps,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    p_pointers = _pointers(p_address, start, lanes, PARAM, ALIGNED)
    g_pointers = _pointers(g_address, start, lanes, GRAD, ALIGNED)
    m_pointers = _pointers(m_address, start, lanes, STATE, ALIGNED)
    v_pointers = _pointers(v_address, start, lanes, STATE, ALIGNED)
    mask = None
    if MASKED:
        mask = lanes < numel - start
    p = tl.load(p_pointers, mask=mask).to(tl.float32)
    g = tl.load(g_pointers, mask=mask).to(tl.float32)
    m = tl.load(m_pointers, mask=mask).to(tl.float32)
    v = tl.load(v_pointers, mask=mask).to(tl.float32)
    step_size = tl.load(coefficients)
    root_correction = tl.load(coefficients + 1)
    decay = tl.load(coefficients + 2)
    g = g * tl.load(coefficients + 3)
    m = m + (g - m) * beta1_rest
    v = v * beta2 + g * g * beta2_rest
    p = p * decay - step_size * m / (tl.sqrt(v) * root_correction + eps)
    tl.store(p_pointers, p.to(PARAM), mask=mask)
    tl.store(m_pointers, m.to(STATE), mask=mask)
    tl.store(v_pointers, v.to(STATE), mask=mask)


@triton.jit
def _adamw_update_kernel(
    table,
    gradients,
    block_tensor,
    coefficients,
    found_inf,
    beta1_rest,
    beta2,
    beta2_rest,
    eps,
    COLUMNS: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK elements of one tensor: p, g, m and v are read once, p, m and v written once."""
    if found_inf is not None:  # noqa: SIM102
        if tl.load(found_inf) != 0:
            return
    block = tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    row = table + tensor * COLUMNS
    p, m, v, g = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(gradients + tensor)
    numel = tl.load(row + 3)
    start = (block - tl.load(row + 4)) * BLOCK  # int64, as all of the table
    lanes = tl.arange(0, BLOCK)
    coefficients = coefficients + tensor * 4
    # Two branches, because a mask that may end anywhere would cut every load into single elements.
    if start + BLOCK <= numel:
        _update(
            p, g, m, v, coefficients, start, lanes, numel, beta1_rest, beta2, beta2_rest, eps,
            PARAM, GRAD, STATE, ALIGNED, False,
        )  # fmt: skip
    else:
        _update(
            p, g, m, v, coefficients, start, lanes, numel, beta1_rest, beta2, beta2_rest, eps,
            PARAM, GRAD, STATE, ALIGNED, True,
        )  # fmt: skip


class _Bucket:
    """Parameters that one launch updates: of one group and one dtype. Their tables on the device.

    What an earlier CUDA graph reads is never written again: parameters that have moved make a new bucket, and a capture
    makes its own table of gradients, whose addresses it holds by value.
    """

    def __init__(self, params: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
        device = params[0].device
        self.params, self.group = params, group
        self.param_dtype, self.state_dtype = params[0].dtype, states[0]["exp_avg"].dtype
        blocks = [triton.cdiv(p.numel(), BLOCK) for p in params]
        rows = [
            (p.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(), p.numel(), first)
            for p, state, first in zip(params, states, itertools.accumulate([0, *blocks[:-1]]), strict=True)
        ]
        self.blocks = sum(blocks)
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        numbers = torch.arange(len(params), dtype=torch.int32)
        self.block_tensor = numbers.repeat_interleave(torch.tensor(blocks)).to(device)
        self.coefficients = torch.empty(len(params), 4, dtype=torch.float32, device=device)
        # Each state's step is a view of one tensor, which one kernel counts up.
        self.steps = torch.stack([_scalar(state["step"], device) for state in states])
        for state, step in zip(states, self.steps.unbind(), strict=True):
            state["step"] = step
        self._params_aligned = all(address % 16 == 0 for row in rows for address in row[:3])
        self._addresses: list[int] = []
        self.gradients = self.table
        self.aligned = False

    def point_at_gradients(self, capturing: bool) -> None:
        """The table of gradients' addresses is made anew when they have moved, and always within a capture."""
        gradients = [p.grad for p in self.params if p.grad is not None]
        addresses = [g.data_ptr() for g in gradients]
        if not capturing and addresses == self._addresses:
            return
        self._addresses = [] if capturing else addresses
        # autograd lays gradients out as the parameters are; one assigned by hand may be anything.
        for n, (p, g) in enumerate(zip(self.params, gradients, strict=True)):
            if g.dtype != p.dtype or g.stride() != p.stride():
                gradients[n] = torch.empty_like(p).copy_(g)
                addresses[n], self._addresses = gradients[n].data_ptr(), []
        self._kept = gradients  # until the launch: a copy has no other owner
        self.aligned = self._params_aligned and all(address % 16 == 0 for address in addresses)
        device = self.table.device
        if capturing:
            # A captured copy would read host memory at every replay; numbers added to a list of tensors are arguments
            # of a kernel, so the graph holds them by value.
            self.gradients = torch.zeros(len(addresses), dtype=torch.int64, device=device)
            torch._foreach_add_(list(self.gradients.unbind()), addresses)
        else:
            # Pinned memory of torch's allocator is not reused before the copy is done.
            on_host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
            self.gradients = on_host.to(device, non_blocking=True)

    def add_squares(self, partials: Tensor) -> None:
        """Each program's sum of squares of gradients into `partials`."""
        _adamw_norm_kernel[(len(partials),)](
            self.table, self.gradients, self.block_tensor, self.blocks, partials,
            COLUMNS=_COLUMNS, GRAD=_TL[self.param_dtype], ALIGNED=self.aligned, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def update(
        self, partials: Tensor | None, max_norm: float, norm: Tensor | None, scale: Tensor | None, inf: Tensor | None
    ) -> None:
        """The coefficients, then the update."""
        lr, (beta1, beta2) = self.group["lr"], self.group["betas"]
        on_device = isinstance(lr, Tensor) and lr.device == self.table.device
        _adamw_prepare_kernel[(1,)](
            self.steps, self.coefficients, len(self.params), lr if on_device else float(lr),
            float(self.group["weight_decay"]), partials, 0 if partials is None else len(partials), float(max_norm), norm,
            scale, inf, LN_BETA1=_log(beta1), LN_BETA2=_log(beta2), LR_ON_DEVICE=on_device, BLOCK=PREPARE_BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
        _adamw_update_kernel[(self.blocks,)](
            self.table, self.gradients, self.block_tensor, self.coefficients, inf, 1 - beta1, beta2, 1 - beta2,
            float(self.group["eps"]), COLUMNS=_COLUMNS, PARAM=_TL[self.param_dtype], GRAD=_TL[self.param_dtype],
            STATE=_TL[self.state_dtype], ALIGNED=self.aligned, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(max(beta, 1e-300))  # of 0: its powers vanish all the same


def _scalar(step: Tensor | float, device: torch.device) -> Tensor:
    """A step count on the device: AdamW of torch.optim keeps it on the host unless told otherwise, others as an int."""
    return torch.as_tensor(step, dtype=torch.float32, device=device).reshape(())


class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with torch.optim.AdamW's arguments, states and results, in two launches a group.

    Always capturable: step counts live on the device; a 0-dim tensor `lr` on the device is read anew by a replayed CUDA
    graph. Run one step before capturing, as torch's own guide does: it builds the tables.

    `max_grad_norm` clips by the norm over all parameters, as torch.nn.utils.clip_grad_norm_ does, while updating: the
    gradients themselves stay as they are; `grad_norm` is their norm before clipping.

    `state_dtype=torch.bfloat16` halves the states' memory and is an approximation: m and v are rounded to nearest, and
    with β₂ above 0.998 v hardly moves once it is within 2⁻⁸ / (1 − β₂) of the squares it averages. States are fp32
    otherwise, for bf16 parameters too.

    A GradScaler's scale and its verdict are read on the device (fp16); gradients are not unscaled in place.
    States are replaced through `load_state_dict` alone. Sparse gradients are refused.
    """

    steps_on_device = True
    grad_norm: Tensor | None = None  # of the last step with max_grad_norm, 0-dim
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf for the step

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
    ) -> None:
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be torch.float32 or torch.bfloat16, got {state_dtype}")
        self.max_grad_norm, self.state_dtype = max_grad_norm, state_dtype
        self._buckets: dict[int, tuple[list[int], list[_Bucket]]] = {}  # of each group: by the parameters' addresses
        self._captured: list[_Bucket] = []  # what CUDA graphs point at
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "state_dtype": self.state_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets = {}
        self.__dict__.setdefault("_captured", [])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this optimizer or of torch.optim.AdamW. torch would round the moments to the parameters' dtype."""
        super().load_state_dict(state_dict)
        saved = [n for group in state_dict["param_groups"] for n in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(saved, own, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state_dict["state"].get(number, {}):
                    moment = state_dict["state"][number][name]
                    self.state[p][name] = torch.zeros_like(p, dtype=self.state_dtype).copy_(moment)
        self._buckets = {}

    @torch.compiler.disable  # addresses are no part of a graph
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for number, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None]
            if params and runs_triton(params[0]):
                self._place(number, group, params)
            else:
                self._buckets[number] = [], []
                self._initialise(params, group)
        buckets = [bucket for _, found in self._buckets.values() for bucket in found]
        if buckets:
            self._launch(buckets, scale, inf)
        else:
            self._step_eager(scale, inf)
        return loss

    def _place(self, number: int, group: dict[str, Any], params: list[Tensor]) -> None:
        """The group's buckets, made anew if other parameters have gradients or parameters have moved."""
        addresses = [p.data_ptr() for p in params]
        if number in self._buckets and self._buckets[number][0] == addresses:
            return
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported("run one optimizer step with the same parameters before capturing a CUDA graph of it")
        self._initialise(params, group)
        filled = [p for p in params if p.numel()]
        dtypes = dict.fromkeys(p.dtype for p in filled)
        chosen = [[p for p in filled if p.dtype == dtype] for dtype in dtypes]
        self._buckets[number] = addresses, [_Bucket(same, [self.state[p] for p in same], group) for same in chosen]

    def _initialise(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Check what is asked for and make the states that are missing."""
        if group.get("amsgrad") or group.get("maximize"):
            raise Unsupported("AdamW of flopwise has no amsgrad and no maximize")
        for p in params:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise Unsupported("AdamW does not take sparse gradients: use torch.optim.SparseAdam for them")
            if p.dtype not in _TL or (runs_triton(p) and not _dense(p)):
                raise Unsupported(
                    f"AdamW takes fp32, bf16 and fp16 parameters without gaps, not {p.dtype} {p.stride()}"
                )
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)  # torch.optim's names
                state["exp_avg"] = torch.zeros_like(p, dtype=self.state_dtype)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)

    def _launch(self, buckets: list[_Bucket], scale: Tensor | None, inf: Tensor | None) -> None:
        device = buckets[0].table.device
        if any(bucket.table.device != device for bucket in buckets):
            raise Unsupported("AdamW updates parameters of one device: make one optimizer per device")
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

    def _step_eager(self, scale: Tensor | None, inf: Tensor | None) -> None:
        """The same step on the CPU; to who watches, one op over all tensors of a group, as it is on a GPU."""
        factor: Tensor | None = None if scale is None else 1 / scale
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_grad_norm is not None and pairs:
            norms = torch.stack([torch.linalg.vector_norm(p.grad.float()) for p, _ in pairs])
            self.grad_norm = torch.linalg.vector_norm(norms) * (1.0 if factor is None else factor)
            clip = (self.max_grad_norm / (self.grad_norm + CLIP_EPS)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                states = [self.state[p] for p in params]
                for p, state in zip(params, states, strict=True):
                    if not isinstance(state["step"], Tensor) or state["step"].dim():
                        state["step"] = _scalar(state["step"], p.device)
                _adamw(
                    params, [p.grad for p in params], *([s[name] for s in states] for name in _STATES), factor, inf,
                    float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"],
                )  # fmt: skip


def _dense(p: Tensor) -> bool:
    """Whether a tensor covers its memory without gaps: only then does a tensor like it have its strides."""
    return p.is_contiguous() or torch.empty_like(p).stride() == p.stride()


def cases() -> Iterator[Case]:
    """The kernels in fp32, in bf16 with fp32 states, and in bf16 with bf16 states."""
    tables = {"table": "*i64", "gradients": "*i64", "block_tensor": "*i32"}
    numbers = dict.fromkeys(("beta1_rest", "beta2", "beta2_rest", "eps"), "fp32")
    update = {**tables, "coefficients": "*fp32", **numbers}
    for name, param, state in (
        ("fp32", tl.float32, tl.float32),
        ("bf16", tl.bfloat16, tl.float32),
        ("bf16, bf16 states", tl.bfloat16, tl.bfloat16),
    ):
        fixed = {"COLUMNS": _COLUMNS, "GRAD": param, "ALIGNED": True, "BLOCK": BLOCK}
        yield Case(
            f"adamw update {name}",
            _adamw_update_kernel,
            update,
            {**fixed, "PARAM": param, "STATE": state, "found_inf": None},
            WARPS,
        )
    fixed = {"COLUMNS": _COLUMNS, "GRAD": tl.float32, "ALIGNED": True, "BLOCK": BLOCK}
    yield Case("adamw norm fp32", _adamw_norm_kernel, {**tables, "blocks": "i32", "partials": "*fp32"}, fixed, WARPS)
    prepare = {"steps": "*fp32", "coefficients": "*fp32", "tensors": "i32", "lr": "fp32", "weight_decay": "fp32"}
    clip = {"partials": "*fp32", "n_partials": "i32", "max_norm": "fp32", "norm": "*fp32"}
    logs = {"LN_BETA1": _log(0.9), "LN_BETA2": _log(0.999), "LR_ON_DEVICE": False, "BLOCK": PREPARE_BLOCK}
    absent = {"grad_scale": None, "found_inf": None}
    yield Case("adamw prepare", _adamw_prepare_kernel, {**prepare, **clip}, {**logs, **absent}, WARPS)
