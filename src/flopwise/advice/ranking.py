"""Which lever to try next: what each move from the best step so far is predicted to save, for the time that trying takes."""

from collections.abc import Sequence

import msgspec

from flopwise.advice.constants import HOST_SHOWS, HOST_WOULD_SHOW
from flopwise.advice.facts import Facts
from flopwise.advice.moves import Move, seconds_to_try
from flopwise.advice.predicted import PredictedChange, baseline, predicted_change
from flopwise.predict.constants import DEEP_LAYERS, SHALLOW_LAYERS
from flopwise.predict.prediction import peak_bytes
from flopwise.records.finding import Finding
from flopwise.records.run import Point


class MoveRanking:
    """Predictions for the moves from one step; each is computed when it is first asked for, and kept here."""

    def __init__(self, facts: Facts, findings: Sequence[Finding] = ()) -> None:
        self.facts, self.findings = facts, tuple(findings)
        self.start = baseline(facts)
        self._changes: dict[str, PredictedChange | None] = {}
        self._layers = self.start.layers if self.start is not None else 0
        deep = self.start is not None and self._layers > DEEP_LAYERS
        self.shallow = [self.start.with_layers(n) for n in SHALLOW_LAYERS] if self.start is not None and deep else []

    def after(self, point: Point) -> "MoveRanking":
        """From another step on: of what the first step's trace showed, only the pauses between kernels still hold."""
        ceilings = self.facts.ceilings
        if ceilings is not None and self.start is not None:
            ceilings = msgspec.structs.replace(ceilings, pause_ns=self.start.limits.pause_ns)
        facts = Facts(point=point, ceilings=ceilings, gpu=self.facts.gpu, recorded=self.facts.recorded)
        return MoveRanking(facts, self.findings)

    def choose(self, open_moves: Sequence[Move], least_ns: float) -> Move | None:
        """The largest predicted saving per second of trying; what cannot be predicted comes last, the quickest first.

        A CUDA graph goes first where the host's time shows in the step, or would with the chosen lever: it takes that time
        away, and what follows is measured more reliably. Before it shows, the graph itself has to be worth it.
        """
        best = self.largest(open_moves, least_ns)
        graph = next((move for move in open_moves if move.lever == "graph"), None)
        change = self.change(best) if best is not None and graph is not None else None
        if change is None or graph is None:
            return best
        now, then = (time.host_ns / max(time.gpu_ns, 1.0) for time in (change.now, change.then))
        saving_ns = self.saving_ns(graph) or 0.0
        shows = now > HOST_SHOWS and saving_ns >= -abs(least_ns)
        return graph if shows or (then > HOST_WOULD_SHOW and saving_ns >= least_ns) else best

    def largest(self, open_moves: Sequence[Move], least_ns: float) -> Move | None:
        """The move with the largest saving per second; none that is predicted to save less than `least_ns`."""
        for estimate in (self.rough_ns, self.saving_ns):
            saving = {move.name: ns for move in open_moves if (ns := estimate(move)) is not None}
            known = [move for move in open_moves if move.name in saving]
            left, exact = [move for move in known if saving[move.name] >= least_ns], set[str]()
            while left:
                first = max(left, key=lambda move: saving[move.name] / seconds_to_try(move))
                if first.name in exact:
                    return first
                # A rough estimate is replaced by the exact one before the move is taken; then another may be first.
                exact.add(first.name)
                saving[first.name] = self.saving_ns(first) or 0.0
                if saving[first.name] < least_ns:
                    left.remove(first)
        unknown = [move for move in open_moves if self.saving_ns(move) is None]
        return min(unknown, key=seconds_to_try, default=None)

    def saving_ns(self, move: Move) -> float | None:
        """Of a step, by the model, else by the finding that asks for the lever; None: it cannot be predicted."""
        if (change := self.change(move)) is not None:
            return change.saving_ns
        return max((finding.saving_ns for finding in self.asking(move)), default=None)

    def rough_ns(self, move: Move) -> float | None:
        """About the saving, extrapolated from two models with few layers, where there are many."""
        changes = [predicted_change(self.facts, move.levers, start) for start in self.shallow]
        savings = [change.saving_ns for change in changes if change is not None]
        if len(savings) < len(SHALLOW_LAYERS):
            return self.saving_ns(move)
        few, more = SHALLOW_LAYERS
        return savings[0] + (savings[1] - savings[0]) / (more - few) * (self._layers - few)

    def arithmetic(self, move: Move) -> str:
        """How the saving was computed."""
        if (change := self.change(move)) is not None:
            return change.arithmetic
        asking = self.asking(move)
        return max(asking, key=lambda one: one.saving_ns).arithmetic if asking else ""

    def peak_bytes(self, move: Move) -> int | None:
        """The predicted peak; None where it cannot be predicted."""
        return peak_bytes(move.workload, self.facts.gpu)

    def change(self, move: Move) -> PredictedChange | None:
        """The step with the move, by the model; None where it cannot be predicted."""
        if move.name not in self._changes:
            self._changes[move.name] = predicted_change(self.facts, move.levers, self.start)
        return self._changes[move.name]

    def asking(self, move: Move) -> list[Finding]:
        """The findings that ask for this lever."""
        return [finding for finding in self.findings if finding.levers.get(move.lever) == move.value]
