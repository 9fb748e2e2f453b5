"""The course's five questions, asked of traces of our own: five sizes, four contexts, both profilers, on this machine's GPU.

    python benchmarks/course_traces.py OUT --capture [--sizes small,medium,…] [--contexts 128,…] [--nsys-contexts 128,1024]
    python benchmarks/course_traces.py OUT --explain [--chart FILE.svg]

Captured is what `flopwise profile` captures: the step untraced, then traced, by Kineto in a process that is forked for
it and by nsys in one of its own, one after the other so that none disturbs another's kernels. Explained is what
`flopwise explain` says: one JSON per trace; `answers.md` with a table for each question, `answers.csv` with raw values. The
explaining needs no GPU. A case that fails is a line that says why; what is there already is not done again.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from course_traces_pages import agreement, draw, overhead, per_trace, question_tables

from flopwise.analysis.explanation import Explanation, explain_trace
from flopwise.capture.isolate import Worker
from flopwise.capture.nsys import SUFFIX, trace_with_nsys
from flopwise.capture.nsys_program import find_nsys
from flopwise.errors import FlopwiseError
from flopwise.records.events import TraceRequest
from flopwise.records.run import OK, Point
from flopwise.render.explain_view import explanation_view
from flopwise.render.json import json_text
from flopwise.render.table import csv_text, markdown
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.trace.read import read_trace

SIZES = "small,medium,large,xl,2.7B"
CONTEXTS = "128,256,512,1024"
# As the course asks; its AdamW is left to PyTorch (foreach).
BY_HAND: dict[str, Any] = {"attention": "naive", "norm": "eager", "activation": "eager"}
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
    timed = {(one.name, bool(one.point)): one for one in (msgspec.json.decode(line, type=Timed) for line in lines)}
    found: dict[str, dict[str, Explanation]] = {KINETO: {}, SUFFIX: {}}
    for path in sorted((given.out / "traces").iterdir(), key=lambda path: _order(path.name)):
        suffix = KINETO if KINETO in path.name else SUFFIX
        name = path.name.partition(suffix)[0]
        one = timed.get((name, True))
        try:
            told = msgspec.structs.replace(explain_trace(read_trace(path), one.point if one else None), path=name)
        except FlopwiseError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            continue
        found[suffix][name] = told
        said = explanation_view(told)[1]
        (given.out / f"{name}-{'kineto' if suffix == KINETO else 'nsys'}.json").write_text(json_text(said))
    kineto, nsys = found[KINETO], found[SUFFIX]
    measured = sorted(timed.values(), key=lambda one: _order(one.name))
    tables = [*question_tables(kineto), agreement(kineto, nsys), overhead(measured)]
    head = f"{_captured(measured)} {given.note}".rstrip()
    head += "\n\nCells are size by context. Kineto's traces, unless they say otherwise.\n"
    (given.out / "answers.md").write_text("\n".join([head, *(markdown(table) for table in tables)]))
    (given.out / "answers.csv").write_text(csv_text(per_trace(kineto, nsys)))
    if given.chart:
        draw(kineto, given.chart)


def _order(name: str) -> tuple[bool, int, int]:
    """Training first, then by context, then by size."""
    size, context, kind = name.split("-")
    return kind.startswith("inference"), int(context.removeprefix("t")), SIZES.split(",").index(size)


def _captured(timed: list[Timed]) -> str:
    """On what."""
    point = next(one.point for one in timed if one.point)
    env, workload = point.environment, point.trial.workload
    where = (
        f"{env.gpu.name}, driver {env.gpu.driver}, torch {env.torch}, Python {env.python}"
        if env and env.gpu
        else "no GPU"
    )
    levers = ", ".join(f"{name} = {value}" for name, value in workload.recipe.changed().items())
    return f"`python benchmarks/course_traces.py OUT --explain`, captured on {where}; batch {workload.batch}, {levers}."


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
    parser.add_argument("--note", default="", help="what else the head of answers.md is to say")
    parser.add_argument("--chart", type=Path, help="draw the shares by class over context (.svg, .png)")
    given = parser.parse_args()
    if given.capture:
        capture(given)
    if given.explain:
        explain(given)


if __name__ == "__main__":
    main()
