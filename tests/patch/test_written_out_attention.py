"""Attention written out in many ways becomes SDPA; what SDPA cannot do stays as written, and is named."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flopwise.patch import attention
from flopwise.patch.patched import Patched
from patch.models import OwnAttention, OwnGPT, assert_alike, check_patch, hugging_face, loss_of


def replace(model, patched):
    return attention.replace(model, "sdpa", patched)


class Spy:
    """Counts the calls of SDPA, and keeps what the last one was given."""

    def __init__(self, monkeypatch) -> None:
        self.calls, self.original = 0, F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(self, q, k, v, attn_mask=None, **options):
        self.calls, self.mask, self.options = self.calls + 1, attn_mask, options
        return self.original(q, k, v, attn_mask, **options)


@pytest.fixture
def spy(monkeypatch):
    return Spy(monkeypatch)


class InPlace(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.shape[-2]
        att = torch.matmul(q, k.mT)
        att *= self.scale
        att.masked_fill_(~torch.ones(T, T, dtype=torch.bool).tril(), -1e9)
        return torch.matmul(att.softmax(-1), v)


class Bmm(OwnAttention):
    """As OPT and fairseq: heads folded into the batch, a mask added, softmax in fp32."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        q, k, v = (one.reshape(B * H, T, D) for one in (q * self.scale, k, v))
        att = torch.bmm(q, k.transpose(1, 2)).view(B, H, T, T) + torch.triu(torch.full((T, T), float("-inf")), 1)
        weights = F.softmax(att.view(B * H, T, T), dim=-1, dtype=torch.float32).to(v.dtype)
        return torch.bmm(F.dropout(weights, p=0.0, training=self.training), v).view(B, H, T, D)


class Einsum(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        at = torch.arange(q.shape[1])
        att = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        att = torch.where(at[:, None] >= at, att, torch.finfo(att.dtype).min)
        return torch.einsum("bhqk,bkhd->bhqd", att.softmax(dim=-1), v)


class Grouped(OwnAttention):
    """Two heads of keys for four of queries, in five dimensions, with a module for the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softmax(dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.unflatten(1, (2, 2)), k[:, :2, None], v[:, :2, None]
        T = q.shape[-2]
        att = (q @ k.transpose(-2, -1)) * self.scale
        return (self.soft(att.masked_fill(self.mask[0, 0, :T, :T] == 0, -math.inf)) @ v).flatten(1, 2)


CAUSAL = [OwnAttention, InPlace, Bmm, Einsum, Grouped]


@pytest.mark.parametrize("written", CAUSAL)
def test_causal_attention_written_out_is_sdpas_causal_one(written, spy):
    patched = check_patch(OwnGPT(written), replace)
    assert patched.done == [f"attention: 2 {written.__name__} run SDPA"]
    assert spy.mask is None
    assert spy.options["is_causal"]


@pytest.mark.parametrize("written", CAUSAL)
def test_a_length_that_was_not_seen_before_is_as_right(written):
    model, plain, patched = OwnGPT(written), OwnGPT(written), Patched()
    replace(model, patched)
    for length in (16, 9, 24):
        tokens = torch.randint(0, 64, (2, length))
        torch.testing.assert_close(model(tokens), plain(tokens))


class Padded(OwnAttention):
    """Keys are left out for some rows, one row has none: a large negative number gives all keys the same weight."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool)
        keep[0, 5:], keep[1] = False, False
        return ((q @ k.transpose(-2, -1)) * self.scale).masked_fill(~keep[:, None, None], -1e9).softmax(-1) @ v


class Biased(OwnAttention):
    """A learned temperature and a learned bias."""

    def __init__(self) -> None:
        super().__init__()
        self.heat, self.slope = nn.Parameter(torch.rand(4, 1, 1)), nn.Parameter(torch.rand(4, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        att = (q @ k.transpose(-2, -1)) * self.heat - self.slope * torch.arange(q.shape[-2])
        return att.softmax(-1) @ v


class Window(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[-2])
        far = (at[:, None] < at) | (at[:, None] - at > 3)
        return ((q @ k.transpose(-2, -1)) * self.scale).masked_fill(far, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("written", [Padded, Biased, Window])
def test_other_masks_are_given_to_sdpa(written, spy):
    patched = check_patch(OwnGPT(written), replace)
    assert patched.done == [f"attention: 2 {written.__name__} run SDPA"]
    assert spy.mask is not None


class Capped(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (5 * torch.tanh((q @ k.transpose(-2, -1)) / 5)).softmax(-1) @ v


class Kept(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1)
        return self.weights @ v


class OtherBackward(torch.autograd.Function):
    """A softmax whose gradient is not a softmax's."""

    @staticmethod
    def forward(ctx, scores):
        return torch.softmax(scores, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Straight(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OtherBackward.apply((q @ k.transpose(-2, -1)) * self.scale) @ v


class Assigned(OwnAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        att = (q @ k.transpose(-2, -1)) * self.scale
        att[..., 0] = 0.5
        return att.softmax(-1) @ v


@pytest.mark.parametrize("written", [Capped, Kept, Straight, Assigned])
def test_what_sdpa_cannot_do_stays_as_written_and_is_named(written, spy):
    patched = check_patch(OwnGPT(written), replace)
    assert patched.done == []
    assert patched.refused[0].startswith(f"attention: {written.__name__}: ")
    assert not spy.calls or written is Kept  # which completes the pattern, and was compared


class Changing(OwnAttention):
    """Goes another way than at its first call."""

    calls = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        att = (q @ k.transpose(-2, -1)) * self.scale
        if self.calls == 2:
            att.clamp_(max=0.01)
        if self.calls == 3:
            att = att - att.max()
        weights = att.softmax(-1)
        return weights @ v if self.calls < 4 else (weights + weights.sum(-1, keepdim=True)) @ v


def test_a_module_that_goes_another_way_later_is_never_wrong():
    check_patch(OwnGPT(Changing), replace, steps=5)


def test_dropout_is_kept_while_training(spy):
    model, patched = OwnGPT(lambda: OwnAttention(dropout=0.5)), Patched()
    replace(model, patched)
    loss_of(model)
    assert not torch.equal(loss_of(model), loss_of(model))
    assert spy.options["dropout_p"] == 0.5
    model.eval()
    plain = OwnGPT().eval()
    assert_alike(model, plain)
    assert spy.options["dropout_p"] == 0.0


def test_a_mask_that_is_changed_in_place_is_seen(spy):
    model, plain, patched = OwnGPT(), OwnGPT(), Patched()
    replace(model, patched)
    for open_ in (False, True):
        for one in (model, plain):
            for block in one.h:
                block.attn.mask[..., :4].fill_(1.0 if open_ else block.attn.mask[0, 0, -1, 0].item())
        assert_alike(model, plain)


def test_a_checkpointed_block_computes_the_same_again():
    class Recomputed(OwnAttention):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    check_patch(OwnGPT(Recomputed), replace)


def test_a_compiler_sees_the_code_as_written():
    model, plain, patched = OwnGPT(), OwnGPT(), Patched()
    replace(model, patched)
    assert_alike(model, plain)
    tokens = torch.randint(0, 64, (2, 16))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), plain(tokens))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Phi3", "GPT2", "ViT"])
def test_a_setting_of_transformers_is_switched_and_put_back(name, spy):
    model = hugging_face(name, attn_implementation="eager")
    patched = check_patch(model, replace)
    assert patched.done == [f"attention: 1 {type(model).__name__} switched from eager to SDPA"]
    assert spy.calls
    assert model.config._attn_implementation == "eager"


def test_attention_weights_that_are_asked_for_come_as_before():
    model, patched = hugging_face("Llama", attn_implementation="eager"), Patched()
    replace(model, patched)
    loss_of(model)
    ids = torch.arange(3, 9)[None]
    expected = hugging_face("Llama", attn_implementation="eager")(input_ids=ids, output_attentions=True).attentions
    made = model(input_ids=ids, output_attentions=True).attentions
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


REFUSED = [
    ("Gemma2", {}, "attn_logit_softcapping"),
    ("GPT2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
]


@pytest.mark.parametrize(("name", "settings", "why"), REFUSED)
def test_a_model_that_sdpa_would_change_is_refused_by_name(name, settings, why):
    patched = check_patch(hugging_face(name, attn_implementation="eager", **settings), replace)
    assert patched.done == []
    assert why in patched.refused[0]


def test_rows_without_a_key_are_noticed_at_the_first_call():
    """With a window, padded queries see no key: eager gives each key the same weight, transformers' SDPA does not."""
    model = hugging_face("Mistral", sliding_window=4, attn_implementation="eager")
    padding = (torch.arange(16) < torch.tensor([[16], [8]])).long()
    patched = check_patch(model, replace, attention_mask=padding)
    assert "differs from the original" in patched.refused[0]


def test_models_that_run_sdpa_are_left_and_named():
    model, patched = hugging_face("Llama"), Patched()
    assert replace(model, patched) == 0
    assert patched.refused == [
        "attention: LlamaForCausalLM: calls SDPA as it is",
        "attention: LlamaModel: calls SDPA as it is",
    ]


def test_torchs_own_layers_are_left():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    check_patch(OwnGPT(Encoder), replace)
