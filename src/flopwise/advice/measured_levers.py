"""The levers of plain PyTorch that save most of a measured step, predicted from its clocks."""

from flopwise.advice.facts import Facts
from flopwise.advice.predicted import baseline, predicted_change
from flopwise.predict.machine import find_ceilings
from flopwise.predict.plain_levers import LeverSaving, SavingNs, best_levers, by_layers
from flopwise.records.run import Point
from flopwise.spec.gpu import Gpu


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
