"""Logits that wait for their loss: the same numbers, whatever is done with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopwise.errors import Unsupported
from flopwise.patch.loss import DeferredLogits, find_head, fuse_loss
from flopwise.patch.patched import Patched

V, D = 40, 16
_PLAIN = DeferredLogits.plain
TARGETS = torch.arange(24).reshape(2, 12) % V


class Model(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V, bias=bias)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def shifted(logits):
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, V), TARGETS[:, 1:].reshape(-1))


def ignoring(logits):
    targets = torch.where(TARGETS % 3 == 0, 7, TARGETS)
    return F.cross_entropy(logits.float().view(-1, V), targets.view(-1), ignore_index=7)


LOSSES = {
    "flat": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1)),
    "module": lambda x: nn.CrossEntropyLoss()(x.flatten(0, 1), TARGETS.flatten()),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1), TARGETS),
    "shifted": shifted,
    "ignoring": ignoring,
    "masked": lambda x: F.cross_entropy(x[TARGETS > 5], TARGETS[TARGETS > 5]),
    "sum": lambda x: F.cross_entropy(x.view(-1, V).to(torch.float32), TARGETS.view(-1), reduction="sum") / 24,
}
OTHERS = {  # which need the logits themselves
    "soft-capped": lambda x: F.cross_entropy((torch.tanh(x / 5) * 5).view(-1, V), TARGETS.view(-1)),
    "smoothed": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1), label_smoothing=0.1),
    "weighted": lambda x: F.cross_entropy(x.view(-1, V), TARGETS.view(-1), weight=torch.linspace(1, 2, V)),
    "fewer words": lambda x: F.cross_entropy(x[..., : V - 1].reshape(-1, V - 1), TARGETS.clamp(max=V - 2).view(-1)),
    "z-loss": lambda x: shifted(x) + 0.1 * torch.logsumexp(x, -1).pow(2).mean(),
    "logarithm": lambda x: F.nll_loss(F.log_softmax(x, -1).view(-1, V), TARGETS.view(-1)),
}


@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
def test_every_loss_and_its_gradients_are_the_same(name, monkeypatch):
    loss_of, found, computed = (LOSSES | OTHERS)[name], [], []
    for fused in (False, True):
        model, patched = Model(), Patched()
        if fused:
            fuse_loss(find_head([model]), patched)
            monkeypatch.setattr(DeferredLogits, "plain", lambda self: computed.append(1) or _PLAIN(self))
        loss = loss_of(model(TARGETS))
        loss.backward()
        found.append([loss.item(), *(p.grad for p in model.parameters())])
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert bool(computed) == (name in OTHERS)  # all logits exist only where they are needed


def test_logits_can_be_looked_at_and_undone():
    model, patched = Model(), Patched()
    expected = model(TARGETS).detach()
    fuse_loss(model.head, patched)
    logits = model(TARGETS)
    assert isinstance(logits, DeferredLogits)
    assert logits.shape == (2, 12, V)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits.detach(), expected)
    with torch.no_grad():
        assert not isinstance(model(TARGETS), DeferredLogits)
    patched.undo()
    assert torch.equal(model(TARGETS), expected)
    assert "forward" not in vars(model.head)


def gradients(fused, use):
    model, patched = Model(), Patched()
    if fused:
        fuse_loss(model.head, patched)
    logits = model(TARGETS)
    return use(model, logits)


def twice(model, logits):
    loss = F.cross_entropy(logits.view(-1, V), TARGETS.view(-1))
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    return [p.grad for p in model.parameters()]


def of_kept_logits(model, logits):
    logits.retain_grad()
    F.cross_entropy(logits.view(-1, V), TARGETS.view(-1)).backward()
    return [logits.grad, *(p.grad for p in model.parameters())]


def of_computed_logits(model, logits):
    loss = F.cross_entropy(5 * torch.tanh(logits / 5).view(-1, V), TARGETS.view(-1))
    return torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("use", [twice, of_kept_logits, of_computed_logits])
def test_gradients_are_the_same_however_they_are_asked_for(use):
    for one, other in zip(gradients(False, use), gradients(True, use), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("options", [{}, {"allow_unused": True}])
def test_the_gradient_of_logits_that_the_loss_never_saw_is_refused_in_one_line(options, looked_at):
    def use(model, logits):
        loss = F.cross_entropy(logits.view(-1, V), TARGETS.view(-1))
        if looked_at:
            logits.argmax(-1)
        torch.autograd.grad(loss, logits, **options)

    with pytest.raises(Unsupported, match="the gradient of the logits is asked for") as error:
        gradients(True, use)
    assert error.value.levers == ("loss",)


def test_a_head_that_cannot_be_is_refused():
    with pytest.raises(Unsupported, match="bias"):
        find_head([Model(bias=True)])
    with pytest.raises(Unsupported, match="no module"):
        find_head([nn.Linear(2, 3)])
