"""What a trace costs to read and explain, in flopwise and in its peers, on one and the same generated file.

    python benchmarks/trace_reading.py [--mb 100] [--kernels N] [--peers PYTHON] [--repeat N]
                                       [--mode compile] [--stack] [--shapes] [--gzip] [--emit-nvtx]

`--mb` is the size of a PyTorch (Kineto) trace before gzip, 0 for none; `--kernels` adds an Nsight Systems export with
about that many kernels. Both hold training steps with known truth. `--peers` names the interpreter of an environment
with the peers, made so (HTA 0.5.0 fails under pandas 3; nsys-ai falls back to a slower path where DuckDB has no
`sqlite_scanner`, which it would otherwise download):

    python -m venv peers
    peers/bin/pip install HolisticTraceAnalysis "pandas<3" nsys-ai duckdb==1.5.5 duckdb-extension-sqlite-scanner==1.5.5

What each is asked to do, each in a process of its own, interpreter start and imports included:

    flopwise            read_trace, then explain_trace: attribution, steps, GPU time by phase, class and module, the top
                        kernels, idle time by cause
    HTA                 TraceAnalysis(trace_dir, include_last_profiler_step=True).get_gpu_kernel_breakdown(): GPU time
                        by kind of kernel and the top kernels; one rank, plots off
    nsys-ai summary     span, busy time and the top kernels
    nsys-ai diagnose    its default analysis: ranked findings as JSON; once cold, once with the cache the first left

CPU seconds are user + system, peak is the resident set, both as the kernel counted them for the process and its
children. With `--repeat`, the run with the fewest CPU seconds counts. 'GPU time' is what the tool found of the truth.
TraceLens (AMD-AGI/TraceLens) is not compared: the `TraceLens` of PyPI is another project.
"""

import argparse
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GENERATORS = Path(__file__).parent.parent / "tests" / "trace"
KERNELS_PER_STEP = 1980  # of gen_nsys.py's model

# A tool may end its output with a JSON line: the GPU nanoseconds it found; flopwise's reader must find all of them.
FLOPWISE = """
import json, sys
from flopwise.analysis.explanation import explain_trace
from flopwise.trace.read import read_trace
trace = read_trace(sys.argv[1])
found = explain_trace(trace)
read_ns = sum(int((t["end_ns"] - t["start_ns"]).sum()) for t in (trace.kernels, trace.copies))
print(json.dumps({"gpu_ns": found.gpu_ns * found.steady_steps, "read_ns": read_ns}))
"""
HTA = """
import json, os, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=os.path.dirname(sys.argv[1]), include_last_profiler_step=True)
kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
print(json.dumps({"gpu_ns": 1000 * float(kinds["sum"].sum())}))
"""
# Not measured: what nsys-ai would download, where the environment brings it along.
DUCKDB = """
import duckdb, duckdb_extension_sqlite_scanner as package, pathlib
for path in pathlib.Path(package.__file__).parent.rglob(f"v{duckdb.__version__}/*.duckdb_extension"):
    duckdb.execute(f"INSTALL '{path}'")
"""
VERSIONS = """
import importlib.metadata as m, json, platform, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({"Python": platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))
"""
OWN = """
import json, platform
import flopwise.version, numpy, polars
print(json.dumps({"Python": platform.python_version(), "flopwise": flopwise.version.__version__,
                  "polars": polars.__version__, "numpy": numpy.__version__}))
"""


@dataclass(frozen=True)
class File:
    """A generated trace."""

    path: Path
    events: int
    what: str
    gpu_ns: int


@dataclass(frozen=True)
class Tool:
    name: str
    command: list[str]
    fresh: bool = True  # gets a copy of the trace that no tool has seen


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    wall_s: float
    peak_mb: float
    answer: dict[str, float]
    failure: str


def kineto(folder: Path, options: argparse.Namespace) -> File:
    path = folder / "trace.json"
    flags = [f"--{name}" for name in ("stack", "shapes") if getattr(options, name)]
    arguments = ["--mb", str(options.mb), "--mode", options.mode, *flags]
    subprocess.run([sys.executable, GENERATORS / "gen_kineto.py", path, *arguments], check=True)
    truth = json.loads(Path(f"{path}.truth.json").read_text())
    if options.gzip:
        with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", 6) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
        path.unlink()
        path = Path(f"{path}.gz")
    return File(path, truth["events"], f"Kineto, {options.mode}", truth["gpu_busy_ns"])


def nsys(folder: Path, options: argparse.Namespace) -> File:
    path = folder / "trace.sqlite"
    steps = max(1, round(options.kernels / KERNELS_PER_STEP))
    flags = ["--emit-nvtx"] if options.emit_nvtx else []
    command = [sys.executable, str(GENERATORS / "gen_nsys.py"), str(path), "--steps", str(steps), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    truth = json.loads(Path(f"{path}.truth.json").read_text())
    rows = truth["kernels"] + truth["nvtx"] + truth["runtime"]
    return File(path, rows, f"Nsight Systems, {truth['kernels']:,} kernels", truth["busy_ns"])


def cost(command: list[str], folder: Path, environment: dict[str, str] | None) -> Cost:
    """One process; the generators ran in others, so this one is small and its peak does not shine through.

    A peer gets its own environment, and leaves its files in `folder`; flopwise runs where this script does.
    """
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=out, stderr=err, cwd=folder if environment else None, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        lines, complaints = out.read().splitlines(), err.read().splitlines()
    answered = not process.returncode and lines and lines[-1].startswith('{"gpu_ns"')
    answer: dict[str, float] = json.loads(lines[-1]) if answered else {}
    failure = f"failed: {complaints[-1] if complaints else process.returncode}" if process.returncode else ""
    peak = usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e6 / 1024)
    return Cost(usage.ru_utime + usage.ru_stime, wall, peak, answer, failure)


def measured(file: File, tools: list[Tool], repeat: int, environment: dict[str, str]) -> list[Cost]:
    best: dict[str, Cost] = {}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for number, tool in enumerate(tools):
                own = folder / str(number if tool.fresh else number - 1)
                (own / "trace").mkdir(parents=True, exist_ok=True)
                path = own / "trace" / file.path.name
                if not path.exists():
                    shutil.copyfile(file.path, path)
                own_environment = environment if number else None
                now = cost([*(str(path) if part == "{}" else part for part in tool.command)], own, own_environment)
                if tool.name not in best or now.cpu_s < best[tool.name].cpu_s:
                    best[tool.name] = now
                if number + 1 == len(tools) or tools[number + 1].fresh:
                    shutil.rmtree(own)
    return [best[tool.name] for tool in tools]


def table(file: File, tools: list[Tool], costs: list[Cost]) -> None:
    """Ratios are the peer's over flopwise's, which comes first."""
    own = costs[0]
    if own.answer.get("read_ns") != file.gpu_ns:
        raise SystemExit(f"flopwise did not read the generated truth: {own}")
    print(f"\n{file.what}: {file.path.stat().st_size / 1e6:,.0f} MB, {file.events:,} events\n")
    print("| tool | CPU s | × | peak MB | × | wall s | GPU time |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for tool, c in zip(tools, costs, strict=True):
        if c.failure:
            print(f"| {tool.name} | {c.failure} | | | | | |")
            continue
        found = f"{c.answer['gpu_ns'] / file.gpu_ns:.2%}" if c.answer else "–"
        ratios = f"{c.cpu_s / own.cpu_s:.1f}", f"{c.peak_mb / own.peak_mb:.1f}"
        print(
            f"| {tool.name} | {c.cpu_s:.2f} | {ratios[0]} | {c.peak_mb:,.0f} | {ratios[1]} | {c.wall_s:.2f} | {found} |"
        )


def said(command: list[str]) -> dict[str, str | None]:
    answer: dict[str, str | None] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return answer


def line(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=float, default=100, help="size of the Kineto trace before gzip; 0 for none")
    parser.add_argument("--kernels", type=int, default=0, help="of the Nsight Systems export; 0 for none")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter of an environment with the peers")
    parser.add_argument("--mode", default="eager", choices=("eager", "compile", "cudagraph"))
    parser.add_argument("--repeat", type=int, default=1)
    for flag in ("stack", "shapes", "gzip", "emit-nvtx"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()

    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load before the run {load}")
    print(line(said([sys.executable, "-c", OWN])))
    peers: dict[str, str | None] = {}
    if options.peers:
        names = ("HolisticTraceAnalysis", "nsys-ai", "pandas", "duckdb", "duckdb-extension-sqlite-scanner")
        peers = said([options.peers, "-c", VERSIONS, *names])
        print(f"peers: {line(peers)}")

    flopwise = Tool("flopwise", [sys.executable, "-c", FLOPWISE, "{}"])
    kinds: list[tuple[Callable[[Path, argparse.Namespace], File], list[Tool]]] = []
    if options.mb:
        hta = [Tool("HTA", [options.peers, "-c", HTA, "{}"])] if peers.get("HolisticTraceAnalysis") else []
        kinds.append((kineto, [flopwise, *hta]))
    if options.kernels:
        ai = [options.peers, "-m", "nsys_ai"]
        diagnose = [*ai, "diagnose", "{}", "--format", "json"]
        both = [
            Tool("nsys-ai summary", [*ai, "summary", "{}"]),
            Tool("nsys-ai diagnose", diagnose),
            Tool("nsys-ai diagnose, again", diagnose, fresh=False),
        ]
        kinds.append((nsys, [flopwise, *(both if peers.get("nsys-ai") else [])]))
    with tempfile.TemporaryDirectory() as home:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": home}
        if peers.get("duckdb-extension-sqlite-scanner"):
            subprocess.run([options.peers, "-c", DUCKDB], check=True, env=environment)
        for generated, tools in kinds:
            with tempfile.TemporaryDirectory() as folder:
                file = generated(Path(folder), options)
                table(file, tools, measured(file, tools, options.repeat, environment))


if __name__ == "__main__":
    main()
