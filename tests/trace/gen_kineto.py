"""Synthesise a realistic GPU Kineto (chrome-trace JSON) file of a Transformer-LM training run.

Schema follows libkineto's ChromeTraceLogger as seen in real H100/B200/MI300 traces and torch 2.13 CPU output:
  ph=X cat in {cpu_op,user_annotation,gpu_user_annotation,cuda_runtime,cuda_driver,kernel,gpu_memcpy,gpu_memset,
               python_function,Trace}, ph=s/f cat in {ac2g,fwdbwd}, ph=i cat=cpu_instant_event, ph=M metadata.
Ground truth (exact ns per phase / module / kernel class, busy / idle) is written to OUT.truth.json.

  gen_kineto.py OUT.json --mb 100            stop at the end of the first step past 100 MB
  gen_kineto.py OUT.json --steps 3 --layers 12 --mode eager|compile|cudagraph --stack --shapes --mem

Semantics reproduced on purpose:
  * backward runs on another tid; 'Sequence number' is shared fwd<->bwd, 'Fwd thread id' is 1 on bwd, 0 on fwd;
    several nested cpu_ops of one forward op carry the same (peeked) sequence number; AccumulateGrad carries none.
  * gpu_user_annotation spans [first kernel start, last kernel end] of kernels whose *innermost* annotation on the
    launching thread is that one: record_function('backward') on the main thread therefore has no GPU span.
  * kernel start = max(stream free + gap, launch + latency): small kernels come out launch-bound.
  * compile mode: 'Torch-Compiled Region', '## Call CompiledFxGraph', triton_* cpu_op + cuLaunchKernel(Ex), backward
    under CompiledFunctionBackward; cudagraph mode: one cudaGraphLaunch correlation for many kernels, 'graph node id'.
"""

import argparse, json, random, os

GEMM = [
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT",
    "nvjet_tst_256x128_64x4_2x1_v_bz_TNN",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8::Params)",
]
EW = {
    "add": "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
    "mul": "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul>)",
    "silu": "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda()#4}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul> >(int, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}::operator()() const::{lambda()#4}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>)",
    "pow": "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase&, float)::{lambda(float)#1}, std::array<char*, 2ul> >(int, at::native::(anonymous namespace)::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase&, float)::{lambda(float)#1}, std::array<char*, 2ul>)",
    "copy": "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}, std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>, TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(int, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}, std::array<char*, 2ul>)",
    "mask": "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16, bool)#1}>(at::TensorIteratorBase&, at::native::(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1} const&)::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<>)",
}
RED = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4>)"
SMF = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, false>(c10::BFloat16*, c10::BFloat16 const*, int, int, int, bool const*, int, bool)"
SMB = "void (anonymous namespace)::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, 10, false, false>(c10::BFloat16*, c10::BFloat16 const*, c10::BFloat16 const*, int, int, int, bool const*)"
EMB = "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)"
EMBB = "void at::native::(anonymous namespace)::embedding_backward_kernel<c10::BFloat16, long>(long const*, c10::BFloat16*, long const*, long)"
CEF = "void (anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, (anonymous namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)"
CEB = "void (anonymous namespace)::cunn_SoftMaxBackward<8, float, float, float, (anonymous namespace)::LogSoftMaxBackwardEpilogue>(float*, float const*, float const*, int)"
FE = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double, double, double, double, double, bool, float const*, float const*>(at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>)"


def klass(n):
    if n.startswith(("nvjet", "sm90_xmma_gemm", "void cutlass")):
        return "gemm"
    if "oftmax" in n or "SoftMax" in n:
        return "softmax"
    if "reduce_kernel" in n:
        return "reduce"
    if n.startswith("triton_"):
        return "triton"
    if "FusedAdam" in n:
        return "optimizer"
    if "Memcpy" in n:
        return "memcpy"
    if "Memset" in n:
        return "memset"
    return "elementwise" if "elementwise" in n else "other"


# op = (aten, kernel, us, nested aten chain, bwd node, [(bwd aten, kernel, us)], flops)
def model_ops(B, T, D, H, F, V, L, rng):
    P = 600e6  # effective flop per us at ~60% of 989 TF

    def mm(m, n, k, name="aten::mm"):
        fl = 2 * m * n * k
        us = max(3.0, fl / P)
        return (
            name,
            rng.choice(GEMM),
            us,
            (),
            "MmBackward0",
            [("aten::mm", rng.choice(GEMM), us), ("aten::mm", rng.choice(GEMM), us)],
            fl,
        )

    def bmm(b, m, n, k):
        fl = 2 * b * m * n * k
        us = max(3.0, fl / P * 1.4)
        return (
            "aten::bmm",
            rng.choice(GEMM),
            us,
            ("aten::matmul",),
            "BmmBackward0",
            [("aten::bmm", rng.choice(GEMM), us)] * 2,
            fl,
        )

    def ew(kind, n, bwd, nb=1):
        us = max(1.6, n * 6 / 3.0e6)
        return ("aten::" + kind, EW.get(kind, EW["mul"]), us, (), bwd, [("aten::mul", EW["mul"], us)] * nb, 0)

    def red(n):
        us = max(2.2, n * 4 / 2.6e6)
        return ("aten::mean", RED, us, (), "MeanBackward1", [("aten::div", EW["mul"], us)], 0)

    N = B * T
    M = []

    def norm(p):
        return (
            p,
            "RMSNorm",
            [
                (
                    "",
                    [
                        ew("copy", N * D, "ToCopyBackward0"),
                        ew("pow", N * D, "PowBackward0", 2),
                        red(N * D),
                        ew("add", N, "AddBackward0", 0),
                        ew("mul", N, "RsqrtBackward0", 2),
                        ew("mul", N * D, "MulBackward0", 2),
                        ew("mul", N * D, "MulBackward0", 2),
                    ],
                )
            ],
        )

    def lin(p, m, n, k):
        return (p, "Linear", [("", [mm(m, n, k)])])

    S = B * H * T * T
    for i in range(L):
        b = f"layers.{i}"
        M.append(
            (
                b,
                "TransformerBlock",
                [
                    norm(f"{b}.ln1"),
                    (
                        f"{b}.attn",
                        "CausalSelfAttention",
                        [
                            lin(f"{b}.attn.q_proj", N, D, D),
                            lin(f"{b}.attn.k_proj", N, D, D),
                            lin(f"{b}.attn.v_proj", N, D, D),
                            (
                                f"{b}.attn.rope",
                                "RotaryEmbedding",
                                [
                                    (
                                        "",
                                        [
                                            ew("mul", N * D, "MulBackward0"),
                                            ew("mul", N * D, "MulBackward0"),
                                            ew("add", N * D, "AddBackward0", 0),
                                            ew("copy", N * D, "StackBackward0"),
                                        ],
                                    )
                                ],
                            ),
                            ("@attn_scores", [bmm(B * H, T, T, D // H), ew("mul", S, "DivBackward0")]),
                            ("@attn_mask", [ew("mask", S, "WhereBackward0")]),
                            (
                                "@attn_softmax",
                                [
                                    (
                                        "aten::_softmax",
                                        SMF,
                                        max(2.0, S * 4 / 2.8e6),
                                        ("aten::softmax",),
                                        "SoftmaxBackward0",
                                        [("aten::_softmax_backward_data", SMB, max(2.0, S * 6 / 2.8e6))],
                                        0,
                                    )
                                ],
                            ),
                            ("@attn_value", [bmm(B * H, T, D // H, T)]),
                            lin(f"{b}.attn.o_proj", N, D, D),
                        ],
                    ),
                    ("", [ew("add", N * D, "AddBackward0", 0)]),
                    norm(f"{b}.ln2"),
                    (
                        f"{b}.ffn",
                        "SwiGLU",
                        [
                            lin(f"{b}.ffn.w1", N, F, D),
                            lin(f"{b}.ffn.w3", N, F, D),
                            ("", [ew("silu", N * F, "SiluBackward0"), ew("mul", N * F, "MulBackward0", 2)]),
                            lin(f"{b}.ffn.w2", N, D, F),
                        ],
                    ),
                    ("", [ew("add", N * D, "AddBackward0", 0)]),
                ],
            )
        )
    top = (
        "",
        "TransformerLM",
        [
            (
                "token_emb",
                "Embedding",
                [
                    (
                        "",
                        [
                            (
                                "aten::embedding",
                                EMB,
                                max(2, N * D * 4 / 3e6),
                                ("aten::index_select",),
                                "EmbeddingBackward0",
                                [("aten::embedding_dense_backward", EMBB, max(4, N * D * 6 / 3e6))],
                                0,
                            )
                        ],
                    )
                ],
            )
        ]
        + M
        + [norm("ln_f"), lin("lm_head", N, V, D)],
    )
    loss = (
        "",
        [
            (
                "aten::_log_softmax",
                CEF,
                max(3, N * V * 8 / 3e6),
                ("aten::cross_entropy_loss", "aten::log_softmax"),
                "LogSoftmaxBackward0",
                [("aten::_log_softmax_backward_data", CEB, max(3, N * V * 12 / 3e6))],
                0,
            )
        ],
    )
    return top, loss


class Gen:
    def __init__(s, path, a):
        s.a = a
        s.rng = random.Random(a.seed)
        s.f = open(path, "w", buffering=1 << 22)
        s.path = path
        s.base = 1790857026000000000
        s.pid = 41234
        s.mt = 41234
        s.bt = 41987
        s.dev = 0
        s.stream = 7
        s.tc = 3845976557080535
        s.tg = s.tc  # ns relative to base
        s.corr = 1000
        s.ext = 1
        s.ev = 0
        s.seq = 100
        s.pyid = 1
        s.n = 0
        s.fb = 0
        s.first = True
        s.bytes = 0
        s.truth = {
            "phase_ns": {},
            "module_ns": {},
            "class_ns": {},
            "phase_class_ns": {},
            "ann_ns": {},
            "kernels": 0,
            "gemm_flops": 0,
        }
        s.busy = []
        s.anns = {}
        s.stack = {s.mt: [], s.bt: []}
        s.modseq = {}
        h = (
            ' {\n    "schemaVersion": 1,\n    "deviceProperties": [\n    \n    {\n      "id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 84942979072,\n      "computeMajor": 9, "computeMinor": 0,\n      "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,\n      "regsPerBlock": 65536, "warpSize": 32,\n      "sharedMemPerBlock": 49152, "numSms": 132\n    , "regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472\n    }\n    ],\n    "cupti_version": 26, "cuda_runtime_version": 12080, "cuda_driver_version": 12080,\n      "trace_id": "13B817A69C9447958E4B7388CA6718D3",\n%s    "displayTimeUnit": "ms",\n    "baseTimeNanoseconds": %d,\n    "traceEvents": [\n    '
            % (
                ('      "with_stack": 1,\n      "with_modules": 1,\n' if a.stack else "")
                + ('      "record_shapes": 1,\n' if a.shapes else "")
                + ('      "profile_memory": 1,\n' if a.mem else ""),
                s.base,
            )
        )
        s.w(h)
        for pid, nm, lb in ((s.pid, "python", "CPU"), (0, "python", "GPU 0")):
            s.e(
                f'"ph": "M", "name": "process_name", "ts": {s.us(s.tc)}, "pid": {pid}, "tid": 0, "args": {{"name": "{nm}"}}'
            )
            s.e(
                f'"ph": "M", "name": "process_labels", "ts": {s.us(s.tc)}, "pid": {pid}, "tid": 0, "args": {{"labels": "{lb}"}}'
            )
        for t, nm in ((s.mt, "python"), (s.bt, "pt_autograd_0")):
            s.e(
                f'"ph": "M", "name": "thread_name", "ts": {s.us(s.tc)}, "pid": {s.pid}, "tid": {t}, "args": {{"name": "thread {t} ({nm})"}}'
            )
        s.e(f'"ph": "M", "name": "thread_name", "ts": {s.us(s.tc)}, "pid": 0, "tid": 7, "args": {{"name": "stream 7"}}')

    def w(s, x):
        s.f.write(x)
        s.bytes += len(x)

    def us(s, ns):
        return "%d.%03d" % divmod(ns, 1000)

    def e(s, body):
        # libkineto writes one field group per line; keep the same byte density
        s.w(("\n  {\n    " if s.first else ",\n  {\n    ") + body + "\n  }")
        s.first = False
        s.n += 1

    def x(s, cat, name, tid, t0, t1, args, pid=None):
        s.e(
            f'"ph": "X", "cat": "{cat}", "name": "{name}", "pid": {s.pid if pid is None else pid}, "tid": {tid},\n    "ts": {s.us(t0)}, "dur": {s.us(t1 - t0)},\n    "args": {{\n      {args}\n    }}'
        )

    def cpu(s, name, tid, t0, t1, seq=None, fwdtid=0, dims=None, extra=""):
        a = f'"External id": {s.ext},"Record function id": 0, '
        s.ext += 1
        if seq is not None:
            a += f'"Sequence number": {seq}, "Fwd thread id": {fwdtid}, '
        if s.a.shapes and dims:
            a += '"Concrete Inputs": [%s], "Input type": [%s], "Input Strides": [%s], "Input Dims": [%s], ' % (
                ", ".join(['""'] * len(dims)),
                ", ".join(['"c10::BFloat16"'] * len(dims)),
                ", ".join(f"[{d[-1]}, 1]" for d in dims),
                ", ".join(str(d) for d in dims),
            )
        a += extra + f'"Ev Idx": {s.ev}'
        s.ev += 1
        s.x("cpu_op", name, tid, t0, t1, a)
        return s.ext - 1

    def gpu(s, name, us, corr, ext, launch_end, node=None):
        dur = max(700, int(us * 1000 * s.rng.uniform(0.97, 1.05)))
        st = max(s.tg + s.rng.randint(600, 1400), launch_end + s.rng.randint(1500, 4500))
        en = st + dur
        s.tg = en
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
        if cat == "kernel":
            g = s.rng.choice((132, 264, 1024, 4096, 17888))
            ar = (
                f'"External id": {ext},"queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {corr}, "registers per thread": {s.rng.choice((16, 32, 40, 168, 232))}, "shared memory": 0, "blocks per SM": {g / 132:.6f}, "warps per SM": {g / 33:.6f}, "grid": [{g}, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": {s.rng.choice((13, 25, 50, 100))}'
                + (
                    f', "graph id": 3, "graph node id": {node}'
                    if node is not None
                    else ', "graph id": 0, "graph node id": 0'
                )
            )
        else:
            by = int(us * 2e5)
            ar = f'"External id": {ext},"device": 0, "context": 1, "stream": 7, "correlation": {corr}, "bytes": {by}, "memory bandwidth (GB/s)": {by / dur}'
        s.x(cat, name, 7, st, en, ar, pid=0)
        s.e(
            f'"ph": "f", "id": {corr}, "pid": 0, "tid": 7, "ts": {s.us(st)},\n    "cat": "ac2g", "name": "ac2g", "bp": "e"'
        )
        s.busy.append((st, en))
        return st, en

    def launch(s, name, us, tid, ext, phase, mod, ann, flops=0, nodes=None):
        """runtime call + kernel(s); advances CPU clock"""
        for _ in range(s.rng.choice((0, 0, 1, 2))):  # noise runtime calls seen in real traces
            s.corr += 1
            d = s.rng.randint(300, 900)
            s.x(
                "cuda_runtime",
                "cudaStreamIsCapturing",
                tid,
                s.tc,
                s.tc + d,
                f'"External id": {ext},"cbid": 317, "correlation": {s.corr}',
            )
            s.tc += d + 200
        s.corr += 1
        c = s.corr
        t0 = s.tc
        d = s.rng.randint(2200, 5200)
        s.tc += d
        drv = name.startswith(("triton_", "nvjet"))
        rt = (
            "cudaGraphLaunch"
            if nodes
            else "cudaMemcpyAsync"
            if name.startswith("Memcpy")
            else "cudaMemsetAsync"
            if name.startswith("Memset")
            else ("cuLaunchKernelEx" if drv else "cudaLaunchKernel")
        )
        s.x(
            "cuda_driver" if drv and not nodes else "cuda_runtime",
            rt,
            tid,
            t0,
            s.tc,
            f'"External id": {ext},"cbid": {311 if nodes else 211}, "correlation": {c}',
        )
        s.e(f'"ph": "s", "id": {c}, "pid": {s.pid}, "tid": {tid}, "ts": {s.us(t0)},\n    "cat": "ac2g", "name": "ac2g"')
        for nm, u, ph, mo, an, fl, node in nodes or [(name, us, phase, mod, ann, flops, None)]:
            st, en = s.gpu(nm, u, c, ext, t0 + d, node)
            k = klass(nm)
            T = s.truth
            dn = en - st
            for key, sub in (
                ("phase_ns", ph),
                ("module_ns", mo),
                ("class_ns", k),
                ("phase_class_ns", f"{ph}/{k}"),
                ("ann_ns", an or "-"),
            ):
                T[key][sub] = T[key].get(sub, 0) + dn
            T["kernels"] += 1
            T["gemm_flops"] += fl
            if s.stack[tid]:
                an_ = s.stack[tid][-1]
                r = s.anns.setdefault(an_, [st, en])
                r[0] = min(r[0], st)
                r[1] = max(r[1], en)
        return t0, s.tc

    def annotate(s, name, tid):
        key = (name, s.ext)
        s.ext += 1
        s.stack[tid].append(key)
        return key, s.tc

    def endann(s, h, tid):
        (key, t0) = h
        s.stack[tid].pop()
        s.tc += 300
        s.x(
            "user_annotation",
            key[0],
            tid,
            t0,
            s.tc,
            f'"External id": {key[1]},"Record function id": 0, "Ev Idx": {s.ev}',
        )
        s.ev += 1
        if key in s.anns:
            st, en = s.anns.pop(key)
            s.x("gpu_user_annotation", key[0], 7, st, en, f'"External id": {key[1]}', pid=0)

    def py(s, name, t0, t1, parent, mod=None):
        i = s.pyid
        s.pyid += 1
        s.x(
            "python_function",
            name,
            s.mt,
            t0,
            t1,
            f'"Python parent id": {parent}, "Python id": {i}, '
            + (f'"Python module id": {mod}, ' if mod is not None else "")
            + f'"Ev Idx": {s.ev}',
        )
        s.ev += 1
        return i

    def fwd_op(s, op, phase, mod, ann, tape):
        aten, kern, us, chain, bnode, bops, fl = op
        s.seq += 1
        q = s.seq
        t0 = s.tc
        spans = []
        for c in chain:
            spans.append((c, s.tc))
            s.tc += s.rng.randint(600, 1500)
        ti = s.tc
        s.tc += s.rng.randint(1500, 3500)
        if s.a.mem:
            s.e(
                f'"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": {s.pid}, "tid": {s.mt}, "ts": {s.us(s.tc)},\n    "args": {{"Total Reserved": 2629828608, "Total Allocated": {s.rng.randint(10**9, 2 * 10**9)}, "Bytes": {s.rng.randint(512, 2**25)}, "Addr": 137877174353920, "Device Id": 0, "Device Type": 1, "Ev Idx": {s.ev}}}'
            )
            s.ev += 1
        te = s.tc
        s.tc += 900
        s.cpu("aten::empty", s.mt, te, s.tc)
        ext = s.ext
        s.launch(kern, us, s.mt, ext, phase, mod, ann, fl)
        s.tc += s.rng.randint(500, 1200)
        s.cpu(aten, s.mt, ti, s.tc, q if tape is not None else None, 0, ([32, 1024, 1024], [1024, 1024]))
        for c, ts in reversed(spans):
            s.tc += 400
            s.cpu(c, s.mt, ts, s.tc, q if tape is not None else None, 0, ([32, 1024, 1024],))
        if tape is not None and bnode:
            tape.append((q, bnode, bops, mod, ann, fl))
            s.e(
                f'"ph": "s", "id": {q}, "pid": {s.pid}, "tid": {s.mt}, "ts": {s.us(t0)},\n    "cat": "fwdbwd", "name": "fwdbwd"'
            )

    def walk(s, node, phase, tape, parent="null", mod="", ann=None):
        if len(node) == 2 and isinstance(node[1], list) and (node[0] == "" or node[0].startswith("@")):
            h = None
            if node[0]:
                h = s.annotate(node[0][1:], s.mt)
            for op in node[1]:
                s.fwd_op(op, phase, mod, node[0][1:] or ann, tape)
            if h:
                s.endann(h, s.mt)
            return
        path, cls, kids = node
        t0 = s.tc
        idx = s.modseq.setdefault(path, len(s.modseq))
        s.tc += s.rng.randint(1500, 4000)
        me = s.pyid
        if s.a.stack:
            s.pyid += 3
        for k in kids:
            s.walk(k, phase, tape, me + 2 if s.a.stack else "null", path, ann)
        s.tc += s.rng.randint(800, 2000)
        if s.a.stack:
            keep = s.pyid
            s.pyid = me
            i = s.py(f"nn.Module: {cls}_{idx}", t0, s.tc, parent, idx)
            i = s.py("torch/nn/modules/module.py(1773): _call_impl", t0 + 300, s.tc - 300, i)
            s.py(f"model/{cls.lower()}.py({100 + idx % 400}): forward", t0 + 700, s.tc - 500, i)
            s.pyid = keep

    def backward(s, tape):
        s.tc += 15000
        for q, bnode, bops, mod, ann, fl in reversed(tape):
            t0 = s.tc
            s.tc += s.rng.randint(2000, 4500)
            t1 = s.tc
            s.tc += s.rng.randint(1000, 2500)
            for aten, kern, us in bops:
                ti = s.tc
                s.tc += s.rng.randint(1500, 3200)
                s.launch(kern, us, s.bt, s.ext, "backward", mod, ann, fl)
                s.tc += 600
                s.cpu(aten, s.bt, ti, s.tc, None, 0, ([32, 1024, 1024], [1024, 1024]))
            s.tc += 700
            s.cpu(bnode, s.bt, t1, s.tc, q, 1)
            s.e(
                f'"ph": "f", "id": {q}, "pid": {s.pid}, "tid": {s.bt}, "ts": {s.us(t1)},\n    "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"'
            )
            s.tc += 500
            s.cpu(f"autograd::engine::evaluate_function: {bnode}", s.bt, t0, s.tc, q, 1)
            if bnode == "MmBackward0":  # AccumulateGrad has no sequence number
                t2 = s.tc
                s.tc += 900
                t3 = s.tc
                s.tc += 1200
                s.cpu("torch::autograd::AccumulateGrad", s.bt, t3, s.tc)
                s.tc += 300
                s.cpu("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", s.bt, t2, s.tc)
        s.tc += 6000

    def flat(s, node, mod="", ann=None):
        if len(node) == 2:
            for op in node[1]:
                yield op, mod, (node[0][1:] or ann)
        else:
            for k in node[2]:
                yield from s.flat(k, node[0], ann)

    def compiled(s, top, loss, tape):
        """Inductor: pointwise/reduction ops fused into triton kernels; gemms stay extern."""
        t0 = s.tc
        s.tc += 9000
        h = s.annotate("## Call CompiledFxGraph fal4xpiah2v6blbfmwwonu52dvevbsmlh743q5tkclrt4gcqpzea ##", s.mt)
        run = []
        k = 0

        def flush():
            nonlocal run, k
            if not run:
                return
            nm = f"triton_{'red' if any(o[0][0] == 'aten::mean' for o in run) else 'poi'}_fused_{'_'.join(sorted({o[0][0].split('::')[1] for o in run}))[:60]}_{k}"
            k += 1
            us = max(o[0][2] for o in run) * 1.2
            ti = s.tc
            s.tc += 3000
            ext = s.ext
            s.launch(nm, us, s.mt, ext, "forward", run[0][1], run[0][2])
            s.tc += 800
            s.cpu(
                nm,
                s.mt,
                ti,
                s.tc,
                extra='"kernel_backend": "triton", "kernel_hash": "cqaokwf2bph4egogzevc22vluasiyuui4i54zpemp6knbsggfbuu", "kernel_file": "/tmp/torchinductor_u/qa/cqaokwf2bph4egogzevc22vluasiyuui4i54zpemp6knbsggfbuu.py", "grid": "grid(100,)", "stream": 0, "num_warps": 8, "num_stages": 1, "kernel_kwargs": "XBLOCK=2,R0_BLOCK=2048", ',
            )
            run = []

        for op, mod, ann in list(s.flat(top)) + list(s.flat(loss)):
            if op[6]:
                flush()
                ti = s.tc
                s.tc += 2200
                ext = s.ext
                s.launch(op[1], op[2], s.mt, ext, "forward", mod, ann, op[6])
                s.tc += 500
                s.cpu(op[0], s.mt, ti, s.tc, None, 0, ([32768, 1024], [1024, 1024]))
            else:
                run.append((op, mod, ann))
        flush()
        s.endann(h, s.mt)
        s.seq += 1
        q = s.seq
        s.cpu("CompiledFunction", s.mt, t0 + 2000, s.tc, q, 0)
        s.tc += 900
        s.cpu("Torch-Compiled Region: 0/0", s.mt, t0, s.tc)
        bops = [
            (b[0], b[1] if klass(b[1]) == "gemm" else "triton_poi_fused_mul_%d" % i, b[2])
            for op, m, an in list(s.flat(top))[::-1]
            for i, b in enumerate(op[5])
            if op[6] or i == 0
        ]
        tape.append((q, "CompiledFunctionBackward", bops, "", None, 0))

    def step(s, i, top, loss):
        a = s.a
        st = s.annotate(f"ProfilerStep#{i}", s.mt)
        t = s.tc
        s.tc += 3000
        ext = s.ext
        s.launch("Memcpy HtoD (Pageable -> Device)", 4.0, s.mt, ext, "data", "", None)
        s.cpu("aten::copy_", s.mt, t, s.tc + 500)
        s.tc += 600
        tape = []
        h = s.annotate("forward", s.mt)
        if a.mode == "eager":
            s.walk(top, "forward", tape)
            s.walk(loss, "forward", tape, ann=None)
        elif a.mode == "compile":
            s.compiled(top, loss, tape)
        else:
            nodes = [
                (o[1], o[2], "forward", m, an, o[6], 500 + j)
                for j, (o, m, an) in enumerate(list(s.flat(top)) + list(s.flat(loss)))
            ]
            nodes += [
                (b[1], b[2], "backward", m, an, o[6], 9000 + j)
                for j, (o, m, an, b) in enumerate((o, m, an, b) for o, m, an in list(s.flat(top))[::-1] for b in o[5])
            ]
            s.launch("", 0, s.mt, s.ext, "", "", None, nodes=nodes)
            s.tc += 20000
        s.endann(h, s.mt)
        if tape:
            h = s.annotate("backward", s.mt)
            s.backward(tape)
            s.endann(h, s.mt)
        h = s.annotate("optimizer", s.mt)
        h2 = s.annotate("Optimizer.step#AdamW.step", s.mt)
        for j in range(max(2, a.layers // 2)):
            t = s.tc
            s.tc += 9000
            s.launch(FE, 220.0, s.mt, s.ext, "optimizer", "", None)
            s.tc += 800
            s.cpu("aten::_fused_adamw_", s.mt, t, s.tc)
        s.endann(h2, s.mt)
        t = s.tc
        s.tc += 1500
        s.launch("Memset (Device)", 2.0, s.mt, s.ext, "optimizer", "", None)
        s.cpu("aten::zero_", s.mt, t, s.tc + 300)
        s.tc += 500
        s.endann(h, s.mt)
        t = s.tc
        s.tc = max(s.tc, s.tg) + 3000
        s.corr += 1
        s.x("cuda_runtime", "cudaDeviceSynchronize", s.mt, t, s.tc, f'"cbid": 165, "correlation": {s.corr}')
        s.tc += 2000
        s.endann(st, s.mt)

    def close(s, steps, t0):
        s.x("Trace", "PyTorch Profiler (0)", '"PyTorch Profiler"', t0, s.tc, '"Op count": 0', pid='"Spans"')
        s.e(f'"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": {s.us(s.tc)}')
        s.w('\n  ],\n  "traceName": "%s"\n}' % os.path.basename(s.path))
        s.f.close()
        b = sum(e - q for q, e in s.busy)
        span = max(e for _, e in s.busy) - s.busy[0][0]
        s.truth.update(
            steps=steps, events=s.n, bytes=s.bytes, gpu_busy_ns=b, gpu_span_ns=span, gpu_idle_ns=span - b, mode=s.a.mode
        )
        with open(s.path + ".truth.json", "w") as out:
            json.dump(s.truth, out, indent=1)


def parser():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--mb", type=float)
    p.add_argument("--mode", default="eager", choices=("eager", "compile", "cudagraph"))
    for flag in ("stack", "shapes", "mem"):
        p.add_argument(f"--{flag}", action="store_true")
    sizes = {
        "steps": 3,
        "layers": 24,
        "seed": 0,
        "batch": 4,
        "ctx": 512,
        "d": 1024,
        "heads": 16,
        "ff": 2752,
        "vocab": 10000,
    }
    for name, value in sizes.items():
        p.add_argument(f"--{name}", type=int, default=value)
    return p


def generate(*arguments):
    """Write the trace and its truth as the command line would; returns the truth."""
    a = parser().parse_args([str(argument) for argument in arguments])
    g = Gen(a.out, a)
    top, loss = model_ops(a.batch, a.ctx, a.d, a.heads, a.ff, a.vocab, a.layers, g.rng)
    t0 = g.tc
    i = 0
    while (g.bytes < a.mb * 1e6) if a.mb else (i < a.steps):
        g.step(i, top, loss)
        i += 1
    g.close(i, t0)
    return g.truth


if __name__ == "__main__":
    import sys

    generate(*sys.argv[1:])
