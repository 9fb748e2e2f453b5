"""What a Triton kernel needs of the chip, found by compiling it: no GPU is needed.

    python -m flopwise.kernels.resources [--arch 80,90,100]

Every module of this room names its kernels in the configurations it ships (`cases()`). A register spill, or more shared
memory than the chip has, is a fault of the configuration: `faults` says so, and the tests fail on it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flopwise.kernels import (
    adamw_kernels,
    attention_triton,
    cross_entropy_rows,
    fp8,
    fp8_rows,
    gelu,
    multiply_add,
    pointwise_chains,
    rms_norm,
    rope,
    softmax,
    swiglu,
)
from flopwise.kernels.case import Case
from flopwise.kernels.triton_private import compile_triton, cuobjdump

_ROWS = (gelu, softmax, rms_norm, swiglu, rope, cross_entropy_rows)
_MODULES = (*_ROWS, fp8, fp8_rows, attention_triton, adamw_kernels, multiply_add, pointwise_chains)
MODULES: dict[str, Callable[[], Iterator[Case]]] = {m.__name__.rpartition(".")[2]: m.cases for m in _MODULES}
# Of one block: CUDA programming guide, technical specifications.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Resources(NamedTuple):
    """What one block takes."""

    registers: int  # per thread
    spilled_bytes: int  # per thread: the stack and local memory
    shared_bytes: int


def compiled(case: Case, arch: int) -> Any:
    """Triton's kernel of one case for one architecture (80, 90, 100)."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    whole = [n for n, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in case.divisible]
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return compile_triton(case.kernel, signature, case.constexprs, whole, arch, options)


def resources(case: Case, arch: int) -> Resources:
    """What one case takes on one architecture."""
    built = compiled(case, arch)
    usage = _usage(built.asm["cubin"])
    return Resources(usage[0], usage[1] + usage[3], built.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(cuobjdump()), "--dump-resource-usage", str(path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(output)
    if not found:
        raise RuntimeError(f"cuobjdump printed no resource usage: {output[:200]}")
    return tuple(int(number) for number in found.groups())


def cases(modules: Iterable[str] = tuple(MODULES)) -> Iterator[Case]:
    """Every kernel in every configuration that is shipped."""
    for name in modules:
        yield from MODULES[name]()


def faults(case: Case, arch: int) -> str:
    """What is wrong with a configuration, or ''."""
    fault = _fault(resources(case, arch), arch, case.spills.get(arch, 0))
    return f"{case.name} on sm_{arch}: {fault}" if fault else ""


def _fault(found: Resources, arch: int, known: int) -> str:
    if found.spilled_bytes > known:
        return f"{found.spilled_bytes} bytes spilled per thread" + (f", {known} are known" if known else "")
    if found.shared_bytes > SHARED_BYTES[arch]:
        return f"{found.shared_bytes} bytes of shared memory, the chip has {SHARED_BYTES[arch]}"
    return ""


def main() -> int:
    """Print what every case takes; 1 if one is at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="80,90,100")
    parser.add_argument("--only", default="", help="modules, separated by commas")
    given = parser.parse_args()
    modules = given.only.split(",") if given.only else list(MODULES)
    for asked, known in ((modules, list(MODULES)), (given.arch.split(","), [str(arch) for arch in SHARED_BYTES])):
        unknown = [name for name in asked if name not in known]
        if unknown:
            print(f"{unknown[0]!r} is none of {', '.join(known)}", file=sys.stderr)  # noqa: T201
            return 2
    status = 0
    for case in cases(modules):
        for arch in SHARED_BYTES:
            if str(arch) in given.arch.split(",") and arch in case.archs:
                found = resources(case, arch)
                fault = _fault(found, arch, case.spills.get(arch, 0))
                status = 1 if fault else status
                print(f"sm_{arch:<4} {case.name:50} {found} {fault}".rstrip())  # noqa: T201
    return status


if __name__ == "__main__":
    sys.exit(main())
