"""A trace of somebody's own training script, with ranges of its own: what a course's student profiles."""

import json
from pathlib import Path

MM, BMM = "sm80_xmma_gemm_tf32f32_tn", "cutlass_80_tensorop_s1688gemm_128x128"
POINTWISE, EXP = (
    "void at::native::elementwise_kernel<MulFunctor>",
    "void at::native::vectorized_elementwise_kernel<exp_kernel>",
)
ADAM = "void at::native::vectorized_elementwise_kernel<AddcmulFunctor>"
# GPU microseconds of each kernel, of one layer.
QKV, SCORES, SOFTMAX, VALUES, PROJECTION, MLP, GELU = 30, 10, 40, 12, 9, 80, 15
BACKWARD, UPDATE = 200, 25
HEAD_DIM, HEADS, BATCH = 64, 12, 4


class _Script:
    """Host and GPU as two clocks, in microseconds; the host launches and goes on."""

    def __init__(self, shapes: bool, ops: bool) -> None:
        self.events, self.host, self.gpu, self.number, self.shapes, self.ops = [], 0.0, 0.0, 0, shapes, ops

    def range(self, name, inside, thread=1):
        start = self.host
        inside()
        self.add("user_annotation", name, thread, start, self.host)

    def add(self, kind, name, thread, start, end, **args):
        self.events.append(
            {
                "ph": "X",
                "cat": kind,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )

    def op(self, name, kernel, us, dims=None, thread=1, **args):
        self.number += 1
        start = self.host
        self.host += 8
        sizes = {"Input Dims": dims, "Input type": ["float"] * len(dims)} if dims and self.shapes else {}
        if self.ops:
            self.add("cpu_op", name, thread, start, self.host - 1, **{"External id": self.number}, **sizes, **args)
        call = {"correlation": self.number, "External id": self.number}
        self.add("cuda_runtime", "cudaLaunchKernel", thread, start + 2, start + 5, **call)
        self.gpu = max(self.gpu, self.host)
        self.add("kernel", kernel, 7, self.gpu, self.gpu + us, device=0, stream=7, **call)
        self.gpu += us


def own_script(path: Path, *, context=256, layers=2, warmup=1, steps=2, shapes=True, ops=True, trains=True) -> Path:
    """Write a trace of `warmup` and then `steps` steps. Each has `layers` times the kernels above.

    Without `ops` it has what Nsight Systems sees of a script that marks ranges and nothing else.
    """
    s, width, tokens, many = _Script(shapes, ops), HEADS * HEAD_DIM, BATCH * context, BATCH * HEADS

    def attention():
        keys = [[many, context, HEAD_DIM], [many, HEAD_DIM, context]]
        s.range("computing attention scores", lambda: s.op("aten::bmm", BMM, SCORES, keys))
        square = [[BATCH, HEADS, context, context]]
        s.range("computing softmax", lambda: s.op("aten::exp", EXP, SOFTMAX, square))
        s.range(
            "final matmul",
            lambda: s.op("aten::bmm", BMM, VALUES, [[many, context, context], [many, context, HEAD_DIM]]),
        )

    def block():
        s.op("aten::mm", MM, QKV, [[tokens, width], [width, 3 * width]])
        s.range("scaled dot product attention", attention)
        s.op("aten::mm", MM, PROJECTION, [[tokens, width], [width, width]])

    def forward():
        for _ in range(layers):
            s.range("multihead attention", block)
            s.op("aten::mm", MM, MLP, [[tokens, width], [width, 4 * width]])
            s.op("aten::mul", POINTWISE, GELU)

    def backward():
        for _ in range(layers):
            start = s.host
            s.op("aten::mm", MM, BACKWARD, thread=2)
            if ops:
                s.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 2, start - 1, s.host)

    def step():
        s.range("forward pass", forward)
        if trains:
            s.range("backward pass", backward)
            s.range("optimizer step", lambda: s.op("aten::addcmul_", ADAM, UPDATE))
        s.host = max(s.host, s.gpu)  # torch.cuda.synchronize()

    s.range("warmup", lambda: [step() for _ in range(warmup)])
    for _ in range(steps):
        step()
    made = {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}], "traceEvents": s.events}
    path.write_text(json.dumps(made))
    return path
