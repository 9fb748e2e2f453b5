"""A long file of rocprofv3: steps of many kernels, each launched by a call, in ROCTx ranges.

    python tests/trace/gen_rocprof.py OUT.json --mb 1000

Writes OUT.json.truth.json with the steps and the nanoseconds in which the GPU was busy.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from rocprof_made import HIP, MARKER, SYMBOLS, dispatch, record, rocprof_file

KERNELS = 500  # of a step
STEP_NS, KERNEL_NS = 5_000_000, 9_000
BYTES_PER_STEP = 307_000
START = 10**15


def _kernels(step: int) -> Iterator[dict[str, object]]:
    for i in range(KERNELS):
        at = START + step * STEP_NS + 20_000 + i * 9_500
        yield dispatch(at, at + KERNEL_NS, 1 + step * (KERNELS + 1) + i, 1 + i % len(SYMBOLS))


def _calls(step: int) -> Iterator[dict[str, object]]:
    for i in range(KERNELS):
        at = START + step * STEP_NS + 1000 + i * 5_000
        yield record(HIP, 0, at, at + 3_000, 1 + step * (KERNELS + 1) + i)


def _markers(step: int) -> Iterator[dict[str, object]]:
    at = START + step * STEP_NS
    yield record(MARKER, 1, at, at + STEP_NS - 1000, (step + 1) * (KERNELS + 1))


def _messages(step: int) -> Iterator[dict[str, object]]:
    yield {"key": (step + 1) * (KERNELS + 1), "value": f"step {step}"}


def _list(file: TextIO, steps: int, made: Callable[[int], Iterator[dict[str, object]]]) -> None:
    file.write("[")
    for step in range(steps):
        file.write("," * (step > 0) + ",".join(map(json.dumps, made(step))))
    file.write("]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--mb", type=float, default=100)
    given = parser.parse_args()
    steps = max(1, round(given.mb * 1e6 / BYTES_PER_STEP))
    (process,) = rocprof_file(1)["rocprofiler-sdk-tool"]
    process["strings"]["marker_api"] = "@messages"
    process["buffer_records"] = {"kernel_dispatch": "@kernels", "hip_api": "@calls", "marker_api": "@markers"}
    lists = {"messages": _messages, "kernels": _kernels, "calls": _calls, "markers": _markers}
    text = json.dumps({"rocprofiler-sdk-tool": [process]})
    with given.out.open("w") as file:
        for name, made in lists.items():
            before, _, text = text.partition(f'"@{name}"')
            file.write(before)
            _list(file, steps, made)
        file.write(text)
    truth = {"steps": steps, "busy_ns": steps * KERNELS * KERNEL_NS}
    Path(f"{given.out}.truth.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    main()
