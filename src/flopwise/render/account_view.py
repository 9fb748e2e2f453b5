"""What a user is shown of an account: the model, its work, its memory, and what that means on each GPU."""

from collections.abc import Callable
from typing import Any

import msgspec

from flopwise import units
from flopwise.predict.account import Account, GpuAccount, WorkRow, total_row
from flopwise.predict.constants import HOST
from flopwise.predict.flops import DAY_S
from flopwise.render.json import document
from flopwise.render.table import Column, Table, View
from flopwise.work.operation import ATTENTION, OWNERS, Footprint

TOP = 12
_BAR = 40  # characters for the whole memory


def account_view(account: Account) -> View:
    """The tables for people, and everything for programs."""
    tables = [_summary(account), _work(account)]
    tables += [_parameters(account)] if account.parameter_rows else []
    tables += [_memory(account)]
    tables += [_bar(one) for one in account.gpus[:1] if one.gpu.memory_bytes]
    tables += [_kept(account)] if account.step.kept else []
    tables += [_gpus(account)] if account.gpus else []
    tables += [_times(account)] if any(one.time for one in account.gpus) else []
    tables += [_training(account)] if any(one.training for one in account.gpus) else []
    tables += [_inference(account)] if account.inference is not None else []
    return tables, _document(account)


def _flops(value: float) -> str:
    """FLOPs with their prefix.

    >>> _flops(1.5e12)
    '1.50 T'
    """
    text = units.count(value).replace("B", "G")
    return f"{text[:-1]} {text[-1]}" if text[-1:] in "TGMK" else text


def _percent(share: float) -> str:
    return units.percent(share)


def _ns(seconds: float) -> str:
    return units.duration(seconds * 1e9)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _summary(a: Account) -> Table:
    w, f, whole = a.workload, a.flops, total_row(a.rows)
    if f is None:
        return _dry_summary(a)
    row = {
        "parameters": a.parameters, "tokens": w.batch * w.context, "forward_flops": f.forward, "backward_flops": f.backward,
        "flops": f.total, "causal_flops": f.causal, "moved_bytes": whole.moved_bytes, "kernels": whole.kernels,
        "intensity": whole.intensity, "peak_bytes": a.step.peak_bytes,
    }  # fmt: skip
    columns = [Column("parameters", "parameters", units.count), Column("tokens", "tokens", units.count)]
    columns += [Column("forward_flops", "forward FLOPs", _flops), Column("backward_flops", "backward FLOPs", _flops)]
    columns += [Column("flops", "all FLOPs", _flops), Column("causal_flops", "causal", _flops)]
    columns += [Column("moved_bytes", "moved", units.size), Column("kernels", "kernels", units.count)]
    columns += [Column("intensity", "FLOPs/byte", units.significant), Column("peak_bytes", "peak memory", units.size)]
    times = 2 if w.phase == "forward" else 6
    notes = [
        f"predicted from shapes for eager PyTorch; {times} · parameters · tokens would be {_flops(f.rule)}FLOPs, "
        f"the count is {units.significant(f.total / f.rule)} times that",
        f"of them attention's scores and values {_percent(f.attention_forward / f.forward)}, counted as whole squares; "
        "causal: only what the mask leaves",
        *a.notes,
    ]
    return Table(title=f"account of {w.label()}", columns=tuple(columns), rows=(row,), notes=tuple(notes))


def _dry_summary(a: Account) -> Table:
    """Of a step that is known by its ops alone."""
    whole = total_row(a.rows)
    row = {
        "parameters": a.parameters or None, "flops": whole.flops, "moved_bytes": whole.moved_bytes,
        "kernels": whole.kernels, "intensity": whole.intensity, "peak_bytes": a.step.peak_bytes,
    }  # fmt: skip
    columns = [Column("parameters", "parameters", units.count), Column("flops", "all FLOPs", _flops)]
    columns += [Column("moved_bytes", "moved", units.size), Column("kernels", "kernels", units.count)]
    columns += [Column("intensity", "FLOPs/byte", units.significant), Column("peak_bytes", "peak memory", units.size)]
    return Table(title=f"account of {a.workload.label()}", columns=tuple(columns), rows=(row,), notes=a.notes)


def _work(a: Account) -> Table:
    rows = [*_largest_rows(a.rows), total_row(a.rows)]
    fused = any(row.kind == ATTENTION and row.backward_flops for row in a.rows)
    notes = ("fused attention computes its scores again in the backward pass",) if fused else ()
    return Table(
        title="work by module and class of op, layers together",
        columns=(
            Column("module", "module", right=False),
            Column("kind", "class", right=False),
            Column("forward_flops", "forward FLOPs", _flops),
            Column("backward_flops", "backward FLOPs", _flops),
            Column("moved_bytes", "moved", units.size),
            Column("intensity", "FLOPs/byte", units.significant),
            Column("kernels", "kernels", units.count),
        ),
        rows=tuple(_work_row(row) for row in rows),
        notes=notes,
    )


def _largest_rows(rows: tuple[WorkRow, ...]) -> list[WorkRow]:
    """Rows that move a thousandth of the bytes or more, in the model's order; the rest in one."""
    least = sum(row.moved_bytes for row in rows) / 1000
    small = [row for row in rows if row.moved_bytes < least and not row.flops]
    kept = [row for row in rows if row not in small]
    return kept + ([msgspec.structs.replace(total_row(small), module="the rest")] if small else [])


def _work_row(row: WorkRow) -> dict[str, Any]:
    return {
        "module": row.module, "kind": row.kind, "forward_flops": row.forward_flops or None,
        "backward_flops": row.backward_flops or None, "read_bytes": row.read_bytes, "write_bytes": row.write_bytes,
        "moved_bytes": row.moved_bytes, "intensity": row.intensity if row.flops else None, "kernels": row.kernels,
    }  # fmt: skip


def _parameters(a: Account) -> Table:
    rows = tuple(msgspec.to_builtins(row) for row in a.parameter_rows)
    columns = (
        Column("module", "module", right=False),
        Column("parameters", "parameters", units.count),
        Column("share", "share", _percent),
    )
    return Table(title=f"parameters: {a.parameters:,}", columns=columns, rows=rows)


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
    columns = [Column("owner", "owner", right=False), *(Column(m.moment, m.moment, units.size) for m in moments)]
    notes = [f"the peak is in {a.step.peak.phase}", *(["moments in 8 bits"] if a.optimizer_bits == 8 else [])]
    return Table(title="memory by owner", columns=tuple(columns), rows=tuple(rows), notes=tuple(notes))


def _bar(one: GpuAccount) -> Table:
    """The peak against the GPU's memory, one bar per owner; what is free at the end."""
    memory = one.gpu.memory_bytes or 1
    owners = [(owner, one.step.peak.owners.get(owner, 0)) for owner in OWNERS if one.step.peak.owners.get(owner)]
    owners.append(("free" if one.fits else "too much", abs(memory - one.step.peak_bytes)))
    rows, begun = [], 0.0
    for owner, n_bytes in owners:
        share = n_bytes / memory
        rows.append({"owner": owner, "n_bytes": n_bytes, "share": share, "bar": _bar_text(begun, share)})
        begun += share
    columns = (
        Column("owner", "owner", right=False),
        Column("n_bytes", "at the peak", units.size),
        Column("share", "share", _percent),
        Column("bar", f"of {one.gpu.title}", right=False),
    )
    return Table(title=f"peak memory against {one.gpu.title}", columns=columns, rows=tuple(rows))


def _bar_text(begun: float, share: float) -> str:
    """A bar that begins where the one before it ended.

    >>> _bar_text(0.5, 0.25)
    '····················██████████··········'
    """
    start, end = min(round(begun * _BAR), _BAR), min(round((begun + share) * _BAR), _BAR)
    return "·" * start + "█" * (end - start) + "·" * (_BAR - end)


def _kept(a: Account) -> Table:
    rows = tuple(
        {"module": k.module or "model", "op": k.op, "owner": k.owner, "n_bytes": k.n_bytes,
         "layer_bytes": k.n_bytes // a.spec.n_layers if a.spec and k.module.startswith("blocks") else None}
        for k in a.step.kept[:TOP]
    )  # fmt: skip
    columns = (
        Column("module", "module", right=False),
        Column("op", "made by", right=False),
        Column("owner", "owner", right=False),
        Column("n_bytes", "all layers", units.size),
        Column("layer_bytes", "a layer", units.size),
    )
    rest = sum(k.n_bytes for k in a.step.kept[TOP:])
    notes = (f"and {units.size(rest)} in {len(a.step.kept) - TOP} more",) if rest else ()
    return Table(title="kept for the backward pass", columns=columns, rows=rows, notes=notes)


def _gpus(a: Account) -> Table:
    rows = tuple(_gpu_row(one) for one in a.gpus)
    on_cpu = all(one.gpu.name == "cpu" for one in a.gpus)
    columns: tuple[Column, ...] = (
        Column("gpu", "machine" if on_cpu else "GPU", right=False),
        Column("memory_bytes", "memory", _gb),
        Column("peak_bytes", "step's peak", _gb),
        Column("fits", "fits", _yes),
        Column("largest_batch", "largest batch"),
        Column("largest_context", "largest context"),
        Column("largest_model", "largest model", units.count),
        Column("limit_s", "least step time", _ns),
        Column("bound", "bound", right=False),
        Column("mfu_at_limit", "MFU at that", _percent),
        Column("predicted_ns", "predicted", units.duration),
        Column("mfu_predicted", "MFU predicted", _percent),
        Column("mfu_measured", "MFU measured", _percent),
    )
    used = tuple(c for c in columns if any(row[c.key] is not None for row in rows))
    room = "beside the weights and a full KV cache" if a.inference else "model: weights, gradients and state alone"
    has_room = any(one.largest_batch is not None for one in a.gpus)
    has_limit = any(one.limit is not None for one in a.gpus)
    notes = [
        *([f"largest batch with this context, largest context with this batch; {room}"] if has_room else []),
        *([_LIMIT] if has_limit else []),
        *([_AT_LIMIT] if has_limit and a.flops and a.workload.recipe.attention != "naive" else []),
        *(
            f"{one.gpu.title}: measured below the least time; was it another precision?"
            for one in a.gpus
            if _beats(a, one)
        ),
    ]
    return Table(title="on the CPU" if on_cpu else "on the GPU", columns=used, rows=rows, notes=tuple(notes))


_LIMIT = "least step time: op by op the datasheet's peak or bandwidth, whichever is slower; launches free, L2 unused"
_AT_LIMIT = (
    "least step time, MFU at that: of attention what the causal mask leaves; other MFUs: whole squares, as is usual"
)


def _times(a: Account) -> Table:
    """The predicted step, phase by phase."""
    columns = (
        Column("gpu", "GPU", right=False),
        Column("phase", "phase", right=False),
        Column("wall_ns", "time", units.duration),
        Column("gpu_ns", "GPU busy", units.duration),
        Column("host_ns", "launching", units.duration),
        Column("kernels", "kernels"),
        Column("bound", "bound by", right=False),
    )
    rows = []
    for one in a.gpus:
        if one.time is not None:
            rows += [{"gpu": one.gpu.title} | msgspec.to_builtins(phase) for phase in one.time.phases]
            whole = {name: getattr(one.time, name) for name in ("wall_ns", "gpu_ns", "host_ns", "bound")}
            kernels = sum(phase.kernels for phase in one.time.phases)
            rows.append({"gpu": one.gpu.title, "phase": "step", "kernels": kernels} | whole)
    timed = [one for one in a.gpus if one.time is not None]
    notes = [
        f"{', '.join(one.gpu.title for one in timed if one.ceilings == said)}: {_ceilings_said(said)}"
        for said in dict.fromkeys(one.ceilings for one in timed)
    ]
    return Table(title="predicted step time", columns=columns, rows=tuple(rows), notes=tuple(notes))


def _ceilings_said(told: str) -> str:
    if told:
        return f"from ceilings {told}"
    return (
        f"from the datasheet, and a host that needs {units.duration(HOST['forward'].op_ns)} to launch an operation; "
        "`flopwise doctor --calibrate` on the machine itself tells more"
    )


def _beats(a: Account, one: GpuAccount) -> bool:
    return a.measured_ns is not None and one.limit is not None and a.measured_ns < one.limit.seconds * 1e9


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"  # as datasheets count


def _gpu_row(one: GpuAccount) -> dict[str, Any]:
    floor = one.limit
    return {
        "gpu": one.gpu.title, "memory_bytes": one.gpu.memory_bytes, "peak_bytes": one.step.peak_bytes, "fits": one.fits,
        "largest_batch": one.largest_batch, "largest_context": one.largest_context, "largest_model": one.largest_model,
        "limit_s": floor.seconds if floor else None, "bound": floor.bound if floor else None,
        "mfu_at_limit": one.mfu_at_limit, "mfu_measured": one.mfu_measured,
        "predicted_ns": one.time.wall_ns if one.time else None, "mfu_predicted": one.mfu_predicted,
    }  # fmt: skip


def _training(a: Account) -> Table:
    rows = tuple(
        {"gpu": one.gpu.title, "gpus": t.gpus, "tokens": t.tokens, "mfu": t.mfu, "rule": t.rule, "dtype": t.dtype,
         "flops": t.flops,
         "days": t.days, "gpu_hours": t.gpu_hours}
        for one in a.gpus
        for t in one.training
    )  # fmt: skip
    columns = (
        Column("gpu", "GPU", right=False),
        Column("rule", "FLOPs by", right=False),
        Column("dtype", "in", right=False),
        Column("gpus", "GPUs"),
        Column("tokens", "tokens", units.count),
        Column("mfu", "MFU", _percent),
        Column("flops", "FLOPs", _exponent),
        Column("days", "takes", _days),
        Column("gpu_hours", "GPU hours", _hours),
    )
    return Table(title="training", columns=columns, rows=rows)


def _days(days: float) -> str:
    """Days, or hours and less where it is no day.

    >>> _days(143.92), _days(0.5), _days(0.000179)
    ('144 days', '12.0 h', '15.5 s')
    """
    if days >= 1:
        return f"{units.significant(days) if days < 1000 else f'{days:,.0f}'} days"
    return f"{units.significant(24 * days)} h" if 24 * days >= 1 else units.duration(days * DAY_S * 1e9)


def _hours(hours: float) -> str:
    return units.count(hours) if hours >= 1000 else units.significant(hours)


def _exponent(value: float) -> str:
    return f"{value:.3g}"


def _inference(a: Account) -> Table:
    i = a.inference
    assert i is not None
    limits = {(x.part, one.gpu.title): x for one in a.gpus for x in one.inference}
    rows = []
    for part in (i.prefill, i.decode):
        row: dict[str, Any] = {
            "part": part.part, "tokens": part.tokens, "flops": part.flops, "read_bytes": part.read_bytes,
            "write_bytes": part.write_bytes, "intensity": part.intensity,
        }  # fmt: skip
        for one in a.gpus:
            found = limits.get((part.part, one.gpu.title))
            row |= {
                f"{one.gpu.name} tokens_per_s": found and found.tokens_per_s,
                f"{one.gpu.name} bound": found and found.bound,
            }
        rows.append(row)
    show: list[tuple[str, str, Callable[[Any], str]]] = [
        ("tokens", "tokens", units.count), ("flops", "FLOPs", _flops), ("read_bytes", "read", units.size),
        ("write_bytes", "written", units.size), ("intensity", "FLOPs/byte", units.significant),
    ]  # fmt: skip
    for one in a.gpus:
        show += [(f"{one.gpu.name} tokens_per_s", f"{one.gpu.name}: tokens/s at most", units.count)]
        show += [(f"{one.gpu.name} bound", "bound", str)]
    columns = (Column("part", "part", right=False), *(Column(*each) for each in show))
    notes = (
        f"weights {units.size(i.weights_bytes)} in {i.dtype}, KV cache {units.size(i.kv_cache_bytes)} for {i.batch} × "
        f"{i.context} tokens, {units.size(i.kv_cache_bytes_per_token)} for each",
        "prefill: of attention what the causal mask leaves; decode: one token for every sequence, with that context behind it",
    )
    return Table(title="inference", columns=columns, rows=tuple(rows), notes=notes)


def _document(a: Account) -> dict[str, Any]:
    w, f = a.workload, a.flops
    return document(
        "account",
        label=w.label(),
        obtained="predicted",
        workload=w,
        parameters=a.parameters,
        parameters_by_module=a.parameter_rows,
        flops=None if f is None else {
            "forward": f.forward, "backward": f.backward, "total": f.total, "causal": f.causal, "rule": f.rule,
            "recomputed": a.step.flops("recompute"),
        },
        work=[_work_row(row) for row in a.rows],
        total=_work_row(total_row(a.rows)),
        memory=_memory_document(a),
        gpus=[_gpu_document(one) for one in a.gpus],
        inference=a.inference,
        measured_ns=a.measured_ns,
        notes=a.notes,
    )  # fmt: skip


def _memory_document(a: Account) -> dict[str, Any]:
    moments = [msgspec.to_builtins(m) | {"total_bytes": m.total_bytes} for m in _moments(a)]
    phases = [
        {"phase": p.phase, "start_bytes": p.start_bytes, "peak_bytes": p.peak_bytes, "end_bytes": p.end_bytes}
        for p in a.step.phases
    ]
    return {
        "peak_bytes": a.step.peak_bytes, "moments": moments, "phases": phases, "kept": a.step.kept,
        "optimizer_bits": a.optimizer_bits,
    }  # fmt: skip


def _gpu_document(one: GpuAccount) -> dict[str, Any]:
    training = [msgspec.to_builtins(t) | {"days": t.days, "gpu_hours": t.gpu_hours} for t in one.training]
    return _gpu_row(one) | {
        "name": one.gpu.name, "owners": one.step.peak.owners, "limit": one.limit, "training": training,
        "time": one.time, "inference": one.inference, "peaks": one.gpu.peaks, "bandwidth_bytes_s": one.gpu.bandwidth_bytes_s,
        "sources": one.gpu.sources,
    }  # fmt: skip
