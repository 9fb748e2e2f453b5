"""What a memory snapshot costs to read and answer for, beside what PyTorch's own tools do with the same file.

    python benchmarks/memory_reading.py [--events 200000] [--repeat N]

The snapshot is generated (tests/snapshot/gen_snapshot.py): training steps of 24 blocks, stacks of some forty frames. Each tool
runs in a process of its own, interpreter start and imports included:

    flopwise memory     reads it without running it; timeline by owner, peak, the largest allocations, steps, leaks; as JSON
    trace_plot,         PyTorch's `_memory_viz.py`, run as a script (it needs no torch): wraps the pickle into a page that
    segment_plot        does its work in the browser, which is not counted
    trace               the same script: every event as a line of text

They do not do the same work: no PyTorch tool tells owners, and its pages unpickle whatever the file says. CPU seconds are user +
system, peak is the resident set, both as the kernel counted them. With `--repeat`, the run with the fewest CPU seconds counts.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GENERATOR = Path(__file__).parent.parent / "tests" / "snapshot" / "gen_snapshot.py"
VERSIONS = """
import json, platform, flopwise, numpy, polars
print(json.dumps([platform.python_version(), flopwise.__version__, numpy.__version__, polars.__version__]))
"""


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    wall_s: float
    peak_mb: float
    output: bytes


def cost(command: list[str]) -> Cost:
    """One process, by the kernel's count."""
    with tempfile.TemporaryFile() as out:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"failed: {command}")
        out.seek(0)
        peak = usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e6 / 1024)
        return Cost(usage.ru_utime + usage.ru_stime, wall, peak, out.read())


def viewer() -> str:
    """PyTorch's script, found without importing torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit("torch is not installed here: there is nothing to compare with")
    return str(Path(torch.origin).parent / "cuda" / "_memory_viz.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load before the run {load}")
    python, flopwise, numpy, polars = json.loads(
        subprocess.run([sys.executable, "-c", VERSIONS], check=True, capture_output=True).stdout
    )
    torch = importlib.metadata.version("torch")
    print(f"Python {python}, flopwise {flopwise}, numpy {numpy}, polars {polars}; torch {torch} for its script")
    with tempfile.TemporaryDirectory() as name:
        path, page = Path(name) / "snapshot.pickle", str(Path(name) / "page.html")
        made = subprocess.run(
            [sys.executable, GENERATOR, path, "--events", str(options.events)], check=True, capture_output=True
        )
        print(f"\n{int(made.stdout):,} events, {path.stat().st_size / 1e6:.0f} MB\n")
        tools = {
            "flopwise memory": [sys.executable, "-m", "flopwise", "memory", str(path), "--format", "json"],
            "_memory_viz trace_plot": [sys.executable, viewer(), "trace_plot", str(path), "-o", page],
            "_memory_viz segment_plot": [sys.executable, viewer(), "segment_plot", str(path), "-o", page],
            "_memory_viz trace": [sys.executable, viewer(), "trace", str(path)],
        }
        costs = {
            tool: min((cost(command) for _ in range(options.repeat)), key=lambda c: c.cpu_s)
            for tool, command in tools.items()
        }
    table(costs, int(made.stdout))


def table(costs: dict[str, Cost], events: int) -> None:
    """Ratios are the other's over flopwise's, which comes first; its answer is checked."""
    own = costs["flopwise memory"]
    device = json.loads(own.output)["devices"][0]
    if device["events"] != events or sum(device["peak"]["owners"].values()) != device["peak"]["allocated_bytes"]:
        raise SystemExit("flopwise did not read all of it")
    print("| tool | CPU s | × | peak MB | × | wall s |")
    print("|---|---:|---:|---:|---:|---:|")
    for tool, c in costs.items():
        ratios = f"{c.cpu_s / own.cpu_s:.2f}", f"{c.peak_mb / own.peak_mb:.2f}"
        print(f"| {tool} | {c.cpu_s:.2f} | {ratios[0]} | {c.peak_mb:,.0f} | {ratios[1]} | {c.wall_s:.2f} |")


if __name__ == "__main__":
    main()
