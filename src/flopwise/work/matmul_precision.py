"""On which units and in which precision a matrix product ran, where its kernel's name says so.

The trap this avoids: float32 inputs do not mean float32 arithmetic. With TF32 allowed the kernel is a tensor-core one
(`s1688gemm` on Ampere, `tf32f32` in xmma names), ten bits of mantissa and an order of magnitude faster than `sgemm`.

nvjet letters (cuBLAS 12.8 and later, Hopper and Blackwell; not documented by NVIDIA, read off public traces whose ops give the
types): `h` float16, `t` bfloat16, `s` float32, `q` float8, `o` float4. Three letters are input, compute, output
(`tst`: bfloat16 in and out, float32 sums; `hsh`, `tss`); five are A, B, C, compute, D (`qqtst`, `ootst`). Other letters: unknown.
"""

import re
from typing import NamedTuple

from flopwise.work.kernel_class import classify
from flopwise.work.kernel_signature import signature
from flopwise.work.kernel_spelling import LONGEST_MATCHED
from flopwise.work.operation import MATMUL

UNKNOWN = "unknown"


class MatmulPrecision(NamedTuple):
    """What a matmul kernel's name tells."""

    tensor_cores: bool | None  # None: the name does not say (AMD: matrix cores)
    precision: str  # of the multiplied operands: fp64, fp32, tf32, fp16, bf16, fp8, fp6, fp4, int8 or 'unknown'


_NVJET_TYPES = {"h": "fp16", "t": "bf16", "q": "fp8", "o": "fp4", "s": "tf32"}
_NVJET = re.compile(r"^nvjet_(?:(sm\d+)\w*?_)?([a-z]+)_")
_XMMA = re.compile(r"xmma_\w*?(?:gemm|fprop|dgrad|wgrad)\w*?_([a-z0-9]+)_([a-z]+\d\w*?|f32)_")
_LONGEST_XMMA = 400  # no xmma kernel's name is longer, and the pattern backtracks
_CUDA_CORES = re.compile(
    r"simt|ffma|gemv|magma|dot_kernel|(?:ampere|volta|turing|maxwell|pascal)_[shdcz]gemm|(?:\b|_)[sdh](?:gemm|cudnn)_"
)
_LETTER_GEMM = re.compile(
    r"(?:simt|ampere|volta|turing|maxwell|pascal|magma|lds\d+|kernel)_([shdcz])gemm|(?:\b|_)([sdh])(?:gemm|cudnn)_"
)
_TENSOR_CORES = re.compile(
    r"tensorop|wmma|wgmma|tensor\d+x|warpgroup|[shid](?:884|1688|16816|161616|16832|16864|\d+x\d+x\d+)"
)
_TILE_LETTER = re.compile(r"(?:^|_)([shid])(884|1688|16816|161616)(?:gemm|fprop|dgrad|wgrad|tf32|cudnn|_)")
_TYPE_WORDS = (  # the first word found names the operands: narrow types before the wide ones they are stored to
    (re.compile(r"tf32|tfloat32"), "tf32"),
    (re.compile(r"e2m1|xf4|float4|nvfp4|mxf4|\bf4"), "fp4"),
    (re.compile(r"e3m2|e2m3|xf6"), "fp6"),
    (re.compile(r"e4m3|e5m2|fp8|float8|f8f"), "fp8"),
    (re.compile(r"i8i|_s8(?!\d)|int8|imma|i16832|i8816"), "int8"),
    (re.compile(r"bf16|bfloat16"), "bf16"),
    (re.compile(r"(?<!b)f16|fp16|half|hmma"), "fp16"),
    (re.compile(r"f64|double|dmma"), "fp64"),
)
_LETTERS = {"s": "fp32", "h": "fp16", "d": "fp64", "c": "fp32", "z": "fp64"}
_XMMA_TYPES = {"e4m3": "fp8", "e5m2": "fp8", "tf32": "tf32", "bf16": "bf16", "f16": "fp16", "f64": "fp64", "i8": "int8"}
_TENSILE = re.compile(r"cijk_[a-z]+_[a-z]+_(?:mx)?([a-z0-9]+?)(?:_|$)")
_TENSILE_TYPES = {
    "f8": "fp8",
    "b8": "fp8",
    "i8": "int8",
    "f4": "fp4",
    "h": "fp16",
    "b": "bf16",
    "d": "fp64",
    "s": "fp32",
}


def matmul_precision(name: str) -> MatmulPrecision | None:
    """None for a kernel that is no matrix product (split-K reductions included).

    >>> matmul_precision("ampere_sgemm_128x64_nn")
    MatmulPrecision(tensor_cores=False, precision='fp32')
    >>> matmul_precision("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>")
    MatmulPrecision(tensor_cores=True, precision='tf32')
    """
    text = _told(name[:LONGEST_MATCHED])
    if classify(name) != MATMUL or "reduce" in text or "reduction" in text:
        return None
    for reader in (_nvjet, _tensile, _xmma):
        if (told := reader(text)) is not None:
            return told
    return _cuda_cores(text) or _tensor_cores(text) or MatmulPrecision(None, _word(text) or UNKNOWN)


def _told(name: str) -> str:
    """What of a name can tell: the function's own name, its namespaces and template arguments, not its parameters; of a
    mangled name the identifiers (`_S8_` in it is no int8, but refers to the tenth type before)."""
    parts = signature(name)
    arguments = " ".join(parts.words()) if name.startswith("_Z") else parts.arguments
    path = f"{parts.scope}::{parts.own}" if parts.scope else parts.own
    return f"{path}<{arguments}>".lower()


def _nvjet(text: str) -> MatmulPrecision | None:
    parts = _NVJET.match(text)
    if parts is None:
        return None
    chip, letters = parts.groups()
    precision = _NVJET_TYPES.get(letters[0], UNKNOWN) if len(letters) in (3, 5) else UNKNOWN
    if precision == "tf32" and "tf32" not in text and chip is not None and int(chip[2:]) >= 100:
        precision = UNKNOWN  # Blackwell's cuBLAS can also make float32 out of bfloat16 products (BF16x9)
    return MatmulPrecision(True, precision)


def _tensile(text: str) -> MatmulPrecision | None:
    parts = _TENSILE.search(text)
    if parts is None:
        return None
    code = parts.group(1)
    precision = next((kind for start, kind in _TENSILE_TYPES.items() if code.startswith(start)), UNKNOWN)
    if precision == "fp32" and "x" in code:
        precision = "tf32"  # AMD's XF32
    return MatmulPrecision(re.search(r"_mi\d", text) is not None, precision)


def _xmma(text: str) -> MatmulPrecision | None:
    parts = _XMMA.search(text[:_LONGEST_XMMA])
    if parts is None:
        return None
    if "ffma" in text:
        return MatmulPrecision(False, "fp32")
    operands = parts.group(2)
    tensor = _TENSOR_CORES.search(text) is not None
    for word, precision in _XMMA_TYPES.items():
        if operands.startswith(word):
            return MatmulPrecision(True, precision)
    return MatmulPrecision(tensor, "tf32" if tensor else "fp32")  # float32 operands on tensor cores are TF32


def _cuda_cores(text: str) -> MatmulPrecision | None:
    if _CUDA_CORES.search(text) is None or "tensorop" in text:
        return None
    letter = _LETTER_GEMM.search(text)
    if letter is not None:
        return MatmulPrecision(False, _LETTERS[letter.group(1) or letter.group(2)])
    return MatmulPrecision(False, _word(text) or ("fp32" if "float" in text or "magma_s" in text else UNKNOWN))


def _tensor_cores(text: str) -> MatmulPrecision | None:
    if _TENSOR_CORES.search(text) is None:
        return None
    if (word := _word(text)) is not None:
        return MatmulPrecision(True, word)
    tile = _TILE_LETTER.search(text)
    if tile is None:
        return MatmulPrecision(True, UNKNOWN)
    letter, shape = tile.groups()
    if letter == "d":
        return MatmulPrecision(True, "fp64")
    if letter == "s" and shape == "1688" and "turing" not in text and "_75_" not in text:
        return MatmulPrecision(True, "tf32")  # float32 operands: from Ampere on the 16×8×8 tile is TF32's
    return MatmulPrecision(True, "fp16")


def _word(text: str) -> str | None:
    return next((precision for pattern, precision in _TYPE_WORDS if pattern.search(text)), None)
