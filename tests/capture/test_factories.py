"""A user's factory: found by module or file, called with what it takes, and checked."""

import os
import sys
import textwrap

import pytest
import torch

from flopwise.capture.factories import made_phases
from flopwise.capture.functions import LOADING
from flopwise.capture.raised import describe_error
from flopwise.errors import FlopwiseError
from flopwise.spec.workload import workload

CPU = torch.device("cpu")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder of the user's, with files written into it; what is loaded from it is forgotten afterwards."""
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))

    yield write
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def phases(target: str, **arguments):
    return made_phases(workload(target, set=arguments).subject, CPU)


def refused(target: str, **arguments) -> FlopwiseError:
    with pytest.raises(FlopwiseError) as error:
        phases(target, **arguments)
    return error.value


def test_a_file_finds_its_neighbours_and_is_not_the_main_program(project):
    project("sub/near.py", "NUMBER = 7")
    project(
        "sub/my-step.v2.py",
        """
        import dataclasses, sys
        from near import NUMBER

        @dataclasses.dataclass
        class Config:
            number: int = NUMBER

        def make(device):
            return lambda: (Config().number, str(device), sys.argv, __name__)

        words = list(sys.argv)
        if __name__ == "__main__":
            raise SystemExit("run as a program")
        """,
    )
    number, device, _, name = phases("sub/my-step.v2.py:make")["step"]()
    assert (number, device, name) == (7, "cpu", "my_step_v2")
    assert sys.modules[name].words == ["sub/my-step.v2.py"]  # not pytest's own, which a file's argparse would refuse
    assert LOADING not in os.environ


def test_a_file_of_a_package_is_the_package_s_module(project):
    project("project/pkg/__init__.py", "")
    project("project/pkg/sizes.py", "SIZE = 3")
    project("project/pkg/inner/__init__.py", "")
    project("project/pkg/inner/steps.py", "from ..sizes import SIZE\ndef make(device): return lambda: SIZE")
    assert phases("project/pkg/inner/steps.py:make")["step"]() == 3
    assert sys.modules["pkg.inner.steps"].SIZE == 3


def test_a_file_named_as_a_module_that_is_loaded_is_still_its_own(project):
    project("types.py", "def make(device): return lambda: 'mine'")
    project("torch.py", "def make(device): return lambda: 'mine too'")
    assert phases("types.py:make")["step"]() == "mine"
    assert phases("torch.py:make")["step"]() == "mine too"
    assert sys.modules["torch"] is torch


FACTORIES = """
    def first(dev): return lambda: dev
    def by_name(n=1, *, device): return lambda: (device, n)
    def optional(n=1, device=None): return lambda: (device, n)
    def none_at_all(): return lambda: "placed by itself"
    def only_arguments(n=1): return lambda: n
    def any_arguments(device, **others): return lambda: (device, others)
    def passed_on(*args, **kwargs): return first(*args, **kwargs)
    def required(device, n, m): return lambda: n + m
    class Trainer:
        def __init__(self, device, n=1): self.n = n
        def __call__(self): return self.n
        @classmethod
        def make(cls, device): return cls(device, 5)
"""


@pytest.mark.parametrize(
    ("name", "arguments", "returned"),
    [
        ("first", {}, CPU),
        ("by_name", {"n": 2}, (CPU, 2)),
        ("optional", {"n": 2}, (CPU, 2)),
        ("none_at_all", {}, "placed by itself"),
        ("only_arguments", {}, 1),
        ("only_arguments", {"n": 4}, 4),
        ("any_arguments", {"x": 1}, (CPU, {"x": 1})),
        ("passed_on", {}, CPU),
        ("required", {"n": 1, "m": 2}, 3),
        ("Trainer", {"n": 3}, 3),
        ("Trainer.make", {}, 5),
    ],
)
def test_a_factory_gets_the_device_where_it_takes_one_and_its_arguments(project, name, arguments, returned):
    project("made.py", FACTORIES)
    assert phases(f"made.py:{name}", **arguments)["step"]() == returned
    assert phases(f"py:made:{name}", **arguments)["step"]() == returned


BAD = """
    import torch
    NUMBER = 5
    model = torch.nn.Linear(2, 2)
    def make(device, n_layers=1): return lambda: None
    def needs(device, a, b): return lambda: None
    def number(device): return 42
    def nothing(device): pass
    def generator(device): yield 1
    async def asynchronous(device): return lambda: None
    def generates(device):
        def step(): yield 1
        return step
    def awaits(device):
        async def step(): pass
        return {"forward": step}
    def numbers(device): return (n for n in range(3))
    def returns_model(device): return model
    def wants_batch(device): return lambda batch: batch
    def whole_and_part(device): return {"step": make, "other": make}
"""


@pytest.mark.parametrize(
    ("name", "arguments", "said", "hint"),
    [
        ("mak", {}, "'bad.py' has no 'mak'", "did you mean 'make'? functions in it: make, needs"),
        ("NUMBER", {}, "bad.py:NUMBER is not callable", "returns a callable"),
        ("model", {}, "bad.py:model is a model", "returns a callable"),
        ("make", {"n_layer": 1}, "has no argument 'n_layer'", "did you mean 'n_layers'? arguments it has: n_layers"),
        ("needs", {"a": 1}, "bad.py:needs needs b", "--set b=…"),
        ("number", {}, "returned <class 'int'>, and no callable", "takes the device and returns"),
        ("nothing", {}, "returned nothing", "takes the device and returns"),
        ("generator", {}, "is a generator", "returns a callable"),
        ("asynchronous", {}, "is an async function", "returns a callable"),
        ("generates", {}, "returned a step that is a generator: calling it does no work", ""),
        ("awaits", {}, "returned a phase forward that is an async function: calling it does no work", ""),
        ("numbers", {}, "returned <class 'generator'>", "lambda: next(g)"),
        ("returns_model", {}, "a step that is a model and needs input, and a step takes nothing", ""),
        ("wants_batch", {}, "a step that needs batch, and a step takes nothing", ""),
        ("whole_and_part", {}, "names a phase 'step' among others", "choose another"),
    ],
)
def test_what_is_no_factory_is_one_line_and_a_hint(project, name, arguments, said, hint):
    project("bad.py", BAD)
    error = refused(f"bad.py:{name}", **arguments)
    assert said in error.message
    assert hint in error.hint


def test_a_file_that_python_cannot_read_names_the_line(project):
    project("broken.py", "x = 1\ndef make(device:\n")
    assert (
        refused("broken.py:make").message
        == "broken.py:2 cannot be read by Python: '(' was never closed: def make(device:"
    )
    project("imports.py", "import broken")
    assert refused("py:imports:make").message.startswith("broken.py:2 cannot be read")


def test_a_function_that_returns_no_function_is_the_step_itself(project):
    project("bare.py", "calls = []\ndef step(n=1): calls.append(n); return {'loss': 0.5}")
    step = phases("bare.py:step", n=3)["step"]
    assert step() == {"loss": 0.5}
    assert sys.modules["bare"].calls == [3, 3]  # the call that showed what it is, and this one


def test_an_error_shows_the_innermost_line_of_the_user(project):
    project(
        "sub/raises.py",
        """
        import torch

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x * 2
            @staticmethod
            def backward(ctx, gradient): raise RuntimeError("two\\nlines")

        def make(device):
            x = torch.ones(3, requires_grad=True)
            return {"own": Fails.apply(x).sum().backward, "torch_s": lambda: (x * 2).backward()}

        def fails(device):
            assert device is None
        """,
    )
    made = phases("sub/raises.py:make")
    for name, said in (
        ("own", "sub/raises.py:8 in backward: RuntimeError: two lines"),
        (
            "torch_s",
            "sub/raises.py:12 in <lambda>: RuntimeError: grad can be implicitly created only for scalar outputs",
        ),
    ):
        with pytest.raises(RuntimeError) as error:
            made[name]()
        assert describe_error(error.value) == said
    with pytest.raises(AssertionError) as error:
        phases("sub/raises.py:fails")
    assert describe_error(error.value) == "sub/raises.py:15 in fails: AssertionError"
    with pytest.raises(TypeError) as error:
        torch.nn.Linear("x", 2)
    assert describe_error(error.value.with_traceback(error.value.__traceback__.tb_next)).startswith("TypeError: ")
