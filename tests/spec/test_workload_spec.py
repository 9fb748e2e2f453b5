"""Workloads, trials and their keys."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.spec.model import preset_names
from flopwise.spec.operations import OPS
from flopwise.spec.recipe import LEVERS, WITH_MASTERS, Recipe
from flopwise.spec.sweep import sweep_from
from flopwise.spec.workload import Sampling, Trial, UserStep, Workload, varied, workload

HERE = Path(__file__).parent

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1, 64)
    | st.floats()
    | st.text(max_size=8)
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.sampled_from(
    [
        "bf16",
        "fp16",
        "sdpa",
        "on",
        "off",
        "forward",
        "backward",
        "train",
        "transformers",
        "fused",
        "gelu",
        1,
        2,
        1.5,
        True,
    ]
)
OPTIONS = ("batch", "context", "phase", "recipe", "implementation", *LEVERS, "batches")
SETTABLE = ("d_model", "n_heads", "n_layers", "head_dim", "rope_theta", "tied", "name", "dim", "rows", "m", "nothing")


def trial(target="tiny", **options):
    return Trial(workload=workload(target, **options), sampling=Sampling())


@pytest.mark.parametrize("target", [*preset_names(), *(f"op:{name}" for name in OPS), "py:my.module:factory"])
def test_every_target_has_defaults_that_are_allowed_and_survives_the_disk(target):
    one = trial(target)
    again = msgspec.json.decode(msgspec.json.encode(one), type=Trial)
    assert again == one
    assert again.key() == one.key()
    assert one.workload.label().startswith(target)


@pytest.mark.parametrize(
    ("target", "options", "said", "hint"),
    [
        ("small", {"batch": 0}, "batch = 0", "a whole number from 1 to"),
        ("small", {"batch": 10**5000}, "batch = a very large int", "a whole number from 1 to"),
        ("small", {"context": "512"}, "context = '512'", "a whole number from 1 to"),
        (
            "small",
            {"phase": "forwards"},
            "phase = 'forwards'",
            "did you mean 'forward'? allowed: forward, backward, train",
        ),
        ("small", {"phase": ""}, "phase = ''", "forward, backward, train"),  # once taken as the default
        ("small", {"precision": "bf61"}, "precision = 'bf61'", "did you mean 'bf16'"),
        ("small", {"batches": 4}, "no field 'batches' (value 4)", "did you mean 'batch'"),
        ("small", {"set": {"n_layer": 1}}, "no field 'n_layer'", "did you mean 'n_layers'"),
        ("small", {"set": 5}, "set = 5", "a table"),
        ("small", {"recipe": "fast"}, "recipe = 'fast'", "a Recipe"),
        ("small", {"implementation": "jax"}, "implementation = 'jax'", "flopwise, transformers"),
        ("small", {"implementation": "transformers"}, "needs a config", "hf:PATH/config.json"),
        ("small", {"graph": "on", "phase": "forward"}, "graph = 'on'", "phase = train"),
        ("gpt2", {"context": 1025}, "context = 1025 is longer than the model's 1024", "1 to 1024"),
        ("op:matmull", {}, "no operation 'op:matmull'", "did you mean 'matmul'"),
        ("op:gelu", {"phase": "train"}, "phase = 'train' means nothing to op:gelu", "forward, backward"),
        ("op:gelu", {"attention": "flex"}, "attention = 'flex' means nothing to op:gelu", "levers it has: precision"),
        ("op:gelu", {"set": {"dim": 5}}, "op:gelu has no field 'dim'", "rows, cols"),
        ("op:gelu", {"set": {"rows": 0}}, "rows = 0", "a whole number from 1"),
        ("op:rope", {"set": {"dim": 15}}, "dim = 15 is odd", "an even dim"),
        ("op:mlp", {"compile": "blocks"}, "compile = 'blocks' means nothing to op:mlp", "default"),
        ("op:mlp", {"compile": "reduce-overhead"}, "compile = 'reduce-overhead' means nothing to op:mlp", "default"),
        ("small", {"compile": "reduce-overhead", "graph": "on"}, "graph = 'on' with compile", "compile = default"),
        ("small", {"compile": "reduce-overhead", "overlap": "on"}, "overlap = 'on' with compile", "overlap = off"),
        ("small", {"compile": "reduce-overhead", "phase": "decode"}, "writes to a cache", "graph = on"),
        ("small", {"compile": "reduce-overhead", "parallel": "ddp", "ranks": 2}, "with parallel = 'ddp'", "default"),
        ("py:nothing", {}, "is not py:module:factory", "py:my_project.steps:make_step"),
        ("py:a:b", {"attention": "flash"}, "attention = 'flash' cannot be applied to py:a:b", "sdpa, sdpa-flash"),
        ("py:a:b", {"loss": "chunked"}, "loss = 'chunked' cannot be applied to py:a:b", "full, fused"),
        ("py:a:b", {"checkpoint": 2}, "checkpoint = 2 cannot be applied to py:a:b", "off, 1"),
        ("py:a:b", {"set": {"x-y": 1}}, "'x-y' cannot be an argument of py:a:b", "n_layers=2"),
        ("py:a:b", {"set": {"device": "cpu"}}, "'device' cannot be an argument of py:a:b", "--device"),
        ("py:a:b", {"set": {"x": {1, 2}}}, "x = {1, 2} is not allowed", "text, numbers"),
        (
            "py:a:b",
            {"batch": 4},
            "batch = 4 means nothing to 'py:a:b'",
            "none of batch, context and phase; --set batch",
        ),
        ("no/such.py:make", {}, "there is no file 'no/such.py'", "path/file.py:factory"),
        (f"{HERE}/test_workload_spek.py:make", {}, "there is no file", "did you mean 'test_workload_spec.py'"),
        (f"{HERE}/test_workload_spec.py", {}, "names no factory", "flopwise run "),
        ("op:gelu", {"batch": 2}, "batch = 2 means nothing to 'op:gelu'", "phase"),
        ("op:mlp", {"context": 2}, "context = 2 means nothing to 'op:mlp'", "batch, phase"),
        ("tiny", {"set": {"name": "x"}}, "no field 'name'", "n_layers"),
        (5, {}, "workload = 5", "text"),
        ("hf:\udcff", {}, "workload = ", "text"),  # a path's undecodable bytes: no file could hold its key
    ],
)
def test_what_is_wrong_names_the_field_the_value_and_what_is_allowed(target, options, said, hint):
    with pytest.raises(FlopwiseError) as error:
        workload(target, **options)
    assert said in error.value.message
    assert hint in error.value.hint


def test_levers_given_by_name_win_over_the_recipe_s():
    made = workload("small", recipe=Recipe(precision="bf16", compile="default"), compile="off")
    assert made.recipe == Recipe(precision="bf16")


def test_one_side_of_a_matmul_may_differ():
    assert workload("op:matmul", set={"dim": 8, "k": 2}).subject.dims == {"m": 8, "n": 8, "k": 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("warmup", -1),
        ("samples", 0),
        ("samples", 1.0),
        ("seconds", 0),
        ("seconds", "10"),
        ("half_width", 2),
        ("timeout_s", float("nan")),
    ],
)
def test_sampling_out_of_range_names_the_field(field, value):
    with pytest.raises(FlopwiseError, match=f"{field} = ") as error:
        Sampling(**{field: value})
    assert "allowed: a" in error.value.hint


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:1234", "cuda:x", "CPU", "", 5, None, [], "cuda:٣"])
def test_a_device_that_is_none_is_named(device):
    with pytest.raises(FlopwiseError, match="device = ") as error:
        Trial(workload=workload("tiny"), sampling=Sampling(), device=device)
    assert error.value.hint == "allowed: auto, cpu, cuda, cuda:N"


def test_a_key_is_the_same_in_every_process():
    code = (
        "from flopwise.spec.workload import *;"
        "w = workload('op:matmul', set={'k': 2, 'm': 3}, precision='bf16');"
        "print(Trial(workload=w, sampling=Sampling()).key())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("0", "77")
    }
    assert keys == {trial("op:matmul", set={"m": 3, "k": 2}, precision="bf16").key()}


def test_a_key_does_not_depend_on_the_order_of_fields():
    made = trial("op:matmul")
    turned = dict(reversed(made.workload.subject.dims.items()))
    subject = msgspec.structs.replace(made.workload.subject, dims=turned)
    again = msgspec.structs.replace(made, workload=msgspec.structs.replace(made.workload, subject=subject))
    assert again.key() == made.key()


def test_a_key_tells_everything_apart_that_changes_the_measurement():
    w = workload("tiny")
    made = [
        Trial(workload=w, sampling=Sampling()),
        Trial(workload=w, sampling=Sampling(seconds=5)),
        Trial(workload=w, sampling=Sampling(), device="cpu"),
        Trial(workload=w, sampling=Sampling(), group="g"),
        trial(batch=5),
        trial(precision="bf16"),
        trial(set={"n_layers": 1}),
    ]
    assert len({t.key() for t in made}) == len(made)


def test_whole_and_decimal_forms_of_one_number_have_one_key_also_after_the_disk():
    """A sweep file says `seconds = 10`; read back it is 10.0, and the run could not be resumed."""
    whole, decimal = (Trial(workload=workload("tiny"), sampling=Sampling(seconds=s, timeout_s=60)) for s in (10, 10.0))
    assert whole.key() == decimal.key()
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Trial).key() == whole.key()
    theta = trial(set={"rope_theta": 500})
    assert msgspec.json.decode(msgspec.json.encode(theta), type=Trial).key() == theta.key()


@given(
    target=st.sampled_from(["tiny", "gpt2", "op:matmul", "op:attention", "py:a:b"]) | st.text(max_size=12) | ANYTHING,
    options=st.dictionaries(st.sampled_from(OPTIONS), ANYTHING | WORDS, max_size=4),
    changes=st.none() | st.dictionaries(st.sampled_from(SETTABLE), ANYTHING | WORDS, max_size=3) | ANYTHING,
)
def test_anything_is_a_workload_that_survives_the_disk_or_one_line(target, options, changes):
    with contextlib.suppress(FlopwiseError):
        made = workload(target, set=changes, **options)
        one = Trial(workload=made, sampling=Sampling())
        assert isinstance(made, Workload)
        assert msgspec.json.decode(msgspec.json.encode(one), type=Trial).key() == one.key()
        assert made.label()


@given(reference=st.text(max_size=20))
def test_any_py_target_is_a_step_or_one_line(reference):
    with contextlib.suppress(FlopwiseError):
        assert workload(f"py:{reference}").subject == UserStep(reference=reference)


@given(path=st.text(st.characters(codec=None), max_size=20))
def test_any_hf_path_is_one_line(path):
    with pytest.raises(FlopwiseError):
        workload(f"hf:no-such-folder/{path}")


def test_a_label_tells_models_with_changed_fields_apart():
    assert workload("tiny", set={"n_layers": 1}).label() == "tiny n_layers=1 b4 t128 train"
    assert workload("tiny").label() == "tiny b4 t128 train"


@pytest.mark.parametrize(
    ("target", "levers", "said"),
    [
        ("gpt2", {"norm": "triton"}, "norm = 'triton' is a kernel for RMSNorm, and gpt2"),
        ("small", {"activation": "cuda"}, "activation = 'cuda' is a kernel for GeLU, and small"),
        ("gpt2", {"rope": "triton"}, "rope = 'triton' turns queries and keys, and gpt2"),
        ("small", {"impl": "triton"}, "impl = 'triton' means nothing to 'small'"),
        ("op:matmul", {"impl": "triton"}, "impl = 'triton' means nothing to op:matmul"),
        ("op:gelu", {"impl": "trtion"}, "impl = 'trtion' is not allowed"),
        ("op:gelu", {"impl": "triton", "activation": "eager"}, "activation = 'eager' means nothing to op:gelu"),
        ("op:adamw", {"phase": "backward"}, "phase = 'backward' means nothing to op:adamw"),
    ],
)
def test_a_kernel_for_something_else_is_refused_in_one_line(target, levers, said):
    with pytest.raises(FlopwiseError, match=re.escape(said)) as raised:
        workload(target, **levers)
    assert raised.value.hint


def test_an_implementation_is_part_of_the_label_and_an_axis_of_sweeps():
    assert workload("op:gelu", impl="triton").label() == "op:gelu triton rows=4096 cols=4096 forward"
    table = {"base": {"workload": "op:gelu", "impl": ["torch", "triton"]}, "exclude": [{"impl": "torch"}]}
    (trial,) = sweep_from(table).trials
    assert trial.workload.subject.impl == "triton"


@pytest.mark.parametrize("prefix", ["", "py:"])
def test_a_file_and_its_factory_are_a_step_wherever_the_file_lies(prefix, tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("small.py", "./small.py", "~/small.py", str(tmp_path / "small.py")):
        made = workload(f"{prefix}{place}:make")
        assert made.subject == UserStep(reference=f"{place}:make")
        assert made.label() == f"{prefix}{place}:make"
    assert workload("small").own_model is not None


def test_a_factory_s_arguments_are_in_the_label_and_in_the_key():
    made = workload("py:a:b", set={"n_layers": 2, "name": "x\ny"})
    assert made.subject.arguments == {"n_layers": 2, "name": "x\ny"}
    assert made.label() == "py:a:b n_layers=2 name=x y"
    assert len({trial("py:a:b", set=given).key() for given in ({}, {"n": 1}, {"n": 2}, {"n": "2"}, {"m": 2})}) == 5


def test_a_varied_step_of_the_user_s_own_keeps_what_is_known_of_it():
    known = workload("py:a:b", set={"n": 2})
    known = msgspec.structs.replace(
        known, subject=msgspec.structs.replace(known.subject, pickled="f00", written=Recipe(compile="default"))
    )
    again = varied(known, set={"m": 3}, precision="bf16")
    assert again.subject == UserStep(
        reference="a:b", arguments={"n": 2, "m": 3}, pickled="f00", written=Recipe(compile="default")
    )
    assert (again.recipe, again.changes) == (Recipe(precision="bf16"), {"n": 2, "m": 3})


def test_attention_s_mask_is_part_of_the_label_and_an_axis_of_sweeps():
    assert workload("op:attention", set={"causal": "off"}).label() == "op:attention causal=off dim=64 b8 t1024 backward"
    assert workload("op:attention", set={"causal": "on"}).subject == workload("op:attention").subject
    table = {"base": {"workload": "op:attention", "causal": [True, "off"]}, "exclude": [{"causal": True}]}
    (trial,) = sweep_from(table).trials
    assert not trial.workload.subject.causal
    for target, value, said in (("op:attention", 3, "causal = 3"), ("op:gelu", "off", "has no field 'causal'")):
        with pytest.raises(FlopwiseError, match=said):
            workload(target, set={"causal": value})


def test_an_operation_larger_than_any_memory_is_refused_by_its_sizes() -> None:
    with pytest.raises(FlopwiseError, match="no memory holds op:matmul with n = 2147483648, k = 2147483648"):
        workload("op:matmul", set={"dim": 2**31})
    assert workload("op:matmul", set={"m": 1, "n": 1, "k": 2**31}).subject.dims["k"] == 2**31


@pytest.mark.parametrize("precision", WITH_MASTERS)
def test_masters_bring_our_optimizer_unless_one_is_named(precision):
    assert workload("small", precision=precision).recipe.optimizer == "flopwise"
    assert workload("small", precision=precision, optimizer="flopwise-bf16").recipe.optimizer == "flopwise-bf16"
    with pytest.raises(FlopwiseError, match="keeps masters"):
        workload("small", precision=precision, optimizer="foreach")


def test_an_optimizer_comes_with_masters_however_they_are_asked_for() -> None:
    asked = workload("tiny", precision="bf16-master").recipe.optimizer
    assert asked == "flopwise"
    assert workload("tiny", recipe=Recipe(precision="bf16-master")).recipe.optimizer == asked
    assert varied(workload("tiny"), precision="bf16-master").recipe.optimizer == asked
    assert (
        workload("tiny", recipe=Recipe(optimizer="flopwise-bf16"), precision="fp8").recipe.optimizer == "flopwise-bf16"
    )
    assert (
        workload("tiny", recipe=Recipe(precision="bf16-master"), phase="forward").recipe.optimizer == Recipe().optimizer
    )
    with pytest.raises(FlopwiseError, match="needs an optimizer that keeps masters"):
        workload("tiny", recipe=Recipe(precision="bf16-master"), optimizer="fused")
