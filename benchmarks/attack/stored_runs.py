"""Damage in stored runs: how often a changed bit, byte or length changes what is shown, and nothing says so.

    python benchmarks/attack/stored_runs.py [--bits 400] [--changes 1600] [--seed 0]

Runs of a sweep, a tuning, a training and a profile with its trace are made, then changed one place at a time in each of their
files: the header, every table, the tags, the sums, the raw trace. After each change the run is read as `runs show` and `runs`
do, and compared with what was shown before. 'silent': other values, and neither a warning nor an error.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from flopwise.analysis.reading import traces_of
from flopwise.api.runs import stored_result
from flopwise.errors import FlopwiseError
from flopwise.records.run import OK, PhaseTimes, Point
from flopwise.records.training import FINISHED, Begun, Settings, Steps, Stopped
from flopwise.records.tuning import Attempt, Ended
from flopwise.records.tuning import Begun as TuningBegun
from flopwise.render.views import text_of, view_of
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import Run, StoredRun, list_runs, tag
from flopwise.store.rows import append_row

Change = Callable[[bytes, random.Random], bytes]
LEFT_ALONE = {"lock"}  # empty, and never read


def trials(count: int) -> list[Trial]:
    return [Trial(workload=workload("tiny", batch=n + 1), sampling=Sampling(samples=3)) for n in range(count)]


def point(trial: Trial, **more: Any) -> Point:
    base = 1_000_000 * trial.workload.batch
    phases = tuple(PhaseTimes(phase=p, wall_ns=(base, base + 7, base - 3)) for p in ("step", "forward"))
    return Point(key=trial.key(), trial=trial, status=OK, phases=phases, elapsed_s=0.25, **more)


def sweep_run(root: Path) -> Path:
    with Run.create(root, "sweep", "a", "flopwise sweep a.toml", trials(4)) as run:
        for trial in trials(4):
            run.append(point(trial))
    tag(root, run.path.name, "baseline")
    return run.path


def tuned_run(root: Path) -> Path:
    start = workload("tiny")
    tried = {"before": "off", "status": "ok", "kept": True, "why": "it is faster", "before_ns": 2e7, "after_ns": 1e7}
    with Run.create(root, "tune", "tiny", "flopwise tune tiny", trials(1)) as run:
        run.append(point(trials(1)[0]))
        append_row(run.path / "tuning.jsonl", TuningBegun(workload=start, step_ns=2e7))
        append_row(run.path / "tuning.jsonl", Attempt(lever="compile", value="default", **tried))
        append_row(run.path / "tuning.jsonl", Ended(workload=start, step_ns=1e7, stopped="nothing left to try"))
    return run.path


def trained_run(root: Path) -> Path:
    with Run.create(root, "train", "tiny", "flopwise train tiny", trials(1)) as run:
        settings = Settings(steps=3, data="corpus", rate=1e-3)
        model = {"parameters": 1000, "vocabulary": 256, "tokens": 5000, "flops_per_step": 1e6, "device": "cpu"}
        times = {"rate": 1e-3, "wall_ns": 10**7, "waited_ns": 10**5, "launched_ns": 10**6}
        rows: list[Any] = [Begun(settings=settings, **model)]
        rows += [Steps(step=n + 1, losses=(5.0 - n,), **times) for n in range(3)]
        for row in (*rows, Stopped(status=FINISHED, step=3)):
            append_row(run.path / "training.jsonl", row)
    return run.path


def traced_run(root: Path) -> Path:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.0}
    trace = {"schemaVersion": 1, "traceEvents": [event | {"ts": 10.0 * n, "dur": 5.0 + n} for n in range(40)]}
    with Run.create(root, "profile", "tiny", "flopwise profile tiny", trials(1)) as run:
        run.trace_path("t.kineto.json").write_text(json.dumps(trace))
        run.append(point(trials(1)[0], trace_file="t.kineto.json"))
    return run.path


def flipped(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(8 * len(content))
    changed = bytearray(content)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def other_byte(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    near = b"0123456789" if content[at : at + 1].isdigit() else b'abcdefghijklmnopqrstuvwxyz0123456789{}[],:"\n'
    return content[:at] + bytes([chance.choice(near)]) + content[at + 1 :]


def cut_out(content: bytes, chance: random.Random) -> bytes:
    at, size = chance.randrange(len(content)), chance.choice((1, 2, 8, 64, 512))
    return content[:at] + content[at + size :]


def doubled(content: bytes, chance: random.Random) -> bytes:
    at, size = chance.randrange(len(content)), chance.choice((1, 2, 8, 64, 512))
    return content[:at] + content[at : at + size] * 2 + content[at + size :]


def ended_early(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def zeroed(content: bytes, chance: random.Random) -> bytes:
    at, size = chance.randrange(len(content)), chance.choice((1, 4, 32))
    return content[:at] + b"\0" * len(content[at : at + size]) + content[at + size :]


def lines_changed(content: bytes, chance: random.Random) -> bytes:
    """A line that is dropped, doubled or moved: every row is sound by itself."""
    lines = content.splitlines(keepends=True)
    line = lines.pop(chance.randrange(len(lines)))
    for _ in range(chance.choice((0, 1, 2))):
        lines.insert(chance.randrange(len(lines) + 1), line)
    return b"".join(lines)


KINDS: dict[str, Change] = {
    "bit": flipped,
    "byte": other_byte,
    "bytes cut out": cut_out,
    "bytes doubled": doubled,
    "cut short": ended_early,
    "zeros": zeroed,
    "line dropped, doubled or moved": lines_changed,
}


def shown(run: Path, root: Path) -> tuple[Any, bool]:
    """What is shown of a run, and whether something is said of damage; the place and size on the disk are not compared."""
    said = False
    try:
        found = stored_result(run)
        view = view_of(found)
        text_of(found)
        damage = found.damage() if isinstance(found, StoredRun) else ()
        said = bool(damage or getattr(found, "warnings", ()))
        content = msgspec.to_builtins(view.document, enc_hook=str)
        for path, _ in traces_of(run) if (run / "traces").is_dir() else ():
            content["trace"] = path.read_bytes().hex()
    except FlopwiseError as error:
        return error.message, True
    listed = next((one for one in list_runs(root) if one.id == run.name), None)
    if listed is None:
        return "not listed", True
    row = {
        name: getattr(listed, name)
        for name in ("kind", "name", "created_at", "tags", "ok", "failed", "complete", "planned")
    }
    return (content, row), said or bool(listed.warnings)


def changes(content: bytes, count: int, bits: bool, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    names = ["bit"] if bits else list(KINDS)
    for n in range(count):
        name = names[n % len(names)]
        yield name, KINDS[name](content, chance)


def attacked(run: Path, root: Path, count: int, bits: bool, chance: random.Random) -> Iterator[tuple[str, str, bool]]:
    """For each change: the file, what was done, and whether it is silent."""
    before, said = shown(run, root)
    assert not said, before
    names = [f for f in sorted(run.rglob("*")) if f.is_file() and f.name not in LEFT_ALONE and f.stat().st_size]
    for file in names:
        content = file.read_bytes()
        for name, changed in changes(content, max(1, count // len(names)), bits, chance):
            if changed == content:
                continue
            file.write_bytes(changed)
            after, said = shown(run, root)
            yield file.name, name, after != before and not said
        file.write_bytes(content)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--bits", type=int, default=400)
    asked.add_argument("--changes", type=int, default=1600)
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    tried, silent = Counter[str](), Counter[str]()
    where = Counter[str]()
    for make in (sweep_run, tuned_run, trained_run, traced_run):
        for bits, count in ((True, given.bits), (False, given.changes)):
            folder = Path(tempfile.mkdtemp())
            run, chance = make(folder / "runs"), random.Random(given.seed)
            for file, name, is_silent in attacked(run, folder / "runs", count // 4, bits, chance):
                key = "single bits" if bits else name
                tried[key] += 1
                silent[key] += is_silent
                where[file] += is_silent
            shutil.rmtree(folder)
    print("| change | tried | silent |\n|---|---:|---:|")
    for key in tried:
        print(f"| {key} | {tried[key]} | {silent[key]} |")
    print(f"| all | {sum(tried.values())} | {sum(silent.values())} |")
    print("silent by file:", dict(where.most_common()) if sum(silent.values()) else "none")


if __name__ == "__main__":
    main()
