"""Every kernel in every configuration that is shipped fits the chips it is shipped for: compiled here, without a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from flopwise.kernels import resources
from flopwise.kernels.resources import MODULES, SHARED_BYTES, Case, faults

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compilable"
)

# Another release of the compiler may spill a few bytes in configurations that nobody has looked at.
of_the_pinned_triton = pytest.mark.skipif(not triton.__version__.startswith("3.7."), reason="spills are known for 3.7")


def _shipped() -> Iterator[object]:
    """Every kernel is compiled once for an H200; its other configurations and chips take minutes."""
    compiled = set()
    for case in resources.cases() if os.environ.get("TRITON_INTERPRET") != "1" else ():
        for arch in case.archs:
            quick = arch == 90 and case.kernel not in compiled
            compiled |= {case.kernel} if quick else set()
            marks = (of_the_pinned_triton,) if quick else (of_the_pinned_triton, pytest.mark.slow)
            yield pytest.param(case, arch, id=f"{case.name}-sm_{arch}".replace(" ", "_"), marks=marks)


@pytest.mark.parametrize(("case", "arch"), list(_shipped()))
def test_no_spill_and_no_overflow(case, arch):
    assert faults(case, arch) == ""


@pytest.mark.parametrize("name", MODULES)
def test_every_module_ships_a_configuration_for_every_architecture(name):
    without = {80} if name.startswith("fp8") else set()  # its tensor cores have no fp8
    assert {arch for case in resources.cases([name]) for arch in case.archs} == set(SHARED_BYTES) - without


@triton.jit
def _greedy(x, y, BLOCK: tl.constexpr):
    """A sum and a second use of the same numbers: all of them live at once in one warp's registers."""
    lanes = tl.arange(0, BLOCK)
    numbers = tl.load(x + lanes)
    tl.store(y + lanes, numbers / tl.sum(numbers))


@triton.jit
def _spacious(x, y, N: tl.constexpr):
    """A product whose factors lie in shared memory whole."""
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(x + rows * N + columns)
    tl.store(y + rows * N + columns, tl.dot(a, tl.trans(a)))


def test_a_spill_is_a_fault():
    """256 numbers for each thread are more than its 255 registers."""
    case = Case("greedy", _greedy, {"x": "*fp32", "y": "*fp32"}, {"BLOCK": 32 * 512}, num_warps=1)
    assert "bytes spilled per thread" in faults(case, 90)
    known = case._replace(spills={90: 8})
    assert ", 8 are known" in faults(known, 90)
    assert faults(case._replace(spills={90: 10_000}), 90) == ""
    modest = case._replace(constexprs={"BLOCK": 32 * 16})
    assert faults(modest, 90) == ""


@pytest.mark.parametrize(("spilled", "status"), [(0, 0), (8, 1)])
def test_the_command_says_it_with_its_exit_status(monkeypatch, capsys, spilled, status):
    case = Case("greedy", _greedy, {"x": "*fp32", "y": "*fp32"}, {"BLOCK": 512}, archs=(90,))
    monkeypatch.setattr(resources, "cases", lambda modules: iter([case]))
    monkeypatch.setattr(resources, "resources", lambda case, arch: resources.Resources(32, spilled, 0))
    monkeypatch.setattr("sys.argv", ["resources"])
    assert resources.main() == status
    assert ("8 bytes spilled" in capsys.readouterr().out) == bool(spilled)


@pytest.mark.parametrize("name", ["attention_tune", pytest.param("kernel_tune", marks=pytest.mark.slow)])
def test_without_a_gpu_the_tuning_says_so(name):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (2, "this measures on a GPU, and torch sees none here\n")


def test_too_much_shared_memory_is_a_fault(monkeypatch):
    case = Case("spacious", _spacious, {"x": "*bf16", "y": "*fp32"}, {"N": 64}, num_warps=4)
    assert faults(case, 80) == ""
    monkeypatch.setitem(resources.SHARED_BYTES, 80, 1024)
    assert "bytes of shared memory, the chip has 1024" in faults(case, 80)


@pytest.mark.parametrize("wrong", [["--arch", "120"], ["--arch", "abc"], ["--only", "foo"], ["--arch", "80,"]])
def test_what_is_unknown_is_one_line(monkeypatch, capsys, wrong):
    monkeypatch.setattr("sys.argv", ["resources", *wrong])
    assert resources.main() == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "is none of" in told.err


@pytest.mark.parametrize("case", [c for c in resources.cases(("rope",)) if "bf16" in c.name], ids=lambda c: c.name)
def test_rotations_load_in_wide_words_whatever_the_heads_width(case):
    """With 40 pairs a head known only when it runs, it would load number by number."""
    ptx = resources.compiled(case, 90).asm["ptx"]
    assert "ld.global.v2.b32" in ptx
    assert "ld.global.b16" not in ptx
