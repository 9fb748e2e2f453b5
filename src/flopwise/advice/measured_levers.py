"""The levers of plain PyTorch that save most of a measured step, predicted from its clocks."""

from flopwise.advice.facts import Facts
from flopwise.advice.predicted import baseline, predicted_change
from flopwise.analysis.clocks import gpu_name
from flopwise.analysis.reach import Reach, point_reach
from flopwise.predict.machine import find_ceilings
from flopwise.predict.plain_levers import LeverSaving, SavingNs, best_levers, by_layers
from flopwise.records.run import Point
from flopwise.spec.gpu import Gpu, find_gpu


def measured_reach(point: Point) -> tuple[Reach, tuple[LeverSaving, ...]]:
    """A measured step now, with all levers that are predicted to save time, and at its limit; and those levers."""
    gpu = find_gpu(gpu_name(point)) if gpu_name(point) else None
    best = measured_levers(point, gpu) if gpu is not None else ()
    return point_reach(point, [one.saving_ns for one in best]), best


def measured_levers(point: Point, gpu: Gpu) -> tuple[LeverSaving, ...]:
    """None where the step cannot be predicted: it is not our own model's, or the GPU's limits are not known."""
    facts = Facts(point=point, ceilings=find_ceilings(gpu), gpu=gpu)
    start, step_ns = baseline(facts), facts.untraced_ns
    if start is None or not step_ns:
        return ()

    def with_layers(n: int) -> SavingNs:
        of = start.with_layers(n) if n != start.layers else start

        def saving_ns(levers: dict[str, str]) -> float | None:
            change = predicted_change(facts, levers, of)
            return change.saving_ns if change is not None else None

        return saving_ns

    return best_levers(start.workload.recipe, step_ns, by_layers(with_layers, start.layers))
