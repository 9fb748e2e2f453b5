"""The course's five questions as tables, each with its answer in words, and on one screen."""

from collections.abc import Callable, Sequence
from typing import Any

from flopwise.analysis.course import CourseReport, CourseTrace, why
from flopwise.analysis.shares import Kernel
from flopwise.records.table import Table
from flopwise.render.course_answers import answers, label
from flopwise.render.json import document, picked
from flopwise.render.names import short_paths, unique_names
from flopwise.render.screen import Screen, sentence
from flopwise.render.table import View, columns
from flopwise.spec.model import preset, preset_names
from flopwise.work.kernel_spelling import one_spelling

_ATTENTION = (
    "softmax_ns matmul_ns fused_ns projection_ns softmax_flops matmul_flops projection_flops flops_ratio flops_by"
)


def course_view(report: CourseReport) -> View:
    """A table for each question over all traces, its answer below it; before them the models, after them what was odd."""
    names = _row_names(report.traces)
    said = answers(report)
    tables = [
        _models(report.traces),
        _forward(report.traces, names, said["a"]),
        _top(report.traces, names, said["b"]),
        _others(report.traces, names, said["c"]),
        _matmul(report, names, said["d"]),
        _attention(report.traces, names, said["e"]),
        _notes(report, names),
    ]
    content = document("course", traces=list(report.traces), answers=said, csv=report.csv or None, notes=report.notes)
    return View([table for table in tables if table.rows], content)


def course_screen(report: CourseReport) -> Screen:
    """The five answers."""
    first, several = report.traces[0], len(report.traces) > 1
    gpus = dict.fromkeys(trace.gpu for trace in report.traces if trace.gpu)
    what = f"{len(report.traces)} traces" if several else f"{label(first)}, {first.source} trace"
    notes = dict.fromkeys((*report.notes, *(note for trace in report.traces for note in trace.notes)))
    return Screen(
        title=f"The course's five questions: {what}",
        where=", ".join(gpus),
        paragraphs=tuple(f"({key}) {answer}" for key, answer in answers(report).items()),
        notes=tuple(map(sentence, notes)),
        more="Tables for every trace: --full; as a report: -o report.md",
    )


def _row_names(traces: Sequence[CourseTrace]) -> list[str]:
    """What each trace is of where that tells them apart, else their files' names."""
    said = [f"{label(trace)}, {'training' if trace.trains else 'inference'}" for trace in traces]
    whole = all(trace.model.label for trace in traces) and len(set(said)) == len(said)
    return said if whole else short_paths([trace.path for trace in traces])


def _rows(
    traces: Sequence[CourseTrace], names: Sequence[str], cells: Callable[[CourseTrace], dict[str, Any]]
) -> tuple[dict[str, Any], ...]:
    return tuple({"trace": name} | cells(trace) for trace, name in zip(traces, names, strict=True))


def _models(traces: Sequence[CourseTrace]) -> Table:
    sizes = {trace.model.size for trace in traces}
    rows = tuple(
        {"size": name}
        | picked(preset(name), "d_model d_ff n_layers n_heads")
        | {"parameters": preset(name).parameters()}
        for name in preset_names()
        if name in sizes
    )
    shown = columns("size | d_model: d_model | d_ff: d_ff | n_layers: layers | n_heads: heads | parameters")
    return Table("models", "The models", shown, rows)


def _forward(traces: Sequence[CourseTrace], names: Sequence[str], answer: str) -> Table:
    def cells(t: CourseTrace) -> dict[str, Any]:
        untraced = t.untraced
        return {
            "model": t.model.label,
            **picked(t, "forward_ns forward_span_ns forward_range_ns ratio step_ns"),
            "untraced_ns": untraced.forward_ns if untraced else None,
            "untraced_step_ns": untraced.step_ns if untraced else None,
            "untraced_backward_ns": untraced.backward_ns if untraced else None,
            "backward_ns": t.backward_ns or None,
            "source": untraced.source if untraced else "",
            "why": why(t),
        }

    shown = columns(
        "trace | model | forward_ns: GPU work [ms] | forward_span_ns: first to last kernel [ms] | "
        "forward_range_ns: host in the range [ms] | untraced_ns: without a profiler [ms] | ratio: clock over GPU [times] | why | "
        "backward_ns: backward, GPU [ms] | untraced_backward_ns: backward, clock [ms] | step_ns: step, traced [ms] | "
        "untraced_step_ns: step, clock [ms] | source: clock from"
    )
    title = "(a) How long is the forward pass, and does the clock without a profiler agree?"
    return Table("forward", title, shown, _rows(traces, names, cells), (answer,))


def _top(traces: Sequence[CourseTrace], names: Sequence[str], answer: str) -> Table:
    rows = []
    for t, name in zip(traces, names, strict=True):
        passes = (("forward", t.top_forward), ("backward", t.top_backward), ("both", t.top_both))
        rows += [{"trace": name, "of": of} | _cells(kernel) for of, kernel in passes if kernel is not None]
    title = "(b) Which kernel takes longest in forward, in backward alone, in both?"
    return Table("top", title, _kernel_columns("of: pass | ", rows), tuple(rows), (answer,))


def _others(traces: Sequence[CourseTrace], names: Sequence[str], answer: str) -> Table:
    rows = [
        {"trace": name} | _cells(kernel) | {"share": kernel.share}
        for t, name in zip(traces, names, strict=True)
        for kernel in t.others
    ]
    title = "(c) Which kernels besides matmul take time in forward? The five longest"
    return Table("others", title, _kernel_columns("", rows, " | kind | share: of forward"), tuple(rows), (answer,))


def _cells(kernel: Kernel) -> dict[str, Any]:
    return picked(kernel, "name kind count gpu_ns mean_ns")


def _kernel_columns(first: str, rows: Sequence[dict[str, Any]], last: str = "") -> Any:
    names = {str(row["name"]): one_spelling(str(row["name"])) for row in rows}  # two profilers may have spelled them
    unique = unique_names(names.values())
    short = {name: unique[spelled] for name, spelled in names.items()}
    heading = f"trace | {first}name: kernel | count | gpu_ns: GPU [ms] | mean_ns: mean{last}"
    return columns(heading, labels={"name": short})


def _matmul(report: CourseReport, names: Sequence[str], answer: str) -> Table:
    def cells(t: CourseTrace) -> dict[str, Any]:
        alone = report.inference(t) if t.trains else t
        step = t.classes_step if t.trains else {}
        return {
            "inference": alone.matmul_forward if alone is not None else None,
            "forward": t.matmul_forward if t.trains else None,
            "step": t.matmul_step,
            "other_forward": 1 - t.matmul_forward if t.matmul_forward is not None else None,
            "other_step": 1 - t.matmul_step if t.matmul_step is not None else None,
            "optimizer": step.get("optimizer"),
            "elementwise": step.get("elementwise"),
        }

    shown = columns(
        "trace | inference: matmul, inference [share] | forward: matmul, forward [share] | step: matmul, training step [share] | "
        "other_forward: others, forward [share] | other_step: others, step [share] | optimizer: optimizer, step [share] | "
        "elementwise: elementwise, step [share]"
    )
    title = "(d) What share of the GPU time is matmul, in inference and in a training step?"
    return Table("matmul", title, shown, _rows(report.traces, names, cells), (answer,))


def _attention(traces: Sequence[CourseTrace], names: Sequence[str], answer: str) -> Table:
    def cells(t: CourseTrace) -> dict[str, Any]:
        found = picked(t.attention, f"{_ATTENTION} time_ratio")
        return found | {key: found[key] or None for key in ("softmax_ns", "matmul_ns", "fused_ns")}

    shown = columns(
        "trace | softmax_ns: softmax [ms] | matmul_ns: scores and values [ms] | time_ratio: softmax over matmul, time [times] | "
        "flops_ratio: matmul over softmax, FLOPs [times] | projection_ns: output projection [ms] | fused_ns: fused [ms] | "
        "softmax_flops: softmax FLOPs [flops] | matmul_flops: matmul FLOPs [flops] | "
        "projection_flops: projection FLOPs [flops] | flops_by: FLOPs by"
    )
    notes = (answer, "FLOPs: two a multiply-add, five for each element of a softmax; the scores as whole squares")
    title = "(e) Softmax and the matmuls of attention in forward, by time and by FLOPs"
    return Table("attention", title, shown, _rows(traces, names, cells), notes)


def _notes(report: CourseReport, names: Sequence[str]) -> Table:
    rows = [{"trace": name, "note": note} for t, name in zip(report.traces, names, strict=True) for note in t.notes]
    rows += [{"trace": "(none)", "note": note} for note in report.notes]
    return Table("notes", "Notes", columns("trace | note [sentence]"), tuple(rows))
