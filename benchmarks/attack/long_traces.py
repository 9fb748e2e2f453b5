"""Traces longer than memory is meant for: what they cost, and that the figures stay those of all of their steps.

    python benchmarks/attack/long_traces.py [--mb 3000] [--kernels 5000000]

Generates a PyTorch trace and one of rocprofv3 of so many megabytes, and an Nsight Systems export of so many kernels, in a
temporary folder, and deletes them. Each is explained, then made a page of, in processes of their own. The aim: under 1 GB, and
1.5 GB for the page. The GPU time per step that is shown is compared with what the generator wrote.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GENERATORS = Path(__file__).parent.parent.parent / "tests" / "trace"
KERNELS_PER_STEP = 1980  # of gen_nsys.py's model
LIMITS_MB = {"explain": 1000.0, "report": 1500.0}


def measured(command: list[str]) -> tuple[float, float, str]:
    """CPU seconds, the peak in MB, and what was printed."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-m", "flopwise", *command], stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = out.read()
    if process.returncode:
        raise SystemExit(printed)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6, printed


def attack(path: Path, folder: Path, busy_ns: int, steps: int) -> bool:
    """Print the rows of one trace; whether it kept to the limits and to the truth."""
    cpu_s, peak_mb, printed = measured(["explain", str(path), "--format", "json"])
    found = json.loads(printed)["traces"][0]
    ratio = found["gpu_ns"] / (busy_ns / steps)
    shown = next((note for key, note in zip(found["note_keys"], found["notes"], strict=True) if key == "window"), "")
    size = f"{path.stat().st_size / 1e9:.2f} GB"
    print(f"| explain {path.name} | {size} | {cpu_s:.1f} s | {peak_mb:,.0f} MB | {ratio:.4f} | {shown} |", flush=True)
    kept = peak_mb < LIMITS_MB["explain"] and abs(ratio - 1) < 0.01
    cpu_s, peak_mb, _ = measured(["report", str(path), "-o", str(folder / "page.html")])
    print(f"| report {path.name} | {size} | {cpu_s:.1f} s | {peak_mb:,.0f} MB | | |", flush=True)
    return kept and peak_mb < LIMITS_MB["report"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="FILE", help="t.json, rocprof.json, t.sqlite")
    parser.add_argument("--mb", type=int, default=3000)
    parser.add_argument("--kernels", type=int, default=5_000_000)
    given = parser.parse_args()
    steps = str(max(1, round(given.kernels / KERNELS_PER_STEP)))
    made = {
        "t.json": ("gen_kineto.py", "--mb", str(given.mb), "gpu_busy_ns"),
        "rocprof.json": ("gen_rocprof.py", "--mb", str(given.mb), "busy_ns"),
        "t.sqlite": ("gen_nsys.py", "--steps", steps, "busy_ns"),
    }
    print("| command | file | CPU | peak | GPU time per step, of the truth | note |\n|---|---:|---:|---:|---:|---|")
    kept = []
    for name in given.names or made:
        generator, option, value, busy = made[name]
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / name
            command = [sys.executable, str(GENERATORS / generator), str(path), option, value]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            truth = json.loads(Path(f"{path}.truth.json").read_text())
            kept.append(attack(path, Path(scratch), truth[busy], truth["steps"]))
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
