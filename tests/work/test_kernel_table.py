"""Names of kernels as libraries and profilers write them, each with the class that it was given by hand."""

import csv
import re
from pathlib import Path

import pytest

import flopwise.kernels
from flopwise.work.demangle import demangled
from flopwise.work.kernel_class import classify
from flopwise.work.kernel_signature import signature
from flopwise.work.kernel_words import class_of_word
from flopwise.work.operation import CLASSES

with (Path(__file__).parents[1] / "kernel_classes.tsv").open(encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"][:60])
def test_the_class_given_by_hand(row):
    assert classify(row["name"]) == row["class"], row["why"]
    assert classify(demangled(row["name"])) == row["class"], row["why"]


def test_the_table_has_every_class_and_a_reason_for_each_name():
    assert {row["class"] for row in ROWS} == set(CLASSES) - {"other"}
    assert all(row["library"] and row["why"] for row in ROWS)
    assert len({row["name"] for row in ROWS}) == len(ROWS)


# By the file of kernels/ that a kernel stands in; where a file has several kinds, by a word of its name.
OWN = {
    "adamw_kernels": "optimizer",
    "cross_entropy_rows": "loss",
    "fp8": {"amax": "reduction", "cast": "copy/cast"},
    "fp8_rows": {"rms_norm": "normalisation", "swiglu": "elementwise"},
    "softmax": "softmax",
    **dict.fromkeys(
        ("attention_backward", "attention_hopper", "attention_hopper_backward", "attention_triton"), "attention"
    ),
    **dict.fromkeys(("gelu", "multiply_add", "pointwise_chains", "rope", "swiglu"), "elementwise"),
    **dict.fromkeys(("rms_norm", "rms_norm_forward"), "normalisation"),
}


def own_kernels():
    """Every kernel of ours with its file: those in Triton and Gluon that are launched, and those in CUDA."""
    for path in sorted(Path(flopwise.kernels.__path__[0]).iterdir()):
        text = path.read_text(encoding="utf-8") if path.suffix in (".py", ".cu") else ""
        jitted = r"@(?:triton|gluon)\.jit(?:\([^\n]*\))?\ndef (\w+_kernel)\("
        for name in re.findall(jitted if path.suffix == ".py" else r"__global__ void[^\n]*\n(\w+)\(", text):
            yield pytest.param(path.stem, name, id=name)


@pytest.mark.parametrize(("file", "name"), own_kernels())
def test_our_own_kernels_have_the_class_of_their_file(file, name):
    expected = OWN[file]
    if isinstance(expected, dict):
        (expected,) = (kind for word, kind in expected.items() if word in name)
    assert classify(name) == expected


def test_all_files_with_kernels_are_in_the_table():
    assert {param.values[0] for param in own_kernels()} == OWN.keys()


STRANGERS = "(at::PhiloxCudaState, fbgemm_gpu::FixedDivisor, gemm::Index<softmax>, ncclComm*)"
FUNCTIONS = [
    row for row in ROWS if "(" not in row["name"] and " " not in row["name"] and not row["name"].startswith("_Z")
]


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: row["name"][:60])
def test_neither_parameters_nor_a_result_change_the_class(row):
    """A product is handed an index, attention a Philox state, an embedding fbgemm's divisor."""
    name = f"std::enable_if<!(false), gemm::Softmax>::type {row['name']}{STRANGERS}"
    own = row["name"].partition("<")[0].rpartition("::")[2]
    assert signature(name).own == own.removesuffix(".kd")
    if not row["name"].startswith(("triton_", "mem", "__amd")):  # names that are no functions
        assert classify(name) == row["class"]


def test_many_names_are_told_apart_by_what_they_have_in_common():
    """A hundred thousand names are a few seconds: the words are looked up once, however the names go on."""
    names = [
        f"void at::native::elementwise_kernel<128, {n}, at::native::FillFunctor<float>>(int{n})" for n in range(5000)
    ]
    class_of_word.cache_clear()
    assert {classify(name) for name in names} == {"memory"}
    assert class_of_word.cache_info().misses < 10
