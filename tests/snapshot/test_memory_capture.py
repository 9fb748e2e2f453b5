"""A workload's own memory: recorded on the CPU, kept, read again, and as predicted."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flopwise.capture import memory_trial  # noqa: E402
from flopwise.capture.memory_trial import record_trial  # noqa: E402
from flopwise.errors import FlopwiseError  # noqa: E402
from flopwise.predict.dry.run import dry_run  # noqa: E402
from flopwise.records.events import Done, MemoryMeasured, MemoryRequest, SnapshotWritten  # noqa: E402
from flopwise.records.memory import OP, knowledge_path, read_knowledge  # noqa: E402
from flopwise.records.run import OK, OOM, UNSUPPORTED  # noqa: E402
from flopwise.render.memory_view import temporary_table  # noqa: E402
from flopwise.snapshot.predicted import predicted_report  # noqa: E402
from flopwise.snapshot.read import read_snapshot  # noqa: E402
from flopwise.snapshot.report import report  # noqa: E402
from flopwise.spec.workload import Sampling, Trial, workload  # noqa: E402

HERE = Path(__file__).parent
SMALL = {"context": 64, "batch": 2, "attention": "naive", "set": {"n_layers": 2}}


@pytest.fixture(autouse=True)
def own_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small are slower on many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recorded(path, target="tiny", steps=3, stacks="python", **options):
    """The events of a recording in this very process, and its answers."""
    work = workload(target, **(SMALL | options if target == "tiny" else options))
    events = []
    trial = Trial(workload=work, sampling=Sampling(), device="cpu")
    request = MemoryRequest(path=str(path), steps=steps, stacks=stacks)
    with contextlib.suppress(RuntimeError, MemoryError):  # what is no error of the user's goes into the worker's log
        record_trial(trial, events.append, lambda: True, request)
    ended = next(event for event in events if isinstance(event, Done))
    if not any(isinstance(event, SnapshotWritten) for event in events):
        return ended, events, None
    return ended, events, report(read_snapshot(path), False, read_knowledge(path), work).devices[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "1f.pickle"
    return path, *recorded(path)


def total(line, i):
    return sum(values[i] for values in line.owners.values())


# Laws.


def as_predicted(events, found, **options):
    predicted = dry_run(workload("tiny", **(SMALL | options)), "cpu")
    (memory,) = [event.memory for event in events if isinstance(event, MemoryMeasured)]
    figures = [
        [(m.phase, m.start_bytes, m.peak_bytes, m.end_bytes) for m in each] for each in (memory, predicted.phases)
    ]
    return figures[0] == figures[1] and found.peak.owners == dict(predicted.peak.owners)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_temporary_bytes_by_op_add_up_and_name_the_copies_of_autocast(tmp_path):
    _, _, found = recorded(tmp_path / "1f.pickle", phase="forward", precision="bf16", context=16)
    assert sum(one.bytes for one in found.temporary) == found.peak.owners["temporary"]
    copies = found.temporary[0]
    weights = found.peak.owners["parameters"]
    assert (copies.op, copies.dtype) == ("_to_copy", "bf16")
    assert weights / 4 < copies.bytes < weights / 2 + 2**20  # half the size; the embedding is not multiplied
    assert "autocast" in " ".join(temporary_table(found).notes)
    work = workload("tiny", **(SMALL | {"phase": "forward", "precision": "bf16", "context": 16}))
    assert predicted_report(dry_run(work, "cpu"), work).devices[0].temporary == found.temporary


def test_logits_are_what_the_head_makes_also_where_the_mlp_is_as_wide_as_the_vocabulary():
    alike, apart = (dry_run(workload("tiny", set={"n_layers": 2, "vocab": vocab}, context=32)) for vocab in (192, 256))
    logits = [max(run.live["logits"]) for run in (alike, apart)]
    assert logits[0] * 256 == pytest.approx(logits[1] * 192, rel=0.01)
    assert {t.module for t in alike.saved if t.owner == "activations" and t.shape[-1:] == (192,)} > {"blocks.0.mlp.up"}


def test_the_recording_is_the_dry_run_of_the_same_device_to_the_byte(tiny, tmp_path):
    assert as_predicted(*tiny[2:])
    options = {"checkpoint": 1, "loss": "chunked", "optimizer": "fused", "norm": "eager", "attention": "sdpa"}
    options |= {"context": 32, "set": {"n_layers": 1}}
    _, events, found = recorded(tmp_path / "x.pickle", steps=1, stacks="off", **options)
    assert as_predicted(events, found, **options)
    assert not found.largest[0].stack


def test_a_forward_pass_keeps_nothing(tmp_path):
    _, events, found = recorded(tmp_path / "x.pickle", steps=1, stacks="off", phase="forward")
    assert as_predicted(events, found, phase="forward")
    assert (found.saved, found.named[1].kept) == ((), 0)


def test_owners_add_up_at_every_instant_and_nothing_is_unknown(tiny):
    _, done, _, found = tiny
    assert (done.status, found.exact, found.known_share) == (OK, True, 1.0)
    assert max(total(found.timeline, i) for i in range(len(found.timeline.event))) == found.peak.allocated_bytes
    assert sum(found.peak.owners.values()) == found.peak.allocated_bytes == found.peak.requested_bytes
    parameters = 4 * workload("tiny", **SMALL).subject.parameters()
    assert found.peak.owners["parameters"] == parameters
    assert (found.end.owners["gradients"], found.end.owners["optimizer state"]) == (parameters, 2 * parameters)


def test_steps_are_told_apart_and_do_not_grow(tiny):
    _, _, _, found = tiny
    assert (found.growth.steps, found.growth.bytes_per_step) == (3, 0)
    assert set(found.phases) == {"forward", "loss", "backward", "optimizer"}
    order = [phase for i, phase in enumerate(found.timeline.phase) if phase and phase != found.timeline.phase[i - 1]]
    assert order == ["forward", "loss", "backward", "optimizer"] * 3


def test_what_a_block_keeps_is_told_with_shape_op_and_who_saved_it(tiny):
    _, _, _, found = tiny
    (blocks, outside) = found.saved
    assert (blocks.block, blocks.blocks, len(blocks.largest)) == ("blocks.0 … blocks.1", 2, 5)
    scores = [t for t in blocks.largest if t.owner == "attention scores"]
    assert {(t.op, t.saved_by) for t in scores} == {
        (
            "exp",
            "blocks.0.attention: exp, blocks.0.attention: div",
        ),  # exp keeps its result, and the division its dividend
        ("div", "blocks.0.attention: bmm"),
    }
    assert {t.shape for t in scores} == {(2, 4, 64, 64)}
    kept = 2 * blocks.bytes + outside.bytes
    at_end = next(m for m in tiny[2] if isinstance(m, MemoryMeasured)).memory[1].end_bytes
    lasting = sum(found.end.owners[o] for o in ("parameters", "optimizer state", "inputs", "buffers"))
    assert kept == at_end - lasting


def test_tensors_with_a_name_have_their_size(tiny):
    residual, matrix = tiny[3].named
    assert (residual.bytes, matrix.bytes, matrix.kept) == (4 * 2 * 64 * 64, 4 * 2 * 4 * 64 * 64, 4)


def test_the_largest_have_module_op_shape_and_stack(tiny):
    found = next(one for one in tiny[3].largest if one.op == "exp")
    assert (found.owner, found.count, found.shape) == ("attention scores", 2, (2, 4, 64, 64))
    assert found.module == "blocks.0.attention"
    assert "attention.py:" in found.stack
    assert "memory_watch" not in found.stack


def test_pytorchs_own_viewer_reads_the_file(tiny):
    from torch.cuda import _memory_viz

    raw = pickle.loads(tiny[0].read_bytes())
    assert "flopwise" not in _memory_viz.segsum(raw)
    assert f"{len(raw['device_traces'][0])} entries" in _memory_viz.trace(raw)


# A user's own step.


def test_a_leak_is_named(tmp_path):
    _, _, found = recorded(tmp_path / "x.pickle", "py:memory_steps:leaks", steps=7)
    (leak,) = found.growth.leaks
    assert (leak.bytes_per_step, found.growth.bytes_per_step) == (4000, 4000)
    assert leak.stack.startswith("memory_steps.py:")


def test_running_out_leaves_the_snapshot_of_that_moment(tmp_path):
    done, _, found = recorded(tmp_path / "x.pickle", "py:memory_steps:runs_out")
    (failure,) = found.ooms
    assert (done.status, failure.asked_bytes, failure.allocated_bytes) == (OOM, 2**50, 3 * 2**20)
    assert failure.device_free_bytes > 0
    assert sum(failure.owners.values()) == failure.allocated_bytes


def test_what_cannot_begin_leaves_no_snapshot(tmp_path):
    done, _, found = recorded(tmp_path / "x.pickle", "llama3-405b")
    assert (done.status, found) == (OOM, None)
    assert "needs at least" in done.reason
    assert not list(tmp_path.iterdir())


def test_a_compiled_step_on_the_cpu_is_refused(tmp_path):
    done, _, found = recorded(tmp_path / "x.pickle", compile="default")
    assert (done.status, found) == (UNSUPPORTED, None)
    assert not list(tmp_path.iterdir())


def test_damaged_knowledge_is_one_line(tiny, tmp_path):
    path = tmp_path / "x.pickle"
    content = knowledge_path(tiny[0]).read_bytes()
    for damage in (content[: len(content) // 2], b"", b"\xc1" * 20):
        knowledge_path(path).write_bytes(damage)
        with pytest.raises(FlopwiseError, match="cannot be read"):
            read_knowledge(path)


# The GPU's half, with a pretended GPU: its history is made of the very allocations that the recorder saw.


class PretendedGpu:
    """In the place of memory_cuda: takes the words, and writes a trace as torch does, with a kernel's own allocations."""

    def __init__(self, module):
        self.matched, self.session, self.words = module.matched, None, []

    def start(self, stacks, clear=True):
        self.words.clear()

    def stop(self):
        self.words = None  # as torch: stopping forgets

    def can_say(self):
        return True

    def say(self, word):
        self.words.append(word)

    def snapshot(self):
        assert self.words
        recorder, trace, live = self.session.recorder, [], {}
        recorder.address[dead_after_warm_up(recorder.tape)] = 8  # where a library then finds room for its workspace
        for section in recorder.tape.sections():
            if section in recorder.tape.steady and not live.get("begun"):
                trace, live["begun"] = [], True
            for kind, number in section.events:
                if kind == 2 or recorder.tape.storages[number].label == "host":
                    continue
                storage = recorder.tape.storages[number]
                entry = {"addr": recorder.address[number], "size": storage.nbytes, "stream": 0, "time_us": len(trace)}
                if kind == 0 and storage.nbytes:
                    said = {"user_metadata": f"{OP}{storage.op}"}
                    own = {**entry, "addr": 16, "size": 64, **said}  # what the kernel takes and gives back
                    trace += [{"action": "alloc", **own}, {"action": "free_completed", **own}]
                    trace.append({"action": "alloc", **entry, **said})
                    live[number] = entry
                elif storage.nbytes:
                    trace += [{"action": "free_requested", **entry}, {"action": "free_completed", **entry}]
                    live.pop(number, None)
        live.pop("begun", None)
        word = next(entry["user_metadata"] for entry in trace if "user_metadata" in entry)
        late = {"addr": 24, "size": 1024, "stream": 0, "time_us": 0, "user_metadata": word}
        trace.insert(0, {"action": "alloc", **late})  # taken in an op, and not given back when it ends
        trace[1:] = [{**entry, "time_us": entry["time_us"] + 1} for entry in trace[1:]]
        live["late"] = late
        workspace = {"addr": 8, "size": 4096}
        blocks = [*live.values(), workspace]
        return {"device_traces": [trace], "segments": [segment(entry) for entry in blocks]}


def dead_after_warm_up(tape):
    """A storage that a warm-up step made and freed."""
    events = [event for section in tape.first for event in section.events]
    return next(number for kind, number in events if kind == 0 and (1, number) in events)


def segment(entry):
    size = -(-entry["size"] // 512) * 512
    block = {"address": entry["addr"], "size": size, "requested_size": entry["size"], "state": "active_allocated"}
    return {"device": 0, "address": entry["addr"], "total_size": size, "stream": 0, "blocks": [block]}


def test_a_gpus_history_gets_exact_owners_too(tmp_path, monkeypatch, tiny):
    gpu = PretendedGpu(memory_trial.memory_cuda)
    monkeypatch.setattr(memory_trial, "memory_cuda", gpu)
    monkeypatch.setattr(memory_trial, "memory_snapshot", gpu.snapshot)
    original = memory_trial._Session.__init__

    def on_gpu(self, work, device, request):
        original(self, work, device, request)
        self.on_gpu, self._say = True, gpu.say
        self.recorder._say, self.recorder._on_gpu = gpu.say, True
        gpu.session = self

    monkeypatch.setattr(memory_trial._Session, "__init__", on_gpu)
    monkeypatch.setattr(memory_trial._Session, "_range", lambda self, name: memory_trial.nullcontext())
    _, _, found = recorded(tmp_path / "x.pickle", steps=2)
    on_cpu = tiny[3].peak.owners
    assert found.known_share == 1.0
    assert found.peak.owners["workspace"] == 4096 + 1024
    for owner, size in on_cpu.items():  # rounding only, and a kernel's own 64 bytes
        assert 0 <= found.peak.owners.get(owner, 0) - size <= max(2048, size // 20), owner


# Through the worker, the store and the command line.


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    import flopwise

    runs = tmp_path_factory.mktemp("runs")
    return runs, flopwise.memory("tiny", device="cpu", runs=runs, steps=2, tag="mine", **SMALL)


def run(capsys, *words):
    from flopwise.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["memory", *map(str, words)])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_a_kept_run_reads_the_same_again(kept, capsys):
    import flopwise

    runs, first = kept
    assert flopwise.memory("last", runs=runs) == flopwise.memory("mine", runs=runs) == first
    dry, closed = first.predictions
    assert dry.peak.owners == first.devices[0].peak.owners
    assert closed.peak.total_bytes == pytest.approx(first.devices[0].peak.allocated_bytes, rel=0.1)
    code, out, _ = run(capsys, "last", "--runs", runs, "--full")
    assert code == 0
    for words in ("dry run: the same peak to the byte", "attention N × N matrix", "--checkpoint 1", "saved by"):
        assert words in out
    document = json.loads(run(capsys, "last", "--runs", runs, "--format", "json")[1])
    assert document["schema"] == "flopwise.memory/1"
    assert document["devices"][0]["saved"][0]["blocks"] == 2


def test_the_cpu_reserves_nothing_and_none_is_shown(kept, capsys, tmp_path):
    pytest.importorskip("altair")
    from flopwise.render.memory_charts import timeline_chart

    _, out, _ = run(capsys, "last", "--runs", kept[0])
    assert "reserved then" not in out
    assert "dashed" not in json.dumps(timeline_chart(kept[1]).to_dict())


def test_a_prediction_for_one_step_says_that_the_steps_grow(kept):
    import msgspec

    from flopwise.render.memory_view import composition

    first = kept[1].devices[0]
    grown = msgspec.structs.replace(first, growth=msgspec.structs.replace(first.growth, bytes_per_step=2**20))
    notes = composition(msgspec.structs.replace(kept[1], devices=(grown,))).notes
    assert any("it grows by 1.00 MiB per step" in note for note in notes)
    assert not any("per step" in note for note in composition(kept[1]).notes)


def test_an_interruption_is_said(kept, capsys, monkeypatch):
    import msgspec

    from flopwise.cli import memory as verb

    stopped = msgspec.structs.replace(kept[1], status="interrupted", devices=())
    monkeypatch.setattr(verb, "memory", lambda *words, **options: stopped)
    code, _, err = run(capsys, "tiny")
    assert (code, err.splitlines()[-1]) == (130, "interrupted: nothing was recorded")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("last", "--batch", "2"), "batch means nothing"),
        (("tiny", "--steps", "0"), "steps = 0"),
        (("tiny", "--stacks", "some"), "stacks = 'some'"),
        (("tiny", "--gpu", "h200"), "gpu is for a prediction"),
        (("tiny", "--predict", "--gpu", "h200,h100"), "one prediction is for one GPU"),
        (("nothing-like-it",), "no workload, no snapshot and no run"),
    ],
)
def test_bad_input_is_one_line(words, said, kept, capsys):
    code, out, err = run(capsys, *words, "--runs", kept[0])
    assert (code, out) == (2, "")
    assert said in err.splitlines()[0]


def test_reading_a_run_needs_no_torch(kept):
    code = f"import sys, flopwise; flopwise.memory('last', runs={str(kept[0])!r}); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60).returncode == 0
