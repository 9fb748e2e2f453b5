"""A linear layer's three products in bf16 and in fp8, and what the casts cost: one table; first, whether the kernels are right.

    python benchmarks/fp8_matmuls.py [--rows 16384] [-o DIR]

Layers are those of 2.7B, xl and llama3.2-1b. Times are medians over repetitions of a queue of launches, in µs; TFLOP/s of
products alone. `all` is what a training step pays: three products, the casts of x, dy and W.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from flopwise.kernels import fp8, fp8_linear, fp8_rows

LAYERS = {
    "2.7B qkv": (2560, 7680),
    "2.7B out": (2560, 2560),
    "2.7B gate+up": (2560, 20480),
    "2.7B down": (10240, 2560),
    "xl gate+up": (1600, 12800),
    "xl down": (6400, 1600),
    "llama3.2-1b gate+up": (2048, 16384),
    "llama3.2-1b down": (8192, 2048),
}
LAUNCHES, REPEATS = 10, 5


def microseconds(run: Callable[[], object]) -> float:
    """The median time of one launch, after a warm-up."""
    run()
    run()
    found = []
    for _ in range(REPEATS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        for _ in range(LAUNCHES):
            run()
        ended.record()
        torch.cuda.synchronize()
        found.append(1000 * begun.elapsed_time(ended) / LAUNCHES)
    return sorted(found)[REPEATS // 2]


def differing(a: Tensor, b: Tensor) -> float:
    """The share of fp8 numbers that are not the same bits."""
    return float((a.view(torch.uint8) != b.view(torch.uint8)).float().mean())


def check() -> None:
    """Kernels against their references on this GPU: scales equal, fp8 numbers equal but for ties of a last bit."""
    torch.manual_seed(0)
    print("| kernel | scales off by | fp8 numbers that differ |\n| :-- | --: | --: |")
    for rows, columns in ((1024, 2560), (1040, 10240), (144, 400)):
        x = torch.randn(rows, columns, device="cuda").bfloat16()
        for dtype in (fp8.E4M3, fp8.E5M2):
            for axis in (False, True):
                for both in (False, True):
                    ours, right = (make(x, dtype, axis, True, both, None) for make in (fp8._cast, fp8.cast_reference))
                    scale = float((ours[1] / right[1] - 1).abs().max())
                    far = max(differing(ours[n], right[n]) for n in (0, 2)[: 1 + both])
                    print(f"| cast {rows}x{columns} {dtype} axis={axis} both={both} | {scale:.1e} | {far:.1e} |")
        weight, up = torch.rand(columns, device="cuda").bfloat16(), torch.randn_like(x)
        for by_rows in (True, False):
            for name, ours, right in (
                (
                    "rms_norm",
                    fp8_rows._rms_norm_cast(x, weight, 1e-5, by_rows),
                    fp8_rows.rms_norm_reference(x, weight, 1e-5),
                ),
                ("swiglu", fp8_rows._swiglu_cast(x, up, by_rows), fp8_rows.swiglu_reference(x, up)),
            ):
                _, quantised, scale = fp8_rows._reference(ours[0], by_rows)  # of the same bf16 numbers
                near = float((ours[0].float() - right.float()).norm() / right.float().norm())
                far = differing(ours[1], quantised) if by_rows else 0.0
                off = float((ours[2].view(torch.float32) / scale.view(torch.float32) - 1).abs().max())
                print(f"| {name} {rows}x{columns} by_rows={by_rows}: y off by {near:.1e} | {off:.1e} | {far:.1e} |")
    for axis in (False, True):
        for narrow in (False, True):
            scaling = fp8_linear.Scaling(axis, narrow)
            x, w = torch.randn(512, 1024, device="cuda").bfloat16(), torch.randn(768, 1024, device="cuda").bfloat16()
            x.requires_grad_(), w.requires_grad_()
            dy = torch.randn(512, 768, device="cuda").bfloat16()
            y = fp8_linear.linear(x, w, None, scaling)
            dx, dw = torch.autograd.grad(y, (x, w), dy)
            exact = (x.float() @ w.float().t(), dy.float() @ w.float(), dy.float().t() @ x.float())
            far = [float(((a.float() - b).norm() / b.norm()).detach()) for a, b in zip((y, dx, dw), exact, strict=True)]
            print(
                f"| linear axis={axis} narrow dW={narrow}: y, dx, dW off by | {' '.join(f'{one:.3f}' for one in far)} | |"
            )


def layer(rows: int, ins: int, outs: int) -> dict[str, float]:
    """Microseconds of everything that a layer does, by name."""
    x, w, dy = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((rows, ins), (outs, ins), (rows, outs)))
    found = {
        "bf16 y": microseconds(lambda: x @ w.t()),
        "bf16 dx": microseconds(lambda: dy @ w),
        "bf16 dW": microseconds(lambda: dy.t() @ x),
    }
    for name, axis in (("tensor", False), ("row", True)):
        gradient = fp8_linear.Scaling(axis).gradient
        casts = {"x": (x, fp8.E4M3), "W": (w, fp8.E4M3), "dy": (dy, gradient)}
        made = {of: fp8.cast(m, dtype, axis=axis) for of, (m, dtype) in casts.items()}
        for of, (m, dtype) in casts.items():
            for both in (False, True):
                run = partial(fp8.cast, m, dtype, axis=axis, by_columns=both)
                found[f"{name} cast {of}{' both' if both else ''}"] = microseconds(run)
        found[f"{name} amax x"] = microseconds(partial(fp8._amax, x, axis))
        X, W, D = made["x"], made["W"], made["dy"]
        for fast in (True, False):
            how = "fast" if fast else "exact"
            products = {
                "y": (X.by_rows, X.row_scale, W.by_rows, W.row_scale),
                "dx": (D.by_rows, D.row_scale, W.by_columns, W.column_scale),
                "dW": (D.by_columns, D.column_scale, X.by_columns, X.column_scale),
            }
            for of, operands in products.items():
                try:
                    found[f"{name} {how} {of}"] = microseconds(partial(fp8.matmul, *operands, None, fast))
                except RuntimeError as error:
                    print(f"{name} {how} {of}: {str(error).splitlines()[0][:150]}")
                    found[f"{name} {how} {of}"] = float("nan")
    return found


def summary(found: dict[str, float]) -> dict[str, float]:
    """A training step's share of the layer under each choice."""
    sums = {"bf16": sum(found[f"bf16 {of}"] for of in ("y", "dx", "dW"))}
    for name in ("tensor", "row"):
        for how in ("exact", "fast"):
            forward, back = found[f"{name} fast y"], found[f"{name} {how} dx"]
            weights = found[f"{name} cast W both"]
            narrow = sum(found[f"{name} cast {of} both"] for of in ("x", "dy")) + found[f"{name} {how} dW"]
            wide = sum(found[f"{name} cast {of}"] for of in ("x", "dy")) + found["bf16 dW"]
            sums[f"{name} {how}, dW fp8"] = forward + back + weights + narrow
            sums[f"{name} {how}, dW bf16"] = forward + back + weights + wide
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("-o", type=Path)
    asked = parser.parse_args()
    check()
    kept = {}
    for name, (ins, outs) in LAYERS.items():
        rows = asked.rows if not name.startswith("llama") else asked.rows // 4
        found = layer(rows, ins, outs)
        kept[name] = {"rows": rows, "ins": ins, "outs": outs, "us": found, "all_us": summary(found)}
        work = 2e-6 * rows * ins * outs
        print(f"\n**{name}**, {rows} x {ins} x {outs}\n\n| | us | TFLOP/s |\n| :-- | --: | --: |")
        for what, us in found.items():
            rate = "" if "cast" in what or "amax" in what else f"{work / us:.0f}"
            print(f"| {what} | {us:.1f} | {rate} |")
        for what, us in kept[name]["all_us"].items():
            print(f"| all: {what} | {us:.0f} | {3 * work / us:.0f} |")
        if asked.o:
            (asked.o / "fp8_matmuls.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
