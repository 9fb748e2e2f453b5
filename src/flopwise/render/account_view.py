"""An account as tables: the model, its work, its memory, and what that means on each GPU."""

from typing import Any

import msgspec

from flopwise import units
from flopwise.predict.account import Account, GpuAccount, WorkRow, total_row
from flopwise.predict.constants import HOST
from flopwise.predict.flops import TrainingTime
from flopwise.records.table import Column, Table
from flopwise.render.account_screen import account_reach
from flopwise.render.json import document, picked
from flopwise.render.reach_view import with_reach
from flopwise.render.table import View, columns, grouped
from flopwise.work.operation import ATTENTION, OWNERS, Footprint

SUMMARY, GPUS, TIMES = "account", "gpus", "predicted-times"
_GROUPS = {
    "Work": "work parameters",
    "Memory": "memory memory-bars kept",
    "Time and what fits": f"{GPUS} {TIMES} training inference",
}
_TOP = 12  # rows of what is kept for the backward pass
_SMALL = 1e-3  # of the bytes moved: smaller rows without FLOPs are added up
_BAR_WIDTH = 40  # characters for the whole memory
_LIMIT = "least step time: op by op, none fused, the datasheet's peak or bandwidth, whichever is slower; launches free, L2 unused"
_AT_LIMIT = (
    "least step time and its MFU: of attention what the causal mask leaves; other MFUs: whole squares, as is usual"
)
_ELEMENT_FLOPS = (
    "FLOPs: two a multiply-add, of matmuls and attention; totals and MFU have no others. "
    "Element FLOPs: one for every element of an operation without a matmul, as in `roofline`"
)
_DATASHEET = (
    f"from the datasheet, and a CPU that needs {units.duration(HOST['forward'].op_ns)} to launch an operation; "
    "`flopwise doctor --calibrate` on the machine itself gives better numbers"
)


def account_view(a: Account) -> View:
    """The tables for people, and everything for programs."""
    tables = [_summary(a), _work(a), _parameters(a), _memory(a), *(_bars(one) for one in a.gpus[:1]), _kept(a)]
    tables += [_gpus(a), _times(a), _training(a), _inference(a)]
    view = View(grouped([table for table in tables if table.rows], _GROUPS), _document(a))
    return with_reach(view, account_reach(a, a.gpus[0]) if a.gpus else None)


def _summary(a: Account) -> Table:
    w, f, whole = a.workload, a.flops, total_row(a.rows)
    row = picked(whole, "flops moved_bytes kernels intensity")
    row |= {"parameters": a.parameters or None, "peak_bytes": a.step.peak_bytes}
    notes: list[str] = []
    if f is not None:  # a model of ours, not a step that is known by its ops alone
        row |= {"tokens": w.batch * w.context, "forward_flops": f.forward, "backward_flops": f.backward}
        row |= {"flops": f.total, "causal_flops": f.causal}
        times, ratio = 2 if w.phase == "forward" else 6, units.significant(f.total / f.rule)
        notes = [
            f"predicted for eager PyTorch; {times} · parameters · tokens would be {units.flops(f.rule)}FLOPs, "
            f"the count is {ratio} times that",
            f"attention's scores and values are {units.percent(f.attention_forward / f.forward)} of them, counted as whole "
            "squares; causal: only what the mask leaves",
        ]
    shown = columns(
        "parameters | tokens | flops: all FLOPs | peak_bytes | moved_bytes | intensity | kernels | forward_flops | "
        "backward_flops | causal_flops: causal FLOPs"
    )
    return Table(SUMMARY, f"Account of {w.label()}", shown, (row,), (*notes, *a.notes))


def _work(a: Account) -> Table:
    least = _SMALL * sum(row.moved_bytes for row in a.rows)
    small = [row for row in a.rows if row.moved_bytes < least and not row.flops]
    rest = [msgspec.structs.replace(total_row(small), module="the rest")] if small else []
    rows = [*(row for row in a.rows if row not in small), *rest, total_row(a.rows)]
    fused = any(row.kind == ATTENTION and row.backward_flops for row in a.rows)
    notes = ("fused attention computes its scores again in the backward pass",) if fused else ()
    shown = columns(
        "module | kind | forward_flops | backward_flops | element_flops: element FLOPs | moved_bytes | "
        "intensity | kernels"
    )
    title = "Work by module and class of op, layers together"
    return Table("work", title, shown, tuple(map(_work_row, rows)), (_ELEMENT_FLOPS, *notes), total=True)


def _work_row(row: WorkRow) -> dict[str, Any]:
    flops = {key: value or None for key, value in picked(row, "forward_flops backward_flops element_flops").items()}
    own = {"moved_bytes": row.moved_bytes, "intensity": row.intensity or None}
    return msgspec.structs.asdict(row) | flops | own


def _parameters(a: Account) -> Table:
    rows = tuple(msgspec.structs.asdict(row) for row in a.parameter_rows)
    return Table("parameters", f"Parameters: {a.parameters:,}", columns("module | parameters | share"), rows)


def _moments(a: Account) -> list[Footprint]:
    return [m for m in (a.step.start, a.step.after_forward, a.step.peak, a.step.after_backward) if m is not None]


def _memory(a: Account) -> Table:
    moments = _moments(a)
    rows: list[dict[str, Any]] = [
        {"owner": owner} | {m.moment: m.owners.get(owner) for m in moments}
        for owner in OWNERS
        if any(m.owners.get(owner) for m in moments)
    ]
    rows.append({"owner": "all"} | {m.moment: m.total_bytes for m in moments})
    notes = (f"the peak is in {a.step.peak.phase}", *(("moments in 8 bits",) if a.optimizer_bits == 8 else ()))
    shown = (Column("owner"), *(Column(m.moment, m.moment, "bytes") for m in moments))
    return Table("memory", "Memory by owner", shown, tuple(rows), notes, total=True)


def _bars(one: GpuAccount) -> Table:
    """The peak compared with the GPU's memory, one bar per owner, then what is free; no rows without a known memory."""
    memory, peak = one.gpu.memory_bytes or 0, one.step.peak
    sizes = {owner: peak.owners[owner] for owner in OWNERS if peak.owners.get(owner)} if memory else {}
    if memory:
        sizes["free" if one.fits else "too much"] = abs(memory - one.step.peak_bytes)
    rows, begun = [], 0.0
    for owner, size in sizes.items():
        share = size / memory
        rows.append({"owner": owner, "n_bytes": size, "share": share, "bar": _bar(begun, share)})
        begun += share
    shown = columns(f"owner | n_bytes: at the peak | share | bar: of {one.gpu.title} [bar]")
    return Table("memory-bars", f"Peak memory compared with {one.gpu.title}", shown, tuple(rows))


def _bar(begun: float, share: float) -> str:
    """A bar that begins where the one before it ended.

    >>> _bar(0.5, 0.25)
    '····················██████████··········'
    """
    start, end = (min(round(at * _BAR_WIDTH), _BAR_WIDTH) for at in (begun, begun + share))
    return "·" * start + "█" * (end - start) + "·" * (_BAR_WIDTH - end)


def _kept(a: Account) -> Table:
    layers = a.spec.n_layers if a.spec else 0
    rows = tuple(
        picked(k, "op owner n_bytes")
        | {"module": k.module or "model"}
        | {"layer_bytes": k.n_bytes // layers if layers and k.module.split(".")[0] == "blocks" else None}
        for k in a.step.kept
    )
    rest = sum(k.n_bytes for k in a.step.kept[_TOP:])
    notes = (f"and {units.size(rest)} in {len(rows) - _TOP} more",) if rest else ()
    shown = columns("module | op: made by | n_bytes: all layers | layer_bytes: a layer | owner")
    return Table("kept", "Kept for the backward pass", shown, rows, notes, most=_TOP)


def _gpus(a: Account) -> Table:
    on_cpu = all(one.gpu.name == "cpu" for one in a.gpus)
    shown = columns(
        f"gpu: {'machine' if on_cpu else 'GPU'} | fits | peak_bytes: step's peak [GB] | predicted_ns | limit_s: least time | "
        "largest_batch | memory_bytes [GB] | mfu_predicted: MFU predicted [share] | mfu_at_limit: MFU at least time [share] | "
        "mfu_measured: MFU measured [share] | bound | largest_context | largest_model [count]",
        keep="mfu_measured",
    )
    title = "On the CPU" if on_cpu else "On the GPU"
    return Table(GPUS, title, shown, tuple(map(_gpu_row, a.gpus)), tuple(_gpu_notes(a)))


def _gpu_notes(a: Account) -> list[str]:
    notes = []
    if any(one.largest_batch is not None for one in a.gpus):
        room = "after the weights and a full KV cache" if a.inference else "model: weights, gradients and state alone"
        notes.append(f"largest batch with this context, largest context with this batch; {room}")
    if any(one.limit is not None for one in a.gpus):
        notes += [_LIMIT, *([_AT_LIMIT] if a.flops and a.workload.recipe.attention != "naive" else [])]
    for one in a.gpus:
        if a.measured_ns is not None and one.limit is not None and a.measured_ns < one.limit.seconds * 1e9:
            notes.append(f"{one.gpu.title}: measured below the least time; was it another precision?")
    return notes


def _gpu_row(one: GpuAccount) -> dict[str, Any]:
    own = "fits largest_batch largest_context largest_model mfu_at_limit mfu_measured mfu_predicted"
    return picked(one, own) | {
        "gpu": one.gpu.title,
        "memory_bytes": one.gpu.memory_bytes,
        "peak_bytes": one.step.peak_bytes,
        "limit_s": one.limit.seconds if one.limit else None,
        "bound": one.limit.bound if one.limit else None,
        "predicted_ns": one.time.wall_ns if one.time else None,
    }


def _times(a: Account) -> Table:
    """The predicted step, phase by phase."""
    rows: list[dict[str, Any]] = []
    sources: dict[str, list[str]] = {}  # of ceilings: the GPUs that are predicted from them
    for one in a.gpus:
        if one.time is not None:
            sources.setdefault(one.ceilings, []).append(one.gpu.title)
            step = picked(one.time, "wall_ns gpu_ns host_ns bound") | {"phase": "step"}
            step["kernels"] = sum(phase.kernels for phase in one.time.phases)
            rows += [{"gpu": one.gpu.title} | row for row in (*map(msgspec.structs.asdict, one.time.phases), step)]
    heading = "gpu | phase | wall_ns: time | bound: bound by | gpu_ns: GPU busy | host_ns: launching | kernels"
    ceilings = {source: f"from ceilings {source}" if source else _DATASHEET for source in sources}
    notes = tuple(f"{', '.join(gpus)}: {ceilings[source]}" for source, gpus in sources.items())
    return Table(TIMES, "Predicted step time", columns(heading), tuple(rows), notes)


def training_view(parameters: float, run: TrainingTime, gpu: str) -> View:
    """A training run of a model of which only the size is known."""
    row = {"gpu": gpu} | _training_row(run)
    return View([_training_table((row,))], document("training", parameters=parameters, training=[row]))


def _training(a: Account) -> Table:
    return _training_table(tuple({"gpu": one.gpu.title} | _training_row(t) for one in a.gpus for t in one.training))


def _training_table(rows: tuple[dict[str, Any], ...]) -> Table:
    heading = (
        "gpu | days: takes [days] | gpus: GPUs | tokens | mfu | rule: FLOPs by | dtype | flops | gpu_hours [hours]"
    )
    return Table("training", "Training", columns(heading), rows)


def _training_row(one: Any) -> dict[str, Any]:
    return msgspec.structs.asdict(one) | {"days": one.days, "gpu_hours": one.gpu_hours}


def _inference(a: Account) -> Table:
    title, i = "Inference", a.inference
    if i is None:
        return Table("inference", title, (), ())
    limits = {(limit.part, one.gpu.name): limit for one in a.gpus for limit in one.inference}
    gpus = [one.gpu.name for one in a.gpus]
    rows = []
    for part in (i.prefill, i.decode):
        row = msgspec.structs.asdict(part) | {"intensity": part.intensity}
        for gpu in gpus:
            found = limits.get((part.part, gpu))
            row |= {f"{gpu} {key}": found and getattr(found, key) for key in ("tokens_per_s", "bound")}
        rows.append(row)
    rates = [Column(f"{gpu} tokens_per_s", f"{gpu}: tokens/s at most", "count") for gpu in gpus]
    bounds = [Column(f"{gpu} bound", f"{gpu}: bound") for gpu in gpus]
    work = columns("flops | read_bytes | write_bytes: written | intensity")
    weights, cache, token = map(units.size, (i.weights_bytes, i.kv_cache_bytes, i.kv_cache_bytes_per_token))
    notes = (
        f"weights {weights} in {i.dtype}, KV cache {cache} for {i.batch} × {i.context} tokens, {token} for each",
        "prefill: of attention what the causal mask leaves; decode: one token for every sequence, after that context",
    )
    return Table("inference", title, (*columns("part | tokens"), *rates, *work, *bounds), tuple(rows), notes)


def _document(a: Account) -> dict[str, Any]:
    f = a.flops
    flops = picked(f, "forward backward total causal rule") | {"recomputed": a.step.flops("recompute")} if f else None
    return document(
        "account",
        label=a.workload.label(),
        obtained="predicted",
        parameters_by_module=a.parameter_rows,
        flops=flops,
        work=[_work_row(row) for row in a.rows],
        total=_work_row(total_row(a.rows)),
        memory=_memory_document(a),
        gpus=[_gpu_document(one) for one in a.gpus],
        **picked(a, "workload parameters inference measured_ns notes"),
    )


def _memory_document(a: Account) -> dict[str, Any]:
    moments = [msgspec.structs.asdict(m) | {"total_bytes": m.total_bytes} for m in _moments(a)]
    phases = [picked(phase, "phase start_bytes peak_bytes end_bytes") for phase in a.step.phases]
    own = picked(a.step, "peak_bytes kept") | {"optimizer_bits": a.optimizer_bits}
    return own | {"moments": moments, "phases": phases}


def _gpu_document(one: GpuAccount) -> dict[str, Any]:
    facts = picked(one.gpu, "name peaks bandwidth_bytes_s sources") | picked(one, "limit time inference")
    training = [_training_row(t) for t in one.training]
    return _gpu_row(one) | facts | {"owners": one.step.peak.owners, "training": training}
