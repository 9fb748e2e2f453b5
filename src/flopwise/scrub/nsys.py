"""A copy of an Nsight Systems export with nothing in it but what an analysis needs.

An export holds the profiled process's whole environment, command lines, user and host names. The copy is a new file into which
only listed columns of listed tables are written: integers as integers, texts redacted. What is not listed is never copied.
"""

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from flopwise.redact import redacted, redacted_code
from flopwise.trace.nsys_file import Export, integer_sql, limit_work, open_export, quoted, read_only_uri

_WHEN_WHERE = "start end deviceId contextId greenContextId streamId correlationId globalPid "
_PLACED = "start end eventClass globalTid correlationId nameId "
INTEGERS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": _WHEN_WHERE
    + "demangledName shortName launchType registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory "
    "dynamicSharedMemory localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId graphId "
    "clusterX clusterY clusterZ",
    "CUPTI_ACTIVITY_KIND_MEMCPY": _WHEN_WHERE
    + "bytes copyKind srcKind dstKind srcDeviceId dstDeviceId graphNodeId copyCount",
    "CUPTI_ACTIVITY_KIND_MEMSET": _WHEN_WHERE + "value bytes graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _WHEN_WHERE + "syncType eventId eventSyncId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _WHEN_WHERE + "graphId graphExecId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": _PLACED + "returnValue",
    "CUPTI_ACTIVITY_KIND_DRIVER": _PLACED + "returnValue",
    "CUDA_GRAPH_NODE_EVENTS": _PLACED + "graphNodeId originalGraphNodeId",
    "CUDA_GRAPH_EVENTS": _PLACED + "graphId originalGraphId graphExecId",
    "NVTX_EVENTS": "start end eventType rangeId category color globalTid endGlobalTid textId domainId",
    "TARGET_INFO_GPU": "id isDiscrete l2CacheSize totalMemory memoryBandwidth clockRate smCount cuDevice computeMajor "
    "computeMinor smMajor smMinor maxWarpsPerSm maxBlocksPerSm threadsPerWarp maxShmemPerSm maxRegistersPerSm",
    "ENUM_NSYS_EVENT_TYPE": "id",
    "ENUM_CUDA_MEMCPY_OPER": "id",
    "ENUM_CUDA_MEM_KIND": "id",
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": "id",
    "ENUM_CUPTI_SYNC_TYPE": "id",
}
TEXTS = {"NVTX_EVENTS": "text", "TARGET_INFO_GPU": "name chipName"}
TEXTS |= dict.fromkeys((table for table in INTEGERS if table.startswith("ENUM_")), "name label")
_CODE_NAMES = (
    "demangledName",
    "shortName",
    "nameId",
)  # columns that refer to StringIds; textId refers to what users wrote
_VERSIONS = (
    "'EXPORT_PRODUCT_VERSION', 'EXPORT_SCHEMA_VERSION', 'EXPORT_SCHEMA_VERSION_MAJOR', 'EXPORT_SCHEMA_VERSION_MINOR'"
)


def scrub_nsys(source: str | os.PathLike[str], target: Path) -> None:
    """Write the copy to `target`, which does not exist yet."""
    with open_export(source) as export:
        db = sqlite3.connect(target, uri=True, isolation_level=None)
        try:
            _prepare(db, export)
            for base in INTEGERS:
                if table := export.table(base):
                    _copy(db, export, base, table)
            _copy_strings(db, export)
            _copy_versions(db, export)
            db.execute("DETACH source")
            db.execute("VACUUM")  # whole pages only: no torn remains of pages that were split
        finally:
            db.close()


def _prepare(db: sqlite3.Connection, export: Export) -> None:
    size = export.file.stat().st_size
    limit_work(db, 4 * size)
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")
    # A damaged file that repeats itself must not fill the disk.
    db.execute(f"PRAGMA max_page_count = {1000 + 2 * size // 4096}")
    db.execute("ATTACH ? AS source", (read_only_uri(export.file),))
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    db.create_function("redacted", 1, lambda text: _clean(text, redacted), deterministic=True)
    db.create_function("redacted_code", 1, lambda text: _clean(text, redacted_code), deterministic=True)


def _clean(text: object, rule: Callable[[str], str]) -> str | None:
    return None if text is None else rule(text if isinstance(text, str) else "")


def _copy(db: sqlite3.Connection, export: Export, base: str, table: str) -> None:
    integers = [c for wanted in INTEGERS[base].split() if (c := export.column(table, wanted))]
    texts = [c for wanted in TEXTS.get(base, "").split() if (c := export.column(table, wanted))]
    if not integers:
        return
    declared = [f"{quoted(c)} INTEGER" for c in integers] + [f"{quoted(c)} TEXT" for c in texts]
    selected = [integer_sql(c) for c in integers] + [f"redacted({quoted(c)})" for c in texts]
    db.execute(f"CREATE TABLE main.{quoted(table)} ({', '.join(declared)})")
    db.execute(f"INSERT INTO main.{quoted(table)} SELECT {', '.join(selected)} FROM source.{quoted(table)}")


def _copy_strings(db: sqlite3.Connection, export: Export) -> None:
    """Only the texts that a kept column refers to; strict where a user wrote it."""
    table = export.table("StringIds")
    if not (export.column(table, "id") and export.column(table, "value")):
        return
    db.execute("CREATE TABLE main.StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
    kept = [
        (t, c) for base in INTEGERS if (t := export.table(base)) for c in INTEGERS[base].split() if export.column(t, c)
    ]
    by_users = [f"SELECT {quoted(c)} FROM main.{quoted(t)}" for t, c in kept if c == "textId"]
    by_code = [f"SELECT {quoted(c)} FROM main.{quoted(t)}" for t, c in kept if c in _CODE_NAMES]
    for rule, queries in (("redacted", by_users), ("redacted_code", by_code)):
        if queries:
            db.execute(
                f"INSERT OR IGNORE INTO main.StringIds SELECT CAST(id AS INTEGER), {rule}(value) FROM source.{quoted(table)} "
                f"WHERE typeof(id) = 'integer' AND value IS NOT NULL AND id IN ({' UNION '.join(queries)})"
            )


def _copy_versions(db: sqlite3.Connection, export: Export) -> None:
    table = export.table("META_DATA_EXPORT")
    if not (export.column(table, "name") and export.column(table, "value")):
        return
    db.execute("CREATE TABLE main.META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
    db.execute(
        f"INSERT INTO main.META_DATA_EXPORT SELECT name, substr(value, 1, 20) FROM source.{quoted(table)} "
        f"WHERE name IN ({_VERSIONS}) AND value NOT GLOB '*[^0-9.]*'"
    )
