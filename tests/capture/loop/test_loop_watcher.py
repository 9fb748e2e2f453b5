"""Steps of loops of many kinds are found, timed and traced; the loop computes what it computes unwatched."""

import gc
import gzip
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flopwise import torch_private
from flopwise.capture.loop.models import before_forward, trained_models
from flopwise.capture.loop.waits import CHECKPOINT, DATA, EVALUATION
from flopwise.capture.loop.watcher import BETWEEN, OVER, Look, LoopWatcher
from flopwise.records.run import STEP


@pytest.fixture
def watched(tmp_path):
    """Run a loop's body until the look is over; the watcher."""

    def run(body, steps=4, traced=0, most=20_000, **options):
        over = []
        look = Look(steps=steps, traced=traced, seconds=0.3)
        watcher = LoopWatcher(look, lambda: tmp_path / "t.json.gz", lambda: over.append(1), **options)
        watcher.open()
        try:
            for number in range(most):
                body(number, watcher)
                if over:
                    break
        finally:
            watcher.close()
        assert watcher.stage == OVER
        return watcher

    return run


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def _backward(model):
    model(torch.ones(2, 8)).square().sum().backward()


def test_phases_of_a_plain_loop(watched):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(number, watcher):
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()

    looked = watched(body).looked
    assert [one.phase for one in looked.phases] == [STEP, "forward", "backward", "optimizer", BETWEEN]
    assert {len(one.wall_ns) for one in looked.phases} == {4}
    step, *phases = (one.wall_ns for one in looked.phases)
    assert all(sum(parts) == whole for whole, *parts in zip(step, *phases, strict=True))
    assert looked.loop.micro_steps == 1
    assert looked.parameters == 2 * (64 + 8)


def test_accumulated_gradients_are_micro_steps(watched):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number, watcher):
        _backward(model)
        if number % 3 == 2:
            optimizer.step()

    watcher = watched(body)
    assert watcher.looked.loop.micro_steps == 3


@pytest.mark.parametrize("apart", [False, True])
def test_several_optimizers_are_one_step(watched, apart):
    model, other = _model(), _model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    calls = []

    def body(number, watcher):
        before = watcher.steps
        if not apart:
            _backward(model)
        for one, optimizer in zip((model, other), optimizers, strict=True):
            if apart:  # as of a generator and its critic
                _backward(one)
            optimizer.step()
        calls.append(watcher.steps - before)

    assert watched(body).looked.loop.updates == 2
    assert set(calls[3:]) <= {1}


def test_updates_inside_of_the_backward_pass_are_steps(watched):
    model = _model()
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())

    def body(number, watcher):
        _backward(model)

    assert len(watched(body).looked.phases[0].wall_ns) == 4


def test_an_optimizer_that_wraps_another_updates_once(watched):
    model = _model()

    class Wrapping(torch.optim.SGD):
        def step(self, closure=None):
            self.inner.step()

    optimizer = Wrapping(model.parameters(), lr=0.1)
    optimizer.inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number, watcher):
        _backward(model)
        optimizer.step()

    watcher = watched(body)
    assert watcher.looked.loop.updates == 1
    assert watcher.looked.loop.micro_steps == 1


def test_waits_have_their_causes(watched, tmp_path):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(torch.ones(10_000, 8), batch_size=2))

    def body(number, watcher):
        model(next(batches)).sum().backward()
        model.eval()
        model.train()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        optimizer.step()

    loop = watched(body).looked.loop
    assert set(loop.waits_ns) == {DATA}
    assert set(loop.apart_ns) == {EVALUATION, CHECKPOINT}
    assert all(len(ns) == 4 and min(ns) > 0 for ns in (*loop.waits_ns.values(), *loop.apart_ns.values()))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("place", ["before", "after"])
def test_what_lies_between_two_steps_is_part_of_neither(watched, tmp_path, every, place):
    """The law: the phases of a step add up to it, and none of them, nor its trace, holds an evaluation or a checkpoint."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    long_ns, entered = 20_000_000, []

    def between_steps():
        model.eval()
        entered.append(torch.autograd._profiler_enabled())
        with torch.no_grad():
            model(torch.ones(2, 8)).tanh()  # an op of no step
        time.sleep(long_ns / 1e9)
        model.train()
        torch.save(model.state_dict(), tmp_path / "model.pt")

    def body(number, watcher):
        if number % every == 0 and place == "before":
            between_steps()
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
        if number % every == 0 and place == "after":
            between_steps()

    watcher = watched(body, traced=1)
    looked = watcher.looked
    step, *phases = (one.wall_ns for one in looked.phases)
    assert min(step) < long_ns
    assert all(sum(parts) == whole for whole, *parts in zip(step, *phases, strict=True))
    assert sum(ns >= long_ns for ns in looked.loop.apart_ns[EVALUATION]) >= 4 // every
    assert min(looked.warmup_ns) < long_ns
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert text.count('"ProfilerStep#') == 1
    assert "aten::tanh" not in text
    assert not any(entered)  # not even slowed by the profiler


def test_an_evaluation_of_a_part_alone_does_not_keep_it_from_being_traced(watched):
    model = nn.Sequential(_model(), _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number, watcher):
        model.train()
        model[0].eval()  # its statistics are frozen
        _backward(model)
        optimizer.step()

    assert watched(body, traced=2).looked.traced


def test_ranks_end_with_the_same_step_whoever_writes_the_checkpoint(watched, tmp_path):
    steps = []
    for writes in (False, True):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def body(number, watcher, model=model, optimizer=optimizer, writes=writes):
            _backward(model)
            optimizer.step()
            if writes:
                torch.save(model.state_dict(), tmp_path / "model.pt")

        watcher = watched(body, traced=2, ranks=2)
        steps.append(watcher.steps)
        assert watcher.looked.traced
    assert steps[0] == steps[1]


def test_time_between_steps_is_not_the_forward_pass(watched):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number, watcher):
        time.sleep(0.01)
        _backward(model)
        optimizer.step()

    phases = {one.phase: one.wall_ns for one in watched(body).looked.phases}
    assert list(phases) == [STEP, "forward", "backward", "optimizer", BETWEEN]
    assert min(phases[BETWEEN]) >= 10_000_000 > min(phases["forward"])


def test_data_loading_is_a_phase_of_its_own(watched):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def slowly(rows):
        time.sleep(0.01)
        return torch.stack(rows)

    batches = iter(DataLoader(torch.ones(10_000, 8), batch_size=2, collate_fn=slowly))

    def body(number, watcher):
        model(next(batches)).sum().backward()
        optimizer.step()

    phases = {one.phase: one.wall_ns for one in watched(body).looked.phases}
    assert list(phases) == [STEP, DATA, "forward", "backward", "optimizer", BETWEEN]
    assert min(phases[DATA]) >= 10_000_000 > min(phases["forward"])


def test_a_part_that_stays_in_evaluation_is_no_evaluation(watched):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number, watcher):
        model.eval()  # and never trains again
        _backward(model)
        optimizer.step()

    assert EVALUATION not in watched(body).looked.loop.apart_ns


def test_the_trace_holds_the_steps_and_the_names_of_modules(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_private, "compiled_graphs", lambda: 0)  # what other tests compiled is not the loop's
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(number, watcher):
        _backward(model)
        optimizer.step()

    watcher = watched(body, traced=2)
    assert watcher.looked.traced
    assert watcher.looked.traced_step_ns > 0
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert text.count('"ProfilerStep#') >= 2
    assert "flopwise.module:2" in text


def test_by_hand_a_step_is_what_the_user_says(watched):
    model = _model()

    def body(number, watcher):
        with torch.no_grad():
            model(torch.ones(1, 8))
        watcher.step()

    assert len(watched(body).looked.phases[0].wall_ns) == 4


def test_nothing_is_left_behind(watched):
    from torch.optim import optimizer as optimizers

    train, save, backward = nn.Module.train, torch.save, torch.autograd.backward
    kinds = [kind.__next__ for kind in (torch.utils.data.dataloader._BaseDataLoaderIter,)]
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number, watcher):
        _backward(model)
        optimizer.step()

    before = len(optimizers._global_optimizer_post_hooks), len(optimizers._global_optimizer_pre_hooks)
    watched(body, traced=1)
    assert (train, save, backward) == (nn.Module.train, torch.save, torch.autograd.backward)
    assert kinds == [torch.utils.data.dataloader._BaseDataLoaderIter.__next__]
    assert (len(optimizers._global_optimizer_post_hooks), len(optimizers._global_optimizer_pre_hooks)) == before
    assert not any(module._forward_hooks for module in model.modules())


def test_what_fails_in_the_look_does_not_end_the_loop(watched, monkeypatch):
    model, told = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(LoopWatcher, "_warm_up_step", lambda *_: 1 / 0)
    done = 0

    def body(number, watcher):
        nonlocal done
        _backward(model)
        optimizer.step()
        done += 1

    watcher = watched(body, most=60, note=told.append)
    assert done == 60
    assert "ZeroDivisionError" in watcher.looked.problem


def test_a_short_loop_is_timed_by_what_there_is(watched):
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number, watcher):
        _backward(model)
        optimizer.step()

    watcher = watched(body, most=8)
    assert len(watcher.looked.phases[0].wall_ns) == 5


def test_the_outermost_models_of_some_weights():
    gc.collect()
    model, other = _model(), _model()
    assert trained_models([model[0].weight]) == [model]
    assert trained_models([*model.parameters(), *other.parameters()]) in ([model, other], [other, model])


@pytest.mark.parametrize("how", ["eager", "wrapped", "in place"])
def test_a_models_forward_is_told_as_it_begins_and_compiles_nothing_anew(how):
    told, model = [], _model()
    call = torch.compile(model, backend="eager") if how == "wrapped" else model
    if how == "in place":
        model.compile(backend="eager")
    call(torch.ones(2, 8))
    frames = torch_private.compiled_frames()
    with before_forward([call], lambda: told.append(1)):
        call(torch.ones(2, 8))
    call(torch.ones(2, 8))
    assert told == [1]
    assert torch_private.compiled_frames() == frames


def test_by_hand_a_checkpoint_within_a_step_leaves_its_trace_whole(watched, tmp_path):
    def body(number, watcher):
        torch.ones(4).tanh()
        torch.save(torch.ones(1), tmp_path / "x.pt")
        watcher.step()

    watcher = watched(body, traced=2)
    text = gzip.decompress((tmp_path / "t.json.gz").read_bytes()).decode()
    assert watcher.looked.traced
    assert text.count('"aten::tanh"') == text.count('"ProfilerStep#') == 2
