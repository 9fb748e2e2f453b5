"""The tools: each takes a struct of arguments and answers by the API's verb of that name. Nothing is run or written."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from flopwise.analysis.clocks import point_mfu, summarise, tokens_per_second
from flopwise.analysis.explanation import Explanation, Share, changes
from flopwise.analysis.host_explanation import HostExplanation, HostShare
from flopwise.api.account import account
from flopwise.api.compare import compare
from flopwise.api.explain import explain_one, with_gpu_work
from flopwise.errors import Damaged, FlopwiseError
from flopwise.integrations.mcp import answers
from flopwise.integrations.mcp.folder import Folder
from flopwise.predict.account import GpuAccount
from flopwise.records.finding import Finding
from flopwise.records.run import STEP, Point
from flopwise.spec import fields
from flopwise.spec.recipe import LEVERS
from flopwise.store import RunSummary, StoredRun, list_runs
from flopwise.store.stored import TRAIN_KIND, tally

MOST_NOTES = 20  # notes, warnings, lines of evidence or code
_T = TypeVar("_T")

_Limit = Annotated[int, msgspec.Meta(ge=1, le=100, description="At most so many rows.")]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Target = Annotated[
    str,
    msgspec.Meta(
        max_length=1000,
        description="A run (last, last~1, an id, a tag) or a trace's path below the folder: .json, .json.gz, .sqlite.",
    ),
]
_Gpu = Annotated[str, msgspec.Meta(max_length=200, description="h100, h200, …: where the trace does not name its GPU.")]


class ListArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of `runs`."""

    limit: _Limit = 20


class TraceArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of `summary`, `findings` and `kernels`."""

    target: _Target
    timings: Annotated[str, msgspec.Meta(max_length=1000, description="A run of the same step untraced.")] = ""
    gpu: _Gpu = ""
    limit: _Limit = 20


class CompareArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of `compare`."""

    a: _Target
    b: _Target
    phase: _Text = STEP
    clock: Annotated[str, msgspec.Meta(max_length=20, description="wall, gpu or launch.")] = "wall"
    limit: _Limit = 20


class AccountArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of `account`."""

    model: Annotated[str, msgspec.Meta(max_length=1000, description="A preset (small, llama3-8b, …) or hf:PATH.")]
    gpu: Annotated[str, msgspec.Meta(max_length=500, description="h100,h200: one or several.")] = ""
    batch: _Count | None = None
    context: _Count | None = None
    phase: Annotated[str, msgspec.Meta(max_length=20, description="forward, backward or train.")] = ""
    levers: Annotated[dict[str, str], msgspec.Meta(max_length=50, description='{"precision": "bf16"}')] = {}
    tokens: Annotated[float, msgspec.Meta(ge=1, le=1e18, description="To train on.")] | None = None
    gpus: Annotated[int, msgspec.Meta(ge=1, le=10**8)] = 1
    mfu_share: Annotated[float, msgspec.Meta(gt=0, le=1, description="That training reaches.")] = 0.5
    limit: _Limit = 20


def runs(folder: Folder, asked: ListArguments) -> answers.Runs:
    """List the stored runs, newest first."""
    kept, left_out = _first(list_runs(folder.runs), asked.limit)
    return answers.Runs(runs=tuple(_run_row(folder, run) for run in kept), runs_left_out=left_out)


def summary(folder: Folder, asked: TraceArguments) -> answers.Summary:
    """Say where the time of a step went: verdict, phases, classes, modules, idle time by cause, and the waterfall from the
    ideal to the measured step. Of a run without a trace: the measured times by phase."""
    target = folder.target(asked.target)
    run = _run_part(target, asked.limit) if isinstance(target, StoredRun) else None
    if isinstance(target, StoredRun) and not any(point.trace_file for point in target.points):
        return answers.Summary(run=run)
    try:
        found = _explained(folder, target, asked)
    except Damaged as error:
        if run is None:
            raise
        why = f"its trace is not explained: {error.message}; {error.hint}"
        return answers.Summary(run=msgspec.structs.replace(run, warnings=(why, *run.warnings)))
    if isinstance(found, HostExplanation):
        return answers.Summary(run=run, host=_host_part(folder, found, asked.limit))
    return answers.Summary(run=run, trace=_trace_part(folder, found, asked.limit))


def findings(folder: Folder, asked: TraceArguments) -> answers.Findings:
    """Say what to change in a traced step, in the order to do it, each with evidence and the lines to write."""
    found = _explained(folder, folder.target(asked.target), asked)
    kept, left_out = _first(found.findings or (), asked.limit)
    return answers.Findings(step_ns=found.step_ns, findings=tuple(map(_finding_row, kept)), findings_left_out=left_out)


def kernels(folder: Folder, asked: TraceArguments) -> answers.Kernels:
    """List the GPU kernels of a traced step by their time."""
    found = with_gpu_work(_explained(folder, folder.target(asked.target), asked))
    kept, left_out = _first(found.kernels, asked.limit)
    rest = sum(kernel.gpu_ns for kernel in found.kernels[len(kept) :])
    rows = tuple(answers.KernelRow(**msgspec.structs.asdict(kernel)) for kernel in kept)
    return answers.Kernels(kernels=rows, kernels_left_out=left_out, left_out_gpu_ns=rest)


def compared(folder: Folder, asked: CompareArguments) -> answers.Compared:
    """Say whether B is faster than A: two runs by their measured times with a 95 % interval, or two traces kernel by kernel,
    largest saving first."""
    a, b = folder.target(asked.a), folder.target(asked.b)
    if isinstance(a, Path) and isinstance(b, Path):
        return _changes(with_gpu_work(explain_one(a)), with_gpu_work(explain_one(b)), asked)
    if not isinstance(a, StoredRun) or not isinstance(b, StoredRun):
        raise FlopwiseError("a run and a trace's file cannot be compared", "give two runs, or two traces")
    found = compare(a, b, phase=asked.phase, clock=asked.clock)
    kept, left_out = _first(found.pairs, asked.limit)
    pairs = tuple(
        answers.PairRow(
            a=x.trial.workload.label(),
            b=y.trial.workload.label(),
            ratio=c.ratio,
            ratio_low=c.low,
            ratio_high=c.high,
            verdict=c.verdict,
            reason=c.reason,
            what_would_settle_it=c.settle,
        )
        for x, y, c in kept
    )
    return answers.Compared(
        phase=asked.phase,
        clock=asked.clock,
        pairs=pairs,
        pairs_left_out=left_out,
        only_a=len(found.only_a),
        only_b=len(found.only_b),
        damage=_said(found.damage),
        different_environments=found.across,
    )


def accounted(folder: Folder, asked: AccountArguments) -> answers.Accounted:
    """Predict what a step of a model costs without running it: FLOPs, memory by owner, step time and what fits on a GPU."""
    fields.known("levers", asked.levers, LEVERS)
    sizes = {"batch": asked.batch, "context": asked.context, "phase": asked.phase or None, **asked.levers}
    options: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    training: dict[str, Any] = {"tokens": asked.tokens, "gpus": asked.gpus, "mfu": asked.mfu_share}
    found = account(_model(folder, asked.model), gpu=asked.gpu or (), **training, **options)
    kept, left_out = _first(sorted(found.rows, key=lambda row: (-row.flops, -row.moved_bytes)), asked.limit)
    return answers.Accounted(
        workload=found.workload.label(),
        parameters=found.parameters,
        forward_flops=found.flops.forward if found.flops else None,
        backward_flops=found.flops.backward if found.flops else None,
        peak_bytes=found.step.peak_bytes,
        peak_by_owner_bytes={owner: size for owner, size in found.step.peak.owners.items() if size},
        modules=tuple(
            answers.ModuleRow(
                module=row.module, kind=row.kind, flops=row.flops, moved_bytes=row.moved_bytes, kernels=row.kernels
            )
            for row in kept
        ),
        modules_left_out=left_out,
        gpus=tuple(map(_gpu_row, found.gpus)),
        notes=found.notes[:MOST_NOTES],
    )


class Tool(NamedTuple):
    """A tool's arguments, answer and function; its description is the function's."""

    arguments: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    call: Callable[[Folder, Any], Any]


TOOLS = {
    "runs": Tool(ListArguments, answers.Runs, runs),
    "summary": Tool(TraceArguments, answers.Summary, summary),
    "findings": Tool(TraceArguments, answers.Findings, findings),
    "kernels": Tool(TraceArguments, answers.Kernels, kernels),
    "compare": Tool(CompareArguments, answers.Compared, compared),
    "account": Tool(AccountArguments, answers.Accounted, accounted),
}


def _first(rows: Iterable[_T], limit: int) -> tuple[Sequence[_T], int]:
    """The first rows, and how many are left out."""
    every = list(rows)
    return every[:limit], max(0, len(every) - limit)


def _said(lost: Sequence[str]) -> tuple[str, ...]:
    """What is lost, line by line; of very many lines, how many there are."""
    more = len(lost) - MOST_NOTES
    return (*lost[:MOST_NOTES], f"and {more} more") if more > 1 else tuple(lost)


def _explained(folder: Folder, target: Path | StoredRun, asked: TraceArguments) -> Explanation | HostExplanation:
    return explain_one(target, timings=folder.run(asked.timings) if asked.timings else None, gpu=asked.gpu or None)


def _model(folder: Folder, name: str) -> str:
    """A preset's name, or a config below the folder; what would run somebody's code is refused."""
    if name.startswith("hf:"):
        place = folder.below(name.removeprefix("hf:"))
        return f"hf:{folder.file(str(place / 'config.json')) if place.is_dir() else folder.file(str(place))}"
    if ":" in name or ".py" in name:
        raise FlopwiseError(f"'{name}' is refused: the server runs no code", "give a preset, or hf:PATH/config.json")
    return name


def _run_row(folder: Folder, run: RunSummary) -> answers.RunRow:
    try:
        folder.check_run(run.path)
    except FlopwiseError as error:  # nothing of what lies elsewhere is shown
        run = RunSummary(id=run.id, path=run.path, created_ns=0, warnings=(error.message,))
    return answers.RunRow(
        id=run.id,
        kind=run.kind,
        name=run.name,
        created_at=run.created_at,
        tags=run.tags[:MOST_NOTES],
        points_ok=run.ok,
        points_failed=run.failed,
        complete=run.complete,
        size_bytes=run.size_bytes,
        warnings=_said(run.warnings),
    )


def _run_part(run: StoredRun, limit: int) -> answers.RunPart:
    kept, left_out = _first(run.points, limit)
    counted = tally(run.path, run.header, run.warnings)  # with the rows of a tuning, a training or the lab
    lost = (*counted.warnings, *(run.left_out if run.header.kind != TRAIN_KIND else ()))  # which has no points
    return answers.RunPart(
        id=run.header.id,
        kind=run.header.kind,
        created_at=run.header.created_at,
        complete=counted.complete,
        points=tuple(map(_point_row, kept)),
        points_left_out=left_out,
        warnings=_said(tuple(dict.fromkeys(lost))),
    )


def _point_row(point: Point) -> answers.PointRow:
    phases = tuple(
        answers.PhaseRow(
            phase=one.phase,
            wall_ns=one.wall.median,
            gpu_ns=one.gpu.median if one.gpu else None,
            launch_ns=one.launch.median if one.launch else None,
            samples=one.wall.n,
        )
        for one in summarise(point)
    )
    return answers.PointRow(
        workload=point.trial.workload.label(),
        device=point.ran.device if point.ran else point.trial.device,
        status=point.status,
        reason=point.reason,
        phases=phases[:MOST_NOTES],
        peak_bytes=max((one.peak_bytes for one in point.memory), default=None),
        mfu_share=point_mfu(point),
        tokens_per_s=tokens_per_second(point),
    )


def _trace_part(folder: Folder, e: Explanation, limit: int) -> answers.TracePart:
    modules, left_out = _first(e.modules, limit)
    parts = e.waterfall.parts if e.waterfall else ()
    return answers.TracePart(
        file=folder.shown(Path(e.path)),
        profiler=e.source,
        gpu=e.gpu,
        verdict=e.verdict,
        launch_bound=e.launch_bound,
        steps=e.steps,
        step_ns=e.step_ns,
        reachable_step_ns=e.reach.reachable_ns if e.reach else None,
        limit_step_ns=e.reach.limit_ns if e.reach else None,
        traced_step_ns=e.window_ns,
        untraced_step_ns=e.untraced_step.ns if e.untraced_step else None,
        gpu_busy_ns=e.busy_ns,
        idle_by_cause_ns={cause: ns / e.steady_steps for cause, ns in (e.untraced_idle or e.idle).by_cause_ns.items()},
        mfu_share=e.waterfall.mfu if e.waterfall else None,
        phases=_time_rows(e.phases),
        classes=_time_rows(e.classes),
        modules=_time_rows(modules),
        modules_left_out=left_out,
        waterfall=tuple(
            answers.WaterfallRow(part=part.name, ns=part.ns, share=part.share, obtained=part.how) for part in parts
        ),
        findings=len(e.findings or ()),
        notes=e.notes[:MOST_NOTES],
    )


def _host_part(folder: Folder, e: HostExplanation, limit: int) -> answers.HostPart:
    modules, modules_left_out = _first(e.modules, limit)
    ops, ops_left_out = _first(e.ops, limit)
    return answers.HostPart(
        file=folder.shown(Path(e.path)),
        verdict=e.verdict,
        bound=e.bound,
        steps=e.steps,
        traced_step_ns=e.window_ns,
        untraced_step_ns=e.host_ns.get(STEP),
        outside_ops_ns=e.outside_ns,
        data_loading_ns=e.loading_ns,
        phases=_host_rows(e.phases),
        modules=_host_rows(modules),
        modules_left_out=modules_left_out,
        ops=tuple(
            answers.OpRow(name=op.name, kind=op.kind, self_ns=op.self_ns, share=op.share, count=op.count) for op in ops
        ),
        ops_left_out=ops_left_out,
        other_threads=len(e.threads),
        findings=len(e.findings or ()),
        notes=e.notes[:MOST_NOTES],
    )


def _host_rows(shares: Iterable[HostShare]) -> tuple[answers.HostRow, ...]:
    return tuple(
        answers.HostRow(name=one.name, wall_ns=one.wall_ns, outside_ops_ns=one.outside_ns, share=one.share)
        for one in shares
    )


def _time_rows(shares: Iterable[Share]) -> tuple[answers.TimeRow, ...]:
    return tuple(
        answers.TimeRow(name=one.name, gpu_ns=one.gpu_ns, share=one.share, kernels=one.count) for one in shares
    )


def _finding_row(one: Finding) -> answers.FindingRow:
    return answers.FindingRow(
        rule=one.rule,
        problem=one.title,
        saving_ns=one.saving_ns,
        saving_with_those_above_ns=one.counted_ns,
        saving_bytes=one.saving_bytes,
        how_computed=one.arithmetic,
        evidence=one.evidence[:MOST_NOTES],
        levers=one.levers,
        code_lines=tuple(one.code.splitlines()[:MOST_NOTES]),
        confidence=one.confidence,
    )


def _changes(before: Explanation, after: Explanation, asked: CompareArguments) -> answers.Compared:
    found = changes(before, after)
    kept, left_out = _first(sorted(found, key=lambda change: -abs(change.saved_ns)), asked.limit)
    rows = tuple(
        answers.ChangeRow(name=c.name, kind=c.kind, before_ns=c.before_ns, after_ns=c.after_ns, saved_ns=c.saved_ns)
        for c in sorted(kept, key=lambda change: -change.saved_ns)
    )
    return answers.Compared(
        phase=STEP,
        clock="trace",
        step_before_ns=before.step_ns,
        step_after_ns=after.step_ns,
        kernels=rows,
        kernels_left_out=left_out,
    )


def _gpu_row(one: GpuAccount) -> answers.GpuRow:
    return answers.GpuRow(
        gpu=one.gpu.title,
        memory_bytes=one.gpu.memory_bytes,
        peak_bytes=one.step.peak_bytes,
        fits=one.fits,
        largest_batch=one.largest_batch,
        largest_context_tokens=one.largest_context,
        least_step_ns=one.limit.seconds * 1e9 if one.limit else None,
        predicted_step_ns=one.time.wall_ns if one.time else None,
        predicted_mfu_share=one.mfu_predicted,
        training=tuple(
            answers.TrainingRow(counted_by=time.rule, dtype=time.dtype, days=time.days, gpu_hours=time.gpu_hours)
            for time in one.training
        ),
    )
