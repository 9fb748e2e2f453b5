"""AdamW in few launches is torch.optim.AdamW: the same parameters after the same gradients, the same states."""

import copy
import gc
import io
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flopwise.errors import Unsupported
from flopwise.kernels import adamw_kernels as module
from flopwise.kernels.adamw import AdamW, joined
from flopwise.kernels.adamw_kernels import BLOCK, LOW

# one element, none, less than a block, a block, a block and an end
SHAPES = {
    "cpu": [(1,), (0, 3), (5, 7), (BLOCK,), (BLOCK + 3,)],
    "cuda": [(1,), (0, 3), (5, 7), (BLOCK,), (BLOCK + 3,), (1000, 777), (4096, 4096)],
}
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def _parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]


def _give_gradients(step: int, *models: list[nn.Parameter]) -> None:
    """The same gradients to each, new tensors at every step, as backward makes them."""
    generator = torch.Generator().manual_seed(step)
    for same in zip(*models, strict=True):
        gradient = torch.randn(same[0].shape, generator=generator)
        for p in same:
            p.grad = gradient.to(p)


def _distance(found: list[nn.Parameter], wanted: list[nn.Parameter]) -> float:
    ours, theirs = (torch.cat([p.detach().double().flatten() for p in ps]) for ps in (found, wanted))
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_definition_in_float64(device, dtype, clip):
    ours = _parameters(SHAPES[device], dtype, device)
    truth = [nn.Parameter(p.detach().double()) for p in ours]
    optimizer = AdamW(ours, lr=1e-2, weight_decay=0.1, max_grad_norm=clip)
    definition = torch.optim.AdamW(truth, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        _give_gradients(step, ours)
        for p, q in zip(ours, truth, strict=True):
            q.grad = p.grad.double()
        optimizer.step()
        if clip:
            norm = nn.utils.clip_grad_norm_(truth, clip)
            assert torch.allclose(optimizer.grad_norm.double(), norm, rtol=1e-5)
        definition.step()
    assert _distance(ours, truth) < BOUNDS[dtype]


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 2 * BLOCK), min_size=1, max_size=4),
    st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.9, 0.0)]),
    st.sampled_from([0.0, 0.3]),
)
def test_any_lengths_any_betas(device, lengths, betas, decay):
    ours, theirs = (_parameters([(n,) for n in lengths], torch.float32, device) for _ in range(2))
    pair = [make(ps, 1e-2, betas, weight_decay=decay) for make, ps in ((AdamW, ours), (torch.optim.AdamW, theirs))]
    for step in range(2):
        _give_gradients(step, ours, theirs)
        for optimizer in pair:
            optimizer.step()
    if sum(lengths):
        assert _distance(ours, theirs) < 1e-6


def test_groups_and_absent_gradients(device):
    """Each group has its own rate and decay; a parameter without a gradient keeps its value and its step count."""
    ours, theirs = (_parameters([(3,), (4,), (5,)], torch.float32, device) for _ in range(2))
    pair = []
    for make, (a, b, c) in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        pair.append(make([{"params": [a, b], "lr": 0.1}, {"params": [c], "weight_decay": 0.5}], lr=0.01))
    for step in range(3):
        _give_gradients(step, ours, theirs)
        if step == 1:
            ours[1].grad = theirs[1].grad = None
        for optimizer in pair:
            optimizer.step()
    assert _distance(ours, theirs) < 1e-6
    assert [int(pair[0].state[p]["step"]) for p in ours] == [3, 2, 3]


def test_gradients_of_any_layout_and_addresses_off_16_bytes(device):
    space = torch.randn(3 * BLOCK, device=device)
    ours = [nn.Parameter(space[1 : BLOCK + 9]), nn.Parameter(torch.randn(6, 4, device=device).T)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    pair = [AdamW(ours, 0.1), torch.optim.AdamW(theirs, 0.1)]
    for _ in range(2):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, device=device)  # contiguous, where the parameter is transposed
            q.grad = p.grad.clone()
        for optimizer in pair:
            optimizer.step()
    assert _distance(ours, theirs) < 1e-6


def test_no_gradient_outlives_its_owner(device):
    """A step that kept them would hold all gradients twice while the next ones are made."""
    params = [nn.Parameter(torch.randn(8, 4, device=device)) for _ in range(2)]
    optimizer = AdamW(params, max_grad_norm=1.0)
    params[0].grad = torch.randn(8, 4, device=device)
    params[1].grad = torch.randn(4, 8, device=device).t()  # of another layout: it is copied for the launch
    gradients = [weakref.ref(p.grad) for p in params]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert [gradient() for gradient in gradients] == [None, None]
    assert not any(bucket._copies for placed in optimizer._buckets for bucket in placed.buckets)


def test_bf16_states_are_an_approximation_within_bounds(device):
    ours, theirs = (_parameters([(BLOCK + 5,)], torch.float32, device) for _ in range(2))
    narrow, wide = AdamW(ours, 1e-2, state_dtype=torch.bfloat16), AdamW(theirs, 1e-2)
    for step in range(4):
        _give_gradients(step, ours, theirs)
        narrow.step()
        wide.step()
    assert narrow.state[ours[0]]["exp_avg"].dtype == torch.bfloat16
    assert 0 < _distance(ours, theirs) < 1e-3


def test_states_are_interchangeable_with_torchs(device):
    """Two steps of one, then two of the other, either way round, are four steps; saved and loaded as a file."""
    for first, second in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW), (AdamW, AdamW)):
        ours, theirs = (_parameters([(5,), (3, 4)], torch.float32, device) for _ in range(2))
        optimizer, whole = first(ours, 0.1), torch.optim.AdamW(theirs, 0.1)
        for step in range(4):
            if step == 2:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                optimizer = second(ours, 0.5)
                optimizer.load_state_dict(torch.load(file))
            _give_gradients(step, ours, theirs)
            optimizer.step()
            whole.step()
        assert _distance(ours, theirs) < 1e-6


def test_resumed_states_of_bf16_parameters_are_not_rounded(device):
    ours, theirs = (_parameters([(50,)], torch.bfloat16, device) for _ in range(2))
    one, other = AdamW(ours, 0.1), AdamW(theirs, 0.1)
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(one.state_dict())
            one = AdamW(ours, 0.1)
            one.load_state_dict(state)
        _give_gradients(step, ours, theirs)
        one.step()
        other.step()
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(one.state[ours[0]]["exp_avg"], other.state[theirs[0]]["exp_avg"])


def test_the_learning_rate_may_be_a_tensor(device):
    ours, theirs = (_parameters([(5,)], torch.float32, device) for _ in range(2))
    rate = torch.tensor(0.1, device=device)
    pair = [AdamW(ours, rate), torch.optim.AdamW(theirs, 0.1)]
    for step in range(2):
        _give_gradients(step, ours, theirs)
        for optimizer in pair:
            optimizer.step()
        rate.fill_(0.3)
        pair[1].param_groups[0]["lr"] = 0.3
    assert _distance(ours, theirs) < 1e-6


def test_a_grad_scalers_scale_and_verdict(device):
    ours, theirs = (_parameters([(BLOCK + 1,)], torch.float32, device) for _ in range(2))
    scaled, plain = AdamW(ours, 0.1, max_grad_norm=1.0), AdamW(theirs, 0.1, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=64.0)
    for step in range(3):
        _give_gradients(step, ours, theirs)
        scaler.scale(torch.zeros((), device=device))  # makes the scale
        ours[0].grad *= scaler.get_scale()
        if step == 1:
            ours[0].grad[3] = float("inf")
        scaler.step(scaled)
        scaler.update()
        if step != 1:
            plain.step()
    assert scaler.get_scale() == 32.0
    assert _distance(ours, theirs) < 1e-6
    assert int(scaled.state[ours[0]]["step"]) == 2


def test_clipping_leaves_a_small_gradient_alone_and_a_nan_arrives(device):
    ours, theirs = (_parameters([(5,)], torch.float32, device) for _ in range(2))
    clipped, plain = AdamW(ours, 0.1, max_grad_norm=1e6), AdamW(theirs, 0.1)
    _give_gradients(0, ours, theirs)
    clipped.step()
    plain.step()
    assert torch.equal(ours[0], theirs[0])
    ours[0].grad[0] = float("nan")
    clipped.step()
    assert ours[0].isnan().all()


def test_a_closure_is_called_with_gradients_on(device):
    (p,) = _parameters([(5,)], torch.float32, device)
    optimizer = AdamW([p], 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > p.square().sum()


def test_a_step_is_two_launches_three_with_clipping(device, monkeypatch):
    launches = []
    for name in ("_adamw_norm_kernel", "_adamw_prepare_kernel", "_adamw_update_kernel"):
        kernel = getattr(module, name)

        class Counted:
            def __init__(self, kernel: object, name: str) -> None:
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid: tuple[int, ...]) -> object:
                launches.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(module, name, Counted(kernel, name))
    for clip, expected in ((None, 2), (1.0, 3)):
        ours = _parameters([(3,)] * 20, torch.float32, device)
        _give_gradients(0, ours)
        launches.clear()
        AdamW(ours, 0.1, max_grad_norm=clip).step()
        assert len(launches) == expected


def test_new_betas_are_no_new_kernel(device, monkeypatch):
    """OneCycleLR changes β₁ at every step: as a constant it would compile at every step."""
    constants, kernel = [], module._adamw_prepare_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*numbers: object, **options: object) -> None:
                constants.append(options)
                kernel[grid](*numbers, **options)

            return launch

    monkeypatch.setattr(module, "_adamw_prepare_kernel", Watched())
    (p,) = _parameters([(3,)], torch.float32, device)
    _give_gradients(0, [p])
    optimizer = AdamW([p], 0.1)
    for betas in ((0.95, 0.999), (0.85, 0.9999), (0.0, 0.5)):
        optimizer.param_groups[0]["betas"] = betas
        optimizer.step()
        step, (rate, root, *_) = int(optimizer.state[p]["step"]), optimizer._buckets[0].buckets[0].coefficients[0]
        assert rate.item() == pytest.approx(0.1 / (1 - betas[0] ** step), rel=1.2e-7)  # two roundings to fp32
        assert root.item() == pytest.approx((1 - betas[1] ** step) ** -0.5, rel=1.2e-7)
    assert constants[0] == constants[1] == constants[2]


def test_a_replayed_cuda_graph_counts_on(device):
    """Other gradients and eager steps in between do not disturb it."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    ours, theirs = (_parameters(SHAPES["cuda"][:5], torch.float32, device) for _ in range(2))
    rate = torch.tensor(0.1, device=device)
    optimizer, reference = AdamW(ours, rate, max_grad_norm=1.0), AdamW(theirs, 0.1, max_grad_norm=1.0)
    _give_gradients(0, ours, theirs)
    optimizer.step()
    reference.step()
    static = [torch.zeros_like(p) for p in ours]
    for p, g in zip(ours, static, strict=True):
        p.grad = g
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 5):
        _give_gradients(step, ours, theirs)
        if step == 3:
            optimizer.step()  # eager, on gradients elsewhere
        else:
            for p, g in zip(ours, static, strict=True):
                g.copy_(p.grad)
            graph.replay()
        reference.step()
    assert _distance(ours, theirs) < 1e-6
    assert int(optimizer.state[ours[0]]["step"]) == 5


def test_on_the_cpu_the_reference_has_the_same_api():
    """Also where Triton does not interpret."""
    ours, theirs = (_parameters([(5,), (3, 4)], torch.float32, "cpu") for _ in range(2))
    optimizer, reference = AdamW(ours, 0.1, max_grad_norm=0.5), torch.optim.AdamW(theirs, 0.1)
    for step in range(3):
        _give_gradients(step, ours, theirs)
        optimizer.step()
        nn.utils.clip_grad_norm_(theirs, 0.5)
        reference.step()
    assert _distance(ours, theirs) < 1e-6
    assert optimizer.grad_norm is not None


def test_what_it_does_not_do_is_refused():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    with pytest.raises(Unsupported, match="sparse gradients"):
        AdamW([p]).step()
    with pytest.raises(ValueError, match="betas"):
        AdamW([p], betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="state_dtype"):
        AdamW([p], state_dtype=torch.float16)
    p.grad = torch.ones(3)
    optimizer = AdamW([p])
    optimizer.load_state_dict(torch.optim.AdamW([p], amsgrad=True).state_dict())
    with pytest.raises(Unsupported, match="amsgrad"):
        optimizer.step()


def _masters(parameters: list[nn.Parameter], optimizer: AdamW) -> list[Tensor]:
    return [joined(p.detach(), optimizer.state[p][LOW]) for p in parameters]


@pytest.mark.parametrize("state_dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_masters_of_bf16_parameters_follow_fp32_weights(device, state_dtype):
    """Updates far below bf16's last place add up; without masters the parameters would not move at all."""
    ours = _parameters(SHAPES[device], torch.bfloat16, device)
    started = [p.detach().clone() for p in ours]
    truth = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer = AdamW(ours, lr=1e-5, weight_decay=0.1, master=True, state_dtype=state_dtype)
    definition = AdamW(truth, lr=1e-5, weight_decay=0.1, state_dtype=state_dtype)
    for step in range(5):
        _give_gradients(step, ours)
        for p, q in zip(ours, truth, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        definition.step()
    moved = torch.cat([(q.detach() - p.float()).flatten() for q, p in zip(truth, started, strict=True)])
    found = torch.cat([(m - p.float()).flatten() for m, p in zip(_masters(ours, optimizer), started, strict=True)])
    assert moved.norm() > 0
    assert (found - moved).norm() < 0.02 * moved.norm()  # a tie is off by one of fp32's last places
    for p, q in zip(ours, _masters(ours, optimizer), strict=True):
        assert torch.equal(p.detach(), q.bfloat16())


def test_masters_begin_with_the_weights_they_are_given(device):
    """So that the first updates show in the parameter as often as they should, and not only when they have added up."""
    exact = torch.linspace(0.5, 1.5, 4096, device=device)
    ours = nn.Parameter(exact.bfloat16())
    optimizer = AdamW([ours], lr=1e-4, weight_decay=0.0, master=True)
    optimizer.set_masters({ours: exact})
    (master,) = _masters([ours], optimizer)
    assert (master - exact).abs().max() <= 2**-23  # a tie is off by one of fp32's last places
    before = ours.detach().clone()
    ours.grad = torch.ones_like(ours)
    optimizer.step()
    moved = (ours.detach() != before).float().mean().item()
    assert 0.01 < moved < 0.05  # 1e-4 of places that are 2⁻⁸ and 2⁻⁷ wide
    assert (_masters([ours], optimizer)[0] - (exact - 1e-4)).abs().max() < 1e-6
    with pytest.raises(Unsupported, match="no fp32 weights"):
        AdamW([ours]).set_masters({ours: exact})


def test_masters_survive_a_checkpoint_and_a_nan_arrives(device):
    ours = _parameters([(5, 7)], torch.bfloat16, device)
    optimizer = AdamW(ours, lr=1e-4, master=True)
    _give_gradients(0, ours)
    optimizer.step()
    again = AdamW(ours, lr=1e-4, master=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(again.state[ours[0]][LOW], optimizer.state[ours[0]][LOW])
    assert again.state[ours[0]][LOW].dtype == torch.int16
    ours[0].grad[0, 0] = float("nan")
    optimizer.step()
    assert ours[0][0, 0].isnan()
    assert ours[0][1:].isfinite().all()


@pytest.mark.parametrize(
    "value",
    [
        0.0,
        float("inf"),
        3.3895e38,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (-0.0, -3.3895e38, 9.2e-41, 1.0)),
    ],
)
def test_a_parameter_set_from_outside_meets_an_old_difference(device, value):
    """Finite stays finite whatever the difference is; zero stays zero."""
    ours = nn.Parameter(torch.full((7,), value, dtype=torch.bfloat16, device=device))
    optimizer = AdamW([ours], lr=0.0, weight_decay=0.0, master=True)
    ours.grad = torch.ones_like(ours)
    optimizer.step()
    optimizer.state[ours][LOW].copy_(torch.tensor([-32768, -1, 0, 1, 2, 100, 32767], dtype=torch.int16))
    optimizer.step()
    assert bool(ours.isnan().any()) is False
    assert torch.allclose(ours.float(), torch.full_like(ours, value).float(), rtol=2**-7, atol=1.0 if value else 0.0)


@pytest.mark.parametrize("value", [0.0, -0.0, 3.3895e38, -3.3895e38, 9.2e-41])
def test_what_is_joined_of_a_finite_parameter_is_finite(value):
    low = torch.tensor([-32768, -1, 0, 32767], dtype=torch.int16)
    whole = joined(torch.full((4,), value, dtype=torch.bfloat16), low)
    assert whole.isfinite().all()
    assert (value == 0.0) == bool((whole == 0.0).all())


def test_zeroed_parameters_of_masters_go_on(device):
    ours = nn.Parameter(torch.randn(64, device=device).bfloat16())
    optimizer = AdamW([ours], lr=1e-3, master=True)
    for step in range(3):
        ours.grad = torch.randn_like(ours)
        optimizer.step()
        if step == 0:
            ours.data.zero_()
    assert ours.isfinite().all()
    assert ours.abs().max() < 0.01


def test_a_group_taken_away_is_updated_no_more(device):
    kept, gone = _parameters([(4, 3), (4, 3)], torch.float32, device)
    optimizer = AdamW([{"params": [kept]}, {"params": [gone]}], lr=0.1)
    _give_gradients(0, [kept, gone])
    optimizer.step()
    optimizer.param_groups.pop()
    was, other = gone.detach().clone(), kept.detach().clone()
    optimizer.step()
    assert torch.equal(gone, was)
    assert not torch.equal(kept, other)


def test_a_gradient_turned_in_its_place(device):
    ours, theirs = ([nn.Parameter(torch.ones(4, 4, device=device))] for _ in range(2))
    optimizer, torchs = AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    _give_gradients(0, ours, theirs)
    for turned in (False, True):
        if turned:
            ours[0].grad, theirs[0].grad = ours[0].grad.t(), theirs[0].grad.t()
        optimizer.step()
        torchs.step()
    assert _distance(ours, theirs) < 1e-6


def test_parameters_of_two_devices_are_refused():
    here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    for groups in ([{"params": [here]}, {"params": [there]}], [{"params": [here, there]}]):
        optimizer = AdamW(groups)
        here.grad, there.grad = torch.ones_like(here), torch.ones_like(there)
        with pytest.raises(Unsupported, match="one optimizer per device"):
            optimizer.step()


@pytest.mark.parametrize("master", [False, True])
def test_masters_of_some_parameters_are_loaded(device, master):
    """Into an optimizer without masters they do not come along; one with masters makes those that are missing."""
    before = _parameters([(4, 3), (5,)], torch.bfloat16, device)
    optimizer = AdamW(before, master=True)
    _give_gradients(0, before)
    optimizer.step()
    saved = optimizer.state_dict()
    del saved["state"][1][LOW]
    resumed = AdamW(before, master=master)
    resumed.load_state_dict(saved)
    resumed.step()
    assert [LOW in resumed.state[p] for p in before] == [master, master]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lr": -1.0}, "lr must"),
        ({"lr": float("nan")}, "lr must"),
        ({"lr": torch.ones(2)}, "lr must"),
        ({"eps": -1e-8}, "eps must"),
        ({"weight_decay": -0.1}, "weight_decay must"),
        ({"betas": (0.9,)}, "betas must"),
        ({"betas": (0.9, 1.0)}, "betas must"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must"),
    ],
)
def test_arguments_are_checked(wrong, said):
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=said):
        AdamW([p], **wrong)
    if "max_grad_norm" not in wrong:
        with pytest.raises(ValueError, match=said):
            AdamW([{"params": [p], **wrong}])


def test_masters_of_fp16_parameters_are_refused():
    with pytest.raises(Unsupported, match="not of fp16"):
        AdamW([nn.Parameter(torch.ones(3, dtype=torch.float16))], master=True)


@pytest.mark.parametrize("name", ["max_grad_norm", "state_dtype", "master"])
def test_what_is_of_the_whole_optimizer_is_refused_in_a_group(name):
    with pytest.raises(Unsupported, match=f"{name} is of the whole"):
        AdamW([{"params": [nn.Parameter(torch.ones(3))], name: 1.0}])


def _stepped(make: type[torch.optim.Optimizer], *shape: int) -> dict[str, object]:
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.ones(shape)
    optimizer = make([p])
    optimizer.step()
    return optimizer.state_dict()


def test_states_of_another_algorithm_or_of_other_shapes_are_refused():
    optimizer = AdamW([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(Unsupported, match=r"torch\.optim\.Adam"):
        optimizer.load_state_dict(_stepped(torch.optim.Adam, 2, 3))
    for shape in ((3,), (2, 1)):  # these would be broadcast
        with pytest.raises(ValueError, match="exp_avg of parameter 0"):
            optimizer.load_state_dict(_stepped(torch.optim.AdamW, *shape))
    assert not optimizer.state


def test_a_loaded_step_count_is_a_copy():
    """Else the optimizer it came from would count on with this one."""
    saved = _stepped(torch.optim.AdamW, 3)
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p])
    optimizer.load_state_dict(saved)
    p.grad = torch.ones(3)
    optimizer.step()
    assert (int(saved["state"][0]["step"]), int(optimizer.state[p]["step"])) == (1, 2)
