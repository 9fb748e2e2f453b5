"""What the host waits for, by cause; all that was wrapped is as it was afterwards."""

import pytest

torch = pytest.importorskip("torch")

from flopwise.capture.loop.waits import CHECKPOINT, DATA, FROM_DEVICE, TO_DEVICE, Waits  # noqa: E402


def test_each_cause_is_seen_once_and_nothing_stays_wrapped(tmp_path):
    before = {name: getattr(torch.Tensor, name) for name in ("item", "tolist", "to", "cuda", "cpu", "__float__")}
    own = before.keys() & vars(torch.Tensor)
    waits, x = Waits(), torch.ones(3)
    with waits.open():
        for _ in torch.utils.data.DataLoader([x, x]):
            pass
        x.to("meta")  # another device, as a GPU is
        x.to(torch.float64)  # the same: no copy between devices
        assert x.sum().item() == 3
        assert float(x.sum()) == 3
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
