"""What the GPUs of an Nsight Systems export are called, by the numbers that each process gave them."""

from collections.abc import Iterable
from itertools import islice

from flopwise.trace.gpu_names import MOST_GPUS, Described, device_name
from flopwise.trace.nsys_file import MISSING, Export, quoted, spellings
from flopwise.trace.tables import NO_ID, DeviceName

_GPU = spellings("id cuda:cuDevice processors:smCount memory:totalMemory major:computeMajor minor:computeMinor")
_NUMBERED = spellings("gpu:gpuId cuda:cudaId pid")  # CUDA_VISIBLE_DEVICES gives a process numbers of its own


def gpus_of(export: Export, processes: Iterable[int]) -> dict[tuple[int, int], DeviceName]:
    """By process and CUDA's number, and by number alone; in the order of the machine's own numbers."""
    by_id = dict(sorted(_described(export).items()))
    found = {(NO_ID, cuda if cuda != MISSING else place): device_name(gpu) for place, (cuda, gpu) in by_id.items()}
    of_pid = {(process >> 24) & 0xFFFFFF: process for process in processes if process != NO_ID}
    table = export.table("TARGET_INFO_CUDA_DEVICE")
    numbered = export.integers(table, _NUMBERED) if table else dict.fromkeys(_NUMBERED, ())
    for place, cuda, pid in list(zip(*(map(int, numbered[name]) for name in _NUMBERED), strict=True))[:MOST_GPUS]:
        if place in by_id and pid in of_pid:
            found[of_pid[pid], cuda] = device_name(by_id[place][1])
    return found


def _described(export: Export) -> dict[int, tuple[int, Described]]:
    """Each GPU by its own number: CUDA's number (MISSING: not given), and what the file says of it."""
    tables = (export.table(base) for base in ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU"))
    table = next((one for one in tables if export.column(one, "name")), "")
    found: dict[int, tuple[int, Described]] = {}
    if not table:
        return found
    text = f"substr(CAST({quoted(export.column(table, 'name'))} AS TEXT), 1, 200)"
    for columns, names in islice(export.chunks(table, _GPU, text), 1):  # of thousands of rows
        for place, name in enumerate(names[:MOST_GPUS]):
            row = {key: int(values[place]) for key, values in columns.items()}
            number = row["id"] if row["id"] != MISSING else len(found)
            cuda = f"{row['major']}.{row['minor']}" if row["major"] > 0 else None
            found[number] = row["cuda"], Described(name, max(row["processors"], 0), max(row["memory"], 0), cuda)
    return found
