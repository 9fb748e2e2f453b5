# ruff: noqa: E501 (tables and names as nsys writes them)
"""Synthesise an nsys SQLite export (export schema 3.25, columns checked against a real 2026.2 H100 export and NVIDIA's docs).
  gen_nsys.py OUT.sqlite --steps 1000 --layers 24 [--emit-nvtx] [--graph none|node|graph] [--textid]
Truth (exact ns per phase/module/annotation/class, busy/idle) goes to OUT.sqlite.truth.json. Semantics kept on purpose:
  * backward launches come from another thread; the main thread's NVTX 'backward' range covers them in time, not in globalTid
  * --emit-nvtx adds torch.autograd.profiler.emit_nvtx ranges: 'aten::mm, seq = 12, op_id = 345' forward,
    'autograd::engine::evaluate_function: MmBackward0, seq = 12, op_id = ..' > 'MmBackward0, seq = 12, ..' on the autograd thread
  * module ranges are push/pop (59) on the main thread only, as forward hooks give; --textid stores half the names via StringIds
  * no indices, as in real exports; --graph node: graphNodeId on kernels + CUDA_GRAPH_NODE_EVENTS (clones via originalGraphNodeId);
    --graph graph: fwd+bwd kernels absent, one CUPTI_ACTIVITY_KIND_GRAPH_TRACE row per cudaGraphLaunch."""

import argparse
import json
import os
import random
import re
import sqlite3

from gen_kineto import FE, klass, model_ops

DDL = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER, qmdBulkReleaseDone INTEGER, qmdPreexitDone INTEGER, qmdLastCtaDone INTEGER, graphId INTEGER, clusterX INTEGER, clusterY INTEGER, clusterZ INTEGER, clusterSchedulingPolicy INTEGER, maxPotentialClusterSize INTEGER, maxActiveClusters INTEGER, sharedMemoryRequestedPercentage INTEGER, tensorSizeMinusOneElements TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER, virtualAddress INTEGER, copyCount INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, deprecatedSyncType INTEGER, syncType INTEGER NOT NULL, eventId INTEGER NOT NULL, eventSyncId INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT",
    "TARGET_INFO_GPU": "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, isDiscrete INTEGER, l2CacheSize INTEGER, totalMemory INTEGER, memoryBandwidth INTEGER, clockRate INTEGER, smCount INTEGER, pwGpuId INTEGER, uuid TEXT, luid INTEGER, chipName TEXT, cuDevice INTEGER, ctxswDevPath TEXT, ctrlDevPath TEXT, revision INTEGER, nodeMask INTEGER, constantMemory INTEGER, maxIPC INTEGER, maxRegistersPerBlock INTEGER, maxShmemPerBlock INTEGER, maxShmemPerBlockOptin INTEGER, maxShmemPerSm INTEGER, maxRegistersPerSm INTEGER, threadsPerWarp INTEGER, asyncEngines INTEGER, maxWarpsPerSm INTEGER, maxBlocksPerSm INTEGER, maxThreadsPerBlock INTEGER, maxBlockDimX INTEGER, maxBlockDimY INTEGER, maxBlockDimZ INTEGER, maxGridDimX INTEGER, maxGridDimY INTEGER, maxGridDimZ INTEGER, computeMajor INTEGER, computeMinor INTEGER, smMajor INTEGER, smMinor INTEGER",
    "TARGET_INFO_CUDA_STREAM": "streamId INTEGER NOT NULL, hwId INTEGER NOT NULL, vmId INTEGER NOT NULL, processId INTEGER NOT NULL, contextId INTEGER NOT NULL, priority INTEGER NOT NULL, flag INTEGER NOT NULL",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER",
    "ANALYSIS_DETAILS": "globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL, stopTime INTEGER NOT NULL",
    "ThreadNames": "nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "META_DATA_CAPTURE": "name TEXT NOT NULL, value TEXT",
    "ENUM_NSYS_EVENT_TYPE": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
    "ENUM_CUDA_MEMCPY_OPER": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
}
GRAPH = {
    "CUDA_GRAPH_NODE_EVENTS": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, nameId INTEGER NOT NULL, graphNodeId INTEGER NOT NULL, originalGraphNodeId INTEGER",
    "CUDA_GRAPH_EVENTS": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, nameId INTEGER NOT NULL, graphId INTEGER, originalGraphId INTEGER, graphExecId INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
}
PID = 111
GP = (1 << 48) | (PID << 24)
MT = GP | PID
BT = GP | 987


class Sim:
    """one template step in relative ns; rows later replicated with offsets"""

    def __init__(s, a, rng):
        s.a, s.rng = a, rng
        s.t = 0
        s.g = 0
        s.K = []
        s.R = []
        s.N = []
        s.corr = 0
        s.op = 0
        s.seq = 0
        s.strs = {}
        s.truth = {k: {} for k in ("phase_ns", "module_ns", "ann_ns", "class_ns")}

    def sid(s, x):
        return s.strs.setdefault(x, 100 + len(s.strs))

    def push(s):
        return s.t

    def pop(s, t0, tid, text, seq=None, emit=False, ids=False):
        s.t += 150
        s.op += emit
        s.N.append((t0, s.t, tid, text, seq, s.op if emit else None, ids))

    def launch(s, name, us, tid, ph, mod, ann):
        r = s.rng
        for _ in range(r.choice((0, 0, 1, 2))):
            s.corr += 1
            s.R.append((s.t, s.t + 400, tid, s.corr, "cudaStreamIsCapturing_v10000"))
            s.t += 600
        s.corr += 1
        d = r.randint(2200, 5200)
        s.R.append(
            (
                s.t,
                s.t + d,
                tid,
                s.corr,
                "cuLaunchKernelEx"
                if name.startswith("nvjet")
                else "cudaMemcpyAsync_v3020"
                if name.startswith("Memcpy")
                else "cudaLaunchKernel_v7000",
            )
        )
        s.t += d
        dur = max(700, int(us * 1000 * r.uniform(0.97, 1.05)))
        st = max(s.g + r.randint(600, 1400), s.t + r.randint(1500, 4500))
        s.g = st + dur
        s.K.append((st, s.g, s.corr, name, r.choice((132, 1024, 4096)), ph))
        for k, v in (("phase_ns", ph), ("module_ns", mod), ("ann_ns", ann or "-"), ("class_ns", klass(name))):
            s.truth[k][v] = s.truth[k].get(v, 0) + dur

    def op_(s, o, ph, mod, ann, tape):
        aten, kern, us, chain, bn, bops, _ = o
        s.seq += 1
        q = s.seq
        E = s.a.emit_nvtx
        outer = []
        for c in chain:
            outer.append((s.t, c))
            s.t += 700
        t0 = s.t
        s.t += s.rng.randint(1500, 3500)
        if E:
            te = s.t
            s.t += 800
            s.pop(te, MT, "aten::empty", None, True)
        s.launch(kern, us, MT, ph, mod, ann)
        s.t += 700
        if E:
            s.pop(t0, MT, aten, q, True)
            for tc, c in reversed(outer):
                s.pop(tc, MT, c, q, True)
        if bn:
            tape.append((q, bn, bops, mod, ann))

    def walk(s, n, tape, mod="", ann=None):
        if len(n) == 2:
            t0 = s.t
            s.t += 200
            for o in n[1]:
                s.op_(o, "forward", mod, n[0][1:] or ann, tape)
            if n[0]:
                s.pop(t0, MT, n[0][1:])
            return
        t0 = s.t
        s.t += s.rng.randint(1500, 3500)
        for k in n[2]:
            s.walk(k, tape, n[0], ann)
        s.pop(t0, MT, n[0] or n[1], ids=True)

    def step(s, top, loss):
        ts = s.t
        s.t += 1000
        s.launch("Memcpy HtoD (Pageable -> Device)", 4.0, MT, "data", "", None)
        tape = []
        t0 = s.t
        s.t += 300
        s.walk(top, tape)
        s.walk(loss, tape)
        s.pop(t0, MT, "forward")
        E = s.a.emit_nvtx
        t0 = s.t
        s.t += 15000
        for q, bn, bops, mod, ann in reversed(tape):
            ta = s.t
            s.t += s.rng.randint(2000, 4500)
            tb = s.t
            s.t += 1200
            for aten, kern, us in bops:
                tc = s.t
                s.t += s.rng.randint(1500, 3200)
                s.launch(kern, us, BT, "backward", mod, ann)
                s.t += 500
                if E:
                    s.pop(tc, BT, aten, None, True)
            if E:
                s.pop(tb, BT, bn, q, True)
                s.pop(ta, BT, f"autograd::engine::evaluate_function: {bn}", q, True)
            s.t += 300
        s.t += 5000
        s.pop(t0, MT, "backward")
        t0 = s.t
        s.t += 300
        for _ in range(max(2, s.a.layers // 2)):
            s.t += 9000
            s.launch(FE, 220.0, MT, "optimizer", "", None)
            s.t += 800
        s.pop(t0, MT, "optimizer")
        t0 = s.t
        s.t = max(s.t, s.g) + 3000
        s.corr += 1
        s.R.append((t0, s.t, MT, s.corr, "cudaDeviceSynchronize_v3020"))
        s.sync = (t0 + 500, s.t - 500, s.corr)
        s.pop(ts, MT, "step")
        s.t += 20000


def short(n):
    m = re.search(
        r"([A-Za-z_0-9]+)(<|\(|$)",
        n.replace("(anonymous namespace)::", "").split("void ")[-1].split("<")[0].split("::")[-1],
    )
    return m.group(1) if m else n[:40]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--emit-nvtx", action="store_true")
    p.add_argument("--textid", action="store_true")
    p.add_argument("--graph", default="none", choices=("none", "node", "graph"))
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    rng = random.Random(a.seed)
    top, loss = model_ops(4, 512, 1024, 16, 2752, 10000, a.layers, rng)
    s = Sim(a, rng)
    s.step(top, loss)
    if os.path.exists(a.out):
        os.remove(a.out)
    db = sqlite3.connect(a.out)
    db.execute("pragma journal_mode=off")
    db.execute("pragma synchronous=off")
    for t, c in {**DDL, **(GRAPH if a.graph != "none" else {})}.items():
        db.execute(f"create table {t} ({c})")

    def ins(t, cols, rows):
        db.executemany(f"insert into {t} ({','.join(cols)}) values ({','.join('?' * len(cols))})", rows)

    kn = sorted({k[3] for k in s.K})
    ks = [k for k in s.K if not k[3].startswith("Memcpy")]
    mc = [k for k in s.K if k[3].startswith("Memcpy")]
    for n in kn:
        s.sid(n)
        s.sid(short(n))
        s.sid("_Z" + short(n))
    for r in s.R:
        s.sid(r[4])
    for n in s.N:
        if n[6] and a.textid:
            s.sid(n[3])
    for x in ("python", "pt_autograd_0", "cudaGraphLaunch_v10000", "Graph Node Creation"):
        s.sid(x)
    base = 155_360_000_000
    span = s.t + 40_000
    dc = s.corr + 1
    do = s.op + 1
    dq = s.seq
    for i in range(a.steps):
        o = base + i * span
        c0 = 1_400_000 + i * dc
        if a.steps:
            rows = []
            for st, en, c, n, gx, ph in ks:
                if a.graph == "graph" and ph in ("forward", "backward"):
                    continue
                gn = (50_000 + c) if a.graph == "node" and ph in ("forward", "backward") else None
                rows.append(
                    (
                        o + st,
                        o + en,
                        0,
                        1,
                        0,
                        7,
                        c0 + (0 if gn else c),
                        GP,
                        s.strs[n],
                        s.strs[short(n)],
                        s.strs["_Z" + short(n)],
                        1,
                        1,
                        32,
                        gx,
                        1,
                        1,
                        128,
                        1,
                        1,
                        0,
                        0,
                        0,
                        250871808,
                        i * dc + c,
                        32768,
                        gn,
                        0,
                        1,
                        "[]",
                    )
                )
            ins(
                "CUPTI_ACTIVITY_KIND_KERNEL",
                [
                    "start",
                    "end",
                    "deviceId",
                    "contextId",
                    "greenContextId",
                    "streamId",
                    "correlationId",
                    "globalPid",
                    "demangledName",
                    "shortName",
                    "mangledName",
                    "launchType",
                    "cacheConfig",
                    "registersPerThread",
                    "gridX",
                    "gridY",
                    "gridZ",
                    "blockX",
                    "blockY",
                    "blockZ",
                    "staticSharedMemory",
                    "dynamicSharedMemory",
                    "localMemoryPerThread",
                    "localMemoryTotal",
                    "gridId",
                    "sharedMemoryExecuted",
                    "graphNodeId",
                    "sharedMemoryLimitConfig",
                    "clusterSchedulingPolicy",
                    "tensorSizeMinusOneElements",
                ],
                rows,
            )
        R = s.R
        if a.graph != "none":
            fb = {k[2] for k in s.K if k[5] in ("forward", "backward")}
            R = [r for r in s.R if r[3] not in fb]
            f0 = min(k[0] for k in s.K if k[5] == "forward")
            b1 = max(k[1] for k in s.K if k[5] == "backward")
            ins(
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                ["start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue"],
                [(o + 12000, o + 18000, 0, MT, c0, s.strs["cudaGraphLaunch_v10000"], 0)],
            )
            if a.graph == "graph":
                ins(
                    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
                    [
                        "start",
                        "end",
                        "deviceId",
                        "contextId",
                        "streamId",
                        "correlationId",
                        "globalPid",
                        "graphId",
                        "graphExecId",
                    ],
                    [(o + f0, o + b1, 0, 1, 7, c0, GP, 2, 3)],
                )
            if i == 0 and a.graph == "node":
                lt = {r[3]: r for r in s.R}
                ins(
                    "CUDA_GRAPH_NODE_EVENTS",
                    ["start", "end", "eventClass", "globalTid", "nameId", "graphNodeId", "originalGraphNodeId"],
                    [
                        x
                        for k in s.K
                        if k[2] in fb
                        for x in (
                            (
                                base - span + lt[k[2]][0],
                                base - span + lt[k[2]][0],
                                0,
                                lt[k[2]][2],
                                s.strs["Graph Node Creation"],
                                10_000 + k[2],
                                None,
                            ),
                            (
                                base - 100_000,
                                base - 100_000,
                                0,
                                MT,
                                s.strs["Graph Node Creation"],
                                50_000 + k[2],
                                10_000 + k[2],
                            ),
                        )
                    ],
                )
                N0 = s.N
                ins(
                    "NVTX_EVENTS",
                    ["start", "end", "eventType", "text", "globalTid", "domainId"],
                    [(base - span + n[0], base - span + n[1], 59, n[3], n[2], 0) for n in N0],
                )
        ins(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            ["start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue"],
            [(o + x, o + y, 0, t, c0 + c, s.strs[n], 0) for x, y, t, c, n in R],
        )
        ins(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            [
                "start",
                "end",
                "deviceId",
                "contextId",
                "greenContextId",
                "streamId",
                "correlationId",
                "globalPid",
                "bytes",
                "copyKind",
                "srcKind",
                "dstKind",
                "copyCount",
            ],
            [(o + k[0], o + k[1], 0, 1, 0, 7, c0 + k[2], GP, 16384, 1, 0, 2, 1) for k in mc],
        )
        ins(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            ["start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "syncType", "eventId"],
            [(o + s.sync[0], o + s.sync[1], 0, 1, 4294967295, c0 + s.sync[2], GP, 4, 0)],
        )
        N = s.N if a.graph == "none" else [n for n in s.N if n[3] in ("step", "optimizer")]
        ins(
            "NVTX_EVENTS",
            ["start", "end", "eventType", "text", "globalTid", "textId", "domainId"],
            [
                (
                    o + x,
                    o + y,
                    59,
                    None
                    if (ids and a.textid)
                    else (
                        f"step {i}"
                        if n == "step"
                        else n
                        if op is None
                        else f"{n}, op_id = {op + i * do}"
                        if q is None
                        else f"{n}, seq = {q + i * dq}, op_id = {op + i * do}"
                    ),
                    t,
                    s.strs[n] if (ids and a.textid) else None,
                    0,
                )
                for x, y, t, n, q, op, ids in N
            ],
        )
    ins("StringIds", ("id", "value"), [(v, k) for k, v in s.strs.items()])
    ins(
        "TARGET_INFO_GPU",
        [
            "vmId",
            "id",
            "name",
            "busLocation",
            "isDiscrete",
            "l2CacheSize",
            "totalMemory",
            "memoryBandwidth",
            "clockRate",
            "smCount",
            "uuid",
            "chipName",
            "cuDevice",
            "computeMajor",
            "computeMinor",
            "smMajor",
            "smMinor",
        ],
        [
            (
                GP,
                0,
                "NVIDIA H100 80GB HBM3",
                "0000:18:00.0",
                1,
                52428800,
                84942979072,
                3352320000000,
                1980000000,
                132,
                "GPU-0",
                "GH100",
                0,
                9,
                0,
                9,
                0,
            )
        ],
    )
    ins(
        "TARGET_INFO_CUDA_STREAM",
        ["streamId", "hwId", "vmId", "processId", "contextId", "priority", "flag"],
        [(7, 0, 0, PID, 1, 0, 1)],
    )
    ins(
        "ThreadNames",
        ["nameId", "priority", "globalTid"],
        [(s.strs["python"], 20, MT), (s.strs["pt_autograd_0"], 20, BT)],
    )
    ins("PROCESSES", ["globalPid", "pid", "name"], [(GP, PID, "python")])
    ins(
        "META_DATA_EXPORT",
        ("name", "value"),
        [
            ("EXPORT_PRODUCT_VERSION", "2026.2.1.210"),
            ("EXPORT_SCHEMA_VERSION", "3.25.0"),
            ("EXPORT_SCHEMA_VERSION_MAJOR", "3"),
            ("EXPORT_SCHEMA_VERSION_MINOR", "25"),
        ],
    )
    ins("META_DATA_CAPTURE", ("name", "value"), [("CAPTURE_EVENT_TYPE", "Cuda"), ("CAPTURE_EVENT_TYPE", "NvtxEvents")])
    ins(
        "ENUM_NSYS_EVENT_TYPE",
        ("id", "name", "label"),
        [
            (i, n, n)
            for i, n in (
                (33, "NvtxCategory"),
                (34, "NvtxMark"),
                (59, "NvtxPushPopRange"),
                (60, "NvtxStartEndRange"),
                (75, "NvtxDomainCreate"),
            )
        ],
    )
    ins(
        "ENUM_CUDA_MEMCPY_OPER",
        ("id", "name", "label"),
        [
            (1, "CUDA_MEMCPY_KIND_HTOD", "Host-to-Device"),
            (2, "CUDA_MEMCPY_KIND_DTOH", "Device-to-Host"),
            (8, "CUDA_MEMCPY_KIND_DTOD", "Device-to-Device"),
        ],
    )
    ins("ENUM_CUDA_KERNEL_LAUNCH_TYPE", ("id", "name", "label"), [(1, "CUDA_KERNEL_LAUNCH_TYPE_REGULAR", "Regular")])
    ins(
        "TARGET_INFO_SESSION_START_TIME",
        ("utcEpochNs", "utcTime", "localTime", "systemClockNs"),
        [(1779630014975716426, "2026-05-24T13:40:14", "2026-05-24T13:40:14", 35255823190)],
    )
    ins(
        "ANALYSIS_DETAILS",
        ("globalVid", "duration", "startTime", "stopTime"),
        [(1 << 48, span * a.steps, base, base + span * a.steps)],
    )
    db.commit()
    busy = sum(k[1] - k[0] for k in s.K)
    T = {k: {x: v * a.steps for x, v in d.items()} for k, d in s.truth.items()}
    T.update(
        steps=a.steps,
        kernels=len(ks) * a.steps,
        busy_ns=busy * a.steps,
        nvtx=len(s.N) * a.steps,
        runtime=len(s.R) * a.steps,
        bytes=os.path.getsize(a.out),
    )
    with open(a.out + ".truth.json", "w") as truth:
        json.dump(T, truth, indent=1)
    db.close()
    print({k: T[k] for k in ("kernels", "nvtx", "runtime", "bytes", "busy_ns")}, T["phase_ns"])


if __name__ == "__main__":
    main()
