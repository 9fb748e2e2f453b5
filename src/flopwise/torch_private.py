"""Every private name of torch and Triton that flopwise uses. Nothing else in the source reaches one.

A new torch release is this file to read and `tests/test_torch_private.py` to run: it has a test for each name, and one that
no other file uses a private name. What takes long to import (`torch._dynamo`, `torch._inductor`), or may not be installed
(Triton), is imported at the first call.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload as OpOverload
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch
from torch.utils import checkpoint as _recomputation
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

T = TypeVar("T")
_C: Any = torch._C
_aten: Any = torch.ops.aten

# --- Fake tensors: the classes, and what they raise where a step cannot run on them.

FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
ITEM: Any = _aten._local_scalar_dense.default  # what `.item()`, `float()` and `bool()` end in
DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
UnsupportedFakeTensorException = fake_tensor.UnsupportedFakeTensorException
UnsupportedOperatorException = fake_tensor.UnsupportedOperatorException


@contextmanager
def taken_as_real() -> Iterator[None]:
    """While open, code that asks whether a tensor is fake (transformers does, and then makes masks) is told that none is."""
    subclasses: Any = torch._subclasses
    subclasses.FakeTensor = type("NeverFake", (), {})
    try:
        yield
    finally:
        subclasses.FakeTensor = FakeTensor


real_tensors: Callable[[], AbstractContextManager[Any]] = (
    _python_dispatch._disable_current_modes
)  # none is fake while open

# --- Operators.

fused_sdp_choice: Callable[..., int] = torch._fused_sdp_choice  # the backend SDPA takes: an int of SDPBackend
foreach_add_: Callable[..., None] = torch._foreach_add_
scaled_mm: Callable[..., Tensor] = torch._scaled_mm  # fp8
int_mm: Callable[..., Tensor] = torch._int_mm  # int8, sums in int32
sparse_compress: Callable[..., Tensor] = torch._cslt_compress  # 2:4 sparsity by cuSPARSELt
sparse_mm: Callable[..., Tensor] = torch._cslt_sparse_mm
sparse_mm_search: Callable[..., int] = torch._cslt_sparse_mm_search  # the number of the fastest algorithm
sdpa_flash: Any = _aten._scaled_dot_product_flash_attention
sdpa_cudnn: Any = _aten._scaled_dot_product_cudnn_attention
sdpa_efficient: Any = _aten._scaled_dot_product_efficient_attention
sdpa_math: Any = _aten._scaled_dot_product_attention_math


# --- CUDA: a kernel that spins, and the allocator's history.


def spin(cycles: int) -> None:
    """Queue a kernel that keeps the GPU busy for so many cycles."""
    torch.cuda._sleep(cycles)


def record_memory_history(**options: Any) -> None:
    """Record every allocation from now on; `enabled=None` stops it and forgets what was recorded."""
    torch.cuda.memory._record_memory_history(**options)


def memory_snapshot() -> dict[str, Any]:
    """What was recorded, as PyTorch's memory viewer reads it."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def memory_labels() -> Callable[[str], None] | None:
    """The function that labels every later allocation (`user_metadata`); None where this torch has none."""
    return getattr(torch.cuda.memory, "_set_memory_metadata", None)


# --- Autograd.

current_autograd_node: Callable[[], Any] = _C._current_autograd_node  # None outside of a backward pass
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph  # of a running backward pass


def last_node_number() -> int:
    """The sequence number of the autograd node made last by this thread."""
    return int(_C._autograd._get_sequence_nr()) - 1


def node_number(node: Any) -> int:
    """An autograd node's own sequence number."""
    return int(node._sequence_nr())


def saved_tensor_hook() -> Any:
    """What packs tensors that are saved for backward here and now, a checkpoint's for example; None where nothing does."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks else None


# Ends the forward that a checkpoint runs again, once all that the backward pass needs is there.
StopRecomputation: type[Exception] = _recomputation._StopRecomputationError


def profiler_is_on() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


# --- Tensors and storages.


def storage_key(x: Tensor | torch.UntypedStorage) -> int:
    """One number per storage, also of a fake tensor, which has no address."""
    if isinstance(x, Tensor):
        x = getattr(x, "_local_tensor", x).untyped_storage()  # a DTensor's own storage is this rank's part
    key: int = x._cdata
    return key


def use_counts(tensor: Tensor) -> tuple[int, int]:
    """How often C++ refers to the tensor and to its storage."""
    return int(tensor._use_count()), int(_C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a backward pass through the module calls anything of somebody else's."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place, by itself or through another view of its memory."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    return tensor._is_view()


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that a view is of; None where it is no view."""
    return view._base


def gather_traceback() -> Any:
    """The Python stack here, cheaply: `symbolize_tracebacks` makes frames of it."""
    return _C._profiler.gather_traceback(python=True, script=False, cpp=False)


def symbolize_tracebacks(tracebacks: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """Each traceback's frames, innermost first: name, filename, line."""
    frames: list[list[dict[str, Any]]] = _C._profiler.symbolize_tracebacks(list(tracebacks))
    return frames


# --- The dispatcher.

AUTOCAST_CPU = "AutocastCPU"
_AUTOCAST_KEYS = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)


def in_fake_mode() -> bool:
    """Whether tensors made here and now are fake."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None


def ops_are_followed() -> bool:
    return bool(_C._len_torch_dispatch_stack())


def is_composite(op: OpOverload) -> bool:
    """Whether an op only calls others: it has a composite kernel and none of its own for the CPU."""
    has_kernel, key = _C._dispatch_has_kernel_for_dispatch_key, _C.DispatchKey
    return bool(has_kernel(op.name(), key.CompositeImplicitAutograd) and not has_kernel(op.name(), key.CPU))


def run_composite(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op's composite kernel, whose calls are dispatched again."""
    return op._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def marking_views() -> AbstractContextManager[None]:
    """While open inside a dispatch mode, views are marked as views, as outside of it."""
    without = _C._dispatch_tls_local_exclude_set().remove(_C.DispatchKey.ADInplaceOrView)
    guard: AbstractContextManager[None] = _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), without)
    return guard


def without_cpu_autocast() -> AbstractContextManager[None]:
    """While open, ops skip the kernels registered for `AUTOCAST_CPU`."""
    guard: AbstractContextManager[None] = _C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)
    return guard


def ops_with_kernel(key: str) -> Iterator[str]:
    """The full names (`aten::add.Tensor`) of all ops that have a kernel for a dispatch key."""
    return (op for op in _C._dispatch_get_all_op_names() if _C._dispatch_has_kernel_for_dispatch_key(op, key))


def overload_name(op: OpOverload) -> str:
    """`Tensor` of `aten::add.Tensor`."""
    return op._overloadname


def overload_packet(op: OpOverload) -> Any:
    """`torch.ops.aten.add` of `torch.ops.aten.add.Tensor`."""
    return op._overloadpacket


def schema(op: OpOverload) -> Any:
    """An op's schema: name, arguments, returns, each with `alias_info`."""
    return op._schema


def destroy(library: torch.library.Library) -> None:
    """Take back every kernel that was registered through a library."""
    library._destroy()


# --- Modules.


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name, to be read or replaced; None where a slot is empty."""
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, to be read or replaced."""
    return module._buffers


@contextmanager
def applying_by(apply: Callable[..., nn.Module]) -> Iterator[None]:
    """While open, `module.to(...)` and its kin go through `apply(module, fn, recurse=True)`, for its children as well."""
    original: Any = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def apply_to(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """What `module.to(...)` does, with any function of tensors."""
    module._apply(fn)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of a module that was compiled in place runs; None where it is not compiled."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    module._compiled_call_impl = call


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's forward with its hooks, whether or not it is compiled."""
    return module._call_impl(*args, **kwargs)


# --- Optimizers and the loss scaler.

SCALES_GRADIENTS = "_step_supports_amp_scaling"  # an optimizer that reads `grad_scale` and `found_inf` itself


def takes_scaled_gradients(optimizer: T) -> T:
    """Mark an optimizer, or a class of them, that reads `grad_scale` and `found_inf` itself: GradScaler then sets them."""
    setattr(optimizer, SCALES_GRADIENTS, True)
    return optimizer


@contextmanager
def scaler_always_steps() -> Iterator[None]:
    """While open, a GradScaler steps without asking the device whether a gradient overflowed."""
    scaler: Any = torch.amp.GradScaler
    original = scaler._maybe_opt_step
    scaler._maybe_opt_step = lambda self, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)
    try:
        yield
    finally:
        scaler._maybe_opt_step = original


@contextmanager
def foreach_by_default() -> Iterator[None]:
    """While open, optimizers and gradient clipping go over lists of fake CPU tensors where nobody says how: as on a GPU."""
    from torch.optim import optimizer as optimizers
    from torch.utils import _foreach_utils as lists

    places: Any = optimizers
    original = places._get_foreach_kernels_supported_devices
    types = (places._foreach_supported_types, lists._foreach_supported_types)
    places._get_foreach_kernels_supported_devices = lambda: [*original(), "cpu"]
    for known in types:
        known.append(FakeTensor)
    try:
        yield
    finally:
        places._get_foreach_kernels_supported_devices = original
        for known in types:
            known.remove(FakeTensor)


# --- torch.compile.


def load_compiler(backend: bool) -> None:
    """Import Dynamo, and with `backend` Inductor too: once before many forks."""
    import torch._dynamo

    if backend:
        import torch._inductor.compile_fx  # noqa: F401


def _counter(group: str, name: str) -> int:
    loaded = sys.modules.get("torch._dynamo.utils")  # else nothing was compiled in this process
    return int(loaded.counters[group][name]) if loaded else 0


compiled_graphs = partial(_counter, "stats", "unique_graphs")  # graphs that Dynamo has made in this process
compiled_frames = partial(_counter, "frames", "total")  # frames that it has looked at
captured_calls = partial(_counter, "stats", "calls_captured")  # calls that all graphs together hold
compile_cache_hits = partial(_counter, "inductor", "fxgraph_cache_hit")  # graphs from Inductor's cache on disk
skipped_graphs = partial(_counter, "inductor", "cudagraph_skips")  # that were to be CUDA graphs, and could not be


def generated_kernels() -> int:
    """How many kernels Inductor has generated."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)


def generated_code(compiled: Callable[[Tensor], Any], x: Tensor) -> list[str]:
    """The source that Inductor writes when a compiled function is called first; none where its cache had it."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(compiled, x)[1]


def compiler_error() -> type[Exception]:
    """The class of everything that Dynamo raises."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile(module) made this module."""
    loaded = sys.modules.get("torch._dynamo")
    return loaded is not None and isinstance(module, loaded.OptimizedModule)


def compiler_skips(function: Any) -> bool:
    """Whether Dynamo passes over a function because of the file it is in (those of torch.nn, for example)."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(function))


# --- Tensors that stand for others.


def wrapper_tensor(
    cls: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Any:
    """A tensor of a subclass that has a shape and no memory."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def as_plain_tensor() -> AbstractContextManager[Any]:
    """While open, a tensor of a subclass is treated as any tensor."""
    return _C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def step_hooks(optimizer: Any) -> list[Any]:
    """The hooks that a user has put before and after an optimizer's steps, in their tables."""
    return [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]


def in_place_of_step(step: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """A step that a learning-rate scheduler takes for the one that it has wrapped."""

    def own(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    own._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return own


def share_step_hooks(source: Any, other: Any) -> None:
    """Let another optimizer call the hooks of this one."""
    other._optimizer_step_pre_hooks, other._optimizer_step_post_hooks = step_hooks(source)


def data_loader_iterators() -> list[type]:
    """The classes that a DataLoader's `next` can be of, each with a `__next__` of its own."""
    from torch.utils.data import dataloader

    def kinds(kind: Any) -> list[type]:
        return [kind, *(one for sub in kind.__subclasses__() for one in kinds(sub))]

    return [kind for kind in kinds(dataloader._BaseDataLoaderIter) if "__next__" in vars(kind)]


def loader_workers(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0))  # a user's own class may do without
