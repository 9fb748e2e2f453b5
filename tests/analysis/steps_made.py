"""Steps made by hand: kernels one after another, each under an op, and what the host did."""

from dataclasses import dataclass, field, replace

import polars as pl

from flopwise.analysis.traced_steps import traced_steps
from flopwise.analysis.waterfall import waterfall
from flopwise.predict.datasheet import from_datasheet
from flopwise.spec.gpu import gpu
from flopwise.trace import tables

from .test_idle import frame, trace

H200 = gpu("h200")
LIMITS = from_datasheet(H200)
BF16 = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
FP32 = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>"
FLASH = "pytorch_flash::flash_fwd_kernel<float>"
MUL = "void at::native::vectorized_elementwise_kernel<4, MulFunctor>"
ADAM = "multi_tensor_apply_kernel<FusedAdamMathFunctor>"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


@dataclass
class Step:
    """Kernels run one after the other from 1,000 ns on, launched long before; ns of time."""

    names: list[str] = field(default_factory=lambda: ["launch"])
    shapes: list[str] = field(default_factory=lambda: [""])
    kernels: list[tuple] = field(default_factory=list)
    launches: list[tuple] = field(default_factory=list)
    ops: list[tuple] = field(default_factory=list)
    sized: list[tuple] = field(default_factory=list)
    ranges: list[tuple] = field(default_factory=list)
    syncs: list[tuple] = field(default_factory=list)
    at: int = 1000

    def name(self, text):
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def run(self, kernel, ns, op="aten::mul", sizes="", under="", start=None, stream=7, launched=None):
        """One kernel; `under` is a range around its launch, `launched` when the host asked for it."""
        number = len(self.kernels) + 1
        start = self.at if start is None else start
        call = 2 * number if launched is None else launched
        self.kernels.append((start, start + ns, 1, 0, stream, self.name(kernel), number, -1))
        self.launches.append((call, call + 1, 1, 11, 0, number))
        self.ops.append((call, call + 1, 1, 11, self.name(op), -1, False, -1))
        if sizes:
            self.shapes.append(sizes)
            self.sized.append((len(self.ops) - 1, len(self.shapes) - 1))
        if under:
            self.ranges.append((call, call + 1, 1, 11, self.name(under), "annotation"))
        self.at = max(self.at, start + ns)
        return self

    def mm(self, m, k, n, ns, kernel=BF16, **more):
        return self.run(kernel, ns, "aten::mm", f"[[{m}, {k}], [{k}, {n}]]", **more)

    def trace(self):
        made = replace(
            trace([], []),
            names=tuple(self.names),
            shapes=tuple(self.shapes),
            kernels=frame(tables.KERNELS, *self.kernels),
            launches=frame(tables.LAUNCHES, *self.launches),
            syncs=frame(tables.SYNCS, *self.syncs),
            ranges=frame(tables.RANGES, *self.ranges),
        )
        order = sorted(range(len(self.ops)), key=lambda i: self.ops[i][0])
        sized = dict(self.sized)
        rows = [(place, sized[i]) for place, i in enumerate(order) if i in sized]
        return replace(
            made,
            ops=frame(tables.OPS, *(self.ops[i] for i in order)),
            sized_ops=pl.DataFrame(rows, schema=tables.SIZED_OPS, orient="row"),
        )

    def waterfall(self, limits=LIMITS, **more):
        return waterfall(traced_steps(self.trace()), limits, H200, **more)


def peak_ns(flops, precision="bf16"):
    return 1e9 * flops / LIMITS.matmul[precision].peak_flops
