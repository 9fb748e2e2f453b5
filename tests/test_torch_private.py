"""Each private name of torch and Triton that flopwise uses: it is there, and does what is relied on (torch 2.11 to 2.13).

Run it first against a new release. On a machine without a GPU the CUDA names are only known to be there.
"""

import ast
import inspect
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

import flopwise
from flopwise import torch_private as private
from flopwise.kernels import triton_private
from flopwise.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode

ADD = torch.ops.aten.add.Tensor
SOURCE = Path(flopwise.__file__).parent


# --- Fake tensors.


def test_reading_a_number_is_one_op_that_comes_to_a_mode():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            with private.no_dispatch():
                return func(*args, **(kwargs or {}))

    seen = []
    with Watch():
        assert float(torch.ones(())) == 1.0
    assert private.ITEM in seen


def test_code_that_asks_is_told_that_no_tensor_is_fake():
    with FakeTensorMode():
        made = torch.ones(1)
    subclasses = getattr(torch, "_subclasses")  # noqa: B009  as transformers asks
    with private.taken_as_real():
        assert not isinstance(made, subclasses.FakeTensor)
    assert isinstance(made, subclasses.FakeTensor)


# --- Operators.


def test_sdpa_says_which_backend_it_takes():
    q = torch.randn(1, 2, 16, 8)
    assert (
        SDPBackend(int(private.fused_sdp_choice(q, q, q, is_causal=True, enable_gqa=False))).name == "FLASH_ATTENTION"
    )


def test_a_list_of_tensors_has_a_number_added_to_each():
    values = torch.zeros(3, dtype=torch.int64)
    private.foreach_add_(list(values.unbind()), [2**40, 1, 7])
    assert values.tolist() == [2**40, 1, 7]


def test_scaled_matmul_takes_fp8():
    a = torch.ones(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())
    product = private.scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    assert product.dtype == torch.bfloat16
    assert product[0, 0] == 16


def test_int8_matmul_sums_in_int32():
    a = torch.full((32, 32), 100, dtype=torch.int8)
    assert private.int_mm(a, a.t())[0, 0] == 32 * 100 * 100


def test_the_sparse_matmul_has_the_arguments_that_are_passed():
    for name in ("_cslt_sparse_mm", "_cslt_sparse_mm_search"):
        given = {argument.name for argument in private.schema(getattr(torch.ops.aten, name).default).arguments}
        assert {"compressed_A", "dense_B", "out_dtype"} <= given
    assert "alg_id" in {one.name for one in private.schema(torch.ops.aten._cslt_sparse_mm.default).arguments}
    assert all(map(callable, (private.sparse_compress, private.sparse_mm, private.sparse_mm_search)))


def test_the_sdpa_backends_have_the_arguments_that_a_dry_run_passes():
    def arguments(op) -> list[str]:
        return [argument.name for argument in private.schema(op.default).arguments]

    tensors = ["query", "key", "value"]
    assert arguments(private.sdpa_flash) == [*tensors, "dropout_p", "is_causal", "return_debug_mask", "scale"]
    for op, name in ((private.sdpa_cudnn, ["return_debug_mask"]), (private.sdpa_efficient, [])):
        middle = ["compute_log_sumexp", "dropout_p", "is_causal"]
        assert arguments(op) == [*tensors, "attn_bias", *middle, *name, "scale"]
    math = ["attn_mask", "dropout_p", "is_causal", "dropout_mask", "scale", "enable_gqa"]
    assert arguments(private.sdpa_math) == [*tensors, *math]


# --- CUDA.


def test_cuda_names_are_there():
    assert callable(torch.cuda._sleep)
    assert callable(torch.cuda.memory._snapshot)
    wanted = {"enabled", "context", "stacks", "max_entries", "clear_history", "global_record_annotations"}
    assert wanted <= set(inspect.signature(torch.cuda.memory._record_memory_history).parameters)
    assert private.memory_labels() is None or callable(private.memory_labels())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_allocator_labels_what_it_records():
    private.record_memory_history(enabled="all", context="alloc", stacks="python", clear_history=True)
    label = private.memory_labels()
    assert label is not None
    label("here")
    kept = torch.empty(1 << 20, device="cuda")
    private.spin(1000)
    found = private.memory_snapshot()
    private.record_memory_history(enabled=None)
    entries = [entry for entry in found["device_traces"][0] if entry["addr"] == kept.data_ptr()]
    assert entries[-1]["action"] == "alloc"
    assert entries[-1]["user_metadata"] == "here"


# --- Autograd.


def test_the_node_of_an_op_is_made_before_the_op_runs_and_known_in_backward():
    seen = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            node = private.current_autograd_node()
            if func is torch.ops.aten.sin.default:
                seen["forward"] = private.last_node_number()
            if func is torch.ops.aten.cos.default and node is not None:
                seen["backward"] = private.node_number(node)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    assert private.current_autograd_node() is None
    with Watch():
        x.sin().sum().backward()
    assert seen["forward"] == seen["backward"]


@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_pass_knows_whether_its_graph_is_kept(retain):
    kept, x = [], torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: kept.append(private.keeps_graph()))
    y.sum().backward(retain_graph=retain)
    assert kept == [retain]


def test_what_packs_saved_tensors_is_known():
    def pack(x):
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert private.saved_tensor_hook() is pack
    assert private.saved_tensor_hook() is None


def test_the_profiler_says_whether_it_is_on():
    assert not private.profiler_is_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiler_is_on()


# --- Tensors and storages.


def test_one_key_per_storage_also_of_fake_tensors():
    x = torch.ones(4)
    assert private.storage_key(x) == private.storage_key(x[1:]) == private.storage_key(x.untyped_storage())
    assert private.storage_key(x) != private.storage_key(x.clone())
    with FakeTensorMode():
        fake = torch.ones(4)
        assert private.storage_key(fake) == private.storage_key(fake[1:]) != private.storage_key(torch.ones(4))


def test_a_write_through_a_view_is_a_new_version_of_the_whole():
    x = torch.zeros(4)
    part, before = x[:2], private.version_of(x)
    part.add_(1)
    assert private.version_of(x) == private.version_of(part) == before + 1


def test_references_are_counted():
    x = torch.ones(4)
    tensors, storages = private.use_counts(x)
    view = x[1:]
    assert private.use_counts(x)[1] == storages + 1  # the view's
    assert private.use_counts(x)[0] >= tensors
    assert private.is_view(view)
    assert not private.is_view(x)
    assert private.base_of(view) is x
    assert private.base_of(x) is None


def test_a_stack_is_gathered_and_named():
    frames = private.symbolize_tracebacks([private.gather_traceback()])[0]
    here = next(frame for frame in frames if frame["filename"].endswith("test_torch_private.py"))
    assert here["name"] == "test_a_stack_is_gathered_and_named"
    assert here["line"] > 0


# --- The dispatcher.


def test_fake_tensors_are_known_and_refuse_what_needs_values():
    assert not private.in_fake_mode()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert private.in_fake_mode()
        fake = torch.ones(3)
        assert isinstance(fake, FakeTensor)
        assert fake.fake_device == torch.device("cpu")
        with pytest.raises(private.DataDependentOutputException) as error:
            fake[0].item()
        assert error.value.func is torch.ops.aten._local_scalar_dense.default
        with pytest.raises(private.DynamicOutputShapeException):
            fake.nonzero()
    assert issubclass(private.UnsupportedOperatorException, Exception)
    assert issubclass(private.UnsupportedFakeTensorException, Exception)


def test_a_composite_op_is_known_and_taken_apart():
    matmul = torch.ops.aten.matmul.default
    assert private.is_composite(matmul)
    assert not private.is_composite(torch.ops.aten.mm.default)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Watch():
        private.run_composite(matmul, (torch.ones(2, 2), torch.ones(2, 2)), {})
    assert torch.ops.aten.mm.default in seen
    assert matmul not in seen


def test_views_are_marked_inside_a_mode():
    marked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                with self, private.marking_views():
                    marked.append(private.is_view(torch.ops.aten.view.default(args[0], [-1])))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.ones(2, 2).detach()
    assert marked == [True]


def test_cpu_autocast_is_skipped_and_its_ops_are_listed():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with private.without_cpu_autocast():
            assert torch.mm(x, x).dtype == torch.float32
    assert {"aten::mm", "aten::linear"} <= set(private.ops_with_kernel(private.AUTOCAST_CPU))


def test_what_an_op_says_of_itself():
    assert private.overload_name(ADD) == "Tensor"
    assert private.overload_packet(ADD) is torch.ops.aten.add
    assert private.schema(ADD).name == "aten::add"
    assert isinstance(ADD, private.OpOverload)
    in_place = private.schema(torch.ops.aten.add_.Tensor)
    assert in_place.arguments[0].alias_info.is_write
    assert in_place.returns[0].alias_info is not None


def test_a_librarys_kernels_are_taken_back():
    name = f"{private.AUTOCAST_CPU}"
    before = set(private.ops_with_kernel(name))
    library = torch.library.Library("aten", "IMPL")
    library.impl("sin", lambda x: x, name)
    assert set(private.ops_with_kernel(name)) - before == {"aten::sin"}
    private.destroy(library)
    assert set(private.ops_with_kernel(name)) == before


# --- Modules.


def test_a_modules_slots_are_read_and_replaced():
    norm = nn.BatchNorm1d(2, affine=False)
    assert private.parameter_slots(norm) == {"weight": None, "bias": None}
    private.buffer_slots(norm)["running_mean"] = torch.ones(2)
    assert norm.running_mean.tolist() == [1.0, 1.0]


def test_a_modules_conversions_go_through_one_function():
    seen = []

    def apply(module, fn, recurse=True):
        seen.append(type(module))
        for child in module.children() if recurse else ():
            private.apply_to(child, fn)
        return module

    model = nn.Sequential(nn.Linear(2, 2))
    with private.applying_by(apply):
        model.to(torch.float64)
    assert seen == [nn.Sequential, nn.Linear]
    assert model[0].weight.dtype == torch.float32
    assert model.double()[0].weight.dtype == torch.float64  # put back
    assert list(inspect.signature(nn.Module._apply).parameters) == [
        "self",
        "fn",
        "recurse",
    ]  # which lm/layers.py overrides


def test_a_compiled_modules_call_is_replaced():
    model, calls = nn.Linear(2, 2), []
    assert private.compiled_call(model) is None

    def call(x):
        calls.append(1)
        return private.call_uncompiled(model, x)

    private.set_compiled_call(model, call)
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert calls == [1]
    private.set_compiled_call(model, None)
    model(torch.ones(1, 2))
    assert calls == [1]
    model.compile(backend="eager")
    assert private.compiled_call(model) is not None


# --- Optimizers and the loss scaler.


def test_a_scaler_hands_scale_and_verdict_to_an_optimizer_that_takes_them():
    seen = {}

    @private.takes_scaled_gradients
    class Takes(torch.optim.SGD):
        def step(self, closure=None):
            seen.update(scale=float(self.grad_scale), inf=float(self.found_inf))

    weight = nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(Takes([weight]))
    assert seen == {"scale": 8.0, "inf": 0.0}


def test_a_scaler_steps_whatever_overflowed():
    weight = nn.Parameter(torch.ones(1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], lr=1.0)
    with private.scaler_always_steps():
        scaler.scale(weight.sum() * float("inf")).backward()
        scaler.step(optimizer)
    assert not torch.isfinite(weight).any()


def test_optimizers_and_clipping_go_over_lists_of_fake_tensors_as_on_a_gpu():
    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(private.schema(func).name)
            return func(*args, **(kwargs or {}))

    def ops(*contexts):
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            seen = stack.enter_context(Watch())
            weight = nn.Parameter(torch.ones(2))
            weight.grad = torch.ones(2)
            nn.utils.clip_grad_norm_([weight], 1.0)
            torch.optim.AdamW([weight]).step()
        return {name for name in seen.names if name.startswith("aten::_foreach")}

    lists = ops(private.FakeTensorMode(), private.foreach_by_default())
    assert lists >= {"aten::_foreach_norm", "aten::_foreach_lerp_", "aten::_foreach_addcdiv_"}
    assert not ops(private.FakeTensorMode())  # nothing stays changed


# --- torch.compile and Triton.


@pytest.mark.slow
def test_a_graph_that_the_compiler_cannot_capture_is_counted():
    before = private.skipped_graphs()
    torch.compile(lambda x: 2 * x + 1, mode="reduce-overhead")(torch.ones(4))  # on the CPU there is nothing to capture
    assert private.skipped_graphs() == before + 1


def test_the_compiler_counts_and_says_what_it_skips():
    private.load_compiler(backend=True)
    graphs, frames, kernels = private.compiled_graphs(), private.compiled_frames(), private.generated_kernels()
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    module(torch.ones(1, 2))
    assert private.compiled_graphs() == graphs + 1
    assert private.captured_calls() > 0
    assert private.compiled_frames() > frames
    assert private.generated_kernels() == kernels
    assert private.compile_cache_hits() >= 0
    assert private.skipped_graphs() >= 0
    assert private.is_compiled(module)
    assert not private.is_compiled(nn.Linear(2, 2))
    assert private.compiler_skips(nn.LSTM(2, 2).forward)
    assert not private.compiler_skips(test_the_compiler_counts_and_says_what_it_skips)
    with pytest.raises(private.compiler_error()):
        torch.compile(lambda x: x if x.sum() > 0 else -x, fullgraph=True, backend="eager")(torch.ones(1))


@pytest.mark.slow
def test_the_code_that_inductor_writes():
    compiled = torch.compile(torch.sin, dynamic=False, options={"fx_graph_cache": False})
    (code,) = private.generated_code(compiled, torch.ones(8))
    assert "def call(" in code


def test_without_the_compiler_nothing_was_compiled():
    program = (
        "import sys; from torch import nn; from flopwise import torch_private as p;"
        "assert not p.is_compiled(nn.Linear(1, 1)) and p.compiled_graphs() == p.compile_cache_hits() == 0;"
        "assert 'torch._dynamo' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_triton_compiles_without_a_gpu_and_brings_cuobjdump():
    triton = pytest.importorskip("triton")
    assert triton_private.triton_interprets() == triton.knobs.runtime.interpret
    assert triton_private.cuobjdump().is_file()
    if not triton_private.triton_interprets():
        from flopwise.kernels.multiply_add import cases
        from flopwise.kernels.resources import resources

        assert resources(next(cases()), 90).registers > 0


def test_gluon_has_what_adds_by_the_copy_engine():
    pytest.importorskip("triton.experimental.gluon")
    libtriton = pytest.importorskip("triton._C.libtriton")
    assert hasattr(libtriton.gluon_ir.GluonOpBuilder, "create_async_tma_reduce")
    assert hasattr(libtriton.ir.DESCRIPTOR_REDUCE_KIND, "ADD")
    assert triton_private.gluon_add_to_global().__triton_builtin__


# --- The law.


OWN = {"_exit", "_SimpleCData", "_fields", "_asdict", "_replace"}  # the standard library's


def private_uses(node: ast.AST) -> list[tuple[str, str]]:
    """What a node reaches that is private, unless flopwise itself has defined that name."""
    modules = []
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        modules = [f"{node.module}.{name.name}" for name in node.names]
    elif isinstance(node, ast.Import):
        modules = [name.name for name in node.names]
    found = []
    for module in modules:
        parts = module.split(".")
        hidden = parts[0] in ("torch", "triton") and any(part.startswith("_") for part in parts)
        if hidden or module.startswith(("triton.backends", "triton.compiler", "triton.runtime", "triton.knobs")):
            found.append(("", f"{node.lineno} imports {module}"))
    if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
        found.append((node.attr, f"{node.lineno} uses .{node.attr}"))
    return found


def defined_by(node: ast.AST) -> str:
    """The name that a node gives to a function, a class, a variable, an attribute of self or an op."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return node.attr if own else ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_fused_rms_norm"):
        return node.value.partition("(")[0]  # ops that the dry run defines
    return ""


def test_backward_hooks_of_a_module_are_seen():
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    assert not private.has_backward_hooks(module)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert private.has_backward_hooks(module)


def test_the_iterators_of_a_data_loader_are_known():
    loader = torch.utils.data.DataLoader([1, 2])
    assert any(isinstance(iter(loader), kind) for kind in private.data_loader_iterators())


def test_no_other_file_reaches_a_private_name():
    own, uses = set(OWN), []
    for path in SOURCE.rglob("*.py"):
        if path.name not in ("torch_private.py", "triton_private.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                own.add(defined_by(node))
                uses += [(name, f"{path.relative_to(SOURCE)}:{told}") for name, told in private_uses(node)]
    own.discard("")
    assert "_apply" in own  # lm/layers.py overrides nn.Module's, see test_a_modules_conversions_go_through_one_function
    assert [told for name, told in uses if name not in own] == []
