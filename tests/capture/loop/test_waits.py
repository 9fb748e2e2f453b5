"""What the host waits for, by cause; all that was wrapped is as it was afterwards."""

import pytest

torch = pytest.importorskip("torch")

from flopwise.capture.loop.waits import CHECKPOINT, DATA, EVALUATION, FROM_DEVICE, TO_DEVICE, Waits  # noqa: E402


def test_each_cause_is_seen_once_and_nothing_stays_wrapped(tmp_path):
    before = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "to", "cuda", "cpu", "__float__")}
    own = before.keys() & vars(torch.Tensor)
    waits, x = Waits(), torch.ones(3)
    with waits.open():
        for _ in torch.utils.data.DataLoader([x, x]):
            pass
        x.to("meta")  # another device, as a GPU is
        with pytest.raises(RuntimeError):
            x.to("meta").item()
        x.to(torch.float64)  # the same: no copy between devices
        torch.save(x, tmp_path / "x.pt")
    assert set(waits.take()) == {DATA, TO_DEVICE, FROM_DEVICE, CHECKPOINT}
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert before.keys() & vars(torch.Tensor) == own


def test_what_fails_is_not_hidden():
    waits = Waits()
    with waits.open(), pytest.raises(RuntimeError):
        torch.ones(3).item()
    with pytest.raises(RuntimeError):
        torch.ones(3).item()


def test_what_lies_on_the_host_is_read_without_a_wait():
    waits, x = Waits(), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([x])  # reads its own count of steps
    with waits.open():
        x.sum().backward()
        optimizer.step()
        assert x.detach().sum().item() < 3
        assert float(x.detach().sum()) < 3
    assert waits.take() == {}


def test_what_is_no_part_of_a_step_is_told_as_it_begins_and_ends(tmp_path):
    told, model = [], torch.nn.Sequential(torch.nn.Linear(2, 2))
    waits = Waits(lambda cause, begins: told.append((cause, begins)))
    with waits.open():
        model.eval()
        torch.save(model.state_dict(), tmp_path / "best.pt")  # of the evaluation
        model.train()
        torch.save(model.state_dict(), tmp_path / "last.pt")
        model.eval()
        for module in model.modules():
            module.training = True  # as Lightning does
        waits.training_begins()
    causes = (EVALUATION, CHECKPOINT, EVALUATION)
    assert told == [(cause, begins) for cause in causes for begins in (True, False)]
    assert waits.evaluated is None
