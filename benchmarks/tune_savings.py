"""What `tune` predicted of each lever and what it measured, over stored runs, as Markdown.

    python benchmarks/tune_savings.py benchmarks/results/h200-2026-11-tune-final/* [--again CEILINGS]

A prediction counts as met within 20 % of the measured saving, or within 1 ms. Levers that could not run have no saving.
`--again`: a column more, what the model as it is now says of the same steps' samples, with the ceilings in that folder. It
shows what a change of the model does; it is no prediction, since the measurements were there first. A user's step is dry-run
again for that: run it where its code can be imported.
"""

import argparse
import os
from pathlib import Path

import msgspec

from flopwise.advice.facts import Facts
from flopwise.advice.moves import with_levers
from flopwise.advice.predicted import pause_ns, predicted_change
from flopwise.capture.isolate import Worker
from flopwise.predict.machine import Machine
from flopwise.predict.prediction import predict, record_step
from flopwise.predict.recorded.step import RecordedStep
from flopwise.records.run import OK
from flopwise.records.tuning import Attempt, Tuning
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.workload import Workload
from flopwise.store import StoredRun
from flopwise.store.ceilings import VARIABLE, load_ceilings
from flopwise.store.tuning import read_tuning

MS = 1e6


def met(predicted_ns: float, measured_ns: float) -> bool:
    return abs(predicted_ns - measured_ns) <= max(MS, 0.2 * abs(measured_ns))


def measured(tuning: Tuning) -> list[tuple[Attempt, float, float]]:
    """Each lever with a prediction and a measurement: predicted and measured saving."""
    return [
        (one, one.predicted_ns, one.saved_ns)
        for one in tuning.attempts
        if one.status == OK and None not in (one.predicted_ns, one.saved_ns)
    ]


def again(tuning: Tuning, run: Path) -> list[float | None]:
    """What the model says now, for each of `measured`: from the samples of the step that the lever was tried on."""
    gpu = find_gpu(tuning.begun.gpu)
    assert gpu is not None
    ceilings, points, current = load_ceilings(gpu.name), StoredRun.load(run).points, tuning.begun.workload
    recorded = record(current, gpu)
    if current.own_model is None and recorded is None:
        return [None for _ in measured(tuning)]
    started = predict(current, Machine(gpu=gpu), recorded=recorded).time_with(ceilings)
    if tuning.begun.waterfall is not None:
        ceilings = msgspec.structs.replace(ceilings, pause_ns=pause_ns(tuning.begun.waterfall, started))
    told: list[float | None] = []
    shown = [one for one, _, _ in measured(tuning)]
    for one in tuning.attempts:
        same = [p for p in points if p.trial.workload.recipe == current.recipe and p.status == OK and p.times()]
        if one in shown:
            most = max(same, key=lambda p: len(p.times().wall_ns), default=None)
            facts = Facts(point=most, ceilings=ceilings, gpu=gpu, recorded=recorded)
            change = predicted_change(facts, one.levers) if most else None
            told.append(change.saving_ns if change else None)
        if one.kept:
            current = with_levers(current, one.levers) or current
    return told


def record(workload: Workload, gpu: Gpu) -> RecordedStep | None:
    """The operations of a user's step; None of our own model's, which needs none, and of a step that cannot be dry-run."""
    if workload.own_model is not None:
        return None
    with Worker() as worker:
        return record_step(worker, workload, gpu)


def table(tuning: Tuning, now: list[float | None]) -> list[str]:
    begun, ended = tuning.begun, tuning.ended
    how = f"{ended.seconds:.0f} s, ended: {ended.stopped}" if ended else "killed: it has no end"
    lines = [
        f"### {begun.workload.label()}",
        "",
        f"{tuning.first_ns / MS:.4g} ms → **{tuning.last_ns / MS:.4g} ms**, {tuning.times_faster:.2f}x; {how}",
        "",
        "| lever | before, ms | with it, ms | predicted saving, ms | measured, ms | met | kept | why |"
        + (" by today's model |" if now else ""),
        "| :--- | ---: | ---: | ---: | ---: | :--- | :--- | :--- |" + (" ---: |" if now else ""),
    ]
    for place, (one, predicted, saved) in enumerate(measured(tuning)):
        told = now[place] if now else None
        lines.append(
            f"| {one.name} | {one.before_ns / MS:.4g} | {one.after_ns / MS:.4g} | {predicted / MS:.3g} "
            f"| {saved / MS:.3g} | {'yes' if met(predicted, saved) else 'no'} | {'yes' if one.kept else 'no'} | {one.why} |"
            + (f" {told / MS:.3g} |" if told is not None else " |" if now else "")
        )
    failed = [one for one in tuning.attempts if one.status != OK]
    last = " |" if now else ""
    lines += [f"| {one.name} | | | | | | no | {one.status}: {one.why} |{last}" for one in failed]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--again", type=Path, metavar="CEILINGS")
    asked = parser.parse_args()
    if asked.again:
        os.environ[VARIABLE] = str(asked.again)
    tunings = {path: read_tuning(path) for path in asked.runs}
    rows = [row for tuning in tunings.values() for row in measured(tuning)]
    good = sum(met(predicted, saved) for _, predicted, saved in rows)
    print(f"Within 20 % or 1 ms: {good} of {len(rows)} levers ({good / max(1, len(rows)):.0%}).")
    now = {path: again(tuning, path) if asked.again else [] for path, tuning in tunings.items()}
    if asked.again:
        pairs = [
            (told, row[2]) for path in tunings for told, row in zip(now[path], measured(tunings[path]), strict=True)
        ]
        good = sum(met(told, saved) for told, saved in pairs if told is not None)
        print(f"By today's model, after the measurements: {good} of {len(pairs)}.")
    for path, tuning in sorted(tunings.items(), key=lambda item: item[1].begun.step_ns):
        print("", *table(tuning, now[path]), sep="\n")


if __name__ == "__main__":
    main()
