"""Does `flopwise tune` refuse wrong steps, and only these? Right steps and planted faults, judged by the code that it judges by.

    python benchmarks/agreement_study.py [--device cuda] [--only graph faults] [-o results.json]

Right steps: the same step with other roundings (its weights are moved by a unit in the last place of fp32), compiled, and
captured in a CUDA graph. Wrong ones: benchmarks/agreement_steps.py has each fault as a change of the step. On a CPU the models
are tiny; with `--device cuda` they are 512 wide.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from flopwise.advice.decisions import allowed, disagreement
from flopwise.capture.agreement import check_agreement
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.records.events import AgreementRequest
from flopwise.records.run import Agreement, Difference
from flopwise.spec.workload import Sampling, Trial, workload

STEPS = Path(__file__).with_name("agreement_steps.py")
sys.path.insert(0, str(STEPS.parent))
from agreement_steps import FAULTS, MODELS, MORE  # noqa: E402

NOT_RUN = "not run"


class Task(msgspec.Struct, frozen=True):
    """One reference, and everything that is judged by it."""

    model: str
    precision: str
    seed: int
    device: str
    nudges: tuple[int, ...] = ()
    levers: tuple[tuple[str, str], ...] = ()  # a right step's lever and value
    faults: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True):
    """One step that was judged."""

    model: str
    precision: str
    seed: int
    case: str
    right: bool
    refused: str  # why; '': it is not
    excess: float  # of its furthest measure, in units of what is allowed
    by: str  # that measure
    seconds: float


def run(task: Task) -> list[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "reference.npz")
        check_agreement(_trial(task), AgreementRequest(path=path, write=True))
        return [_judged(task, path, *case) for case in _cases(task)]


def _cases(task: Task) -> Iterator[tuple[str, bool, dict[str, Any], dict[str, str]]]:
    """The name of each, whether it is right, the factory's arguments and the levers."""
    for nudge in task.nudges:
        yield "other roundings", True, {"nudge": nudge}, {}
    for number, (lever, value) in enumerate(task.levers, 1):
        yield lever, True, {"nudge": 1000 + number}, {lever: value}
    for fault in task.faults:
        yield fault, False, {"fault": fault}, {}


def _judged(task: Task, path: str, case: str, right: bool, arguments: dict[str, Any], levers: dict[str, str]) -> Row:
    began = time.monotonic()
    torch.compiler.reset()
    try:
        found: Agreement | str = check_agreement(_trial(task, arguments, **levers), AgreementRequest(path=path))
    except Unsupported as error:
        found = NOT_RUN if right else str(error)
    except FlopwiseError as error:
        found = str(error)
    refused, excess, by = found if isinstance(found, str) else "", 0.0, ""
    if isinstance(found, Agreement):
        wrong = disagreement(found)
        refused = wrong.key if wrong is not None else ""
        worst = max(found.differences, key=_excess)
        excess, by = _excess(worst), f"{worst.kind} {worst.measure} {worst.step}"
    seconds = time.monotonic() - began
    return Row(task.model, task.precision, task.seed, case, right, refused, excess, by, seconds)


def _excess(difference: Difference) -> float:
    return difference.error / allowed(difference)


def _trial(task: Task, arguments: dict[str, Any] | None = None, **levers: str) -> Trial:
    size = "real" if task.device.startswith("cuda") else "tiny"
    given = {"model": task.model, "precision": task.precision, "seed": task.seed, "size": size} | (arguments or {})
    place = os.path.relpath(STEPS)
    return Trial(workload=workload(f"{place}:make", set=given, **levers), sampling=Sampling(), device=task.device)


KINDS = ("roundings", "compile", "graph", "faults")


def tasks(device: str, quick: bool, first: int, kinds: Collection[str] = KINDS) -> list[Task]:
    """Over 200 right steps, and every fault in every model in fp32 and bf16."""
    gpu = device.startswith("cuda")
    levers = [pair for pair in [("compile", "blocks")] * 2 + [("graph", "on")] * 5 * gpu if pair[0] in kinds]
    found = []
    for model in MODELS:
        for seed in range(first, first + (1 if quick else 2)):
            for precision, nudges in (("bf16", 9), ("fp32", 8), ("fp16", 5)):
                half = precision == "fp16"  # a CPU is slow in it; its loss scaler cannot be captured
                count = (2 if quick else nudges) if "roundings" in kinds else 0
                wrong = () if half or seed > first or "faults" not in kinds else (*FAULTS, *MORE)
                task = Task(
                    model, precision, seed, device, tuple(range(1, count + 1)), () if half else tuple(levers), wrong
                )
                if any(_cases(task)):
                    found.append(task)
    return found


def show(rows: list[Row]) -> None:
    print(
        "\n| right steps | judged | refused | furthest, of what is allowed | by |\n| :--- | ---: | ---: | ---: | :--- |"
    )
    for precision, case in dict.fromkeys((row.precision, row.case) for row in rows if row.right):
        ran = [row for row in rows if (row.precision, row.case) == (precision, case) and row.refused != NOT_RUN]
        if not ran:
            print(f"| {precision}, {case} | 0 | | not run | |")
            continue
        worst = max(ran, key=lambda row: row.excess)
        refused = sum(bool(row.refused) for row in ran)
        print(f"| {precision}, {case} | {len(ran)} | {refused} | {worst.excess:.2f} | {worst.model}: {worst.by} |")
    columns = list(dict.fromkeys((row.model, row.precision) for row in rows if not row.right))
    print(f"\n| fault, times what is allowed | {' | '.join(f'{model} {precision}' for model, precision in columns)} |")
    print(f"| :--- |{' ---: |' * len(columns)}")
    for fault in dict.fromkeys(row.case for row in rows if not row.right):
        cells = {(row.model, row.precision): _cell(row) for row in rows if row.case == fault and not row.right}
        print(f"| {fault} | {' | '.join(cells.get(column, '') for column in columns)} |")
    right = Counter(bool(row.refused) for row in rows if row.right and row.refused != NOT_RUN)
    missed = [row for row in rows if row.case in FAULTS and not row.refused]
    print(f"\nright steps: {right.total()}, refused: {right[True]}; the {len(FAULTS)} faults: {len(missed)} not found")


def _cell(row: Row) -> str:
    if row.refused and not row.by:
        return "not finite"
    return f"{row.excess:.3g}" if row.refused else f"**{row.excess:.2f}**"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cpu")
    options.add_argument("--jobs", type=int, default=0, help="processes; 0: one per core of a CPU, six on a GPU")
    options.add_argument("--quick", action="store_true", help="one seed of each")
    options.add_argument(
        "--seed", type=int, default=0, help="of the weights and the data; the factors were chosen with 0 to 2"
    )
    options.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="of right steps, and of wrong ones")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    jobs = chosen.jobs or (6 if chosen.device.startswith("cuda") else os.cpu_count() or 1)
    began, rows = time.monotonic(), list[Row]()
    spawn, ignored = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with spawn.Pool(jobs, signal.signal, ignored) as pool, suppress(KeyboardInterrupt):
        for found in pool.imap_unordered(run, tasks(chosen.device, chosen.quick, chosen.seed, chosen.only)):
            rows += found
            print(f"{len(rows)} judged, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (list(MODELS).index(row.model), row.precision, row.seed))
    print(f"torch {torch.__version__}, {chosen.device}, {time.monotonic() - began:.0f} s")
    show(rows)
    if chosen.output:
        chosen.output.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    main()
