"""Steps and step times of traces from the raw JSON, next to what flopwise says of them.

    python benchmarks/public_traces.py TRACE.json.gz…

`steps_of` is independent: it reads the file with `json` and uses nothing of flopwise. A step is a `ProfilerStep#`, else an
iteration of a server, else what lies between the ends of two `Optimizer.step#`, else the whole trace. Only GPU work launched
inside a step is its own. On the GPU a step begins when its mark opens and all work launched before it is done, or later: if the
GPU seems to do nothing for a millisecond or more with work of the step in its queue, work that was cut out of the file was
running. It ends when the next step begins; the last one when its mark and its work have ended.

The table in benchmarks/results/public-traces-2026-11.md is made of these lines, and judged by hand.
"""

import gzip
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

GPU, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver", "hip_runtime")
MARKS = (r"ProfilerStep#\d+$", r"execute_\w*(?:context|new|generation)|step\[")
QUEUED_MS = 1.0  # longer than a GPU takes to begin what is in its queue
FEW = 0.05  # of the step's work


def steps_of(path: Path) -> list[tuple[float, float]]:
    """Milliseconds, and those of them in which the GPU was busy, of each step with GPU work."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    calls = {
        e["args"]["correlation"]: e for e in events if e.get("cat") in CALLS and "correlation" in e.get("args", {})
    }
    work = []  # (launched, start, end, when the call returned)
    for e in (e for e in events if e.get("cat") in GPU):
        call = calls.get(e["args"].get("correlation"))
        launched = (call["ts"], call["ts"] + call["dur"]) if call else (float("-inf"),) * 2
        work.append((launched[0], e["ts"], e["ts"] + e["dur"], launched[1]))
    host = [e["ts"] for e in events if e.get("cat") in (*CALLS, "cpu_op")]
    begins, end = _marks(events, min(host, default=0.0))
    found = []
    for begin, after in zip(begins, [*begins[1:], end], strict=True):
        last = after == end
        own = sorted(piece for piece in work if begin <= piece[0] and (piece[0] <= after if last else piece[0] < after))
        if own:
            done = max((piece[2] for piece in work if piece[0] < begin), default=begin)
            opened = min(min(piece[1] for piece in own), max(begin, done))
            found.append((opened, max(piece[2] for piece in own), own))
    if not found:
        return []
    opened = [_after_hidden(*found[0][1:]) or found[0][0], *(one[0] for one in found[1:])]
    closed = [*opened[1:], max(found[-1][1], end if end < float("inf") else 0.0)]
    spans = sorted((piece[1], piece[2]) for piece in work)
    return [((b - a) / 1e3, _covered(spans, a, b) / 1e3) for a, b in zip(opened, closed, strict=True)]


def _marks(events: list[dict], first: float) -> tuple[list[float], float]:
    """Where steps begin on the host, and where the last one ends."""
    ranges = [e for e in events if e.get("cat") in ("user_annotation", "cpu_op", "Operator")]
    for pattern in MARKS:
        marks = sorted((e["ts"], e["ts"] + e["dur"]) for e in ranges if re.match(pattern, e["name"]))
        outer = [mark for mark in marks if not any(o[0] <= mark[0] and mark[1] <= o[1] for o in marks if o != mark)]
        if outer:
            launches = [e["ts"] for e in events if e.get("cat") in CALLS]
            held = [mark for mark in outer if any(mark[0] <= ts <= mark[1] for ts in launches)]
            return [mark[0] for mark in held], held[-1][1]
    named = [e for e in ranges if re.match(r"Optimizer\.step#", e["name"])]
    if named:
        ends = sorted(e["ts"] + e["dur"] for e in named if e["name"] == named[0]["name"])
        return [first, *ends[:-1]], ends[-1]
    return [first], float("inf")


def _after_hidden(_: float, own: list[tuple[float, float, float, float]]) -> float | None:
    """When the step's own work began after the last long pause with work in the queue, near the step's beginning."""
    pieces = sorted(own, key=lambda piece: piece[1])
    whole, so_far, reach, found = sum(p[2] - p[1] for p in pieces), 0.0, None, None
    for _launched, start, end, returned in pieces:
        waited = start - max(returned if reach is None else max(reach, returned), 0.0)
        if waited > 1e3 * QUEUED_MS and so_far <= FEW * whole:
            found = start
        reach, so_far = end if reach is None else max(reach, end), so_far + end - start
    return found


def _covered(spans: list[tuple[float, float]], low: float, high: float) -> float:
    total, reach = 0.0, low
    for start, end in spans:
        start, end = max(start, reach), min(end, high)
        total, reach = total + max(0.0, end - start), max(reach, end)
    return total


def main() -> None:
    """One line per trace: by this script, and by flopwise."""
    print("| trace | steps | ms | busy ms | steps, flopwise | ms | busy ms | classes | verdict | first change |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for path in map(Path, sys.argv[1:]):
        steps = steps_of(path)
        by = [f"{statistics.median(column):.2f}" for column in zip(*steps, strict=True)] if steps else ["", ""]
        command = [sys.executable, "-m", "flopwise", "explain", str(path), "--format", "json"]
        e = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)["traces"][0]
        most = max(e["findings"], key=lambda one: one["counted_ns"] or 0.0, default=None)
        ours = (f"{statistics.median(one[name] for one in e['step_times']) / 1e6:.2f}" for name in ("ns", "busy_ns"))
        largest = ", ".join(f"{one['name']} {one['share']:.0%}" for one in e["classes"][:3])
        cells = (e["steps"], *ours, largest, e["verdict"], most["title"] if most else "none")
        print("|", " | ".join(map(str, (path.name, len(steps), *by, *cells))), "|")


if __name__ == "__main__":
    main()
