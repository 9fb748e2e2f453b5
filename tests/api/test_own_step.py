"""Steps of a user's own, from the command line and from Python, good and bad, each in a process of its own."""

import functools
import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import flopwise
from flopwise.capture import functions
from flopwise.capture.functions import as_workload
from flopwise.errors import FlopwiseError
from flopwise.spec.workload import UserStep
from flopwise.store import StoredRun, find, list_runs
from in_process import in_process

QUICK = {"device": "cpu", "warmup": 1, "samples": 6, "processes": 1}
TRAIN = """
import sys
import torch
from torch import nn

def trained(device, loss_of, width=16, layers=1):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, width, device=device)
    def step():
        optimizer.zero_grad()
        loss = loss_of(model, x)
        optimizer.step()
        return loss
    return step

def backward(loss):
    loss.backward()
    return loss

def plain(device, width=16, layers=1):
    return trained(device, lambda model, x: backward(model(x).square().mean()), width, layers)

def accumulates(device):
    return trained(device, lambda model, x: sum(backward(model(part).square().mean() / 4).detach() for part in x.chunk(4)))

def clips(device):
    def loss_of(model, x):
        loss = backward(model(x).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss
    return trained(device, loss_of)

def draws(device):
    return trained(device, lambda model, x: backward(nn.functional.dropout(model(x), 0.5).square().mean()))

def other_shapes(device):
    counted = []
    def loss_of(model, x):
        counted.append(1)
        return backward(model(x[: 1 + len(counted) % 4]).square().mean())
    return trained(device, loss_of)

def prints_much(device):
    return trained(device, lambda model, x: print("x" * 100_000) or backward(model(x).square().mean()))

def returns_nothing(device):
    step = plain(device)
    return lambda: step() and None

def no_model(device):
    x = torch.randn(8, 8, device=device)
    return lambda: x @ x

def moves(device):
    counted = []
    def loss_of(model, x):
        counted.append(1)
        return backward(model.to("meta" if len(counted) == 3 else device)(x).square().mean())
    return trained(device, loss_of)

def raises_at_build(device):
    raise ValueError("bad\\nsize")

def raises_later(device):
    counted = []
    def step():
        counted.append(1)
        if len(counted) == 3:
            raise RuntimeError("third")
    return step

def quits(device):
    return lambda: sys.exit("no data")

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def bare():
    optimizer.zero_grad()
    loss = backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    return loss
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "train.py").write_text(TRAIN)
    return folder


def line_of(text: str) -> int:
    return TRAIN[: TRAIN.index(text)].count("\n") + 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    ["plain", "accumulates", "clips", "draws", "other_shapes", "prints_much", "returns_nothing", "no_model", "bare"],
)
def test_a_step_is_measured_whatever_it_does(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    run = flopwise.bench(f"train.py:{name}", **QUICK)
    assert run.points[0].status == "ok", run.points[0].reason
    assert run.median_ms > 0
    # Those that it computes with: `bare` has a model of its file, which the others do not use.
    assert run.points[0].ran.parameters == {"bare": 20, "no_model": 0}.get(name, 272)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("moves", f"train.py:{line_of('return backward(model.to')} in loss_of: RuntimeError: "),
        ("raises_at_build", f"train.py:{line_of('raise ValueError')} in raises_at_build: ValueError: bad size"),
        ("raises_later", f"train.py:{line_of('raise RuntimeError')} in step: RuntimeError: third"),
        ("quits", f"train.py:{line_of('return lambda: sys.exit')} in <lambda>: SystemExit: no data"),
    ],
)
def test_a_step_that_raises_shows_its_own_line_and_is_not_the_last_run(folder, name, said):
    good = in_process("bench", "train.py:no_model", "--device", "cpu", "--samples", 2, "-q", cwd=folder)
    assert good.returncode == 0, good.stderr
    runs = folder / ".flopwise" / "runs"
    last = find("last", runs)
    for words in (("bench", "--samples", 9), ("tune", "--budget", "1s")):
        failed = in_process(words[0], f"train.py:{name}", "--device", "cpu", "-q", *words[1:], cwd=folder)
        assert failed.returncode == 2
        lines = failed.stderr.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith(f"error: train.py:{name}: error: {said}")
        assert (list_runs(runs)[0].kind, list_runs(runs)[0].failed) == (words[0], 1)
        assert find("last", runs) == last


def test_arguments_of_a_factory_are_set_compared_and_checked(folder):
    words = ("--device", "cpu", "--samples", 4, "--processes", 1, "-q")
    done = in_process("bench", "train.py:plain", "--set", "layers=3", "--versus", "width=64", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    points = StoredRun.load(find("last", folder / ".flopwise" / "runs")).points
    assert [point.ran.parameters for point in points] == [3 * 16 * 17, 3 * 64 * 65]
    assert [point.trial.workload.label() for point in points] == [
        "train.py:plain layers=3",
        "train.py:plain layers=3 width=64",
    ]
    wrong = in_process("bench", "train.py:plain", "--set", "layer=3", *words, cwd=folder)
    assert "train.py:plain has no argument 'layer'" in wrong.stderr
    assert "did you mean 'layers'? arguments it has: width, layers" in wrong.stderr


@pytest.mark.parametrize("verb", ["tune", "bench"])
def test_a_page_is_written(folder, verb):
    words = ("--budget", "1s") if verb == "tune" else ("--samples", 4)
    done = in_process(
        verb, "train.py:plain", "--device", "cpu", "--seconds", 0.1, *words, "-q", "-o", f"{verb}.html", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"wrote {verb}.html\n"
    assert "train.py:plain" in done.stdout  # the answer itself, too
    page = (folder / f"{verb}.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "train.py:plain" in page
    refused = in_process(verb, "train.py:plain", "-o", f"{verb}.html", "--format", "json", cwd=folder)
    assert "is a page, and --format json asks for none" in refused.stderr


# --- from Python


def make_multiply(device, n=8):
    x = torch.randn(n, n, device=device)
    return lambda: x @ x


def multiply():
    return torch.ones(8, 8) @ torch.ones(8, 8)


def test_a_function_is_measured_and_so_is_one_with_arguments(tmp_path):
    for target, arguments in ((make_multiply, {}), (multiply, {}), (functools.partial(make_multiply, n=4), {"n": 4})):
        run = flopwise.bench(target, runs=tmp_path, **QUICK)
        assert run.points[0].status == "ok", run.points[0].reason
        assert run.points[0].trial.workload.subject.arguments == arguments
        assert run.median_ms > 0


def test_a_function_is_named_so_that_another_process_finds_it():
    assert as_workload(make_multiply, {}).target == f"py:{__name__}:make_multiply"
    made = as_workload(functools.partial(make_multiply, n=4), {"set": {"n": 5}, "precision": "bf16"})
    assert (made.subject.arguments, made.recipe.precision) == ({"n": 5}, "bf16")
    with pytest.raises(FlopwiseError, match="'device' cannot be an argument"):
        as_workload(functools.partial(make_multiply, torch.device("cpu")), {})
    with pytest.raises(FlopwiseError, match=r"a model \(Linear\) is not a step"):
        as_workload(torch.nn.Linear(2, 2), {})


@pytest.mark.parametrize(
    "verb", [flopwise.bench, flopwise.profile, flopwise.memory, flopwise.tune], ids=lambda f: f.__name__
)
def test_a_step_that_fails_raises_one_line_and_its_run_is_kept(folder, monkeypatch, tmp_path, verb):
    monkeypatch.chdir(folder)
    with pytest.raises(FlopwiseError, match=r"^train.py:nope: error: 'train.py' has no 'nope'") as error:
        verb("train.py:nope", device="cpu", runs=tmp_path)
    assert "functions in it: " in error.value.hint
    assert [run.failed for run in list_runs(tmp_path)] == [1]
    if verb is flopwise.bench:
        assert error.value.result.points[0].status == "error"
        assert "0 of 1 measured" in repr(error.value.result)


@pytest.mark.parametrize(
    "verb",
    [flopwise.bench, flopwise.profile, flopwise.memory, flopwise.tune, flopwise.account, flopwise.roofline],
    ids=lambda f: f.__name__,
)
def test_what_is_no_target_is_refused_and_what_is_one_is_named(verb):
    with pytest.raises(FlopwiseError, match="target = 3 is not allowed") as error:
        verb(3)
    assert all(word in error.value.hint for word in ("'small'", "'file.py:factory'", "a function"))


class Trainer:
    def step(self):
        return None


@pytest.mark.parametrize(
    "target", [lambda: None, Trainer().step, functools.partial(lambda n: None, 2)], ids=["lambda", "method", "partial"]
)
def test_a_function_that_no_name_leads_to_is_refused_in_one_line(target, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    with pytest.raises(FlopwiseError, match="cannot import it by name") as error:
        flopwise.bench(target, **QUICK)
    assert "module-level function" in error.value.hint


FAKE_CLOUDPICKLE = """
import marshal, pickle, types

class Function:
    def __init__(self, function): self.function = function
    def __reduce__(self):
        cells = tuple(cell.cell_contents for cell in self.function.__closure__ or ())
        return rebuilt, (marshal.dumps(self.function.__code__), self.function.__module__, cells)

def rebuilt(code, module, cells):
    code = marshal.loads(code)
    return types.FunctionType(code, {"__name__": module}, closure=tuple(map(types.CellType, cells)))

def dumps(function): return pickle.dumps(Function(function))
"""


def test_with_cloudpickle_a_closure_is_measured_and_the_record_holds_no_code(tmp_path, monkeypatch):
    if importlib.util.find_spec("cloudpickle") is None:
        (tmp_path / "cloudpickle.py").write_text(FAKE_CLOUDPICKLE)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)
    size = 3

    def make(device):
        import torch

        x = torch.ones(size, size, device=device)
        return lambda: x @ x

    run = flopwise.bench(make, runs=tmp_path / "runs", **QUICK)
    assert run.points[0].status == "ok", run.points[0].reason
    subject = run.points[0].trial.workload.subject
    assert subject == UserStep(reference=f"{__name__}:make", pickled=subject.pickled)
    assert len(subject.pickled) == 64  # a hash: whoever reads the run cannot be made to run code
    (functions._folder() / f"{subject.pickled}.pickle").unlink()
    with pytest.raises(FlopwiseError, match="a Python process that has ended"):
        flopwise.bench(run.points[0].trial.workload, runs=tmp_path / "runs", **QUICK)


SCRIPT = """
import functools
import flopwise
from neighbour import SIZE

def make(device, n=SIZE):
    import torch
    x = torch.ones(n, n, device=device)
    return lambda: x @ x

def measured(target):
    run = flopwise.bench(target, device="cpu", warmup=1, samples=4, processes=1)
    print(run.header.name, run.points[0].status)

"""


@pytest.fixture
def script(tmp_path):
    """Run SCRIPT with this end."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbour.py").write_text("SIZE = 4")

    def run(end):
        (tmp_path / "sub" / "script.py").write_text(SCRIPT + end)
        environment = os.environ | {"FLOPWISE_RUNS": str(tmp_path / "runs")}
        words = [sys.executable, "sub/script.py"]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_a_script_measures_its_own_function(script):
    done = script('if __name__ == "__main__":\n    measured(make)')
    assert done.stdout == "sub/script.py:make ok\n", done.stderr


@pytest.mark.slow
def test_without_a_guard_the_traceback_ends_with_what_to_do(script):
    *_, message, hint = script("measured(make)").stderr.splitlines()
    assert message.endswith(
        "sub/script.py:make: error: flopwise was called while sub/script.py:make was loaded to be measured"
    )
    assert hint.startswith('hint: put the call under `if __name__ == "__main__":`')


def test_a_function_of_no_file_is_refused_in_one_line(tmp_path):
    program = textwrap.dedent("""
        import sys
        sys.modules["cloudpickle"] = None
        import flopwise
        def make(device): return lambda: None
        try:
            flopwise.bench(make, device="cpu")
        except flopwise.FlopwiseError as error:
            print(error.message, "|", error.hint)
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "make: the process that measures cannot import it by name | write it as a module-level"
    )
