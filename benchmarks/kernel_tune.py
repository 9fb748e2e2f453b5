"""Which constants are fastest for the kernels that move bytes, on this GPU: GeLU, RMSNorm, RoPE.

    python benchmarks/kernel_tune.py [--only gelu,rms_norm] [--json tuned.json]

Every variant is a set of a module's constants: the kernel runs with them through its own function, its result is compared
with torch's, and it is timed as in `kernels.py`. A table for each operation, fastest first, with the share of a copy's speed
that is measured in the same process. What is best over all of an operation's cases goes into the module by hand; until then
`kernels.py --tuned tuned.json` measures with it.
"""

import argparse
import importlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import ceilings, distance, times_ms

Variant = dict[str, Any]


class Case(NamedTuple):
    """One shape of an operation."""

    name: str
    bytes: int
    run: Callable[[], Sequence[Tensor]]
    truth: Sequence[Tensor]
    bound: float


class Tuning(NamedTuple):
    module: str
    cases: list[Case]
    variants: list[Variant]
    peer: tuple[str, Callable[[], Any]] | None = None  # what it is to beat, on the first case


def module(name: str) -> Any:
    return importlib.import_module(f"flopwise.kernels.{name}")


def grid(**choices: Sequence[Any]) -> list[Variant]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def gelu(name: str, variants: list[Variant]) -> Tuning:
    x = torch.randn(16384, 16384, device="cuda")
    function = module("gelu").GELU[name]
    case = Case("16384² fp32", 2 * x.nbytes, lambda: [function(x)], [F.gelu(x, approximate="tanh")], 1e-5)
    return Tuning("gelu", [case], variants, ("torch", lambda: F.gelu(x, approximate="tanh")))


def gelu_triton() -> Tuning:
    return gelu("triton", grid(BLOCK=(512, 1024, 2048), WARPS=(4, 8)))


def gelu_cuda() -> Tuning:
    return gelu("cuda", grid(THREADS=(128, 256, 512)))


def _norms(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, dy, other = (torch.randn(16384, 8192, device="cuda").to(dtype) for _ in range(3))
    weight = torch.randn(8192, device="cuda").to(dtype)
    return x, dy, other, weight, torch.rsqrt(x.float().pow(2).mean(-1) + 1e-5)


BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def rms_norm_forward() -> Tuning:
    ours, forward, cases = module("rms_norm"), module("rms_norm_forward").launch_forward, []
    for dtype in (torch.bfloat16, torch.float32):
        x, _, other, weight, _ = _norms(dtype)
        run = lambda x=x, weight=weight: forward(x, None, weight, 1e-5)[:1]  # noqa: E731
        cases.append(Case(f"{dtype}", 2 * x.nbytes, run, [ours.rms_norm_reference(x, weight, 1e-5)], BOUNDS[dtype]))
        added = lambda x=x, o=other, weight=weight: forward(x, o, weight, 1e-5)[:2]  # noqa: E731
        right = ours.add_rms_norm_reference(x, other, weight, 1e-5)
        cases.append(Case(f"add {dtype}", 4 * x.nbytes, added, right, BOUNDS[dtype]))
    return Tuning("rms_norm_forward", cases, grid(FORWARD_WARP=(256, 512, 1024, 2048)))


def rms_norm_backward() -> Tuning:
    ours, cases = module("rms_norm"), []
    for dtype in (torch.bfloat16, torch.float32):
        x, dy, other, weight, inverse = _norms(dtype)
        for title, more in (("", None), ("add ", other)):
            given = dy, more, x, weight, inverse
            run = lambda given=given: ours._backward(*given)  # noqa: E731
            right = ours.rms_norm_backward_reference(*given)
            cases.append(Case(f"{title}{dtype}", (3 if more is None else 4) * x.nbytes, run, right, BOUNDS[dtype]))
    stages = [(1, 1), (2, 2), (2, 3), (2, 4)]
    variants = [
        {"BACKWARD_WARP": w, "WARPS_PER_SM": n, "STAGES": wide, "NARROW_STAGES": narrow}
        for w in (256, 512) for n in (16, 32) for wide, narrow in stages
    ]  # fmt: skip
    return Tuning("rms_norm", cases, variants)


def rope() -> Tuning:
    ours, cases = module("rope"), []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(8, 32, 4096, 128, device="cuda").to(dtype)
        angles = torch.arange(4096, device="cuda")[:, None] * 10000.0 ** (-torch.arange(0, 128, 2, device="cuda") / 128)
        given = x, angles.cos(), angles.sin()
        run = lambda given=given: [ours.rope(*given)]  # noqa: E731
        cases.append(Case(f"{dtype}", 2 * x.nbytes, run, [ours.rope_reference(*given)], BOUNDS[dtype]))
    return Tuning("rope", cases, grid(TILE=(512, 1024), WARPS=(4, 8)))


TUNINGS = {
    "gelu_triton": gelu_triton,
    "gelu_cuda": gelu_cuda,
    "rms_norm_forward": rms_norm_forward,
    "rms_norm_backward": rms_norm_backward,
    "rope": rope,
}


def apply(name: str, variant: Variant) -> None:
    place = module(name)
    for constant, value in variant.items():
        setattr(place, constant, value)
    if name == "gelu":
        place._cuda_kernels.cache_clear()


def measure(case: Case, seconds: float) -> float:
    """Milliseconds, or inf where it is wrong or does not run."""
    try:
        if not distance(case.run(), case.truth) <= case.bound:
            return math.inf
        return statistics.median(times_ms(case.run, seconds))
    except Exception:  # noqa: BLE001
        return math.inf


def rows(tuning: Tuning, deadline: float) -> Iterator[tuple[Variant, list[float]]]:
    for variant in tuning.variants:
        if time.monotonic() < deadline:
            apply(tuning.module, variant)
            yield variant, [measure(case, 0.03) for case in tuning.cases]


def report(name: str, tuning: Tuning, copy: float, deadline: float) -> tuple[Variant, list[dict[str, Any]]]:
    """Print the table; return the best variant and all rows."""
    place = module(tuning.module)
    shipped = {constant: getattr(place, constant) for constant in tuning.variants[0]}
    found = sorted(rows(tuning, deadline), key=lambda row: math.prod(row[1]))  # the geometric mean over the cases
    apply(tuning.module, shipped)
    print(f"\n{name}: ms (share of a copy's speed) of " + "; ".join(case.name for case in tuning.cases))
    if tuning.peer:
        print(f"{statistics.median(times_ms(tuning.peer[1], 0.1)):8.4f}  {tuning.peer[0]}")
    for variant, times in found:
        cells = (f"{t:8.4f} ({c.bytes / t / 1e6 / copy:5.1%})" for t, c in zip(times, tuning.cases, strict=True))
        print(*cells, variant, "<- shipped" if variant == shipped else "", flush=True)
    best = found[0][0] if found and math.isfinite(math.prod(found[0][1])) else shipped
    return best, [{"variant": variant, "ms": times} for variant, times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TUNINGS), help="separated by commas")
    parser.add_argument("--budget", type=float, default=60, help="seconds after which nothing is tried any more")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this measures on a GPU, and torch sees none here\n")
    deadline = time.monotonic() + given.budget
    torch.manual_seed(0)
    copy = ceilings()["GB/s"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {copy:.0f} GB/s")
    told: dict[str, Any] = {"copy": copy, "best": {}, "rows": {}}
    for name in given.only.split(","):
        tuning = TUNINGS[name]()
        best, told["rows"][name] = report(name, tuning, copy, deadline)
        told["best"].setdefault(tuning.module, {}).update(best)
        del tuning
        torch.cuda.empty_cache()
        if given.json:
            given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
