"""A trial that records memory: build, warm up, record some steps, write the snapshot and what is known of it."""

import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from flopwise.atomic import write_atomically
from flopwise.capture import memory_cuda
from flopwise.capture.build import build_step, resolve_device
from flopwise.capture.environment import device_info
from flopwise.capture.memory_cpu import CpuHistory, address
from flopwise.capture.memory_known import known, known_parameters
from flopwise.capture.memory_limit import free_bytes
from flopwise.capture.memory_watch import Recorder
from flopwise.capture.pipes import Emit
from flopwise.capture.ranges import NUMBERED_STEP
from flopwise.capture.step import Step, synchronise
from flopwise.capture.trials import failure, peak_rss_bytes, phase_memory
from flopwise.capture.watch.modules import ModuleNames
from flopwise.capture.watch.owners import known_shapes, owners
from flopwise.capture.watch.tape import ALLOC, Section
from flopwise.collector import no_collector
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.records.events import Done, MemoryMeasured, MemoryRequest, SnapshotWritten, StepBuilt, WarmupStep
from flopwise.records.memory import BEFORE, PHASE, Knowledge, knowledge_path
from flopwise.records.run import INTERRUPTED, OK, OOM, STEP, PhaseMemory
from flopwise.spec.rank_share import rank_share
from flopwise.spec.workload import Trial, Workload
from flopwise.torch_private import memory_labels, memory_snapshot

WARMUP_STEPS = 2  # the first makes the optimizer's state, the second is like all that follow
_ASKED = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)  # the CPU allocator's own words


def record_trial(trial: Trial, emit: Emit, may_go_on: Callable[[], bool], request: MemoryRequest) -> None:
    """Run the trial and emit what happens. Whatever ends it, the snapshot of what was recorded until then is written."""
    session: _Session | None = None
    try:
        device = resolve_device(trial.device)
        emit(device_info(device))
        session = _Session(trial.workload, device, request)
        with session.watching():
            begun = time.perf_counter_ns()
            step = build_step(trial.workload, device)
            emit(StepBuilt(setup_ns=time.perf_counter_ns() - begun, captured_first_ns=step.captured_first_ns))
            for _ in range(WARMUP_STEPS):
                begun = time.perf_counter_ns()
                session.warm_up(step)
                emit(WarmupStep(wall_ns=time.perf_counter_ns() - begun))
            session.start()
            recorded = 0
            while recorded < request.steps and may_go_on():
                session.step(step, recorded)
                recorded += 1
        memory = session.write(recorded)
        emit(SnapshotWritten(path=request.path))
        emit(MemoryMeasured(memory=memory or phase_memory(step, device)))
        status = OK if recorded == request.steps else INTERRUPTED
        emit(Done(status=status, stopped="steps", ran=step.ran(), peak_rss_bytes=peak_rss_bytes()))
    except BaseException as error:
        ended = failure(error)
        if session is not None and ended.status == OOM and session.write_failed(str(error)):
            emit(SnapshotWritten(path=request.path))
        emit(ended)
        if not isinstance(error, FlopwiseError):
            raise  # the log keeps the traceback


class _Session:
    """What is recorded of one workload on one device."""

    def __init__(self, workload: Workload, device: torch.device, request: MemoryRequest) -> None:
        eager = workload.recipe.compile == "off" and workload.recipe.graph == "off"
        if device.type == "cpu" and not eager:
            raise Unsupported(
                "memory on the CPU is recorded op by op, and a compiled step has no ops", "use --compile off, or a GPU"
            )
        self.workload, self.device, self.request = workload, device, request
        self.on_gpu, self.watched = device.type == "cuda", eager
        self.names = ModuleNames()
        self._say = memory_labels() if self.on_gpu else None  # without it, owners come from stacks
        stacks = request.stacks != "off" and not self.on_gpu
        self.recorder = Recorder(self.names, stacks=stacks, say=self._say, on_gpu=self.on_gpu)
        self.started = False
        self._there: tuple[int, ...] = ()  # storages alive when counting begins: only they own their addresses then
        self._taken: dict[str, Any] = {}  # a GPU's snapshot, once it is taken

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While open, allocations are recorded, from the building on: memory may run out at any time."""
        with ExitStack() as stack:
            stack.enter_context(self.names.watched())
            stack.enter_context(no_collector())
            if self.on_gpu:
                memory_cuda.start(self.request.stacks)
                stack.callback(memory_cuda.stop)
            if self.watched:
                stack.enter_context(self.recorder.watching_optimizers())
                stack.enter_context(self.recorder.watching_saved())
                stack.enter_context(self.recorder)
            try:
                yield
            finally:  # before recording stops, which forgets everything
                self._section("after", [])
                if self.on_gpu:
                    self._taken = memory_snapshot()

    def warm_up(self, step: Step) -> None:
        self._run(step, self.recorder.tape.first)

    def start(self) -> None:
        """From here on it counts."""
        self.started = True
        self._there = self.recorder.living()
        if self.on_gpu:
            synchronise(self.device)
            memory_cuda.start(self.request.stacks)

    def step(self, step: Step, number: int) -> None:
        with self._range(f"{NUMBERED_STEP}{number}"):
            self._run(step, self.recorder.tape.steady)

    def _run(self, step: Step, sections: list[Section]) -> None:
        for name, run in step.phases.items():
            self._section(name, sections)
            with self._range(f"{PHASE}{name}") if name != STEP else nullcontext():
                run()
        synchronise(self.device)

    def _range(self, name: str) -> Any:
        return torch.profiler.record_function(name) if self.on_gpu else nullcontext()

    def _section(self, name: str, sections: list[Section]) -> None:
        if self.watched:
            self.recorder.begin(name, sections)
        if self._say is not None:
            self._say(f"{PHASE}{name}")

    def write(self, steps: int, failed: dict[str, int] | None = None) -> tuple[PhaseMemory, ...]:
        """Write both files; the phases' figures where the recording is what tells them (the CPU)."""
        tape = self.recorder.tape
        recorded = tape.steady if self.started else tape.first
        owner = owners(tape, **known_shapes(rank_share(self.workload))) if self.watched else []
        memory: tuple[PhaseMemory, ...] = ()
        if self.on_gpu:
            raw = self._taken
            found = self._known_on_gpu(raw, owner, recorded)
        else:
            history = CpuHistory(tape, owner, self.recorder.times_us, recorded)
            numbers = [*history.before, *(n for (_, n), _ in history.events)]
            raw = history.snapshot(self.recorder.frames(list(dict.fromkeys(numbers))), failed)
            places = {n: (BEFORE, address(n)) for n in history.before}
            places |= {n: (i, address(n)) for i, ((kind, n), _) in enumerate(history.events) if kind == ALLOC}
            found, memory = known(self.recorder, owner, places, exact=True), history.phases()
        found = msgspec.structs.replace(found, device=str(self.device), steps=steps, watched=self.watched)
        path = Path(self.request.path)
        write_atomically(knowledge_path(path), msgspec.msgpack.encode(found))
        write_atomically(path, pickle.dumps(raw))
        return memory

    def _known_on_gpu(self, raw: dict[str, Any], owner: list[str], recorded: list[Section]) -> Knowledge:
        if not self.watched:
            return known_parameters(self.names)
        recorder = self.recorder
        # Until counting begins, the GPU's history goes back to the building.
        sections = recorded if self.started else recorder.tape.sections()
        made = {n for section in sections for kind, n in section.events if kind == ALLOC}
        there = {n: a for n in self._there if (a := recorder.address.get(n))}
        index = self.device.index or 0
        trace = raw["device_traces"][index] if index < len(raw["device_traces"]) else []
        tensors = {n: (recorder.tape.storages[n].op, recorder.address[n]) for n in made if n in recorder.address}
        return known(recorder, owner, memory_cuda.matched(trace, tensors, there))

    def write_failed(self, message: str) -> bool:
        """The snapshot at the moment when memory ran out; False where nothing was recorded yet."""
        raw = self._taken if self.on_gpu else {}
        if not (self.recorder.tape.storages or raw.get("segments") or any(raw.get("device_traces", ()))):
            return False
        asked = _ASKED.search(message)
        free = free_bytes(self.device)
        try:
            steps = sum(section.name == self._first() for section in self.recorder.tape.steady)
            self.write(steps, {"size": int(asked[1]) if asked else 0, "device_free": free or 0})
        except (OSError, MemoryError, RuntimeError):  # there may be no memory left to write with
            return False
        return True

    def _first(self) -> str:
        return self.recorder.tape.first[0].name if self.recorder.tape.first else ""
