"""FLOPs in closed form: 2 forward, 4 backward, 6 in all for every weight and token; and attention's squares.

Matmuls alone are counted, as PyTorch's FlopCounterMode and every published MFU count them: everything else is less than
a hundredth of them and is limited by bytes, not by FLOPs.
"""

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec.model import ModelSpec
from flopwise.work.op_rules import causal_share


def matmul_flops(m: int, k: int, n: int) -> int:
    """[m, k] times [k, n]: a multiplication and an addition for each of m·k·n pairs.

    >>> matmul_flops(1024, 256, 64)                    # the lecture's linear layer: batch 1024, 256 -> 64
    33554432
    """
    return 2 * m * k * n


def linear_flops(rows: int, ins: int, outs: int, backward: bool = False) -> int:
    """A linear layer over `rows` inputs; with its backward pass three times that: ∂x and ∂W are a matmul each.

    >>> linear_flops(1024, 64, 64, backward=True) == 6 * 1024 * 64 * 64      # 6 · data points · parameters
    True
    """
    return matmul_flops(rows, ins, outs) * (3 if backward else 1)


def matmul_parameters(spec: ModelSpec) -> int:
    """The weights that take part in a matmul with every token: all but the embeddings' tables, norms and biases.

    The head counts, shared with the embedding or not.

    >>> from flopwise.spec.model import preset
    >>> matmul_parameters(preset("small"))
    120926208
    """
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    attention = spec.d_model * (2 * q + 2 * kv)
    mlp = (3 if spec.mlp == "swiglu" else 2) * spec.d_model * spec.d_ff
    return spec.n_layers * (attention + mlp) + spec.vocab * spec.d_model


class ModelFlops(msgspec.Struct, frozen=True, kw_only=True):
    """The FLOPs of one step that the model itself asks for: nothing that is computed twice."""

    forward: int
    backward: int  # 0: inference
    attention_forward: int  # of `forward`, the scores and their product with the values, counted as whole squares
    causal_saved: int  # of forward and backward, what a causal kernel need not do
    rule: int  # 2 or 6 times parameters times tokens: the rule of thumb, for comparison

    @property
    def total(self) -> int:
        """Every score counted, as PaLM's MFU does it (Chowdhery et al. 2022, appendix B)."""
        return self.forward + self.backward

    @property
    def causal(self) -> int:
        """Only the scores that the causal mask leaves."""
        return self.total - self.causal_saved


def model_flops(spec: ModelSpec, batch: int, context: int, phase: str = "train") -> ModelFlops:
    """One step's FLOPs.

    >>> from flopwise.spec.model import preset
    >>> f = model_flops(preset("small"), batch=4, context=512)
    >>> f.backward == 2 * f.forward, round(f.total / f.rule, 3)
    (True, 1.014)
    """
    tokens = batch * context
    square = 4 * batch * spec.n_heads * spec.head_dim * context * context * spec.n_layers
    forward = 2 * matmul_parameters(spec) * tokens + square
    passes = 1 if phase == "forward" else 3
    saved = round(square * passes * (1 - causal_share(context)))
    return ModelFlops(
        forward=forward,
        backward=forward * (passes - 1),
        attention_forward=square,
        causal_saved=saved,
        rule=2 * passes * spec.parameters() * tokens,
    )


def mfu(flops: float, seconds: float, peak_flops_s: float, gpus: int = 1) -> float:
    """Model FLOPs utilisation: the model's FLOPs over what the GPUs could have done in that time.

    >>> round(mfu(989.4e12, 2.0, 989.4e12), 2)
    0.5
    """
    if seconds <= 0 or peak_flops_s <= 0 or gpus <= 0:
        raise FlopwiseError(f"a time of {seconds:g} s on {gpus} GPUs says nothing about MFU", "give a time above zero")
    return flops / (seconds * peak_flops_s * gpus)
