"""What `tune` knows before it tries: the step's trace, its waterfall and findings, and what each move should save."""

import math

import msgspec

from flopwise.advice.facts import Facts
from flopwise.advice.findings import findings
from flopwise.advice.gather import facts_of_file
from flopwise.advice.moves import Move, seconds_to_try
from flopwise.advice.predicted import Predicted, Standing, predicted_step, standing, with_layers
from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError
from flopwise.predict.dry_step import needs_dry_run
from flopwise.predict.fit import peak_of
from flopwise.predict.fitting import gpu_of
from flopwise.predict.machine import find_ceilings
from flopwise.records.events import DeviceInfo, TraceRequest
from flopwise.records.finding import Finding
from flopwise.records.run import OK, Point
from flopwise.records.waterfall import Waterfall
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Sampling, Trial, Workload
from flopwise.store import Run

TRACED_STEPS, TRACED_SECONDS = 2, 0.5
SHALLOW = (
    2,
    4,
)  # layers: what a lever saves grows with their number nearly as a line, and deep models take long to reckon
DEEP = 8
# A host busy for so much of the GPU's time: the step's wavers with it, and with it what others seem to save. The second is of
# the step that a lever would make.
WAVERS, WOULD_WAVER = 0.4, 0.6


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A step looked at through a profiler; on the CPU there is nothing to see."""

    facts: Facts
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def waterfall(self) -> Waterfall | None:
        return self.facts.waterfall


class Look:
    """Traces steps in the run's folder and reads what the traces say."""

    def __init__(self, run: Run, worker: Worker, there: DeviceInfo, device: str) -> None:
        self.run, self.worker, self.device = run, worker, device
        self.gpu = gpu_of(there.environment)
        self.on_gpu = there.environment.gpu is not None

    def request(self, name: str) -> TraceRequest | None:
        """A trace that is called so, to be taken with a step's samples; on the CPU there is nothing to see."""
        path = self.run.trace_path(f"{name}.kineto.json.gz")
        return TraceRequest(path=str(path.resolve()), steps=TRACED_STEPS) if self.on_gpu else None

    def at(self, workload: Workload, point: Point, name: str) -> Seen:
        """The facts of a step that was measured without a trace: one is taken now."""
        if not self.on_gpu:
            return self.seen(point, name)
        sampling = Sampling(seconds=TRACED_SECONDS, timeout_s=point.trial.sampling.timeout_s)
        trial = Trial(workload=workload, sampling=sampling, device=self.device, group=f"trace {name}")
        traced = self.worker.run(trial, self.run.log_path(trial.key()), trace=self.request(name))
        self.run.append(traced)
        if traced.status != OK:
            return Seen(facts=self._alone(point), notes=(f"no trace of the step {name}: {traced.reason}",))
        return self.seen(msgspec.structs.replace(point, trial=traced.trial, trace_file=traced.trace_file), name)

    def seen(self, point: Point, name: str) -> Seen:
        """The step's facts: from its trace where there is a GPU, else from its clocks alone."""
        if not self.on_gpu:
            notes = ("on the CPU there is no trace to look at: no waterfall, no findings",)
            return Seen(facts=self._alone(point), notes=notes)
        if not point.trace_file:
            return Seen(facts=self._alone(point), notes=(f"no trace of the step {name} could be taken",))
        try:
            facts = facts_of_file(self.run.trace_path(point.trace_file), point)
        except FlopwiseError as error:
            return Seen(
                facts=self._alone(point), notes=(f"the trace of the step {name} says nothing: {error.message}",)
            )
        return Seen(facts=facts, findings=findings(facts))

    def _alone(self, point: Point) -> Facts:
        return Facts(point=point, ceilings=find_ceilings(self.gpu) if self.gpu else None, gpu=self.gpu)


class Outlook:
    """What each move from the best step so far should save."""

    def __init__(self, facts: Facts, found: tuple[Finding, ...] = ()) -> None:
        self.facts, self.findings = facts, found
        self.known: dict[str, Predicted | None] = {}
        self.here = standing(facts)
        self.shallow = self._shallow()

    def after(self, point: Point) -> "Outlook":
        """From another step on: of what the trace of the first said, only the pauses between kernels still hold."""
        ceilings = self.facts.ceilings
        if ceilings is not None and self.here is not None:
            ceilings = msgspec.structs.replace(ceilings, pause_ns=self.here.limits.pause_ns)
        return Outlook(Facts(point=point, ceilings=ceilings, gpu=self.facts.gpu), self.findings)

    def choose(self, open_moves: list[Move], least_ns: float) -> Move | None:
        """The largest predicted saving for the time that trying takes; what cannot be predicted comes last, the quickest first.

        A graph comes before it where the host's time shows in the step, or would with that lever: it takes it away, and what
        follows is measured more surely. Before the host shows, it has to be worth it. Less than `least_ns` is not worth a try.
        """
        best = self._best(open_moves, least_ns)
        graph = next((move for move in open_moves if move.lever == "graph"), None)
        found = self._predicted(best) if best is not None and graph is not None else None
        if found is None or graph is None:
            return best
        now, then = (time.host_ns / max(time.gpu_ns, 1.0) for time in (found.now, found.then))
        saving_ns = self.saving_ns(graph) or 0.0
        shows = now > WAVERS and saving_ns >= -abs(least_ns)
        return graph if shows or (then > WOULD_WAVER and saving_ns >= least_ns) else best

    def _best(self, open_moves: list[Move], least_ns: float) -> Move | None:
        for look in (self._rough_ns, self.saving_ns):
            told = {move.name: saving_ns for move in open_moves if (saving_ns := look(move)) is not None}
            left, closely = [move for move in open_moves if told.get(move.name, -math.inf) >= least_ns], set[str]()
            while left:
                first = max(left, key=lambda move: told[move.name] / seconds_to_try(move))
                if first.name in closely:
                    return first
                # What was seen roughly is looked at closely before it is taken; then another may be the first.
                closely.add(first.name)
                told[first.name] = self.saving_ns(first) or 0.0
                if told[first.name] < least_ns:
                    left.remove(first)
        unknown = [move for move in open_moves if self.saving_ns(move) is None]
        return min(unknown, key=seconds_to_try, default=None)

    def saving_ns(self, move: Move) -> float | None:
        """Of a step; None: nobody can tell."""
        if (found := self._predicted(move)) is not None:
            return found.saving_ns
        asked = self._asking(move)
        return max(finding.saving_ns for finding in asked) if asked else None

    def _rough_ns(self, move: Move) -> float | None:
        """About that, from two models with few layers, where there are many."""
        found = [predicted_step(self.facts, move.levers, here) for here in self.shallow]
        if not found or found[0] is None or found[1] is None or self.here is None:
            return self.saving_ns(move)
        few, more = (one.saving_ns for one in found if one is not None)
        return few + (more - few) / (SHALLOW[1] - SHALLOW[0]) * (_layers(self.here) - SHALLOW[0])

    def _shallow(self) -> list[Standing]:
        if self.here is None or _layers(self.here) <= DEEP:
            return []
        found = (with_layers(self.here, n_layers) for n_layers in SHALLOW)
        return [one for one in found if one is not None]

    def arithmetic(self, move: Move) -> str:
        if (found := self._predicted(move)) is not None:
            return found.arithmetic
        return max(self._asking(move), key=lambda one: one.saving_ns).arithmetic if self._asking(move) else ""

    def rules(self, move: Move) -> tuple[str, ...]:
        """The findings that ask for this lever."""
        return tuple(finding.rule for finding in self._asking(move))

    def peak_bytes(self, move: Move) -> int | None:
        """By the closed form; None for a step it does not know."""
        if needs_dry_run(move.workload):
            return None
        return peak_of(move.workload, self.facts.gpu)

    def _predicted(self, move: Move) -> Predicted | None:
        if move.name not in self.known:
            self.known[move.name] = predicted_step(self.facts, move.levers, self.here)
        return self.known[move.name]

    def _asking(self, move: Move) -> list[Finding]:
        return [finding for finding in self.findings if finding.levers.get(move.lever) == move.value]


def _layers(here: Standing) -> int:
    return here.workload.subject.n_layers if isinstance(here.workload.subject, ModelSpec) else 0
