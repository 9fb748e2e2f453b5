"""The shape simulator against PyTorch itself: the same bytes at every phase's start, peak and end, the same FLOPs and ops."""

import random

import pytest

torch = pytest.importorskip("torch")

from flopwise.capture.model_step import ModelStep  # noqa: E402
from flopwise.lm import loss as lm_loss  # noqa: E402
from flopwise.predict.shapes import losses  # noqa: E402
from flopwise.predict.shapes.step import account_step  # noqa: E402
from flopwise.predict.shapes.tape import Tape  # noqa: E402
from flopwise.spec.workload import workload  # noqa: E402

from .watched import measured  # noqa: E402

PLAIN = {
    "attention": "naive",
    "norm": "eager",
    "activation": "eager",
    "optimizer": "adamw-loop",
    "batch": 2,
    "context": 40,
}
GPT2 = {"d_model": 64, "d_ff": 192, "n_layers": 3, "n_heads": 4, "vocab": 500}
LLAMA = {"n_kv_heads": 2, "qk_norm": True, "qkv_bias": True, "tied": True, "n_layers": 3}

OWN = {"norm": "triton", "activation": "triton", "rope": "triton", "optimizer": "flopwise"}

CASES = {
    "as the course writes it": ("tiny", {}),
    "forward alone": ("tiny", {"phase": "forward"}),
    "without an optimizer": ("tiny", {"phase": "backward"}),
    "long context": ("tiny", {"context": 160, "batch": 1}),
    "torch's activation": ("tiny", {"activation": "torch"}),
    "chunked loss": ("tiny", {"loss": "chunked", "batch": 30}),
    "foreach": ("tiny", {"optimizer": "foreach"}),
    "checkpoint 1": ("tiny", {"checkpoint": 1}),
    "checkpoint 2 of 3": ("tiny", {"checkpoint": 2, "set": {"n_layers": 3}}),
    "bf16 throughout": ("tiny", {"precision": "bf16-pure", "context": 24, "batch": 1}),
    "gpt2": ("gpt2", {"set": GPT2}),
    "gpt2, torch's norm and activation": ("gpt2", {"set": GPT2, "norm": "torch", "activation": "torch"}),
    "our kernels": ("tiny", OWN),
    "our kernels, checkpointed": ("tiny", OWN | {"checkpoint": 1}),
    "our kernels, forward alone": ("tiny", OWN | {"phase": "forward"}),
    "our kernels, bf16 throughout": ("tiny", OWN | {"precision": "bf16-pure", "context": 24}),
    "our kernels, grouped heads, tied, biases, qk norm": ("tiny", OWN | {"set": LLAMA}),
    "our GeLU": ("gpt2", {"set": GPT2, "activation": "triton", "optimizer": "flopwise"}),
    "grouped heads, tied, biases, qk norm": ("tiny", {"set": LLAMA}),
    "updated in backward": ("tiny", {"overlap": "on"}),
    "updated in backward, foreach": ("tiny", {"overlap": "on", "optimizer": "foreach", "set": {"n_layers": 5}}),
    "updated in backward, tied, checkpointed": ("tiny", {"overlap": "on", "set": LLAMA, "checkpoint": 2}),
    "updated in backward, our kernels": ("tiny", OWN | {"overlap": "on", "checkpoint": 1}),
    "updated in backward, gpt2": ("gpt2", {"set": GPT2, "overlap": "on", "optimizer": "foreach"}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on many threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def watched_accumulation(monkeypatch):
    """While a dispatch mode watches, autograd adds gradients up in new memory instead of over the one that waits."""
    monkeypatch.setattr(Tape, "may_overwrite", staticmethod(lambda waiting: False))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_every_phase_has_the_same_bytes_flops_and_ops(case):
    target, options = CASES[case]
    agree(workload(target, **(PLAIN | options)))


@pytest.mark.parametrize("seed", range(8))
def test_so_has_any_shape_with_any_levers(seed):
    agree(workload("tiny", **any_options(random.Random(seed))))


def any_options(chance):
    pick, maybe = chance.choice, lambda: chance.random() < 0.5
    shape = {
        "d_model": pick([32, 48, 64]), "d_ff": pick([64, 96, 200]), "n_layers": pick([1, 2, 3, 4]), "n_heads": 4,
        "vocab": pick([100, 333, 2000]), "n_kv_heads": pick([1, 2, 4]), "mlp": pick(["swiglu", "gelu"]),
        "norm_kind": pick(["rms", "layer"]), "qk_norm": maybe(), "tied": maybe(), "qkv_bias": maybe(),
        "out_bias": maybe(), "mlp_bias": maybe(),
    }  # fmt: skip
    shape |= {"positions": "learned", "max_context": 40} if maybe() else {}
    native = shape["norm_kind"] == "layer" and not shape["qk_norm"]  # torch's rms_norm is one op on a GPU only
    return {
        "set": shape, "attention": "naive", "norm": pick(["eager", "torch"]) if native else "eager",
        "activation": pick(["eager", "torch"]), "loss": pick(["full", "chunked"]),
        "optimizer": pick(["adamw-loop", "foreach"]), "checkpoint": pick([0, 0, 1, 2, 3]), "batch": pick([1, 2, 3]),
        "context": pick([2, 5, 16, 33]), "phase": (phase := pick(["forward", "backward", "train"])),
        "overlap": pick(["off", "on"]) if phase == "train" else "off",
    }  # fmt: skip


def agree(asked):
    torch.manual_seed(0)
    real = measured(ModelStep(asked, torch.device("cpu")))
    told = account_step(asked)
    before = told.phases[0].start_bytes - next(iter(real.values()))[0]  # weights, state and data: not watched
    for phase in told.phases:
        start, peak, end, n_ops, flops = real[phase.phase]
        mine = (phase.start_bytes - before, phase.peak_bytes - before, phase.end_bytes - before)
        assert mine == (start, peak, end), phase.phase
        also = ("recompute",) if phase.phase == "backward" else ()
        assert told.flops(phase.phase, *also) == flops, phase.phase
        updated = asked.recipe.overlap == "on"  # then the backward pass holds the optimizer's ops, too
        if phase.phase == "forward" or (phase.phase == "backward" and not updated):
            assert sum(_is_one_op(op) for op in told.ops if op.phase in (phase.phase, *also)) == n_ops, phase.phase


def _is_one_op(op):
    """PyTorch has these inside another op: the zeros of two gradients, and the second kernel of a norm's backward pass."""
    zeros = op.op == "zeros" and op.module in ("loss", "embedding")
    return not zeros and op.op != "layer_norm_weights"


def test_the_chunks_are_the_models():
    assert losses.CHUNK_TOKENS == lm_loss.CHUNK_TOKENS


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("narrow_sum", [True, False])
def test_so_are_those_of_the_fused_loss(dtype, narrow_sum):
    kernel, torch_dtype = pytest.importorskip("flopwise.kernels.cross_entropy"), lm_dtype(dtype)
    for tokens in (1, 128, 2048, 8192, 65_536, 100_000):
        for vocab in (100, 50_257, 128_256):
            told = losses.fused_chunk(tokens, vocab, torch_dtype.itemsize, narrow_sum)
            assert told == kernel.chunk_rows(tokens, vocab, torch_dtype, narrow_sum)


def lm_dtype(name):
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
