"""Slurm's commands as scripts that run a batch file on this machine at once, and write down what they were asked."""

import itertools
import os
import sys
from pathlib import Path

SBATCH = """
n=$((FIRST + $(ls "$STATE" | grep -c '^job-'))); cp "$1" "$STATE/job-$n.sh"
if [ -e "$STATE/refuse" ]; then cat "$STATE/refuse" >&2; exit 1; fi
export SLURM_JOB_ID=$n SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
setsid bash "$STATE/job-$n.sh" >"$STATE/out-$n" 2>&1 </dev/null & echo $! >"$STATE/pid-$n"
echo "Submitted batch job $n"
"""
SRUN = """
while [ $# -gt 0 ]; do case "$1" in --output|--error) shift 2;; --*) shift;; *) break;; esac; done
exec "$@"
"""
SACCT = """
echo "JobID|State|NodeList"
for file in "$STATE"/pid-*; do n=${file##*-}
  if [ -e "$STATE/state-$n" ]; then s=$(cat "$STATE/state-$n")
  elif kill -0 "$(cat "$file")" 2>/dev/null; then s=RUNNING; else s=COMPLETED; fi
  echo "$n|$s|node1"
done
"""
SCANCEL = """
for n in "$@"; do pid=$(cat "$STATE/pid-$n"); echo "CANCELLED by 0" >"$STATE/state-$n"
  kill -9 -- "-$pid" 2>/dev/null || kill -9 "$pid" 2>/dev/null  # it may not have a group of its own yet
done; true
"""
SINFO = 'echo "$@" >"$STATE/sinfo-asked"; cat "$STATE/nodes"'
COMMANDS = {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scancel": SCANCEL, "sinfo": SINFO, "squeue": "true"}


_HUNDREDS = itertools.count(100, 100)  # submitit remembers the state of every job by its number


class PlayedSlurm:
    """A folder with the commands, and one with what they know."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.bin, self.state, self.first = folder / "bin", folder / "state", next(_HUNDREDS)
        for made in (self.bin, self.state):
            made.mkdir(parents=True)
        (self.state / "nodes").write_text(nodes)
        for name, text in COMMANDS.items():
            (self.bin / name).write_text(f"#!/bin/bash\nSTATE={self.state} FIRST={self.first}\n{text}")
            (self.bin / name).chmod(0o755)
        self.path = f"{self.bin}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def jobs(self) -> list[str]:
        """The batch files, in the order submitted."""
        return [path.read_text() for path in sorted(self.state.glob("job-*.sh"), key=lambda p: int(p.stem[4:]))]

    def running(self) -> list[int]:
        """The jobs whose process is there."""
        return [pid for path in self.state.glob("pid-*") if _alive(pid := int(path.read_text()))]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
