"""The course's own AdamW accounting (CS336, assignment 1, `adamwAccounting`): simpler than ours, and here to compare.

It counts in fp32, for the model's parameters N with d_ff = 4 · d_model and two matrices in the MLP: 4N bytes of weights,
4N of gradients, 8N of state; and of activations only these, per layer: both norms, q, k, v, scores, softmax, their
product with the values, the output projection, W1, its activation, W2; then the last norm, the logits, and the cross
entropy. No copies, no temporaries, no gradients of activations.
"""

import msgspec

from flopwise.spec.model import ModelSpec


class CourseAccounting(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory as a · batch + b."""

    per_sequence_bytes: int  # a
    fixed_bytes: int  # b

    def largest_batch(self, memory_bytes: float) -> int:
        """How many sequences fit.

        >>> CourseAccounting(per_sequence_bytes=10, fixed_bytes=5).largest_batch(48)
        4
        """
        return max(0, int((memory_bytes - self.fixed_bytes) // self.per_sequence_bytes))


def course_accounting(spec: ModelSpec, context: int) -> CourseAccounting:
    """The course's formula for a model of this width and depth.

    >>> from flopwise.spec.model import preset
    >>> course_accounting(preset("gpt2-xl"), 1024).largest_batch(80e9)
    3
    """
    d, layers, vocab = spec.d_model, spec.n_layers, spec.vocab
    parameters = 2 * vocab * d + layers * (12 * d * d + 2 * d) + d
    per_layer = 16 * context * d + 2 * spec.n_heads * context * context
    per_sequence = layers * per_layer + context * d + 2 * context * vocab
    return CourseAccounting(per_sequence_bytes=4 * per_sequence, fixed_bytes=16 * parameters)


def course_forward_flops(spec: ModelSpec, context: int) -> int:
    """Every matmul of a forward pass over one sequence, with two matrices in the MLP.

    >>> from flopwise.spec.model import preset
    >>> round(course_forward_flops(preset("gpt2-xl"), 1024) / 1e12, 2)
    3.51
    """
    d = spec.d_model
    return spec.n_layers * (24 * context * d * d + 4 * context * context * d) + 2 * context * d * spec.vocab


def adamw_flops(parameters: int) -> int:
    """One AdamW step by the course's algorithm. Per parameter: m takes 3, v 4, the update (√v, + ε, m /, α ·, θ −) 5, decay 2.

    >>> adamw_flops(1)
    14
    """
    return 14 * parameters
