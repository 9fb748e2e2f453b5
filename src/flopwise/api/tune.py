"""Make a step faster and prove it: every promising lever, measured against the best step so far."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from flopwise import units
from flopwise.advice import tuner
from flopwise.advice import tuner_actions as actions
from flopwise.advice.constants import DETAILED_SAMPLES, WORTH_KEEPING
from flopwise.advice.decisions import describe_attempt
from flopwise.advice.gather import Inspection, inspect
from flopwise.advice.moves import ON_REQUEST
from flopwise.capture.functions import Target, as_workload
from flopwise.capture.interleave import Contest, Contested
from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress
from flopwise.capture.runners import LOCAL, open_cluster
from flopwise.capture.runners.cluster import Job, check_portable
from flopwise.capture.runners.node_side import Folder, prepare
from flopwise.capture.runners.nodes import START_S, Needs, share
from flopwise.capture.stopping import PairsRule
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.predict.machine import gpu_of
from flopwise.predict.recording import StepRecording
from flopwise.records.cluster import Returned, TuneRequest
from flopwise.records.events import AgreementRequest, AgreementResult, Event, TraceRequest
from flopwise.records.run import INTERRUPTED, OK, Environment, Point
from flopwise.records.tuning import Attempt, Tuning
from flopwise.records.waterfall import Waterfall
from flopwise.scratch import scratch_folder
from flopwise.spec import fields, fp8
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import Sampling, Trial, Workload
from flopwise.store import Run, runs_root
from flopwise.store.rows import append_row
from flopwise.store.run import receive
from flopwise.store.tuning import ROWS, read_tuning

TRACED_STEPS, TRACED_SECONDS = 2, 0.5
START_SECONDS = 3.0  # of sampling, for the first step of a user's own
RECORDING_SHARE = 0.05  # of the budget, that predictions of a user's step are waited for


def tune(
    target: Target,
    *,
    budget: float = 600.0,
    memory_limit: int | None = None,
    keep_exact: bool = False,
    allow: Sequence[str] = (),
    device: str = "auto",
    on: str = LOCAL,
    seconds: float = 6.0,
    timeout: float = 900.0,
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
    **options: Any,
) -> Tuning:
    """Try the levers, most promising first, each against the best so far; keep what is faster or smaller and right.

    `budget` is in seconds: after it, no further lever is begun. `memory_limit` is the most a step may hold, in bytes.
    `keep_exact` leaves out lower precisions; `allow=["fp8"]` adds fp8, which is tried only so. Every lever kept has its
    losses and gradients compared with the same step in eager fp32. `on`: a cluster ('ray', 'ray://host:port', 'slurm'), on
    one node of which all of it runs, as times of different GPUs do not compare. Ctrl-C stores what was measured and raises
    KeyboardInterrupt.

    >>> flopwise.tune("small").best.recipe.changed()        # doctest: +SKIP
    {'precision': 'bf16', 'attention': 'sdpa-cudnn', 'optimizer': 'fused', 'compile': 'default', 'graph': 'on'}
    """
    fields.number("budget", budget, 1.0, 7 * 86_400)
    if memory_limit is not None:
        fields.whole("memory_limit", memory_limit, 1, 2**63)
        if not 2**20 <= memory_limit <= 2**50:
            limit = units.size(memory_limit)
            raise FlopwiseError(f"no step fits a memory limit of {limit}", "from 1MiB to 1024TiB: 40GiB")
    start = as_workload(target, options)
    if isinstance(start.subject, OpSpec):
        raise FlopwiseError(
            f"{start.target} is one operation: there is nothing to tune", f"try: flopwise bench {start.target} --impl …"
        )
    _check_allowed(allow, start, keep_exact)
    sampling = Sampling(seconds=seconds, timeout_s=timeout)
    if on != LOCAL:
        request = TuneRequest(
            workload=start,
            folder=str(Path.cwd()),
            device=device,
            budget=budget,
            memory_limit=memory_limit,
            keep_exact=keep_exact,
            allow=tuple(allow),
            seconds=seconds,
            timeout=timeout,
            command=command,
        )
        return _tune_on_cluster(on, request, runs_root(runs), progress or Progress())
    with Worker() as worker:
        there = worker.look(device)
        _check_device(allow, there.environment)
        plan = [Trial(workload=start, sampling=sampling, device=device, group=tuner.START)]
        with Run.create(runs_root(runs), "tune", start.target, command, plan) as run:
            gpu = there.environment.gpu
            setup = actions.Setup(
                start=start,
                gpu_name=gpu.name if gpu else "cpu",
                gpu=gpu_of(there.environment),
                memory_bytes=gpu.memory_bytes if gpu else None,
                limit_bytes=memory_limit,
                keep_exact=keep_exact,
                allow=tuple(allow),
                budget_s=budget,
                logs=str(run.path / "logs"),
            )
            _Runner(run, worker, setup, plan[0], progress or Progress()).run_all()
            return read_tuning(run.path)


def _check_allowed(allow: Sequence[str], start: Workload, keep_exact: bool) -> None:
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise FlopwiseError(
            f"allow = {fields.show(allow)} is not allowed", f"allowed: a list of {', '.join(ON_REQUEST)}"
        )
    for name in allow:
        fields.one_of("allow", name, tuple(ON_REQUEST))
    if "fp8" in allow and start.implementation != "flopwise":
        hint = "omit --allow fp8; or give a step of your own that builds the model"
        raise FlopwiseError(f"fp8 is not for {start.target} of {start.implementation}", hint)
    if allow and keep_exact:
        raise FlopwiseError(f"--keep-exact does not go with --allow {allow[0]}, which rounds more", "omit one of them")


def _check_device(allow: Sequence[str], environment: Environment) -> None:
    gpu = environment.gpu
    if "fp8" in allow and (gpu is None or tuple(map(int, gpu.capability.split("."))) < fp8.SINCE):
        has = f"{gpu.name} has {gpu.capability}" if gpu is not None else "this device is a CPU"
        needed = ".".join(map(str, fp8.SINCE))
        raise FlopwiseError(f"fp8 needs a GPU of compute capability {needed}; {has}", "omit --allow fp8")


def _tune_on_cluster(on: str, request: TuneRequest, root: Path, progress: Progress) -> Tuning:
    """One job that tunes on one node; its run is stored here."""
    check_portable(request.workload)
    minutes = int((request.budget + 2 * request.timeout + START_S) // 60) + 1
    needs = Needs(device=request.device, ranks=request.workload.recipe.ranks, minutes=minutes)
    job = Job("tune", request.workload.label(), tune_on_node, msgspec.msgpack.encode(request), needs)
    tuning: Tuning | None = None
    with open_cluster(on, root) as runner:
        share(needs, runner.cluster.nodes())
        progress.begin(0, 0)
        try:
            for _, ended in runner.collect([job], progress):
                if ended.returned is None:
                    raise FlopwiseError(f"{job.label}: {ended.status}: {ended.reason}", "tune again")
                tuning = read_tuning(receive(root, ended.returned.files))
                for attempt in tuning.attempts:
                    progress.note(describe_attempt(attempt))
                if ended.returned.interrupted:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            if tuning is None:
                raise
            raise Interrupted(tuning) from None
        finally:
            progress.end()
    assert tuning is not None  # else it raised
    return tuning


def tune_on_node(version: str, asked: bytes) -> bytes:
    """A `TuneRequest` carried out on this node: a `Returned` with the run's files, both as MessagePack."""
    request = msgspec.msgpack.decode(asked, type=TuneRequest)
    if problem := prepare(version, request.folder):
        return msgspec.msgpack.encode(Returned(problem=problem, hint="install the same version on every node"))
    options = {name: getattr(request, name) for name in TuneRequest.__struct_fields__ if name not in _NOT_OPTIONS}
    with scratch_folder() as name:
        interrupted = False
        try:
            tune(request.workload, runs=name, **options)
        except Interrupted:
            interrupted = True
        except FlopwiseError as error:
            return msgspec.msgpack.encode(Returned(problem=error.message, hint=error.hint))
        return msgspec.msgpack.encode(Returned(files=Folder(name).files(), interrupted=interrupted))


_NOT_OPTIONS = ("workload", "folder")


class _Runner:
    """Carries out what the tuner asks for, with processes, files and a clock; it decides nothing."""

    def __init__(self, run: Run, worker: Worker, setup: actions.Setup, first: Trial, progress: Progress) -> None:
        self.run, self.worker, self.first, self.progress = run, worker, first, progress
        self.state, self.began = tuner.begin(setup), time.monotonic()
        self.reference = run.memory_path("reference.npz")
        self.throttle: list[tuple[str, ...]] = []
        self.contest = Contest(run.log_path, progress.event)
        own_code = setup.on_gpu and setup.start.own_model is None
        self.recording = StepRecording(setup.start, setup.gpu, setup.allow) if own_code else None  # for predictions
        if setup.on_gpu:  # on the CPU they would disturb the first measurement
            self.contest.start(compiler=True)

    def run_all(self) -> None:
        self.progress.begin(0, 0)
        for _, text in self.state.notes:
            self.progress.note(text)
        try:
            while (action := tuner.next_action(self.state)) is not None:
                self._advance(action)
        except KeyboardInterrupt:
            end = tuner.interrupted(self.state)
            if end is None:
                raise
            self._advance(end)
            raise Interrupted(read_tuning(self.run.path)) from None
        finally:
            self.contest.close()
            if self.recording is not None:
                self.recording.close()
            self.progress.end()

    def _advance(self, action: actions.Action) -> None:
        """Carry an action out; store the rows and show the notes that it adds."""
        result, before = self._carry_out(action), self.state
        self.state = tuner.advance(before, action, result, time.monotonic() - self.began)
        for row in self.state.rows[len(before.rows) :]:
            append_row(self.run.path / ROWS, row)
            if isinstance(row, Attempt):
                self.progress.note(describe_attempt(row))
        for _, text in self.state.notes[len(before.notes) :]:
            self.progress.note(text)

    def _carry_out(self, action: actions.Action) -> actions.Result:
        match action:
            case actions.WriteReference():
                return self._write_reference(action)
            case actions.MeasureStart():
                return self._measure_start(action)
            case actions.MeasurePair():
                return self._measure_pair(action)
            case actions.Prove():
                trials = self._trial(action.start, "first"), self._trial(action.best, "best")
                return self._contest(trials, PairsRule(self.first.sampling), None, action.together)
            case actions.Finish():
                waterfall = self._traced(action.trace) if action.trace is not None else None
                return actions.Finished(waterfall=waterfall, throttle=tuple(self.throttle))

    def _write_reference(self, action: actions.WriteReference) -> actions.ReferenceWritten:
        request = AgreementRequest(
            path=str(self.reference), write=True, precisions=action.precisions, levers=action.levers
        )
        try:
            trial = self._trial(action.workload, tuner.START)
            return actions.ReferenceWritten(agreement=self.worker.agree(trial, request, self.run.log_path("reference")))
        except FlopwiseError as error:
            return actions.ReferenceWritten(error=error.message)

    def _measure_start(self, action: actions.MeasureStart) -> actions.Measured:
        trial, agreed = self._trial(action.workload, tuner.START), [AgreementResult()]
        if self.recording is not None:  # each lever is measured beside it again: what it takes now need not be exact
            short = msgspec.structs.replace(trial.sampling, seconds=min(START_SECONDS, trial.sampling.seconds))
            trial = msgspec.structs.replace(trial, sampling=short)

        def on_event(event: Event) -> None:
            self.progress.event(event)
            agreed.extend([event] if isinstance(event, AgreementResult) else [])

        point = self.worker.run(
            trial,
            self.run.log_path(trial.key()),
            on_event,
            trace=self._trace_request("before") if action.trace else None,
            compare=self._compare(action.check),
            fewest=action.samples,
            details=DETAILED_SAMPLES,
        )
        self._append(point)
        if point.status == INTERRUPTED:
            raise KeyboardInterrupt
        inspection = self._inspect(point) if point.status == OK else None
        return actions.Measured(point=point, agreed=agreed[-1], inspection=inspection)

    def _measure_pair(self, action: actions.MeasurePair) -> Contested:
        assert self.state.best is not None
        best = msgspec.structs.replace(self.state.best.trial, group=f"best before {action.group}")
        challenger = self._trial(action.move.workload, action.group)
        rule = PairsRule(self.first.sampling, error_rate=action.error_rate, worth=WORTH_KEEPING)
        return self._contest((best, challenger), rule, self._compare(action.check), action.together)

    def _contest(
        self, trials: tuple[Trial, Trial], rule: PairsRule, compare: AgreementRequest | None, together: bool
    ) -> Contested:
        result = self.contest.run(trials, rule, compare, together)
        for point in result.points:
            self._append(point)
        if result.stopped == INTERRUPTED and result.failed is None:
            raise KeyboardInterrupt
        return result

    def _traced(self, work: Workload) -> Waterfall | None:
        """The waterfall of the best step, which was measured without a trace."""
        short = msgspec.structs.replace(self.first.sampling, seconds=TRACED_SECONDS)
        trial = msgspec.structs.replace(self._trial(work, "trace after"), sampling=short)
        traced = self.worker.run(trial, self.run.log_path(trial.key()), trace=self._trace_request("after"))
        self.run.append(traced)
        if traced.status == INTERRUPTED:
            raise KeyboardInterrupt
        if traced.status != OK or self.state.best is None:
            return None
        # Its clock is that of the traced process, which ran alone: in turns, another step had its part in it.
        alone = {"trial": traced.trial, "trace_file": traced.trace_file, "telemetry": traced.telemetry}
        best = msgspec.structs.replace(self.state.best, **alone)
        return self._inspect(best).facts.waterfall

    def _trial(self, work: Workload, group: str) -> Trial:
        trial = msgspec.structs.replace(self.first, workload=work, group=group)
        self.progress.trial(trial)
        return trial

    def _append(self, point: Point) -> None:
        self.run.append(point)
        self.throttle.append(point.telemetry.throttle if point.telemetry else ())

    def _compare(self, check: bool) -> AgreementRequest | None:
        return AgreementRequest(path=str(self.reference)) if check else None

    def _trace_request(self, name: str) -> TraceRequest:
        path = self.run.trace_path(f"{name}.kineto.json.gz").resolve()
        return TraceRequest(path=str(path), steps=TRACED_STEPS)

    def _inspect(self, point: Point) -> Inspection:
        trace = self.run.trace_path(point.trace_file) if point.trace_file else None
        wait_s = RECORDING_SHARE * self.state.setup.budget_s
        recorded = self.recording.result(wait_s) if self.recording is not None else None
        return inspect(point, trace, self.state.setup.gpu, recorded)
