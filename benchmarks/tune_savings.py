"""What `tune` predicted of each lever and what it measured, over stored runs, as Markdown.

    python benchmarks/tune_savings.py benchmarks/results/h200-2026-11/tune-*

A prediction counts as met within 20 % of the measured saving, or within 1 ms. Levers that could not run have no saving.
"""

import argparse
from pathlib import Path

from flopwise.advice.tuning import Attempt, Tuning
from flopwise.records import OK
from flopwise.verbs.tune import read_tuning

MS = 1e6


def met(predicted_ns: float, measured_ns: float) -> bool:
    return abs(predicted_ns - measured_ns) <= max(MS, 0.2 * abs(measured_ns))


def measured(tuning: Tuning) -> list[tuple[Attempt, float, float]]:
    """Each lever with a prediction and a measurement: predicted and measured saving."""
    return [
        (one, one.predicted_ns, one.before_ns - one.after_ns)
        for one in tuning.attempts
        if one.status == OK and None not in (one.predicted_ns, one.before_ns, one.after_ns)
    ]


def table(tuning: Tuning) -> list[str]:
    begun, ended = tuning.begun, tuning.ended
    assert ended is not None
    lines = [
        f"### {begun.workload.label()}",
        "",
        f"{begun.step_ns / MS:.4g} ms → **{ended.step_ns / MS:.4g} ms**, {begun.step_ns / ended.step_ns:.2f}x; "
        f"{ended.seconds:.0f} s, ended: {ended.stopped}",
        "",
        "| lever | before, ms | with it, ms | predicted saving, ms | measured, ms | met | kept | why |",
        "| :--- | ---: | ---: | ---: | ---: | :--- | :--- | :--- |",
    ]
    for one, predicted, saved in measured(tuning):
        lines.append(
            f"| {one.lever} = {one.value} | {one.before_ns / MS:.4g} | {one.after_ns / MS:.4g} | {predicted / MS:.3g} "
            f"| {saved / MS:.3g} | {'yes' if met(predicted, saved) else 'no'} | {'yes' if one.kept else 'no'} | {one.why} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    tunings = [read_tuning(path) for path in parser.parse_args().runs]
    rows = [row for tuning in tunings for row in measured(tuning)]
    good = sum(met(predicted, saved) for _, predicted, saved in rows)
    print(f"Within 20 % or 1 ms: {good} of {len(rows)} levers ({good / max(1, len(rows)):.0%}).")
    for tuning in sorted(tunings, key=lambda one: one.begun.step_ns):
        print("", *table(tuning), sep="\n")


if __name__ == "__main__":
    main()
