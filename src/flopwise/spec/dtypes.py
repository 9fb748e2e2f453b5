"""The one table of dtypes: our name, torch's, the profiler's, the code of an op's `dtype` argument, and the size."""

import msgspec


class Dtype(msgspec.Struct, frozen=True):
    """How the elements of a tensor are stored.

    >>> named("bf16").torch, from_kineto("c10::BFloat16").name, from_code("15").name
    ('bfloat16', 'bf16', 'bf16')
    """

    name: str  # 'bf16'; unique
    n_bytes: int
    torch: str  # 'bfloat16': torch.bfloat16
    kineto: tuple[str, ...] = ()  # spellings in a trace's `Input type`; none: a trace with it is not counted
    code: str = ""  # c10::ScalarType, as an op's dtype argument is written
    floating: bool = False

    @property
    def precision(self) -> str:
        """What arithmetic on it is called: all 8-bit floats are 'fp8'."""
        return self.name.partition("_")[0]


DTYPES = {
    one.name: one
    for one in (
        Dtype("fp64", 8, "float64", ("double",), "7", True),
        Dtype("fp32", 4, "float32", ("float",), "6", True),
        Dtype("fp16", 2, "float16", ("c10::Half",), "5", True),
        Dtype("bf16", 2, "bfloat16", ("c10::BFloat16",), "15", True),
        Dtype("fp8", 1, "float8_e4m3fn", ("c10::Float8_e4m3fn",), "24", True),
        Dtype("fp8_e5m2", 1, "float8_e5m2", ("c10::Float8_e5m2",), "23", True),
        Dtype("fp8_e4m3fnuz", 1, "float8_e4m3fnuz", ("c10::Float8_e4m3fnuz",), "26", True),
        Dtype("fp8_e5m2fnuz", 1, "float8_e5m2fnuz", ("c10::Float8_e5m2fnuz",), "25", True),
        Dtype("fp8_e8m0fnu", 1, "float8_e8m0fnu", (), "44", True),  # of scales
        Dtype("fp4_e2m1fn_x2", 1, "float4_e2m1fn_x2", (), "45", True),  # two numbers in a byte
        Dtype("int64", 8, "int64", ("long int", "long"), "4"),
        Dtype("int32", 4, "int32", ("int",), "3"),
        Dtype("int16", 2, "int16", ("short int", "short"), "2"),
        Dtype("int8", 1, "int8", ("signed char",), "1"),
        Dtype("uint8", 1, "uint8", ("unsigned char",), "0"),
        Dtype("uint16", 2, "uint16", ("short unsigned int", "unsigned short"), "27"),
        Dtype("uint32", 4, "uint32", ("unsigned int",), "28"),
        Dtype("uint64", 8, "uint64", ("long unsigned int", "unsigned long"), "29"),
        Dtype("bool", 1, "bool", ("bool",), "11"),
        Dtype("complex32", 4, "complex32", (), "8"),
        Dtype("complex64", 8, "complex64", (), "9"),
        Dtype("complex128", 16, "complex128", (), "10"),
    )
}
HALVES = ("bf16", "fp16")
_BY_TORCH = {one.torch: one for one in DTYPES.values()}
_BY_KINETO = {spelling: one for one in DTYPES.values() for spelling in one.kineto}
_BY_CODE = {one.code: one for one in DTYPES.values()}
_STORED_AS = {"tf32": "fp32"}  # a precision of matmuls that is no dtype: what its inputs are stored in
ITEM_BYTES = {one.name: one.n_bytes for one in DTYPES.values()} | {"tf32": 4}


def named(name: str) -> Dtype:
    """The dtype called so; of a precision such as `tf32` or `bf16-pure`, the one its tensors are stored in.

    >>> named("tf32").n_bytes, named("bf16-pure").torch
    (4, 'bfloat16')
    """
    plain = name.partition("-")[0]
    return DTYPES[_STORED_AS.get(plain, plain)]


def item_bytes(name: str, default: int = 0) -> int:
    """Bytes of one element; `default` of a dtype that is not known.

    >>> item_bytes("fp16"), item_bytes("tf32"), item_bytes("int4", 1)
    (2, 4, 1)
    """
    return ITEM_BYTES.get(name, default)


def from_kineto(spelling: str) -> Dtype | None:
    """The dtype that a trace spells so; None of what is no tensor, or not known."""
    return _BY_KINETO.get(spelling)


def from_code(code: str) -> Dtype | None:
    """The dtype with this c10::ScalarType."""
    return _BY_CODE.get(code)


def from_torch(dtype: object) -> Dtype | None:
    """Of a `torch.dtype`, or of how torch prints it."""
    return _BY_TORCH.get(str(dtype).removeprefix("torch."))


def dtype_name(dtype: object) -> str:
    """A `torch.dtype` as `bf16`; torch's own name where we have none.

    >>> dtype_name("torch.bfloat16"), dtype_name("torch.float8_e5m2"), dtype_name("torch.qint8")
    ('bf16', 'fp8', 'qint8')
    """
    known = from_torch(dtype)
    return known.precision if known else str(dtype).removeprefix("torch.")
