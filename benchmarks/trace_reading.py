"""How fast, and in how much memory, a PyTorch trace is read.

    python benchmarks/trace_reading.py --mb 1000 [--mode compile] [--stack] [--shapes] [--gzip]

Generates a trace of training steps with known truth, reads it in a process of its own, checks the answer, and prints
one line: megabytes, events, seconds, CPU seconds, peak megabytes.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GENERATOR = Path(__file__).parent.parent / "tests" / "trace" / "gen_kineto.py"

# In a process of its own: the peak is then the reader's alone, interpreter and libraries included.
READ = """
import json, resource, sys, time
from flopwise.trace.kineto import read_kineto
started, cpu = time.perf_counter(), time.process_time()
trace = read_kineto(sys.argv[1])
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
busy = sum(int((t["end_ns"] - t["start_ns"]).sum()) for t in (trace.kernels, trace.copies))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(dict(seconds=seconds, cpu_s=cpu, peak_mb=peak, on_gpu=len(trace.kernels) + len(trace.copies), busy_ns=busy)))
"""


def generated(folder: Path, options: argparse.Namespace) -> tuple[Path, dict[str, int]]:
    """The trace's path and its truth."""
    path = folder / "trace.json"
    flags = [f"--{name}" for name in ("stack", "shapes") if getattr(options, name)]
    subprocess.run(
        [sys.executable, GENERATOR, path, "--mb", str(options.mb), "--mode", options.mode, *flags], check=True
    )
    truth = json.loads(Path(f"{path}.truth.json").read_text())
    if options.gzip:
        with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", 6) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
        path = Path(f"{path}.gz")
    return path, truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=float, default=300, help="size of the trace before gzip")
    parser.add_argument("--mode", default="eager", choices=("eager", "compile", "cudagraph"))
    parser.add_argument("--repeat", type=int, default=1)
    for flag in ("stack", "shapes", "gzip"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, truth = generated(Path(folder), options)
        print(f"{'MB':>8} {'events':>10} {'seconds':>8} {'CPU s':>8} {'peak MB':>8}")
        for _ in range(options.repeat):
            done = subprocess.run([sys.executable, "-c", READ, path], check=True, capture_output=True, text=True)
            found = json.loads(done.stdout)
            assert (found["on_gpu"], found["busy_ns"]) == (truth["kernels"], truth["gpu_busy_ns"]), (
                "not the generated truth"
            )
            print(
                f"{truth['bytes'] / 1e6:8.0f} {truth['events']:10,} {found['seconds']:8.2f} {found['cpu_s']:8.2f}"
                f" {found['peak_mb']:8.0f}"
            )


if __name__ == "__main__":
    main()
