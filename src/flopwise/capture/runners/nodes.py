"""What a trial needs, what a cluster's nodes have, and the share of one node that a trial is given. Pure arithmetic."""

from collections.abc import Sequence

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec.workload import Trial


class Node(msgspec.Struct, frozen=True):
    """One machine of a cluster: all that it has, free or in use."""

    cpus: int
    gpus: int = 0


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """What one job asks of a node."""

    device: str = "auto"  # auto: a GPU where the cluster has any
    ranks: int = 1
    minutes: int = 60  # at most


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is given of one node."""

    cpus: int
    gpus: int = 0
    whole: bool = False  # nothing else runs on that node
    minutes: int = 60

    def fits(self, node: Node) -> bool:
        return self.cpus <= node.cpus and self.gpus <= node.gpus


START_S = 300.0  # importing torch from a cold network file system, and sending the results back


def trial_needs(trial: Trial) -> Needs:
    """A trial's own limits, and the time to start it."""
    seconds = (trial.sampling.processes or 1) * trial.sampling.timeout_s + START_S
    return Needs(device=trial.device, ranks=trial.workload.recipe.ranks, minutes=int(seconds // 60) + 1)


def share(needs: Needs, nodes: Sequence[Node]) -> Share:
    """What such a job is given on any of the nodes that can run it; raises where none ever can.

    One rank on a GPU has that GPU, and the CPUs of the node that fall to a GPU. A trial on the CPU, and one of several
    ranks, has a node for itself, as its neighbours would slow it down: the largest kind of node there is, so that all
    trials of a sweep meet the same hardware.

    >>> share(Needs(device="cuda"), [Node(96, 8)])
    Share(cpus=12, gpus=1, whole=False, minutes=60)
    >>> share(Needs(device="cpu"), [Node(96, 8), Node(32)]).cpus
    96
    """
    on_gpu = needs.device != "cpu" and (needs.device != "auto" or any(node.gpus for node in nodes))
    _refuse_what_never_runs(needs, nodes, on_gpu)
    able = [node for node in nodes if not on_gpu or node.gpus >= needs.ranks]
    if on_gpu and needs.ranks == 1:
        return Share(cpus=min(node.cpus // node.gpus for node in able), gpus=1, minutes=needs.minutes)
    largest = max(able, key=lambda node: (node.gpus if on_gpu else 0, node.cpus))
    return Share(cpus=largest.cpus, gpus=largest.gpus if on_gpu else 0, whole=True, minutes=needs.minutes)


def _refuse_what_never_runs(needs: Needs, nodes: Sequence[Node], on_gpu: bool) -> None:
    if ":" in needs.device:
        named = f"device = '{needs.device}' names one GPU of a machine, and a cluster assigns them"
        raise FlopwiseError(named, "allowed: auto, cpu, cuda")
    if not any(node.cpus for node in nodes):
        raise FlopwiseError(
            "the cluster has no node that is up, with a CPU to give", "ray status, or sinfo, lists them"
        )
    most = max(node.gpus for node in nodes)
    if on_gpu and needs.ranks > most:
        wanted = "a GPU" if needs.ranks == 1 else f"{needs.ranks} GPUs on one node"
        there = f"the most on one is {most}" if most else "there is none"
        raise FlopwiseError(
            f"the cluster can never run this: it needs {wanted}, and of {len(nodes)} nodes {there}",
            "allowed: --device cpu, or a cluster that has them",
        )
