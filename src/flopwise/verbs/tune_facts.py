"""What `tune` knows before it tries: the step's trace, its waterfall and findings, and what each move should save."""

import msgspec

from flopwise.advice.facts import Facts
from flopwise.advice.finding import Finding
from flopwise.advice.findings import findings
from flopwise.advice.moves import Move
from flopwise.advice.predicted import Predicted, predicted_step, standing
from flopwise.analysis.waterfall import Waterfall
from flopwise.capture.events import Surroundings, TraceRequest
from flopwise.capture.isolate import Worker
from flopwise.cost.fit import peak_of
from flopwise.errors import FlopwiseError
from flopwise.records import OK, Point
from flopwise.spec.workload import Sampling, Trial, Workload
from flopwise.store import Run
from flopwise.verbs.account import find_ceilings
from flopwise.verbs.dry_step import needs_dry_run
from flopwise.verbs.findings import facts_of_file
from flopwise.verbs.fitting import gpu_of

TRACED_STEPS, TRACED_SECONDS = 2, 0.5


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

    def __init__(self, run: Run, worker: Worker, there: Surroundings, device: str) -> None:
        self.run, self.worker, self.device = run, worker, device
        self.gpu = gpu_of(there.environment)
        self.on_gpu = there.environment.gpu is not None

    def at(self, workload: Workload, point: Point, name: str) -> Seen:
        """The step's facts: from its trace where there is a GPU, else from its clocks alone."""
        alone = Facts(point=point, ceilings=find_ceilings(self.gpu) if self.gpu else None, gpu=self.gpu)
        if not self.on_gpu:
            return Seen(facts=alone, notes=("on the CPU there is no trace to look at: no waterfall, no findings",))
        sampling = Sampling(seconds=TRACED_SECONDS, timeout_s=point.trial.sampling.timeout_s)
        trial = Trial(workload=workload, sampling=sampling, device=self.device, group=f"trace {name}")
        path = self.run.trace_path(f"{trial.key()}.kineto.json.gz")
        request = TraceRequest(path=str(path.resolve()), steps=TRACED_STEPS)
        traced = self.worker.run(trial, self.run.log_path(trial.key()), trace=request)
        self.run.append(traced)
        if traced.status != OK:
            return Seen(facts=alone, notes=(f"no trace of the step {name}: {traced.status}: {traced.reason}",))
        try:
            facts = facts_of_file(path, msgspec.structs.replace(point, trial=traced.trial))
        except FlopwiseError as error:
            return Seen(facts=alone, notes=(f"the trace of the step {name} says nothing: {error.message}",))
        return Seen(facts=facts, findings=findings(facts))


class Outlook:
    """What each move from the best step so far should save."""

    def __init__(self, facts: Facts, found: tuple[Finding, ...] = ()) -> None:
        self.facts, self.findings = facts, found
        self.known: dict[str, Predicted | None] = {}
        self.here = standing(facts)

    def after(self, point: Point) -> "Outlook":
        """From another step on: what the trace of the first said of its kernels no longer holds."""
        return Outlook(Facts(point=point, ceilings=self.facts.ceilings, gpu=self.facts.gpu), self.findings)

    def saving_ns(self, move: Move) -> float | None:
        """Of a step; None: nobody can tell."""
        if (found := self._predicted(move)) is not None:
            return found.saving_ns
        asked = self._asking(move)
        return max(finding.saving_ns for finding in asked) if asked else None

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
            self.known[move.name] = predicted_step(self.facts, {move.lever: move.value}, self.here)
        return self.known[move.name]

    def _asking(self, move: Move) -> list[Finding]:
        return [finding for finding in self.findings if finding.levers.get(move.lever) == move.value]
