"""Where trials run: on this machine, on a Ray cluster, or as jobs of Slurm. A cluster's software is loaded when it is named."""

from pathlib import Path

from flopwise.capture.runners.cluster import ClusterRunner
from flopwise.capture.runners.local import LocalRunner
from flopwise.capture.runners.runner import Runner
from flopwise.errors import FlopwiseError
from flopwise.spec import fields

LOCAL, RAY, SLURM = "local", "ray", "slurm"
RUNNERS = f"{LOCAL}, {RAY}, ray://HOST:PORT, {SLURM}"


def open_runner(on: str, shared: Path) -> Runner:
    """The runner that `--on` names. `shared`: a folder for a cluster's own files, which its nodes see."""
    return LocalRunner() if on == LOCAL else open_cluster(on, shared)


def open_cluster(on: str, shared: Path) -> ClusterRunner:
    """The cluster that `--on` names; one line where it is not installed, or does not answer."""
    if on == SLURM:
        from flopwise.capture.runners.slurm import SlurmCluster

        return ClusterRunner(SlurmCluster(shared))
    if on == RAY or (isinstance(on, str) and on.startswith("ray://")):
        from flopwise.capture.runners.ray import RayCluster

        return ClusterRunner(RayCluster(on if on != RAY else ""))
    raise FlopwiseError(f"on = {fields.show(on)} is not allowed", f"allowed: {RUNNERS}")
