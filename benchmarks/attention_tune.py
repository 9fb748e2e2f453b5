"""Which tiles are fastest for flash attention on this GPU: every candidate is compiled, checked and timed.

    python benchmarks/attention_tune.py --head-dim 64 --context 16384 --heads 16 --json d64.json
    python benchmarks/attention_tune.py --head-dim 128 --context 4096 --batch 4 --heads 16

Prints one table per kernel, fastest first. TFLOP/s count the work of the model: two matmuls forward, five backward, of
which a causal mask leaves half; the recomputed scores are not counted. The winners go into the tables of
`flopwise.kernels.attention_triton` and `attention_backward`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwise.kernels.attention_backward import DKDV, DQ, Saved, delta_call, dkdv_call, dq_call, launch_backward
from flopwise.kernels.attention_tiles import Call, Config, Problem, architecture, choose, padded
from flopwise.kernels.attention_triton import FORWARD, flash_attention, forward_call, launch_forward

# block_m, block_n, warps, stages. Each is tried by the copy engine, dK/dV's also 'late' (`Config.late`), and by pointers.
CANDIDATES = {
    ("forward", 64): [
        (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 2), (128, 64, 8, 3),
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3),
    ],
    ("forward", 128): [
        (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 2), (64, 128, 4, 2),
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 3),
    ],
    ("dkdv", 64): [
        (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3),
        (128, 128, 8, 2), (32, 128, 8, 3),
    ],
    ("dkdv", 128): [
        (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2),
        (64, 64, 8, 2), (16, 64, 4, 3),
    ],
    ("dq", 64): [
        (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3),
        (64, 32, 4, 3),
    ],
    ("dq", 128): [
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2),
        (64, 32, 4, 3), (64, 128, 4, 2),
    ],
}  # fmt: skip
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}


class Row(NamedTuple):
    milliseconds: float  # inf: it did not run
    config: Config
    registers: int
    note: str


class Bench:
    """One problem's tensors, the right answers, and a launch per kernel and configuration."""

    def __init__(self, given: argparse.Namespace) -> None:
        shape = given.batch, given.heads, given.context, given.head_dim
        dtype = getattr(torch, given.dtype)
        draw = torch.Generator("cuda").manual_seed(0)
        q, k, v, grad = (torch.randn(shape, generator=draw, device="cuda").to(dtype) for _ in range(4))
        self.problem = Problem(not given.full, None, given.head_dim**-0.5)
        self.right = _right(q, k, v, grad, self.problem.causal)
        self.q, self.k, self.v, self.grad = q, k, v, grad
        self.output, self.logsumexp = torch.empty_like(q), torch.empty(shape[:-1], device="cuda")
        self.saved = Saved(grad, q, k, v, self.logsumexp, torch.empty_like(self.logsumexp))
        self.grads = [torch.empty_like(x) for x in (q, k, v)]
        square = 2.0 * shape[0] * shape[1] * shape[2] ** 2 * shape[3] * (0.5 if self.problem.causal else 1.0)
        self.work = {"forward": 2 * square, "dkdv": 3 * square, "dq": 2 * square}  # 5 matmuls of a backward pass

    def call(self, kernel: str, config: Config) -> Call:
        if kernel == "forward":
            return forward_call(self.q, self.k, self.v, self.output, self.logsumexp, self.problem, config)
        if kernel == "dkdv":
            return dkdv_call(self.saved, self.grads[1], self.grads[2], self.problem, config)
        return dq_call(self.saved, self.grads[0], self.problem, config)

    def written(self, kernel: str) -> list[Tensor]:
        return {"forward": [self.output], "dq": self.grads[:1], "dkdv": self.grads[1:]}[kernel]

    def error(self, kernel: str) -> float:
        """The largest relative error of what this kernel writes, over the first head of the first batch."""
        right = {"forward": self.right[:1], "dq": self.right[1:2], "dkdv": self.right[2:]}[kernel]
        return max(_distance(found[:1, :1], x) for found, x in zip(self.written(kernel), right, strict=True))


def _right(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> list[Tensor]:
    """Output and gradients of one head by SDPA in fp32 without TF32."""
    leaves = [x[:1, :1].float().requires_grad_() for x in (q, k, v)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad[:1, :1].float())]


def _distance(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right).norm() / right.norm())


def _median_ms(launch: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        launch()
    pairs = []
    torch.cuda._sleep(20_000_000)  # the host gets ahead: no launch is waited for
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def _compile(bench: Bench, kernel: str, configs: list[Config]) -> None:
    """All at once: a compilation takes one core some seconds. What does not compile says so when it is measured."""

    def warm(config: Config) -> None:
        call = bench.call(kernel, config)
        try:
            call.kernel.warmup(*call.arguments, grid=call.grid, **call.options)
        except Exception:  # noqa: BLE001
            return

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(warm, configs))


def measure(bench: Bench, kernel: str, config: Config, repeats: int) -> Row:
    """Check, then time. A configuration that does not fit the chip is a row."""
    try:
        call = bench.call(kernel, config)
        for x in bench.written(kernel):
            x.fill_(float("nan"))
        built = call.kernel[call.grid](*call.arguments, **call.options)
        error = bench.error(kernel)
        tolerance = TOLERANCE[bench.q.dtype]
        note = "" if error <= tolerance else f"WRONG: error {error:.1e} > {tolerance:.0e}"
        if built.n_spills:
            note += f" spills {built.n_spills} bytes"
        return Row(_median_ms(call.launch, repeats), config, built.n_regs, note)
    except Exception as error:  # noqa: BLE001
        return Row(float("inf"), config, 0, f"{type(error).__name__}: {str(error)[:80]}")


def rows(bench: Bench, kernel: str, configs: list[Config], repeats: int, deadline: float) -> Iterator[Row]:
    for config in configs:
        if time.monotonic() > deadline:
            yield Row(float("inf"), config, 0, "no time left")
        else:
            yield measure(bench, kernel, config, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="forward,dkdv,dq")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--pointers", action="store_true", help="also without the copy engine (TMA)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this measures on a GPU, and torch sees none here\n")
    deadline = time.monotonic() + given.budget
    bench = Bench(given)
    table = {"forward": FORWARD, "dkdv": DKDV, "dq": DQ}
    chosen = {name: choose(table[name], bench.q, given.context) for name in table}
    tables: dict[str, list[dict[str, object]]] = {}
    best = dict(chosen)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {vars(given)}", flush=True)
    for kernel in given.kernels.split(","):
        width = 64 if given.head_dim <= 64 else 128
        tiles = [Config(*x) for x in CANDIDATES[kernel, width]]
        ways = (False, True) if kernel == "dkdv" else (False,)
        configs = [x._replace(tma=True, late=late) for late in ways for x in tiles] + (tiles if given.pointers else [])
        bench.call("forward", chosen["forward"]).launch()  # the backward kernels need L and Δ, the right ones
        delta_call(bench.saved, bench.output).launch()
        began = time.monotonic()
        _compile(bench, kernel, configs)
        print(f"\n{kernel}: {len(configs)} candidates, compiled in {time.monotonic() - began:.0f} s", flush=True)
        found = sorted(rows(bench, kernel, configs, given.repeats, deadline), key=lambda row: row.milliseconds)
        tables[kernel] = [row._asdict() | {"config": row.config._asdict()} for row in found]
        best[kernel] = next((row.config for row in found if not row.note), chosen[kernel])
        for row in found:
            rate = bench.work[kernel] / row.milliseconds / 1e9
            shipped = " <- shipped" if row.config == chosen[kernel] else ""
            print(
                f"{row.milliseconds:9.3f} ms {rate:7.0f} TFLOP/s  {tuple(row.config)} {row.registers} registers "
                f"{row.note}{shipped}", flush=True,
            )  # fmt: skip
        if given.json:
            given.json.write_text(json.dumps({"best": _best(best, bench.q), "rows": tables}, indent=1) + "\n")
    _whole(bench, given, best)


def _best(best: dict[str, Config], q: Tensor) -> dict[str, dict[str, dict[str, object]]]:
    """By module and table, as `kernels.py --tuned` takes it."""

    def entry(kernel: str) -> dict[str, object]:
        return {"arch": architecture(q) // 10 * 10, "head_dim": padded(q.shape[-1]), "config": best[kernel]._asdict()}

    return {
        "attention_triton": {"FORWARD": entry("forward")},
        "attention_backward": {"DKDV": entry("dkdv"), "DQ": entry("dq")},
    }


def _whole(bench: Bench, given: argparse.Namespace, best: dict[str, Config]) -> None:
    """Forward and backward: the fastest of each kernel, then through the public function, as shipped, beside SDPA."""
    leaves = [x.detach().requires_grad_() for x in (bench.q, bench.k, bench.v)]
    causal = bench.problem.causal
    ways = {
        "flash_attention": lambda: flash_attention(*leaves, causal=causal),
        "torch SDPA": lambda: F.scaled_dot_product_attention(*leaves, is_causal=causal),
    }
    print()

    def fastest() -> None:
        output, logsumexp = launch_forward(bench.q, bench.k, bench.v, bench.problem, best["forward"])
        saved = bench.grad, bench.q, bench.k, bench.v, output, logsumexp
        launch_backward(*saved, bench.problem, best["dkdv"], best["dq"])

    step = _median_ms(fastest, given.repeats)
    rate = sum(bench.work.values()) / step / 1e9
    print(f"{step:9.3f} ms {rate:7.0f} TFLOP/s  forward and backward, the fastest of each kernel (without a spill)")
    for name, attend in ways.items():
        step = _median_ms(lambda attend=attend: torch.autograd.grad(attend(), leaves, bench.grad), given.repeats)
        print(f"{step:9.3f} ms {sum(bench.work.values()) / step / 1e9:7.0f} TFLOP/s  forward and backward, {name}")


if __name__ == "__main__":
    main()
