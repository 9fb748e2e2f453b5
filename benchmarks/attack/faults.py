"""`sweep` and `train` among faults, for as long as you like: the table must be the one of a quiet run.

    python benchmarks/attack/faults.py [--minutes 60] [--seed 0] [--keep FOLDER]

Faults: the program is killed (SIGKILL) at random moments; one of the processes below it is, every few seconds; the disk is
full for seconds; the clock jumps by hours. The steps of the sweep leave processes in sessions of their own behind. After
every end of the program, whatever carries its mark in the environment and still runs is an orphan. Runs are on a small disk
in memory, for which it needs `unshare -rm`. Linux only. Ends with 1 if anything was lost, doubled, torn, left or different.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from flopwise.keeper import descendants
from flopwise.store import StoredRun
from flopwise.store.training import read_training

INSIDE, MARK = "FLOPWISE_FAULTS_DISK", "FLOPWISE_FAULTS_MARK"
DISK_MIB = 96
ROWS, LONG_ROWS_PER_S, STEPS = 8, 0.5, 24
ATTEMPTS = 60  # of a command that is ended again and again
ORPHAN_S = 10.0  # until what still runs is an orphan

LEAVE = """
import os, time, torch

def leave():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
"""
STEP = f"""{LEAVE}
def step(device, batch):
    x = torch.randn(64, 64, device=device)

    def run():
        leave()
        time.sleep(0.02)
        return x @ x

    return run
"""

CLOCK = """
import datetime, random, time
real, real_ns, chance = time.time, time.time_ns, random.Random()
offset = 0.0

def jump():
    global offset
    if chance.random() < 0.2:
        offset = chance.uniform(-7200.0, 7200.0)
    return offset

class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=jump())

time.time = lambda: real() + jump()
time.time_ns = lambda: real_ns() + int(jump() * 1e9)
datetime.datetime = Jumping
"""

Table = object
Fault = Callable[["Program"], None]


class Program:
    """One run of the program, with a mark that all it starts inherits."""

    def __init__(self, words: list[str], folder: Path, clock: bool) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        path = [str(folder / "clock")] if clock else []
        path += [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
        environment = os.environ | {MARK: self.mark, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        self.said = folder / "said"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)
        self.begun = time.monotonic()

    @property
    def age(self) -> float:
        return time.monotonic() - self.begun

    def memory_mb(self) -> float:
        """What it has written to; pages of files come and go with the system's needs."""
        try:
            found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        except OSError:
            return 0.0
        return int(found[1]) * 1024 / 1e6 if found else 0.0

    def orphans(self) -> list[int]:
        """Processes with its mark that still run a while after its end; they are ended here."""
        deadline, left = time.monotonic() + ORPHAN_S, self.marked()
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self.marked()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left

    def marked(self) -> list[int]:
        """Processes with its mark that have not ended."""
        wanted, found = f"{MARK}={self.mark}\0".encode(), []
        for place in Path("/proc").iterdir():
            try:
                if place.name.isdigit() and wanted in (place / "environ").read_bytes():
                    state = (place / "stat").read_bytes().rpartition(b")")[2].split()[0]
                    found += [int(place.name)] if state not in (b"Z", b"X") else []
            except OSError:
                continue
        return found


class Attack:
    """Runs commands among faults, and counts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.counts = folder, random.Random(seed), Counter[str]()
        self.filler = folder / "filler"
        self.memory: list[tuple[float, float, float]] = []
        self.problems: list[str] = []

    # Faults: each is asked again and again while the program runs.

    def quiet(self) -> Fault:
        return lambda program: None

    def kill_program(self) -> Fault:
        at = self.random.choice((self.random.uniform(0.1, 3.0), self.random.uniform(3.0, 25.0)))

        def fault(program: Program) -> None:
            if program.age > at and program.process.poll() is None:
                program.process.kill()
                self.counts["program killed"] += 1

        return fault

    def kill_below(self, low_s: float = 3.0, high_s: float = 20.0) -> Fault:
        due = time.monotonic() + self.random.uniform(low_s, high_s)

        def fault(program: Program) -> None:
            nonlocal due
            if time.monotonic() > due and (below := descendants(program.process.pid)):
                place = min(self.random.choice((0, 1, 2, 2, 2, 3, 3)), len(below) - 1)
                try:
                    os.kill(below[place], signal.SIGKILL)
                except ProcessLookupError:
                    return
                self.counts[("keeper", "worker", "step", "left by the step")[place] + " killed"] += 1
                due = time.monotonic() + self.random.uniform(low_s, high_s)

        return fault

    def fill_disk(self) -> Fault:
        begin = time.monotonic() + self.random.uniform(0.5, 20.0)
        end = begin + self.random.uniform(1.0, 8.0)
        filled = False

        def fault(program: Program) -> None:
            nonlocal filled
            if not filled and begin < time.monotonic() < end:
                filled = True
                self.counts["disk full"] += 1
                fill(self.filler)
            elif filled and time.monotonic() > end:
                self.filler.unlink(missing_ok=True)

        return fault

    # One command, ended or not.

    def run(self, words: list[str], *faults: Fault, clock: bool = False, long: bool = False) -> int:
        self.counts["programs started"] += 1
        self.counts["of them with a jumping clock"] += clock
        program, memory = Program([sys.executable, "-m", "flopwise", *words], self.folder, clock), list[float]()
        while program.process.poll() is None:
            for fault in faults:
                fault(program)
            if long and program.age > 60.0:  # all is loaded
                memory += [mb] if (mb := program.memory_mb()) else []
            time.sleep(0.05 if program.age < 30 else 0.2)
        self.filler.unlink(missing_ok=True)
        if memory:
            self.memory.append((memory[0], median(memory), max(memory)))
        if left := program.orphans():
            self.counts["orphans"] += len(left)
            self.problems.append(f"{len(left)} orphans after {' '.join(words[:2])}")
        said = program.said.read_text(errors="replace")
        if "Traceback" in said or "internal error" in said:
            self.counts["tracebacks"] += 1
            self.problems.append(said[-600:])
        return program.process.returncode

    # What is compared.

    def swept(self, file: Path, runs: Path, faults: Callable[[], list[Fault]], clock: bool, long: bool = False) -> None:
        """The sweep until its table is whole; then what is wrong with it."""
        words = ["sweep", str(file), "--runs", str(runs), "--retry-failed", "--quiet"]
        for _ in range(ATTEMPTS):
            self.run(words, *faults(), clock=clock, long=long)
            if (table := sweep_table(runs)) is not None and all(status == "ok" for status, _ in table.values()):
                break
        self.run(words)  # without faults: there is nothing left to do
        self._judge_sweep(file, runs)

    def _judge_sweep(self, file: Path, runs: Path) -> None:
        found = [StoredRun.load(path) for path in runs_in(runs)]
        whole = [run for run in found if run.complete]
        self.counts["runs that were begun twice"] += len(found) - 1
        if len(whole) != 1:
            self.problems.append(f"{file.name}: {len(whole)} whole runs of {len(found)}")
            self.counts["tables that differ"] += 1
            return
        run, planned = whole[0], [trial.key() for trial in whole[0].header.trials]
        ok = Counter(re.findall(rb'"key":"([^"]+)"', b"\n".join(ok_lines(run.path / "points.jsonl"))))
        self.counts["rows"] += len(planned)
        self.counts["rows lost"] += sum(key not in {p.key for p in run.points if p.status == "ok"} for key in planned)
        self.counts["rows doubled"] += sum(ok[key.encode()] > 1 for key in planned)
        self.counts["rows torn"] += len(run.warnings)
        self.counts["scratch left"] += sum("partial-" in path.name for path in run.path.rglob("*"))
        differs = sweep_table(runs) != dict.fromkeys(planned, ("ok", 10)) or run.warnings
        self.counts["tables that differ"] += bool(differs)
        if differs:
            self.problems.append(f"{file.name}: {run.warnings} {sweep_table(runs)}")

    def trained(self, text: Path, runs: Path, faults: Callable[[], list[Fault]], clock: bool, quiet: Table) -> Table:
        """The training until it has all of its steps; whether its losses are those of the quiet one, to the bit."""
        new = [
            "train",
            "tiny",
            "--text",
            str(text),
            "--steps",
            str(STEPS),
            "--checkpoint-every",
            "4",
            "--log-every",
            "1",
        ]
        new += ["--batch", "2", "--context", "32", "--device", "cpu", "--quiet", "--runs", str(runs)]
        losses: Table = None
        for attempt in range(ATTEMPTS + 1):
            last = newest_training(runs)
            words = ["train", "--resume", str(last), "--quiet", "--runs", str(runs), "--device", "cpu"] if last else new
            self.run(words, *(faults() if attempt < ATTEMPTS else ()), clock=clock)  # the last one without faults
            if (last := newest_training(runs)) and len(losses := training_table(last)) >= STEPS:
                break
        if quiet is not None:
            self.counts["rows"] += STEPS
            self.counts["tables that differ"] += losses != quiet
            if losses != quiet:
                self.problems.append(f"train: {losses}")
        return losses


def fill(path: Path) -> None:
    """Until nothing more fits, to the byte."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for size in (1 << 20, 1 << 12, 1):
            with_room = True
            while with_room:
                try:
                    with_room = os.write(fd, bytes(size)) == size
                except OSError:
                    with_room = False
    finally:
        os.close(fd)


def runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/run.json")) if folder.is_dir() else []


def ok_lines(path: Path) -> Iterator[bytes]:
    return (line for line in path.read_bytes().splitlines() if b'"status":"ok"' in line)


def sweep_table(runs: Path) -> dict[str, tuple[str, int]] | None:
    """Of the last run: for every point how it ended and how many samples it has; None before it is whole."""
    found = runs_in(runs)
    run = StoredRun.load(found[-1]) if found else None
    if run is None or not run.complete:
        return None
    samples = {point.key: len(point.times().wall_ns) if point.phases else 0 for point in run.points}  # type: ignore[union-attr]
    return {point.key: (point.status, samples[point.key]) for point in run.points}


def newest_training(runs: Path) -> Path | None:
    """A training with a checkpoint to go on from."""
    return next((path for path in reversed(runs_in(runs)) if list(path.glob("checkpoint*/*"))), None)


def training_table(run: Path) -> list[tuple[int, float]]:
    return [(row.step, row.loss) for row in read_training(run).steps]


def sweep_file(folder: Path, name: str, rows: int) -> Path:
    file = folder / f"{name}.toml"
    batches = ", ".join(str(n) for n in range(1, rows + 1))
    file.write_text(
        f'name = "{name}"\n[base]\nworkload = "{folder / "own_step.py"}:step"\ndevice = "cpu"\n'
        f"warmup = 1\nsamples = 10\nbatch = [{batches}]\n"
    )
    return file


def attack(folder: Path, minutes: float, seed: int, log: Path) -> Attack:
    """A long sweep in one program first, for a third of the time; then short ones and trainings."""
    (folder / "own_step.py").write_text(STEP)
    (folder / "clock").mkdir(exist_ok=True)
    (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
    words = random.Random(0)
    text = folder / "book.txt"
    text.write_text(" ".join(words.choice(("the", "step", "is", "slow", "why", "memory", "wait")) for _ in range(9000)))
    begun, made = time.monotonic(), Attack(folder, seed)
    quiet = made.trained(text, folder / "quiet", list, False, None)
    print(f"quiet training: {quiet}", flush=True)
    rows = max(ROWS, int(minutes * 60 / 3 * LONG_ROWS_PER_S))
    every = (5.0, 20.0) if minutes < 10 else (20.0, 60.0)
    made.swept(sweep_file(folder, "long", rows), folder / "long", lambda: [made.kill_below(*every)], True, long=True)
    report(made, begun, log)
    number = 0
    while time.monotonic() - begun < minutes * 60:
        number += 1
        kinds: list[Callable[[], list[Fault]]] = [
            lambda: [made.kill_program()],
            lambda: [made.kill_below()],
            lambda: [made.fill_disk()],
            lambda: [made.fill_disk(), made.kill_program()],
            lambda: [made.fill_disk(), made.kill_below()],
        ]
        faults, clock = kinds[number % len(kinds)], made.random.random() < 0.5
        runs = folder / f"runs-{number}"
        if number % 3:
            made.swept(sweep_file(folder, f"sweep-{number}", ROWS), runs, faults, clock)
        else:
            made.trained(text, runs, faults, clock, quiet)
        shutil.rmtree(runs)
        made.counts["rounds"] += 1
        report(made, begun, log)
    return made


def report(made: Attack, begun: float, log: Path) -> None:
    counts = made.counts
    wrong = ("rows lost", "rows doubled", "rows torn", "tables that differ", "orphans", "tracebacks", "scratch left")
    lines = [f"| minutes | {(time.monotonic() - begun) / 60:.0f} |"]
    lines += [f"| {name} | {counts[name]:,} |" for name in sorted(counts) if name not in wrong]
    lines += [f"| {name} | {counts[name]:,} |" for name in wrong]
    memory = "program's memory in the long sweep, MB: after a minute, median, most (as the table is shown)"
    lines += [f"| {memory} | {', '.join(f'{mb:.1f}' for mb in of)} |" for of in made.memory]
    log.write_text("\n".join(["| | |", "|---|---:|", *lines, "", *made.problems, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("faults.md"), help="the counts, written after every round")
    given = parser.parse_args()
    if INSIDE not in os.environ:  # once more, where a small disk in memory can be mounted that nobody else sees
        with tempfile.TemporaryDirectory() as disk:
            mount = f"mount -t tmpfs -o size={DISK_MIB}m faults {disk}"
            words = [sys.executable, *sys.argv[:1], "--log", str(given.log.resolve())]
            words += ["--minutes", str(given.minutes), "--seed", str(given.seed)]
            command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *words]
            sys.exit(subprocess.run(command, env=os.environ | {INSIDE: disk}, check=False).returncode)
    disk = Path(os.environ.pop(INSIDE))
    os.environ["TMPDIR"] = str(disk)
    made = attack(disk, given.minutes, given.seed, given.log)
    print(given.log.read_text())
    wrong = [made.counts[name] for name in ("rows lost", "rows doubled", "rows torn", "tables that differ", "orphans")]
    sys.exit(1 if any(wrong) else 0)


if __name__ == "__main__":
    main()
