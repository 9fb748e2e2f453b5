"""Kill the program (SIGKILL) at many moments, in every verb that runs something: what still runs ten seconds later?

    python benchmarks/attack/orphans.py [VERB ...] [--kills 5]

Every step, and the script of `run`, leaves processes in sessions of their own behind. nsys is played by a program of its
name, if there is none; Ray by one on this machine. Prints a row for every verb; ends with 1 if anything was left.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import LEAVE, STEP, Program

SCRIPT = f"""{LEAVE}
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
leave()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100_000):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
"""

NSYS = """#!{python}
import os, subprocess, sys, time
words = sys.argv[1:]
if "--version" in words:
    print("NVIDIA Nsight Systems version 2026.2.1.1")
elif words[0] == "profile" and "--help" not in words:
    if os.fork() == 0:  # as the agent of nsys does
        os.setsid()
        time.sleep(600)
    at = next(i for i, word in enumerate(words) if i and not word.startswith("--"))
    subprocess.run(words[at:])
    time.sleep(600)
"""


ON_CPU = """
from flopwise.api import profile
from flopwise.capture import traced_trial
for module in (profile, traced_trial):
    module.check_device = lambda device: None  # which has no GPU for nsys to see
from flopwise.__main__ import main
main()
"""

# Processes that run when the step does; at most so long is waited for them: a loaded machine takes its time.
STARTS_S, BUSY, BUSY_OF = (
    90.0,
    4,
    {"sweep --on ray": 16, "bench, two ranks": 7, "bench, in pairs": 8, "train": 1, "profile --with nsys": 6},
)


def commands(folder: Path) -> dict[str, list[str]]:
    step, flopwise = f"{folder}/own_step.py:step", [sys.executable, "-m", "flopwise"]
    own = [step, "--set", "batch=2", "--device", "cpu", "--runs", str(folder / "runs")]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "flopwise",
    ]
    train = ["train", "tiny", "--text", f"{folder}/book.txt", "--steps", "100000", "--device", "cpu"]
    train += ["--batch", "1", "--context", "32", "--runs", str(folder / "runs")]
    return {
        "bench": [*flopwise, "bench", *own, "--seconds", "100"],
        "bench, in pairs": [*flopwise, "bench", *own, "--seconds", "100", "--versus", "batch=1"],
        "bench, two ranks": [*flopwise, "bench", "tiny", "--parallel", "ddp", "--ranks", "2", "--device", "cpu",
                             "--seconds", "100", "--runs", str(folder / "runs")],
        "sweep": [*flopwise, "sweep", f"{folder}/sweep.toml", "--runs", str(folder / "runs")],
        "sweep --on ray": [*flopwise, "sweep", f"{folder}/sweep.toml", "--on", "ray", "--runs", str(folder / "runs")],
        "profile": [*flopwise, "profile", *own, "--seconds", "100"],
        "profile --with nsys": [sys.executable, "-c", ON_CPU, "profile", *own, "--with", "nsys", "--seconds", "1"],
        "memory": [*flopwise, "memory", *own, "--steps", "1000"],
        "tune": [*flopwise, "tune", *own, "--seconds", "100"],
        "run": [*flopwise, "run", "--runs", str(folder / "runs"), "--continue", f"{folder}/script.py"],
        "run, torchrun": [*torchrun, "run", "--runs", str(folder / "runs"), "--continue", f"{folder}/script.py"],
        "train": [*flopwise, *train],
        "train, torchrun": [*torchrun, *train],
    }  # fmt: skip


def kill(words: list[str], folder: Path, after_s: float, busy: int) -> tuple[int, int, str]:
    """How many processes there were when the program was killed, how many were left, and what it said.

    The time counts from when so many processes are `busy`.
    """
    program = Program(words, folder, clock=False)
    while program.age < STARTS_S and program.process.poll() is None and len(program.marked()) < busy:
        time.sleep(0.3)
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline and program.process.poll() is None:
        time.sleep(0.01)
    there = len(program.marked())
    program.process.kill()
    program.process.wait()
    return there, len(program.orphans()), program.said.read_text(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verbs", nargs="*", metavar="VERB")
    parser.add_argument("--kills", type=int, default=5)
    given, chance = parser.parse_args(), random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "own_step.py").write_text(STEP)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "book.txt").write_text("why is this step so slow and what is its limit " * 900)
        (folder / "sweep.toml").write_text(
            f'name = "killed"\n[base]\nworkload = "{folder}/own_step.py:step"\ndevice = "cpu"\nseconds = 9.0\nbatch = [1, 2, 3]\n'
        )
        if subprocess.run(["which", "nsys"], capture_output=True, check=False).returncode:
            (folder / "nsys").write_text(NSYS.format(python=sys.executable))
            (folder / "nsys").chmod(0o755)
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        print("| command | kills | processes there, most | left |\n|---|---:|---:|---:|", flush=True)
        total = 0
        for verb, words in commands(folder).items():
            if given.verbs and verb not in given.verbs:
                continue
            # Half of the kills while it starts, half while the step runs.
            found = [
                kill(words, folder, chance.uniform(0.05, 4.0), n % 2 * BUSY_OF.get(verb, BUSY))
                for n in range(given.kills)
            ]
            left = sum(orphans for _, orphans, _ in found)
            total += left
            print(f"| `{verb}` | {given.kills} | {max(there for there, _, _ in found)} | {left} |", flush=True)
            if max(there for there, _, _ in found) < 3:
                print(found[-1][2][-400:], file=sys.stderr)
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
