"""The course's five questions, asked of traces of our own: five sizes, four contexts, both profilers, on this machine's GPU.

    python benchmarks/course_traces.py OUT --capture [--sizes small,medium,…] [--contexts 128,…] [--nsys-contexts 128,1024]
    python benchmarks/course_traces.py OUT --explain

Captured is what `flopwise profile` captures: the step untraced, then traced, by Kineto in a process that is forked for
it and by nsys in one of its own, one after the other so that none disturbs another's kernels. Explained is what
`flopwise explain` says: one JSON per trace, and `answers.md` with the table over all of them. The explaining needs no
GPU. A case that fails is a line that says why; what is there already is not done again.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from flopwise.analysis.explanation import Explanation, explain_trace
from flopwise.capture.events import TraceRequest
from flopwise.capture.isolate import Worker
from flopwise.capture.nsys import SUFFIX, trace_with_nsys
from flopwise.capture.nsys_program import find_nsys
from flopwise.errors import FlopwiseError
from flopwise.records import OK, Point
from flopwise.render.explain_view import explanation_view, explanations_view
from flopwise.render.json import json_text
from flopwise.render.table import Column, Table, markdown
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.trace.read import read_trace

SIZES = "small,medium,large,xl,2.7B"
CONTEXTS = "128,256,512,1024"
BY_HAND = {"attention": "naive", "norm": "eager", "activation": "eager"}  # the course's own code
KINETO = ".kineto.json.gz"


class Timed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A case without a profiler, or how long its step took under nsys."""

    name: str
    point: Point | None = None
    nsys_step_ns: int = 0


def trials(given: argparse.Namespace) -> Iterator[tuple[str, Trial, tuple[str, ...]]]:
    """A name, what is run, and who traces it: training at every context, inference at one."""
    sampling = Sampling(seconds=given.seconds)
    with_nsys = tuple(int(context) for context in given.nsys_contexts.split(",") if context)
    for context in (int(context) for context in given.contexts.split(",")):
        for size in given.sizes.split(","):
            by = (KINETO, SUFFIX) if context in with_nsys else (KINETO,)
            chosen = workload(size, batch=given.batch, context=context, phase="train", **BY_HAND)
            yield f"{size}-t{context}-train", Trial(workload=chosen, sampling=sampling, device=given.device), by
    for size in given.sizes.split(","):
        chosen = workload(size, batch=given.batch, context=given.inference_context, phase="forward", **BY_HAND)
        name = f"{size}-t{given.inference_context}-inference"
        yield name, Trial(workload=chosen, sampling=sampling, device=given.device), (KINETO,)


def capture(given: argparse.Namespace) -> None:
    """Every trace into OUT/traces, and what was measured without a profiler into OUT/timings.jsonl."""
    folder = given.out / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with Worker() as worker, (given.out / "timings.jsonl").open("ab") as timings:
        for name, trial, profilers in trials(given):
            for suffix in profilers:
                path = folder / f"{name}{suffix}"
                if path.exists() or path.with_name(path.name + ".gz").exists():
                    continue
                if time.monotonic() - begun > given.budget:
                    print(f"the time is up before {path.name}", file=sys.stderr)
                    return
                request = TraceRequest(path=str(path.resolve()), steps=given.steps)
                log = given.out / f"{name}{suffix}.log"
                if suffix == KINETO:
                    point = worker.run(trial, log, lambda event: None, request)
                    timings.write(msgspec.json.encode(Timed(name=name, point=point)) + b"\n")
                    said = point.status if point.status == OK else f"{point.status}: {point.reason}"
                else:
                    traced, ended = trace_with_nsys(find_nsys(), trial, request, log, 120.0)
                    step_ns = traced.step_ns if traced else 0
                    timings.write(msgspec.json.encode(Timed(name=name, nsys_step_ns=step_ns)) + b"\n")
                    said = ended.status if ended.status == OK else f"{ended.status}: {ended.reason}"
                print(f"{time.monotonic() - begun:4.0f} s {path.name} {said}", file=sys.stderr)


def explain(given: argparse.Namespace) -> None:
    """Every trace's explanation beside it, and the answers over all of them."""
    lines = (given.out / "timings.jsonl").read_bytes().splitlines()
    timed = [msgspec.json.decode(line, type=Timed) for line in lines]
    points = {one.name: one.point for one in timed if one.point}
    found: dict[str, list[Explanation]] = {KINETO: [], SUFFIX: []}
    for path in sorted((given.out / "traces").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        suffix = KINETO if KINETO in path.name else SUFFIX
        name = path.name.partition(suffix)[0]
        try:
            told = msgspec.structs.replace(explain_trace(read_trace(path), points.get(name)), path=name)
        except FlopwiseError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            continue
        found[suffix].append(told)
        said = explanation_view(told)[1]
        (given.out / f"{name}-{'kineto' if suffix == KINETO else 'nsys'}.json").write_text(json_text(said))
    tables = [overhead(timed)]
    for some in (found[KINETO], found[SUFFIX]):
        tables += explanations_view(some)[0] if len(some) > 1 else []
    (given.out / "answers.md").write_text("\n".join(markdown(table) for table in tables))


def overhead(timed: list[Timed]) -> Table:
    """The step untraced, and what each profiler made of it."""
    nsys = {one.name: one.nsys_step_ns for one in timed if one.nsys_step_ns}
    rows = []
    for one in timed:
        times = one.point.times() if one.point else None
        if one.point and times:
            wall = statistics.median(times.wall_ns)
            kineto, other = one.point.traced_step_ns, nsys.get(one.name)
            rows.append({
                "case": one.name, "wall_ms": wall / 1e6, "kineto": kineto / wall - 1, "nsys": other / wall - 1 if other else None,
            })  # fmt: skip
    columns = (
        Column("case", "case", right=False),
        Column("wall_ms", "step, untraced, ms", lambda ms: f"{ms:.1f}"),
        Column("kineto", "Kineto adds", lambda share: f"{100 * share:+.0f} %"),
        Column("nsys", "nsys adds", lambda share: f"{100 * share:+.0f} %"),
    )
    return Table(title="what tracing costs", columns=columns, rows=tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--contexts", default=CONTEXTS)
    parser.add_argument("--nsys-contexts", default=CONTEXTS)
    parser.add_argument("--inference-context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="the budget for timing each untraced step")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further trace is begun")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if given.capture:
        capture(given)
    if given.explain:
        explain(given)


if __name__ == "__main__":
    main()
