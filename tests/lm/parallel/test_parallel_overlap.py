"""What is sent when, and what is kept: seen by a single rank."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flopwise.errors import FlopwiseError
from flopwise.lm.parallel import DDP, FSDP, BucketedDDP
from flopwise.lm.parallel.gather_ahead import GatherAhead
from flopwise.lm.parallel.shards import Unit


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(number: int = 5) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(number)))


def step(wrap: DDP | FSDP, *, finish: bool = True) -> None:
    wrap(torch.ones(2, 4)).sum().backward()
    if finish:
        wrap.finish_gradient_synchronization()


@pytest.mark.parametrize(("wrap", "messages"), [(DDP, 5), (lambda m: BucketedDDP(m, 128 / 2**20), 3)])
def test_gradients_are_sent_while_the_backward_pass_runs(wrap, messages, monkeypatch):
    sent, real = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: (sent.append(args), real(*args, **options))[1])
    model = layers()
    wrapped, counted = wrap(model), []
    model[0].weight.register_hook(lambda _: counted.append(len(sent)))  # before the last gradient is there
    step(wrapped, finish=False)
    assert counted == [messages - 1]
    assert len(sent) == messages
    wrapped.finish_gradient_synchronization()
    assert len(sent) == messages + 1  # who has a gradient for what


def test_parameters_are_sent_in_one_order_whatever_is_ready_first():
    model = nn.ModuleDict({"used_last": nn.Linear(4, 4, bias=False), "used_first": nn.Linear(4, 4, bias=False)})
    wrap = DDP(model)
    (model["used_last"](model["used_first"](torch.ones(2, 4)))).sum().backward()
    assert wrap.groups == [[model["used_first"].weight], [model["used_last"].weight]]
    assert len(wrap.under_way) == 2
    wrap.finish_gradient_synchronization()
    model["used_last"](torch.ones(2, 4)).sum().backward()
    assert not wrap.under_way  # the other's turn is first


def test_two_backward_passes_without_a_finish_between_them_are_refused():
    wrap = DDP(layers())
    first, second = (wrap(torch.ones(2, 4)).sum() for _ in range(2))
    first.backward()
    with pytest.raises(FlopwiseError, match="second backward pass"):
        second.backward()


def test_nothing_is_sent_under_no_sync():
    wrap = DDP(layers())
    with wrap.no_sync():
        step(wrap, finish=False)
    assert not wrap.under_way
    step(wrap, finish=False)
    assert len(wrap.under_way) == 5


def test_weights_are_gathered_ahead_forward_and_backward_from_the_second_step_on(monkeypatch):
    waits: list[bool] = []
    real = Unit.gather

    def gather(unit):
        if unit.whole is None:
            waits.append(unit._arriving is None)  # nobody has started it
        real(unit)

    monkeypatch.setattr(Unit, "gather", gather)
    wrap = FSDP(layers())
    step(wrap)
    # The last layer's weight is still there for the backward pass; the first layer's input needs no gradient.
    assert waits == [True] * (5 + 3)
    for _ in range(2):
        waits.clear()
        step(wrap)
        assert waits == [True] + [False] * 6  # and the last but one is kept, since it comes next
    with torch.no_grad():
        for expected in ([True] * 5, [True] + [False] * 4):
            waits.clear()
            wrap(torch.ones(2, 4))
            assert waits == expected
    waits.clear()
    step(wrap)
    assert waits == [True] + [False] * 6  # a forward pass alone has not made it forget


def test_two_units_are_whole_at_most_and_none_between_steps(monkeypatch):
    most: list[int] = []
    real = GatherAhead.use

    def use(ahead, unit):
        real(ahead, unit)
        most.append(sum(each.whole is not None or each._arriving is not None for each in ahead.units))

    monkeypatch.setattr(GatherAhead, "use", use)
    wrap = FSDP(layers(6))
    for _ in range(3):
        step(wrap)
        assert all(unit.whole is None and unit._arriving is None for unit in wrap.units)
    assert max(most) == 2


def test_autograd_keeps_no_gathered_weight():
    wrap = FSDP(layers())
    wholes = []
    for layer in wrap.module:
        layer.register_forward_hook(lambda *_: wholes.append(weakref.ref(wrap.ahead.current.whole)))
    loss = wrap(torch.ones(2, 4)).sum()
    gc.collect()
    assert [whole() is not None for whole in wholes] == [False] * 4 + [True]
    loss.backward()


def test_a_step_that_goes_another_way_is_right_too():
    torch.manual_seed(0)
    model = layers(3)
    wrap = FSDP(nn.ModuleDict(dict(zip("abc", model, strict=True))))
    for order in ("abc", "cab", "abcab", "b"):
        x = torch.ones(2, 4)
        wrap.ahead.start_over()
        for name in order:
            x = wrap.module[name](x)
        x.sum().backward()
        wrap.finish_gradient_synchronization()
        full = {name: weight.requires_grad_() for name, weight in wrap.full_state_dict().items()}
        y = torch.ones(2, 4)
        for name in order:
            y = y @ full[f"{name}.weight"].t()
        y.sum().backward()
        for name, p in wrap.module.named_parameters():
            want = full[name].grad
            assert (p.grad is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(p.grad, want.flatten())
        wrap.zero_grad()


def test_reading_a_weight_gives_it_whole_and_a_list_of_parameters_has_the_part():
    wrap = FSDP(layers(1), compute_dtype=torch.bfloat16)
    weight = wrap.module[0].weight
    assert weight.shape == (4, 4)
    assert weight.dtype == torch.bfloat16
    (part,) = wrap.parameters()
    assert part.shape == (16,)
    assert part.dtype == torch.float32
    torch.testing.assert_close(wrap.full_state_dict()["0.weight"].flatten(), part.data)
    assert isinstance(wrap.module[0], nn.Linear)


def test_a_weight_that_was_read_without_gradients_has_one_when_it_is_read_with_them():
    wrap = FSDP(layers(1))
    with torch.no_grad():
        assert not wrap.module[0].weight.requires_grad
    wrap.module[0].weight.sum().backward()
    wrap.finish_gradient_synchronization()
    (part,) = wrap.parameters()
    assert torch.equal(part.grad, torch.ones(16))
