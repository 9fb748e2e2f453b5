"""One step watched op by op, to say what it really does: FLOPs by dtype, tokens, attention, optimizers, checkpoints.

It is run after all that is measured, so nothing of it is in a time or a peak. Not before: a step whose first run is watched
is never compiled afterwards (the compiler skips code that it first meets under a dispatch mode, and goes on skipping it).
What is compiled runs op by op here.
"""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.flop_counter import flop_registry

from flopwise import torch_private
from flopwise.capture.boundaries import BACKWARD, FORWARD, OPTIMIZER, Boundaries
from flopwise.capture.ranges import run_phases
from flopwise.capture.step import Step, synchronise
from flopwise.capture.watch import own_ops
from flopwise.capture.watch.op_facts import Call, OpFacts, facts, flops_of, tensors_in
from flopwise.errors import one_line
from flopwise.lm.precision import fp32_matmul_probe
from flopwise.records.run import WRITTEN_OUT, Seen, SeenOptimizer
from flopwise.spec.dtypes import dtype_name
from flopwise.torch_private import OpOverload, TorchDispatchMode, current_autograd_node, storage_key
from flopwise.work.catalogue import ATTENTION_LAYOUT
from flopwise.work.op_rules import attention
from flopwise.work.operation import ATTENTION, MATMUL, OpWork

RECOMPUTE = "recompute"
_NAMESPACES = ("prim", "profiler")  # bookkeeping, not work
_BACKEND = re.compile(r"_?(?:scaled_dot_product_)?(\w+?)_att(?:entio)?n\w*")  # of an op's name
_LOOKUPS = ("embedding", "index", "index_select")
_EXPONENTIALS = ("_softmax", "exp")  # a softmax, whole or written out; SDPA's own is `_safe_softmax`
_SAFE_SOFTMAX = "_safe_softmax"
_FORMS = ("fused", "flopwise", "foreach", "loop")  # an optimizer that has ops of several is the first of these
_NARROW = 2  # a table whose rows are so many times shorter than another's is no vocabulary's


def watch_step(step: Step, device: torch.device) -> Seen:
    """Run the step once more and watch it. Where it cannot run so, the record has the reason and nothing else."""
    parameters = [*(step.trained.parameters() if step.trained is not None else ()), *step.weights()]
    watch = _Watch(device, list({id(p): p for p in parameters}.values()))
    try:
        with _uncompiled(), watch.open():
            run_phases(step.uncaptured or step.phases)
            synchronise(device)
        return watch.seen(_compiled(step, watch.forward_ops))
    except Exception as error:  # noqa: BLE001  # whatever it is, what was measured before stands
        return Seen(problem=one_line(f"{type(error).__name__}: {error}", 160))


@contextmanager
def _uncompiled() -> Iterator[None]:
    """While open, compiled code runs op by op; the compiler is not loaded for it where it is not yet."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


def _compiled(step: Step, forward_ops: int) -> str:
    """How much of the step its own code has compiled."""
    if not torch_private.compiled_graphs():
        return ""
    modules = list(step.trained.modules()) if step.trained is not None else []
    compiled = [m for m in modules if torch_private.is_compiled(m) or torch_private.compiled_call(m) is not None]
    weights = {id(p): p.numel() for module in compiled for p in module.parameters()}
    whole = sum(p.numel() for p in modules[0].parameters()) if modules else 0
    if 2 * sum(weights.values()) > whole:
        largest = max(sum(p.numel() for p in module.parameters()) for module in compiled)
        return "model" if 2 * largest > whole else "blocks"
    # A function was compiled: the model's, if it holds as much as a forward pass has ops.
    return "model" if 2 * torch_private.captured_calls() >= forward_ops else "parts"


class _Watch(TorchDispatchMode):
    """Sees every op below autograd, in the backward pass's thread too: autograd takes the mode with it."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, device: torch.device, parameters: list[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.forward_ops = device, 0
        self._boundaries = Boundaries(self._bounded)
        self._parameters = parameters
        self._weights, self._used = {storage_key(p) for p in parameters}, set[int]()
        self._modules = 0  # whose forward is running
        self._flops: Counter[tuple[str, bool]] = Counter()  # by dtype, and whether it is of a convolution
        self._useful = self._recomputed = 0
        self._lookups: dict[tuple[int, int], _Lookup] = {}
        self._rows: Counter[int] = Counter()  # FLOPs of forward matmuls by their number of rows
        self._attention = _AttentionSeen()
        self._optimizers: dict[int, tuple[Optimizer, set[str]]] = {}
        self._updated_by: list[Optimizer] = []
        self._autocast: Counter[str] = Counter()
        self._checkpoints, self._in_checkpoint = 0, False
        self._backwards = self._updates = self._replays = 0
        self._has_norm = self._clips = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, all that runs is watched."""
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            self._replays += 1
            replay(graph)

        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # of the hooks; others came in earlier steps
            handles: list[Any] = [
                module_hooks.register_module_forward_pre_hook(self._enter_module),
                module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
                optimizers.register_optimizer_step_pre_hook(self._update_begins),
                optimizers.register_optimizer_step_post_hook(self._update_ends),
            ]
            for handle in handles:
                stack.callback(handle.remove)
            stack.callback(setattr, torch.cuda.CUDAGraph, "replay", replay)
            setattr(torch.cuda.CUDAGraph, "replay", counted)  # noqa: B010  # a name that the type checker may not assign
            stack.enter_context(self._boundaries.open())
            stack.enter_context(self)
            yield

    def _enter_module(self, *_: object) -> None:
        self._modules += 1

    def _leave_module(self, *_: object) -> None:
        self._modules -= 1

    def _bounded(self, phase: str, begins: bool) -> None:
        if begins and phase == BACKWARD:
            self._backwards += not self._boundaries.creates_graph
        elif begins:
            self._updates += 1
        self._has_norm = False

    def _update_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._optimizers.setdefault(id(optimizer), (optimizer, set()))
        self._updated_by.append(optimizer)

    def _update_ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._updated_by:
            self._updated_by.pop()

    # --- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            out = func(*args, **kwargs)
            self._higher_order(func, args, kwargs, out)
            return out
        if _is_composite(func):
            with self, torch_private.marking_views():
                return torch_private.run_composite(func, args, kwargs)
        out = func(*args, **kwargs)
        if func.namespace not in _NAMESPACES:
            self._note(func, facts(func), args, kwargs, out)
        return out

    def _note(self, func: OpOverload, fact: OpFacts, args: Any, kwargs: Any, out: Any) -> None:
        phase = self._phase()
        if phase == BACKWARD:
            self._in_checkpoint = False
        elif phase == FORWARD:
            self._forward(fact, args, out)
        elif phase == OPTIMIZER and self._updated_by and not fact.is_view:
            self._optimizers[id(self._updated_by[-1])][1].add(_form(fact))
        if fact.op.flops is not None or fact.formula is not None or fact.name == own_ops.LOSS_OP:
            done, useful, dtype = _work(func, fact, args, kwargs, out)
            self._count(phase, done, useful, dtype, "conv" in fact.name)
            if phase == FORWARD and fact.kind == MATMUL and len(out.shape) == 2:
                self._rows[out.shape[0]] += done

    def _phase(self) -> str:
        # Gradients are off in a backward pass and in an update, and no module runs: but where a checkpoint runs forward
        # again, or the closure that an optimizer is given.
        runs_forward = torch.is_grad_enabled() or self._modules > 0
        if self._boundaries.innermost == OPTIMIZER:
            return FORWARD if runs_forward else OPTIMIZER
        if current_autograd_node() is None:
            return FORWARD
        return RECOMPUTE if runs_forward and not self._boundaries.creates_graph else BACKWARD

    def _count(self, phase: str, done: int, useful: int, dtype: str, convolves: bool) -> None:
        if phase == OPTIMIZER:  # some optimizers multiply matrices; a model's FLOPs are none of those
            return
        self._flops[dtype, convolves] += done
        if phase == RECOMPUTE:
            self._recomputed += done
            self._checkpoints += bool(done) and not self._in_checkpoint
            self._in_checkpoint = self._in_checkpoint or bool(done)
        else:
            self._useful += useful

    def _higher_order(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        formula, phase = flop_registry.get(func), self._phase()
        if formula is None:
            return
        done = int(formula(*args, **kwargs, out_val=out))
        first = next(iter(tensors_in(args)), None)
        self._count(
            phase, done, _useful_share(done, phase), dtype_name(first.dtype) if first is not None else "", False
        )
        if phase == FORWARD and (name := _BACKEND.fullmatch(func.name())) is not None:
            self._attention.kinds[name[1]] = None

    def _forward(self, fact: OpFacts, args: Any, out: Any) -> None:
        self.forward_ops += not fact.is_view
        if torch.is_grad_enabled() or self._modules:  # else weights are copied or averaged, not computed with
            self._used |= self._weights & {storage_key(x) for x in tensors_in(args) if x.layout is torch.strided}
        if torch.is_autocast_enabled(self.device.type):  # off inside the ops that autocast itself calls
            self._autocast[dtype_name(torch.get_autocast_dtype(self.device.type))] += 1
        self._attention.take(fact, args, out)
        if fact.name in _LOOKUPS and (found := _looked_up(fact.name, args, self._weights)) is not None:
            table, indices = found
            key = storage_key(table), table.shape[-1]
            self._lookups.setdefault(key, _Lookup(table.shape[-1])).add(indices)
        if self._backwards and not self._clips:
            self._clipping(fact, args)

    def _clipping(self, fact: OpFacts, args: Any) -> None:
        """After a backward pass: the gradients' norm is taken, and then they are scaled in place."""
        scales = fact.name in ("_foreach_mul_", "mul_")
        if not scales and "norm" not in fact.name:
            return
        gradients = {storage_key(p.grad) for p in self._parameters if p.grad is not None}
        if any(storage_key(t) in gradients for t in tensors_in(args[:1])):
            self._clips = scales and self._has_norm
            self._has_norm = self._has_norm or not scales

    # --- the record

    def seen(self, compiled: str) -> Seen:
        """All that was seen. Which fp32 products were rounded to TF32 is asked of the device."""
        by_dtype: Counter[str] = Counter()
        for (dtype, convolves), flops in self._flops.items():
            by_dtype[self._rounded(convolves) if dtype == "fp32" else dtype] += flops
        used = [p for p in self._parameters if storage_key(p) in self._used]
        return Seen(
            parameters=None if self._replays else sum(p.numel() for p in used),
            weights=most_common_dtype(used),
            flops={dtype: flops for dtype, flops in by_dtype.most_common() if flops},
            useful_flops=self._useful,
            recomputed_flops=self._recomputed,
            tokens=self._tokens(),
            attention=tuple(self._attention.kinds),
            optimizers=tuple(dict.fromkeys(_described(*one) for one in self._optimizers.values())),
            autocast=max(self._autocast, key=self._autocast.__getitem__, default=""),
            compiled=compiled,
            checkpoints=self._checkpoints,
            replays=self._replays,
            backwards=self._backwards,
            updates=self._updates,
            clips=self._clips,
        )

    def _rounded(self, convolves: bool) -> str:
        product = _convolution if convolves else torch.matmul
        return "tf32" if fp32_matmul_probe(self.device, matmul=product) == "tf32" else "fp32"

    def _tokens(self) -> int:
        """Of the widest tables the one that is looked up most: others hold positions, or a bias for each pair of them."""
        widest = max((one.width for one in self._lookups.values()), default=0)
        heaviest = self._rows.most_common(1)[0][0] if self._rows else 0
        counts = [one.tokens(heaviest) for one in self._lookups.values() if _NARROW * one.width > widest]
        return max(counts, default=0)


class _Lookup:
    """How often rows of one table are looked up."""

    def __init__(self, width: int) -> None:
        self.width, self._in_rows, self._in_a_line = width, 0, Counter[int]()

    def add(self, indices: Tensor) -> None:
        if indices.dim() > 1:
            self._in_rows += indices.numel()
        else:
            self._in_a_line[indices.numel()] += indices.numel()

    def tokens(self, heaviest: int) -> int:
        """Indices in one line are tokens only if most of the model's matmuls have as many rows: labels and positions are not."""
        return self._in_rows + self._in_a_line[heaviest]


class _AttentionSeen:
    """What computes attention: a fused op, or two batched products with a softmax between them."""

    def __init__(self) -> None:
        self.kinds: dict[str, None] = {}
        self._scores = 0  # elements of the last batched product
        self._weights = (0, "")  # elements of the last softmax of such, and what kind of attention has it

    def take(self, fact: OpFacts, args: Any, out: Any) -> None:
        """An op of the forward pass."""
        if fact.kind == ATTENTION:
            backward = ATTENTION_LAYOUT.get(fact.name, (False, True))[0]
            name = _BACKEND.fullmatch(fact.name)
            if not backward:
                self.kinds[name[1] if name else fact.shown] = None
        elif fact.name in ("bmm", "baddbmm"):
            elements, kind = self._weights
            if kind and elements in (args[-2].numel(), args[-1].numel()):
                self.kinds[kind] = None
            self._scores, self._weights = out.numel(), (0, "")
        elif fact.name in _EXPONENTIALS and out.numel() == self._scores:
            self._weights = self._scores, WRITTEN_OUT
        elif fact.name == _SAFE_SOFTMAX:
            self._weights = out.numel(), "math"


@cache
def _is_composite(func: Any) -> bool:
    """Whether an op only calls others; in inference mode it comes whole."""
    return torch_private.is_composite(func)


def _work(func: OpOverload, fact: OpFacts, args: Any, kwargs: Any, out: Any) -> tuple[int, int, str]:
    """FLOPs of one call: those done, those that the model asks for; and their dtype."""
    call = Call(
        fact, args, tensors_in((*args, *kwargs.values())), tensors_in(out if isinstance(out, list | tuple) else [out])
    )
    if fact.name == own_ops.LOSS_OP:
        whole = OpWork(op=fact.name, module="", phase=FORWARD, kind=fact.kind, dtype=dtype_name(args[4]))
        flops = sum(part.flops for part in own_ops.loss_parts(whole, args))
        return flops, flops, dtype_name(args[4])
    done = flops_of(call, args, kwargs, out)
    dtype = "fp8" if call.dtype == "fp8" else dtype_name(tensors_in(args)[0].dtype)
    if fact.kind != ATTENTION:
        return done, done, dtype
    backward, by_head = ATTENTION_LAYOUT.get(fact.name, (False, True))
    if (known := attention(call.args, backward, by_head)) is not None:
        return known.done, known.useful, dtype
    formula = flop_registry.get(torch_private.overload_packet(func))  # sequences of several lengths
    done = done or (int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0)
    return done, _useful_share(done, BACKWARD if backward else FORWARD), dtype


def _useful_share(attention_flops: int, phase: str) -> int:
    """Fused attention computes its scores again going back: one of five products."""
    return attention_flops * 4 // 5 if phase == BACKWARD else attention_flops


def _looked_up(name: str, args: Any, weights: set[int]) -> tuple[Tensor, Tensor] | None:
    """The table and the indices of a lookup of rows: by embedding, or by indexing a parameter."""
    table, rows = args[0], args[1]
    if name == "embedding":
        return table, rows
    if name == "index_select":
        rows = [args[2]] if args[1] == 0 else []
    if table.dim() != 2 or storage_key(table) not in weights or len(rows) != 1 or rows[0].dtype == torch.bool:
        return None
    return table, rows[0]


def _form(fact: OpFacts) -> str:
    if fact.name.startswith("_fused_"):
        return "fused"
    if fact.shown.startswith("flopwise::"):
        return "flopwise"
    return "foreach" if fact.over_lists else "loop"


def _described(optimizer: Optimizer, forms: set[str]) -> SeenOptimizer:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_torch = type(optimizer).__module__.startswith("torch.optim")
    form = next((one for one in _FORMS if one in forms), "")
    return SeenOptimizer(
        name=type(optimizer).__name__,
        form=form if by_torch or form != "loop" else "",
        by_torch=by_torch,
        updates=most_common_dtype(parameters),
        capturable=bool(optimizer.param_groups[0].get("capturable")),
    )


def most_common_dtype(tensors: Sequence[Tensor]) -> str:
    """The dtype of most of their elements.

    >>> most_common_dtype([torch.ones(2), torch.ones(3, dtype=torch.bfloat16)])
    'bf16'
    """
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[dtype_name(tensor.dtype)] += tensor.numel()
    return max(elements, key=elements.__getitem__, default="")


def _convolution(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, by a convolution of one pixel: cuDNN decides about TF32 for itself."""
    return nn.functional.conv2d(a[:, :, None, None], b.t()[:, :, None, None])[:, :, 0, 0]
