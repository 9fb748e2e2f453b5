"""The reference model on shapes: `lm/transformer.py`, `layers.py` and `attention.py` line by line, for every lever.

It mirrors their Python too, because what a local variable still refers to is still in memory.
"""

from collections.abc import Sequence

from flopwise.predict.shapes import fp8, fused, ops
from flopwise.predict.shapes.tape import Gradients, Node, Parameter, Tape, Tensor
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import FP8, Recipe
from flopwise.work.operation import BUFFERS, LOGITS, PARAMETERS, SCORES
from flopwise.work.tensor import Shape

Angles = tuple[Tensor, Tensor] | None
Activation = Tensor | tuple[Tensor, ...]  # in bf16, and in fp8 for the layers that read it


class Network:
    """The model's weights, and its forward pass."""

    def __init__(self, t: Tape, spec: ModelSpec, recipe: Recipe, context: int, backend: str, hopper: bool) -> None:
        self.t, self.spec, self.recipe, self.backend, self.hopper = t, spec, recipe, backend, hopper
        self.dtype = recipe.weights
        self.tf32 = recipe.precision == "tf32"
        self.fp8, self.by_rows = recipe.precision in FP8, recipe.precision == "fp8-rowwise"
        self.parameters: dict[str, Parameter] = {}
        self.joined = recipe.projections == "fused"
        for name, shape in weight_shapes(spec, recipe.projections).items():
            self._own(name, shape)
        self.angles: Angles = None
        if spec.positions == "rope":
            self.angles = tuple(t.tensor((context, spec.head_dim // 2), "fp32", BUFFERS, "rope") for _ in "cs")  # type: ignore[assignment]

    def _own(self, name: str, shape: Shape) -> None:
        weight = self.t.tensor(shape, self.dtype, PARAMETERS, name)
        weight.node = self.parameters[name] = Parameter(name, weight)

    def weight(self, name: str) -> Tensor:
        return self.parameters[name].weight

    def here(self, name: str) -> str:
        """A weight's name in the module the tape is in."""
        return f"{self.t.module}.{name}"

    # --- lm/transformer.py

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        with self.t.inside("head"):
            return ops.linear(self.t, hidden, self.head_weight, None, self.tf32, family=LOGITS)

    @property
    def head_weight(self) -> Tensor:
        return self.weight("embedding.weight" if self.spec.tied else "head.weight")

    def hidden(self, tokens: Tensor) -> Tensor:
        t = self.t
        with t.inside("embedding"):
            x = fused.embedding(t, self.weight("embedding.weight"), tokens)
        if self.spec.positions == "learned":
            with t.inside("positions"):
                x = ops.add(t, x, _rows(t, self.weight("positions.weight"), tokens.shape[1]))
        x = self._run_blocks(x)
        return self.norm(x, "norm")

    def _run_blocks(self, x: Tensor) -> Tensor:
        layers, every = range(self.spec.n_layers), self.recipe.checkpoint
        if not every or not self.t.grad_enabled:
            return self._run(layers, x)
        for start in range(0, len(layers), every):
            segment = layers[start : start + every]
            x = self.t.checkpoint(lambda x, segment=segment: self._run(segment, x), x)  # type: ignore[misc]
        return x

    def _run(self, layers: Sequence[int], x: Tensor) -> Tensor:
        for layer in layers:
            with self.t.inside(f"blocks.{layer}"):
                x = self._block(x)
        return x

    def _block(self, x: Tensor) -> Tensor:
        own = self.recipe.norm == "triton"
        x = ops.add(self.t, x, self._attention(self._prepared(self.norm(x, "attention_norm"), own)))
        return ops.add(self.t, x, self._mlp(self._prepared(self.norm(x, "mlp_norm"), own)))

    def _prepared(self, x: Tensor, own: bool) -> Activation:
        """What layers in fp8 read, cast once for all of them; by our `own` kernel, it leaves with what that one writes."""
        return fp8.prepared(self.t, x, by_rows=self.by_rows, known=own) if self.fp8 else x

    def _mlp(self, x: Activation) -> Tensor:
        t = self.t
        with t.inside("mlp"):
            if self.spec.mlp == "gelu":
                return self.linear(self._gelu(self.linear(x, "up")), "down")
            if self.joined and self.fp8 and self.recipe.activation == "triton":
                return self.linear(self._prepared(self.linear(x, "gate_up", gated=True), True), "down")
            if self.joined:
                return self.linear(self._gated(*_halves(t, self.linear(x, "gate_up"))), "down")
            if self.recipe.activation == "triton":
                return self.linear(self._gated(self.linear(x, "gate"), self.linear(x, "up")), "down")
            return self.linear(ops.mul(t, self._silu(self.linear(x, "gate")), self.linear(x, "up")), "down")

    def _gated(self, gate: Tensor, up: Tensor) -> Activation:
        if self.recipe.activation == "triton":
            return self._prepared(fused.own_swiglu(self.t, gate, up), True)
        return ops.mul(self.t, self._silu(gate), up)

    def _attention(self, x: Activation) -> Tensor:
        t = self.t
        with t.inside("attention"):
            q, k, v = self._project(x)
            if self.spec.qk_norm:
                q, k = self.norm(q, "q_norm", contiguous=False), self.norm(k, "k_norm", contiguous=False)
            if self.angles is not None:
                q, k = self._turned(q, k)
            y = self._attend(q, k, v)
            return self.linear(self._joined(y), "out")

    def _project(self, x: Activation) -> tuple[Tensor, ...]:
        if not self.joined:
            return tuple(self._split(x, name) for name in "qkv")
        y, spec = self.linear(x, "qkv"), self.spec
        batch, context, _ = y.shape
        heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
        return _pieces(self.t, y, [(batch, n, context, spec.head_dim) for n in heads])

    def _split(self, x: Activation, name: str) -> Tensor:
        """[B, T, H·K] -> [B, H, T, K], a view; its gradient comes back head by head and is copied, see `_keeps_order`."""
        y = self.linear(x, name)
        batch, context, width = y.shape
        shape = (batch, width // self.spec.head_dim, context, self.spec.head_dim)
        one_head = shape[1] == 1  # then both orders are the same
        return (ops.view if one_head or self._keeps_order(name, batch) else ops.merged_back)(self.t, y, shape)

    def _keeps_order(self, name: str, batch: int) -> bool:
        """Fused attention leaves v's gradient, and without rotation q's and k's, in the projection's own memory order;
        naive attention only k's, of a single sequence: its gradient arrives transposed.
        """
        if name in "qk" and self.spec.qk_norm and self.recipe.norm == "triton":
            return True  # our norm's gradient lies as its input does
        turned = self._turned_by_head() or self.spec.qk_norm
        if self._heads_repeated() > 1:
            return False
        if self.recipe.attention == "naive":
            return name == "k" and batch == 1 and not self._turned_by_head()
        return name == "v" or not turned

    def _joined(self, y: Tensor) -> Tensor:
        """[B, H, T, K] -> [B, T, H·K]: a copy where attention wrote head by head."""
        batch, heads, context, head_dim = y.shape
        shape = (batch, context, heads * head_dim)
        if self.recipe.attention == "naive":
            return ops.copied(self.t, y, shape, back="copy" if batch > 1 else "view")
        return ops.copied(self.t, y, shape) if self._by_head() else ops.view(self.t, y, shape)

    def _by_head(self) -> bool:
        """Whether fused attention's output lies head by head: with cuDNN and flex it lies as the queries do."""
        return self.backend in ("cudnn", "flex", "triton") and self._turned_by_head()

    def _turned_by_head(self) -> bool:
        """Written out, the rotation leaves its result head by head; our kernels leave theirs as they find it."""
        return self.angles is not None and self.recipe.rope == "eager"

    def linear(self, x: Activation, name: str, *, gated: bool = False) -> Tensor:
        with self.t.inside(name):
            biased = self.here("bias") in self.parameters
            bias = self.weight(self.here("bias")) if biased else None
            weight = self.weight(self.here("weight"))
            if isinstance(x, Tensor) and not self.fp8:
                return ops.linear(self.t, x, weight, bias, self.tf32)
            both = self._prepared(x, False) if isinstance(x, Tensor) else x
            assert not isinstance(both, Tensor)
            return fp8.linear(self.t, both, weight, bias, by_rows=self.by_rows, gated=gated)

    # --- lm/layers.py

    def norm(self, x: Tensor, name: str, contiguous: bool = True) -> Tensor:
        t, before = self.t, x.dtype
        with t.inside(name):
            layer = self.spec.norm_kind == "layer" and not name.endswith(("q_norm", "k_norm"))
            weights = [self.weight(self.here(w)) for w in (("weight", "bias") if layer else ("weight",))]
            if self.recipe.norm == "torch":
                op = "layer_norm" if layer else "rms_norm"
                return ops.to(t, fused.norm(t, ops.to(t, x, self.dtype), weights, op, contiguous), before)
            if self.recipe.norm == "triton":
                return fused.own_rms_norm(t, x, *weights)
            return ops.to(t, self._layer_norm(x, *weights) if layer else self._rms_norm(x, *weights), before)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        t = self.t
        wide = ops.to(t, x, "fp32")
        inverse_rms = ops.rsqrt(t, ops.shifted(t, ops.mean(t, ops.power(t, wide))))
        return ops.mul(t, ops.mul(t, wide, inverse_rms), weight)

    def _layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        t = self.t
        centred = ops.sub(t, ops.to(t, x, "fp32"), ops.mean(t, ops.to(t, x, "fp32")))
        inverse_std = ops.rsqrt(t, ops.shifted(t, ops.mean(t, ops.power(t, centred))))
        return ops.add(t, ops.mul(t, ops.mul(t, centred, inverse_std), weight), bias)

    def _silu(self, x: Tensor) -> Tensor:
        if self.recipe.activation == "torch":
            return ops.from_input(self.t, "silu", x)
        return ops.mul(self.t, x, ops.from_result(self.t, "sigmoid", x))

    def _gelu(self, x: Tensor) -> Tensor:
        t = self.t
        if self.recipe.activation != "eager":
            return ops.from_input(t, "gelu" if self.recipe.activation == "torch" else "flopwise::gelu", x)
        # One expression, as there: a name would keep its tensor.
        return ops.mul(
            t,
            ops.scaled(t, x),
            ops.shifted(t, ops.from_result(t, "tanh", ops.scaled(t, ops.add(t, x, ops.scaled(t, ops.power(t, x)))))),
        )

    def _turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.angles is not None
        if self.recipe.rope == "eager":
            return self._rope(q), self._rope(k)
        with self.t.inside("rope"):
            return fused.own_rope(self.t, q, k, *self.angles)

    def _rope(self, x: Tensor) -> Tensor:
        assert self.angles is not None
        t, (cos, sin) = self.t, self.angles
        with t.inside("rope"):
            first, second = _halves(t, x)
            turned = _joined_halves(
                t,
                ops.sub(t, ops.mul(t, first, cos), ops.mul(t, second, sin)),
                ops.add(t, ops.mul(t, second, cos), ops.mul(t, first, sin)),
            )
            return ops.to(t, turned, x.dtype)

    # --- lm/attention.py

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.recipe.attention == "naive":
            return self._naive(q, k, v)
        repeats = self._heads_repeated()
        k, v = _repeated(self.t, k, repeats), _repeated(self.t, v, repeats)
        return fused.sdpa(self.t, q, k, v, self.backend, self.tf32, self._by_head(), self.hopper)

    def _heads_repeated(self) -> int:
        """How often keys and values are repeated: the fused backends for half precision take grouped heads as they are."""
        if self.recipe.attention != "naive" and self.backend != "efficient":
            return 1
        return self.spec.n_heads // self.spec.n_kv_heads

    def _naive(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = self.t
        batch, heads, context, head_dim = q.shape
        k, v = _repeated(t, k, self._heads_repeated()), _repeated(t, v, self._heads_repeated())
        square = (batch, heads, context, context)
        with t.inside("scores"):
            scores = ops.scaled(t, self._products(q, k, square), "div")
            every = (context, context)
            future = t.run("triu", (fused.filled(t, every, "bool"),), every, "bool")
            scores = ops.masked_fill(t, scores, future)
        with t.inside("softmax"):
            weights = _softmax_eager(t, scores)
        with t.inside("values"):
            flat = ops.view(t, ops.to(t, weights, v.dtype), (batch * heads, context, context))
            shape = (batch * heads, context, head_dim)
            merge = ops.view if self._heads_repeated() > 1 or batch == 1 else ops.copied
            rows = merge(t, v, shape)
            return ops.view(t, ops.bmm(t, flat, rows, self.tf32), q.shape)

    def _products(self, q: Tensor, k: Tensor, square: Shape) -> Tensor:
        """q kᵀ by einsum, which copies what does not lie head by head."""
        t, (batch, heads, context, head_dim) = self.t, q.shape
        merge = ops.view if self._turned_by_head() or batch == 1 else ops.copied
        left = merge(t, q, (batch * heads, context, head_dim))
        right = (ops.view if self._heads_repeated() > 1 else merge)(t, k, (batch * heads, head_dim, context))
        return ops.view(t, ops.bmm(t, left, right, self.tf32, family=SCORES), square)


def _softmax_eager(t: Tape, x: Tensor) -> Tensor:
    exponential = ops.from_result(t, "exp", ops.sub(t, x, ops.maximum(t, x)), upcast=True)
    return ops.div(t, exponential, ops.total(t, exponential))


def _halves(t: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """x.chunk(2, -1)."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    first, second = _pieces(t, x, (half, half))
    return first, second


def _pieces(t: Tape, x: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Views that share x between them; their gradients are joined by a copy."""
    shape, pieces = x.shape, tuple(x.view(piece) for piece in shapes)
    if t.wants(x) and x.node is not None:

        def backward(t: Tape, grad: Tensor, pieces: Sequence[Tensor]) -> Gradients:
            return (t.run("cat", pieces, shape, grad.dtype),)

        t.order += 1
        node = Node(t.order, t.module, [(x.node, x.slot, shape, x.dtype)], backward, None)
        for slot, piece in enumerate(pieces):
            piece.node, piece.slot = node, slot
    return pieces


def _joined_halves(t: Tape, first: Tensor, second: Tensor) -> Tensor:
    """Side by side; both lie in the order of the projection that x came from, not in that of their shape."""
    half = first.shape
    out = t.run("cat", (first, second), (*half[:-1], 2 * half[-1]), first.dtype, strided=True)
    return t.connect(out, (first, second), lambda t, grad, saved: (grad.view(half), grad.view(half)))


def _repeated(t: Tape, x: Tensor, times: int) -> Tensor:
    """Each head `times` times; the gradients of its copies are added up."""
    if times == 1:
        return x
    batch, heads, context, head_dim = x.shape
    out = t.run("repeat", (x,), (batch, heads * times, context, head_dim), x.dtype)
    before = x.shape
    return t.connect(out, (x,), lambda t, grad, saved: (t.run("sum", (grad,), before, grad.dtype),))


def _rows(t: Tape, table: Tensor, n: int) -> Tensor:
    """The first rows of a table, a view; the gradient is written into zeros."""
    shape = table.shape

    def backward(t: Tape, grad: Tensor, saved: Sequence[Tensor]) -> Gradients:
        return (t.run("slice_backward", (grad,), shape, grad.dtype),)

    return t.connect(table.view((n, shape[1])), (table,), backward)


def weight_shapes(spec: ModelSpec, projections: str = "separate") -> dict[str, Shape]:
    """Every weight of the model by its module's name, in the order the model makes them.

    >>> from flopwise.spec.model import preset
    >>> weight_shapes(preset("tiny"))["blocks.0.mlp.up.weight"]
    (192, 64)
    """
    d, q, kv = spec.d_model, spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {"embedding.weight": (spec.vocab, d)}
    if spec.positions == "learned":
        shapes["positions.weight"] = (spec.max_context, d)

    def linear(name: str, outs: int, ins: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (outs, ins)
        if bias:
            shapes[f"{name}.bias"] = (outs,)

    def norm(name: str, dim: int = d, layer: bool = spec.norm_kind == "layer") -> None:
        shapes[f"{name}.weight"] = (dim,)
        if layer:
            shapes[f"{name}.bias"] = (dim,)

    for i in range(spec.n_layers):
        block = f"blocks.{i}"
        norm(f"{block}.attention_norm")
        for name, outs in (("qkv", q + 2 * kv),) if projections == "fused" else (("q", q), ("k", kv), ("v", kv)):
            linear(f"{block}.attention.{name}", outs, d, spec.qkv_bias)
        linear(f"{block}.attention.out", d, q, spec.out_bias)
        if spec.qk_norm:
            norm(f"{block}.attention.q_norm", spec.head_dim, layer=False)
            norm(f"{block}.attention.k_norm", spec.head_dim, layer=False)
        norm(f"{block}.mlp_norm")
        if spec.mlp == "swiglu" and projections == "fused":
            linear(f"{block}.mlp.gate_up", 2 * spec.d_ff, d, spec.mlp_bias)
        else:
            for name in ("gate", "up") if spec.mlp == "swiglu" else ("up",):
                linear(f"{block}.mlp.{name}", spec.d_ff, d, spec.mlp_bias)
        linear(f"{block}.mlp.down", d, spec.d_ff, spec.mlp_bias)
    norm("norm")
    if not spec.tied:
        linear("head", spec.vocab, d, False)
    return shapes
