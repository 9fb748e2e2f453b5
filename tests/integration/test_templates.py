"""The templates for many GPUs: they parse, and run as they are, with two ranks over gloo on the CPU."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHELL = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")])
bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@bash
@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_a_template_parses(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_the_page_names_every_template():
    page = (ROOT / "docs" / "how-to" / "many-gpus.md").read_text()
    assert [path.name for path in SHELL if f"examples/{path.name}" not in page] == []
    assert len(SHELL) == 2


def test_the_batch_file_asks_for_what_a_node_has_to_give():
    options = re.findall(r"^#SBATCH --([\w-]+)", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE)
    assert options == ["job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time"]


# Of Slurm, what the batch file calls: one node, this machine.
PLAYED = {"scontrol": 'test "$*" = "show hostnames node[1]" && echo localhost', "srun": 'exec "$@"'}


@bash
@pytest.mark.slow
@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_a_template_measures_two_ranks(script, tmp_path):
    (tmp_path / "bin").mkdir()
    torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
    for name, text in (PLAYED | {"torchrun": torchrun}).items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FLOPWISE_RUNS": str(tmp_path / "runs"),
        "RANKS": "2",
        "PORT": "0",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_JOB_ID": "1",
    }
    command = ["bash", script, "--steps", "5", EXAMPLES / "ddp.py"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert re.search(
        "2 ranks:|of the mean rank's step", " ".join(ended.stdout.split())
    )  # on a busy machine one may hold up the other
    (traces,) = (tmp_path / "runs").glob("*/traces")
    assert sorted(path.name for path in traces.iterdir()) == ["rank0.kineto.json.gz", "rank1.kineto.json.gz"]
