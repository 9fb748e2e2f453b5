"""Tables and charts of what course_memory.py has stored; torch for the dry runs, no GPU."""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flopwise import units
from flopwise.capture.isolate import Worker
from flopwise.predict.dry.architecture import architecture_of
from flopwise.predict.prediction import memory_from_shapes
from flopwise.records.prediction import DRY_RUN, SHAPES
from flopwise.snapshot.answers import TimelineLine
from flopwise.snapshot.stored import stored_report
from flopwise.snapshot.timeline import thinned
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload
from flopwise.store import StoredRun

MOMENTS = 400  # of a timeline that is drawn: enough for the stairs of 32 blocks
OWNERS = ("parameters", "optimizer state", "gradients", "activations", "attention scores", "temporary")
TOLD_BYTES = 2**20  # an owner's difference that is named
NEAR = 1.05  # as fast as the fastest: within 5 %
DRY_S = 600.0  # a dry run of a nested step has every block


def draw(given: argparse.Namespace, timelines: Mapping[str, Workload], checkpoints: Mapping[str, Workload]) -> None:
    """Charts into the folder of images, tables into OUT/answers.md; both sorts of cases by name."""
    given.images.mkdir(parents=True, exist_ok=True)
    parts = []
    cases = {n: given.out / f"{n}.json" for n in timelines}
    found = {n: json.loads(path.read_text()) for n, path in cases.items() if path.exists()}
    if found:
        parts += [timeline_table(found), error_table(found), largest_table(found)]
        for name in drawn(list(found)):
            draw_timeline(given.out / "runs" / found[name]["run"], given.images / f"memory-{name}.svg")
    path = given.out / "checkpoint.json"
    if path.exists():
        stored = json.loads(path.read_text())
        rows = predicted(stored["rows"], checkpoints, given.gpu)
        path.write_text(json.dumps(stored, indent=1) + "\n")
        for precision in dict.fromkeys(row["precision"] for row in rows):
            gradients = gradients_bytes(checkpoints[f"{precision} off"])
            parts.append(checkpoint_table(precision, [r for r in rows if r["precision"] == precision], gradients))
        parts += stored["failed"]
        if all(row["peak_bytes"] for row in rows):
            draw_checkpoints(rows, given.images / "memory-checkpoint.svg")
    (given.out / "answers.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))


def table(columns: str, rows: list[tuple[object, ...]]) -> str:
    """Markdown; a column whose name begins with '<' is text."""
    names = columns.split(" | ")
    rule = "|".join("---" if name.startswith("<") else "---:" for name in names)
    lines = [f"| {' | '.join(name.lstrip('<') for name in names)} |", f"|{rule}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def size(count: int | None) -> str:
    return "–" if count is None else units.size(count)


def timeline_table(found: dict[str, dict[str, Any]]) -> str:
    """Whose bytes at the recorded peak; the owners add up to it."""
    rows: list[tuple[object, ...]] = []
    for name, case in sorted(found.items(), key=lambda one: _order(one[0])):
        _, context, phase, precision = name.rsplit("-", 3)
        owners = case["owners"]
        rest = sum(n for owner, n in owners.items() if owner not in OWNERS)
        cells = [size(owners[owner]) if owners.get(owner, 0) >= TOLD_BYTES else "–" for owner in OWNERS]
        kept = size(case["kept_bytes"]) if phase == "train" else "–"
        where = f"{size(case['peak_bytes'])}, {case['peak_phase']}"
        rows.append((f"{phase}, {precision}", context[1:], where, *cells, size(rest), kept))
    return table(f"<step | context | peak | {' | '.join(OWNERS)} | the rest | kept for backward", rows)


def error_table(found: dict[str, dict[str, Any]]) -> str:
    """Each prediction against the allocator's own peak, and by owner against the recording."""
    rows: list[tuple[object, ...]] = []
    errors: dict[str, list[float]] = {}
    for name, case in sorted(found.items(), key=lambda one: _order(one[0])):
        peak = case["unwatched_peak_bytes"] or case["peak_bytes"]
        cells: list[str] = []
        for source in (DRY_RUN, SHAPES):
            one = next((p for p in case["predictions"] if p["source"] == source), None)
            if one is None:
                cells += ["–", "–"]
                continue
            errors.setdefault(source, []).append(abs(one["peak_bytes"] / peak - 1))
            cells += [_off(one["peak_bytes"], peak), differing(one["owners"], case["owners"])]
        unseen = peak - case["peak_bytes"]
        rows.append((name.partition("-")[2], f"{peak:,}", size(unseen) if unseen else "0", *cells))
    columns = "<case | peak, bytes | not in the recording | dry run off by | <owners | shape simulator off by | <owners"
    told = [
        f"{source}: median {100 * float(np.median(of)):.3f} %, worst {100 * max(of):.3f} %, "
        f"{sum(e == 0 for e in of)} of {len(of)} exact to the byte"
        for source, of in errors.items()
    ]
    return "\n\n".join([table(columns, rows), "; ".join(told) + "."])


def _off(said: int, measured: int) -> str:
    return "0" if said == measured else f"{100 * (said / measured - 1):+.3f} %"


def differing(said: dict[str, int], recorded: dict[str, int]) -> str:
    """The owners that a prediction has wrong. The shape simulator counts the rounding of weights as workspace: one sum."""
    both = ("parameters", "workspace")
    off = {o: said.get(o, 0) - recorded.get(o, 0) for o in {*said, *recorded} if o not in both}
    off["parameters"] = sum(said.get(o, 0) - recorded.get(o, 0) for o in both)
    named = sorted((o for o in off if abs(off[o]) >= TOLD_BYTES), key=lambda o: (-abs(off[o]), o))
    return ", ".join(f"{o} {'+' if off[o] > 0 else '−'}{size(abs(off[o]))}" for o in named)


def drawn(names: list[str]) -> list[str]:
    """A page needs the largest context, and training at the smallest in fp32: the others look like one of these."""
    contexts = {name: _order(name)[2] for name in names}
    most, least = max(contexts.values()), min(contexts.values())
    return [n for n in names if contexts[n] == most or (contexts[n] == least and n.endswith("-train-fp32"))]


def _order(name: str) -> tuple[str, bool, int]:
    _, context, phase, precision = name.rsplit("-", 3)
    return phase, precision == "bf16", int(context[1:])


def largest_table(found: dict[str, dict[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = []
    for name, case in sorted(found.items(), key=lambda one: _order(one[0])):
        one, sizes = case["largest"], {t["name"]: t for t in case["named"]}
        shape = "×".join(map(str, one["shape"]))
        what = f"{size(one['bytes'])} × {one['count']}"
        residual, square = (sizes.get(n) for n in ("residual stream", "attention N × N matrix"))
        stack = f"`{one['stack']}`" if one["stack"] else ""
        origin = ", ".join(filter(None, (" ".join(filter(None, (one["op"], one["module"]))), stack)))
        named = [size(t["bytes"]) if t else "–" for t in (residual, square)]
        rows.append((name.partition("-")[2], what, one["owner"], f"{shape} {one['dtype']}", origin, *named))
    return table("<case | largest | <owner | <shape | <made by | residual tensor | N × N matrix", rows)


def draw_timeline(run: Path, path: Path) -> None:
    """The timeline of a stored run, thinned: a picture in a page needs no more."""
    from flopwise.render.charts import save
    from flopwise.render.memory_charts import timeline_chart

    report = stored_report(StoredRun.load(run))
    first = msgspec.structs.replace(report.devices[0], timeline=shortened(report.devices[0].timeline))
    save(timeline_chart(msgspec.structs.replace(report, devices=(first,))), path)
    path.write_text(re.sub(r' d="(M[-\d.,L]+)(Z?)"', _straightened, path.read_text()))


def _straightened(path: re.Match[str]) -> str:
    """A path of a picture without the points that lie between others on a level or upright line, to a tenth of a pixel."""
    points: list[tuple[float, ...]] = []
    for one in path[1][1:].split("L"):
        points.append(tuple(round(float(n), 1) for n in one.split(",")))
        while len(points) > 2 and any(len({point[axis] for point in points[-3:]}) == 1 for axis in (0, 1)):
            del points[-2]
    return f' d="M{"L".join(f"{x:g},{y:g}" for x, y in points)}{path[2]}"'


def shortened(line: TimelineLine) -> TimelineLine:
    phases = {name: number for number, name in enumerate(dict.fromkeys(line.phase))}
    totals = np.array(list(line.owners.values()), dtype=np.int64).sum(axis=0)
    kept = thinned(totals, MOMENTS, np.array([phases[name] for name in line.phase])).tolist()
    return TimelineLine(
        event=tuple(line.event[i] for i in kept),
        time_us=tuple(line.time_us[i] for i in kept) if line.time_us is not None else None,
        phase=tuple(line.phase[i] for i in kept),
        reserved_bytes=tuple(line.reserved_bytes[i] for i in kept),
        owners={owner: tuple(values[i] for i in kept) for owner, values in line.owners.items()},
    )


def predicted(rows: list[dict[str, Any]], cases: Mapping[str, Workload], gpu_name: str) -> list[dict[str, Any]]:
    """The rows with the dry run's and the shape simulator's peaks, where they have none yet."""
    gpu = gpu_named(gpu_name)
    with Worker() as worker:
        for row in rows:
            case = cases[f"{row['precision']} {row['strategy']}"]
            if "dry_run_bytes" not in row:
                row["dry_run_bytes"] = worker.dry_run(case, architecture_of(gpu), DRY_S).peak_bytes
                shapes = memory_from_shapes(case, gpu)
                row["shapes_bytes"] = shapes[0].peak_bytes if shapes else None
    return rows


def gradients_bytes(case: Workload) -> int:
    """Of weights kept in fp32, as fp32 and bf16 autocast do."""
    return 4 * case.subject.parameters() if isinstance(case.subject, ModelSpec) else 0


def checkpoint_table(precision: str, rows: list[dict[str, Any]], gradients: int) -> str:
    base = next((row["step_ms"] for row in rows if row["strategy"] == "off"), 0.0)
    lines: list[tuple[object, ...]] = []
    for row in rows:
        less, peak = row["kept_less_gradients_bytes"], row["peak_bytes"]
        error = _off(row["dry_run_bytes"], peak) if peak else "–"
        lines.append(
            (
                row["strategy"],
                f"{row['step_ms']:.0f} ms",
                f"{row['step_ms'] / base:.2f}" if base else "–",
                f"{row['gpu_ms']:.0f} ms" if row.get("gpu_ms") else "–",
                size(None if less is None else less + gradients),
                size(peak),
                row["peak_phase"] or "–",
                size(row["dry_run_bytes"]),
                error,
                size(row["shapes_bytes"]),
            )
        )
    after = "kept after forward | peak | <where | dry run | off by | shape simulator"
    columns = f"<{precision}, checkpoint | step | × off | GPU | {after}"
    return "\n\n".join([table(columns, lines), *best(rows)])


def best(rows: list[dict[str, Any]]) -> list[str]:
    """The strategies that the rules name; of equal peaks the fastest."""
    known = [row for row in rows if row["peak_bytes"]]
    some = [row for row in known if row["strategy"] != "off"]
    if not some:
        return []
    lowest = min(known, key=lambda row: (row["peak_bytes"], row["step_ms"]))
    fastest = min(row["step_ms"] for row in some)
    near = min((r for r in some if r["step_ms"] <= NEAR * fastest), key=lambda r: (r["peak_bytes"], r["step_ms"]))
    return [
        f"Lowest peak: {_told(lowest)}. "
        f"Lowest peak within {NEAR - 1:.0%} of the fastest that checkpoints ({fastest:.0f} ms): {_told(near)}."
    ]


def _told(row: dict[str, Any]) -> str:
    return f"{row['strategy']}, {size(row['peak_bytes'])} at {row['step_ms']:.0f} ms"


def draw_checkpoints(rows: list[dict[str, Any]], path: Path) -> None:
    """Time across, peak upwards: what lies lower left is better."""
    import altair

    from flopwise.render.charts import COLOURS, save

    alt: Any = altair
    values = [{**row, "peak": row["peak_bytes"] / 2**30} for row in rows]
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("step_ms:Q", title="step, ms").scale(zero=False),
        y=alt.Y("peak:Q", title="peak allocated, GiB").scale(zero=False),
        color=alt.Color("precision:N").scale(range=list(COLOURS)),
    )
    names = base.mark_text(dx=9, align="left").encode(text="strategy:N")
    title = "checkpoint every N blocks, nested, or off: time against peak, measured"
    save((base.mark_circle(size=60) + names).properties(width=640, height=380, title=title), path)
