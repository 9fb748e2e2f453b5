"""AdamW's kernels, and the tables through which a launch finds its tensors. The formulas are those of `adamw.py`.

A step is two launches, three with clipping: the norm, a one-program kernel that turns step counts, learning rate and norm
into each tensor's coefficients, and the update. The update finds its tensors through a table of addresses in device memory.
"""

import ctypes
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwise.kernels.case import Case
from flopwise.torch_private import foreach_add_

BLOCK = 1024  # elements of a program: 8 a thread, two 16-byte loads of each tensor; with 16 the masked end takes 208 registers
WARPS = 4
NORM_PROGRAMS = 1056  # 8 on each of an H200's 132 SMs: the partial sums then fit one program
PREPARE_BLOCK = 1024
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOW = "low"  # the state that holds the lower halves of fp32 weights, whose upper halves are the bf16 parameter
# Of the table: the addresses of p, m and v, the number of elements, the first block, the address of the lower halves.
_COLUMNS = tl.constexpr(6)


@dataclass(frozen=True)
class Fixed:
    """What the kernels are compiled for: their constants `C`. Gradients have the parameters' dtype."""

    param: Any
    state: Any
    master: bool
    aligned: bool  # every address is a multiple of 16 bytes


@triton.jit
def _pointers(address, start, lanes, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address from the table as pointers. The hint is what keeps loads 16 bytes wide: the compiler cannot see it."""
    pointers = (address.to(tl.pointer_type(DTYPE)) + start) + lanes  # one 64-bit address, small offsets to it
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _square_sum(address, start, lanes, numel, MASKED: tl.constexpr, C: tl.constexpr):
    pointers = _pointers(address, start, lanes, C.param, C.aligned)
    if MASKED:
        gradient = tl.load(pointers, mask=lanes < numel - start, other=0.0).to(tl.float32)
    else:
        gradient = tl.load(pointers).to(tl.float32)
    return gradient * gradient


@triton.jit
def _adamw_norm_kernel(table, gradients, block_tensor, blocks, partials, C: tl.constexpr, BLOCK: tl.constexpr):
    """Each program's share of the sum of squares of every gradient, in an order that does not vary from run to run."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tensor = tl.load(block_tensor + block)
        row = table + tensor * _COLUMNS
        address = tl.load(gradients + tensor)
        numel = tl.load(row + 3)
        start = (block - tl.load(row + 4)) * BLOCK
        if start + BLOCK <= numel:
            total += _square_sum(address, start, lanes, numel, False, C)
        else:
            total += _square_sum(address, start, lanes, numel, True, C)
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
    ln_beta1,
    ln_beta1_rest,
    ln_beta2,
    ln_beta2_rest,
    LR_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program. Counts each tensor's step and writes its row of coefficients: lr/(1 − β₁ᵗ), 1/√(1 − β₂ᵗ),
    1 − lr · decay, and what gradients are multiplied by. The corrections are differences of nearly equal numbers in
    the first steps, hence fp64: ln β arrives as a sum of two fp32 numbers, since Triton hands over no wider ones. As
    constants they would compile the kernel anew for every β, and some schedules change β at every step.
    """
    lanes = tl.arange(0, BLOCK)
    log1 = tl.cast(ln_beta1, tl.float64) + ln_beta1_rest
    log2 = tl.cast(ln_beta2, tl.float64) + ln_beta2_rest
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
        correction1 = 1.0 - tl.exp(wide * log1)
        correction2 = 1.0 - tl.exp(wide * log2)
        row = coefficients + tensor * 4
        tl.store(row, (rate / correction1).to(tl.float32), mask=mask)
        tl.store(row + 1, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=mask)
        tl.store(row + 2, tl.zeros([BLOCK], tl.float32) + (1.0 - rate * weight_decay), mask=mask)
        tl.store(row + 3, tl.zeros([BLOCK], tl.float32) + factor, mask=mask)


@triton.jit
def _update(addresses, coefficients, start, lanes, numel, betas, MASKED: tl.constexpr, C: tl.constexpr):
    """A block of one tensor. `addresses`: of p, g, m, v and the lower halves; `betas`: 1 − β₁, β₂, 1 − β₂ and ε."""
    p_address, g_address, m_address, v_address, low_address = addresses
    beta1_rest, beta2, beta2_rest, eps = betas
    p_pointers = _pointers(p_address, start, lanes, tl.int16 if C.master else C.param, C.aligned)
    g_pointers = _pointers(g_address, start, lanes, C.param, C.aligned)
    m_pointers = _pointers(m_address, start, lanes, C.state, C.aligned)
    v_pointers = _pointers(v_address, start, lanes, C.state, C.aligned)
    mask = None
    if MASKED:
        mask = lanes < numel - start
    if C.master:
        low_pointers = _pointers(low_address, start, lanes, tl.int16, C.aligned)
        high, low = tl.load(p_pointers, mask=mask).to(tl.int32), tl.load(low_pointers, mask=mask).to(tl.int32)
        size = high & 0x7FFF  # a parameter set to 0 or infinity from outside has no room for an old difference
        low = tl.where((size > 0) & (size < 0x7F80), low, 0)
        p = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
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
    if C.master:
        bits = p.to(tl.int32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        low = tl.minimum(bits - (high << 16), 32767)  # a tie is one more than 16 bits hold
        broken = p != p
        tl.store(p_pointers, tl.where(broken, 0x7FC0, high).to(tl.int16), mask=mask)
        tl.store(low_pointers, tl.where(broken, 0, low).to(tl.int16), mask=mask)
    else:
        tl.store(p_pointers, p.to(C.param), mask=mask)
    tl.store(m_pointers, m.to(C.state), mask=mask)
    tl.store(v_pointers, v.to(C.state), mask=mask)


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
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK elements of one tensor: p, g, m and v are read once, p, m and v written once."""
    if found_inf is not None:  # noqa: SIM102
        if tl.load(found_inf) != 0:
            return
    block = tl.program_id(0)
    tensor = tl.load(block_tensor + block)
    row = table + tensor * _COLUMNS
    p, m, v, g = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(gradients + tensor)
    numel = tl.load(row + 3)
    start = (block - tl.load(row + 4)) * BLOCK  # int64, as all of the table
    lanes = tl.arange(0, BLOCK)
    low = tl.load(row + 5)
    coefficients = coefficients + tensor * 4
    addresses, betas = (p, g, m, v, low), (beta1_rest, beta2, beta2_rest, eps)
    # Two branches, because a mask that may end anywhere would cut every load into single elements.
    if start + BLOCK <= numel:
        _update(addresses, coefficients, start, lanes, numel, betas, False, C)
    else:
        _update(addresses, coefficients, start, lanes, numel, betas, True, C)


class Bucket:
    """Parameters that one launch updates: of one group and one dtype. Their tables on the device.

    What an earlier CUDA graph reads is never written again: parameters that have moved make a new bucket, and a capture
    makes its own table of gradients, whose addresses it holds by value.
    """

    def __init__(self, params: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
        device = params[0].device
        self.params, self.group = params, group
        self.param_dtype, self.state_dtype = params[0].dtype, states[0]["exp_avg"].dtype
        self.master = LOW in states[0]
        blocks = [triton.cdiv(p.numel(), BLOCK) for p in params]
        rows = []
        for p, state, first in zip(params, states, itertools.accumulate([0, *blocks[:-1]]), strict=True):
            addresses = [x.data_ptr() for x in (p, state["exp_avg"], state["exp_avg_sq"])]
            rows.append([*addresses, p.numel(), first, state[LOW].data_ptr() if self.master else 0])
        self.blocks = sum(blocks)
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        numbers = torch.arange(len(params), dtype=torch.int32)
        self.block_tensor = numbers.repeat_interleave(torch.tensor(blocks)).to(device)
        self.coefficients = torch.empty(len(params), 4, dtype=torch.float32, device=device)
        # Each state's step is a view of one tensor, which one kernel counts up.
        self.steps = torch.stack([as_scalar(state["step"], device) for state in states])
        for state, step in zip(states, self.steps.unbind(), strict=True):
            state["step"] = step
        self._params_aligned = all(address % 16 == 0 for row in rows for address in (*row[:3], row[5]))
        self._lying: list[tuple[int, tuple[int, ...], torch.dtype]] = []  # gradients, as the table has them
        self._copies: list[Tensor] = []  # of gradients, until the launch: they have no other owner
        self.gradients = self.table
        self.aligned = False

    def point_at_gradients(self, capturing: bool) -> None:
        """The table of gradients' addresses is made anew when they have moved, and always within a capture."""
        gradients = [p.grad for p in self.params if p.grad is not None]
        addresses = [g.data_ptr() for g in gradients]
        lying = [(address, g.stride(), g.dtype) for address, g in zip(addresses, gradients, strict=True)]
        if not capturing and lying == self._lying:
            return
        self._lying = [] if capturing else lying
        # autograd lays gradients out as the parameters are; one assigned by hand may be anything.
        for n, (p, g) in enumerate(zip(self.params, gradients, strict=True)):
            if g.dtype != p.dtype or g.stride() != p.stride():
                self._copies.append(torch.empty_like(p).copy_(g))
                addresses[n], self._lying = self._copies[-1].data_ptr(), []
        self.aligned = self._params_aligned and all(address % 16 == 0 for address in addresses)
        device = self.table.device
        if capturing:
            # A captured copy would read host memory at every replay; numbers added to a list of tensors are arguments
            # of a kernel, so the graph holds them by value.
            self.gradients = torch.zeros(len(addresses), dtype=torch.int64, device=device)
            foreach_add_(list(self.gradients.unbind()), addresses)
        else:
            # Pinned memory of torch's allocator is not reused before the copy is done.
            on_host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
            self.gradients = on_host.to(device, non_blocking=True)

    def add_squares(self, partials: Tensor) -> None:
        """Each program's sum of squares of gradients into `partials`."""
        tables = (self.table, self.gradients, self.block_tensor)
        _adamw_norm_kernel[(len(partials),)](
            *tables, self.blocks, partials, C=self._fixed(), BLOCK=BLOCK, num_warps=WARPS
        )

    def _fixed(self) -> Fixed:
        return Fixed(_TL[self.param_dtype], _TL[self.state_dtype], self.master, self.aligned)

    def update(
        self, partials: Tensor | None, max_norm: float, norm: Tensor | None, scale: Tensor | None, inf: Tensor | None
    ) -> None:
        """The coefficients, then the update."""
        lr, (beta1, beta2) = self.group["lr"], self.group["betas"]
        on_device = isinstance(lr, Tensor) and lr.device == self.table.device
        rate = (lr if on_device else float(lr), float(self.group["weight_decay"]))
        clip = (partials, 0 if partials is None else len(partials), float(max_norm), norm)
        arguments = (
            self.steps,
            self.coefficients,
            len(self.params),
            *rate,
            *clip,
            scale,
            inf,
            *_log(beta1),
            *_log(beta2),
        )
        _adamw_prepare_kernel[(1,)](*arguments, LR_ON_DEVICE=on_device, BLOCK=PREPARE_BLOCK, num_warps=WARPS)
        tables = (self.table, self.gradients, self.block_tensor, self.coefficients)
        betas = (1 - beta1, beta2, 1 - beta2, float(self.group["eps"]))
        _adamw_update_kernel[(self.blocks,)](*tables, inf, *betas, C=self._fixed(), BLOCK=BLOCK, num_warps=WARPS)
        self._copies = []  # what the stream allocates next comes after the launch


def _log(beta: float) -> tuple[float, float]:
    """ln β as an fp32 number and the rest of it."""
    logarithm = math.log(max(beta, 1e-300))  # of 0: its powers vanish all the same
    high = ctypes.c_float(logarithm).value
    return high, logarithm - high


def as_scalar(step: Tensor | float, device: torch.device) -> Tensor:
    """A step count on the device: AdamW of torch.optim keeps it on the host unless told otherwise, others as an int."""
    return torch.as_tensor(step, dtype=torch.float32, device=device).reshape(())


def cases() -> Iterator[Case]:
    """The kernels in fp32, and in bf16: with fp32 and with bf16 states, with and without the weights' lower halves."""
    tables = {"table": "*i64", "gradients": "*i64", "block_tensor": "*i32"}
    numbers = dict.fromkeys(("beta1_rest", "beta2", "beta2_rest", "eps"), "fp32")
    update = {**tables, "coefficients": "*fp32", **numbers}
    for name, param, state, master in (
        ("fp32", tl.float32, tl.float32, False),
        ("bf16", tl.bfloat16, tl.float32, False),
        ("bf16, bf16 states", tl.bfloat16, tl.bfloat16, False),
        ("bf16 with fp32 masters", tl.bfloat16, tl.float32, True),
        ("bf16 with fp32 masters, bf16 states", tl.bfloat16, tl.bfloat16, True),
    ):
        constants = {"C": Fixed(param, state, master, True), "BLOCK": BLOCK, "found_inf": None}
        yield Case(f"adamw update {name}", _adamw_update_kernel, update, constants, WARPS)
    constants = {"C": Fixed(tl.float32, tl.float32, False, True), "BLOCK": BLOCK}
    norm = {**tables, "blocks": "i32", "partials": "*fp32"}
    yield Case("adamw norm fp32", _adamw_norm_kernel, norm, constants, WARPS)
    prepare = {"steps": "*fp32", "coefficients": "*fp32", "tensors": "i32", "lr": "fp32", "weight_decay": "fp32"}
    clip = {"partials": "*fp32", "n_partials": "i32", "max_norm": "fp32", "norm": "*fp32"}
    logs = dict.fromkeys(("ln_beta1", "ln_beta1_rest", "ln_beta2", "ln_beta2_rest"), "fp32")
    fixed = {"LR_ON_DEVICE": False, "BLOCK": PREPARE_BLOCK, "grad_scale": None, "found_inf": None}
    yield Case("adamw prepare", _adamw_prepare_kernel, {**prepare, **clip, **logs}, fixed, WARPS)
