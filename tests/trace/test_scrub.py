"""A scrubbed trace says the same about the GPU, and nothing about whose it was."""

import gzip
import json
import os
import random
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from flopwise.analysis.explanation import explain_trace
from flopwise.errors import FlopwiseError
from flopwise.redact import redacted, redacted_code, redacted_frame
from flopwise.scrub.scrub import scrub
from flopwise.trace.kineto import read_kineto
from flopwise.trace.nsys import read_nsys
from flopwise.trace.tables import Trace

FIXTURES = Path(__file__).parent / "fixtures"
NSYS = FIXTURES / "h200-small-fp32-naive-2steps.nsys.sqlite.gz"
KINETO = FIXTURES / "h200-small-fp32-naive-2steps.kineto.json.gz"
COMPILED = FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"
TABLES = ("kernels", "copies", "launches", "graph_launches", "graph_runs", "syncs", "ops", "ranges")
LEAK = "LEAKED"  # in every text that must not be in the copy


def assert_same(one: Trace, other: Trace) -> None:
    for name in TABLES:
        ours, theirs = getattr(one, name), getattr(other, name)
        if "name" in ours.columns:
            assert [one.names[i] for i in ours["name"]] == [other.names[i] for i in theirs["name"]], name
            ours, theirs = ours.drop("name"), theirs.drop("name")
        assert ours.equals(theirs), name
    assert one.gpu == other.gpu


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A real export, unpacked, to put secrets into."""
    path = tmp_path / "in.sqlite"
    with gzip.open(NSYS) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


def execute(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


# --- the same answers ---


@pytest.mark.parametrize("suffix", [".sqlite", ".sqlite.gz"])
def test_a_scrubbed_export_reads_the_same(tmp_path, suffix):
    out = scrub(NSYS, tmp_path / f"out{suffix}")
    assert_same(read_nsys(NSYS), read_nsys(out))
    assert sorted(os.listdir(tmp_path)) == [out.name]


@pytest.mark.parametrize(
    ("source", "suffix"), [(COMPILED, ".json"), pytest.param(KINETO, ".json.gz", marks=pytest.mark.slow)]
)
def test_a_scrubbed_pytorch_trace_reads_the_same(tmp_path, source, suffix):
    out = scrub(source, tmp_path / f"out{suffix}")
    assert_same(read_kineto(source), read_kineto(out))
    copy = json.loads(gzip.decompress(out.read_bytes()) if suffix.endswith("gz") else out.read_bytes())
    with gzip.open(source) as file:
        original = json.load(file)
    assert len(copy["traceEvents"]) == len(original["traceEvents"])
    assert copy["baseTimeNanoseconds"] == original["baseTimeNanoseconds"]
    assert copy["deviceProperties"] == original["deviceProperties"]
    assert "traceName" not in copy
    assert "trace_id" not in copy


def test_scrubbing_twice_changes_nothing(tmp_path):
    for source, suffix in ((NSYS, ".sqlite"), (COMPILED, ".json")):
        once = scrub(source, tmp_path / f"once{suffix}")
        assert scrub(once, tmp_path / f"twice{suffix}").read_bytes() == once.read_bytes()


# --- nothing else ---


def test_no_text_of_an_export_leaks_from_where_none_is_expected(export, tmp_path):
    db = sqlite3.connect(export)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    kept_texts = {("NVTX_EVENTS", "text"), ("TARGET_INFO_GPU", "name"), ("TARGET_INFO_GPU", "chipName")}
    for table in tables:
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        free = [
            c
            for c in names
            if (table, c) not in kept_texts and not (table.startswith("ENUM_") or c in ("id", "eventType"))
        ]
        if table != "StringIds":
            loose = ", ".join(names)
            db.execute(f"CREATE TABLE loose ({loose})")
            db.execute(f"INSERT INTO loose SELECT * FROM {table}")
            db.execute("INSERT INTO loose DEFAULT VALUES")
            for column in free:
                db.execute(
                    f"UPDATE loose SET {column} = '{LEAK} {column}' WHERE rowid IN (SELECT max(rowid) FROM loose)"
                )
            db.execute(f"DROP TABLE {table}")
            db.execute(f"ALTER TABLE loose RENAME TO {table}")
    for table in ("META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV", "PROCESSES", "ThreadNames", "DIAGNOSTIC_EVENT"):
        db.execute(f"CREATE TABLE {table} (name TEXT, value TEXT)")
        db.execute(f"INSERT INTO {table} VALUES ('ENVIRONMENT', '{LEAK} environment')")
    db.execute(f"INSERT INTO StringIds VALUES (99999999, '{LEAK} nobody refers to this')")
    db.execute(
        f"INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_HOST', '{LEAK} host'), ('EXPORT_PRODUCT_VERSION', '{LEAK} 1.0')"
    )
    db.execute(f"CREATE TABLE deleted AS SELECT '{LEAK} in a free page' AS x")
    db.execute("DROP TABLE deleted")
    db.commit()
    db.close()
    assert LEAK.encode() in export.read_bytes()
    out = scrub(export, tmp_path / "out.sqlite")
    assert LEAK.encode() not in out.read_bytes()
    assert_same(read_nsys(export), read_nsys(out))


def test_machine_facts_of_an_export_are_gone(export, tmp_path):
    content = scrub(export, tmp_path / "out.sqlite").read_bytes()
    for fact in (
        b"4ac7dd57-44b8-98fa-4241",
        b"0000:00:06.0",
        b"EXPORT_HOST",
        b"EXPORT_TIME",
        b"EXPORT_USER",
        b"uuid",
        b"busLocation",
    ):
        assert fact in export.read_bytes()
        assert fact not in content


SECRETS = [
    "hf_abcdefghijklmnopqrstuvwx",
    "sk-proj-abcdefghij0123456789",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghij0123456789abcdefghij012345",
    "github_pat_11ABCDEFG0123456789_abcdef",
    "xoxb-123456789012-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
    "0123456789abcdef0123456789abcdef01234567",
    "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY0123",
    "4ac7dd57-44b8-98fa-4241-db96731db453",
    "AWS_SECRET_ACCESS_KEY=whatever",
    '{"password": "whatever", "token": "hunter2"}',
    r"{\"password\": \"whatever\", \"auth_token\": \"two hunter2\"}",
    "{'api_key': 'whatever'}",
    "AUTH_TOKEN: whatever",
    "--token whatever --batch 4",
    "--api-key=whatever",
    "--wandb-key 'two hunter2'",
    'TOKEN="two hunter2"',
    r'TOKEN="two \"hunter2\" whatever"',
    "TOKEN='two hunter2",
    "PASSWORD=ab,hunter2",
    "password: 12345678",
    "passphrase: whatever",
    "Authorization: Basic whatever",
    "file:///mnt/whatever/b.py",
    "s3://whatever/hunter2/b.bin",
    "https://example.com/b?sig=whatever",
    "https://whatever.example.com",
    "http://example.com/b?session=whatever",
    "password = hunter2",
    "WANDB_API_KEY=abc",
    "apikey=abc",
    "Authorization: Bearer abcdefgh12345",
    "eve.adams@example.com",
    "https://eve:hunter2@example.com/",
    "/home/eve/secret project/x.py",
    "/Users/eve/x.py",
    "/root/.ssh/id_rsa",
]
HARMLESS = [
    "aten::mm, seq = 12, op_id = 345",
    "autograd::engine::evaluate_function: ScaledDotProductEfficientAttentionBackward0",
    "Optimizer.step#AdamW.step",
    "flopwise.module:blocks.0.attention.key",
    "tokens=512, batch=4",
    "tokens: 512, max_tokens: 2048",
    "--max-tokens 512 --tokenizer gpt2",
    "TokenEmbedding::forward",
    "token_embeddings: forward",
    "flopwise.module:token_embeddings",
    "blocks.0.attention.key: forward",
    "author: sigmoid",
    "key, query, value",
    "forward/loss",
    "## Call CompiledFxGraph fmvnkqtvfqp6kxcsrtsyqqn5ia3fnbqbgqfmqcchy2fv7t2gmm6b ##",
    "nn.Module: Linear_3",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_in_texts_are_removed(secret):
    cleaned = redacted(f"load {secret}")
    assert "[removed]" in cleaned
    for part in (secret, "hunter2", "whatever", "eve", "id_rsa", "12345678"):
        assert part not in cleaned


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_names_stay(text):
    assert redacted(text) == text


def test_real_kernel_names_stay():
    for trace in (read_nsys(NSYS), read_kineto(COMPILED)):
        assert all(redacted_code(name) == name for name in trace.names)


def test_python_frames_keep_the_file_name_only():
    assert redacted_frame("/mnt/eve/run/train.py(12): forward") == "train.py(12): forward"
    assert redacted_frame("C:\\Users\\eve\\train.py(12): forward") == "train.py(12): forward"
    assert redacted_frame("<built-in method relu>") == "<built-in method relu>"


def test_secrets_in_ranges_and_registered_strings_of_an_export(export, tmp_path):
    secret = "hf_abcdefghijklmnopqrstuvwx"
    execute(
        export,
        f"UPDATE NVTX_EVENTS SET text = 'load {secret}' WHERE rowid = 1",
        f"INSERT INTO StringIds VALUES (77777, 'registered {secret}')",
        "UPDATE NVTX_EVENTS SET text = NULL, textId = 77777 WHERE rowid = 2",
    )
    out = scrub(export, tmp_path / "out.sqlite")
    assert secret.encode() not in out.read_bytes()
    assert {"load [removed]", "registered [removed]"} <= set(read_nsys(out).names)


def test_nothing_of_a_pytorch_trace_leaks(tmp_path):
    source = tmp_path / "in.json"
    args = {
        "External id": 1, "correlation": 5, "env": LEAK, "kernel_file": f"/tmp/{LEAK}.py", "Call stack": f"/x/{LEAK}",
        "stream": LEAK, "Addr": 140639919063040, "dtype": "BFloat16",
        "Concrete Inputs": ["[1, 2]", LEAK, ["0.5"]], "Input type": ["float", LEAK + "!"],
    }  # fmt: skip
    event = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 2,
        "ts": 3845547697238.548,
        "dur": 1.5,
        "args": args,
    }
    frame = event | {
        "cat": "python_function",
        "name": f"/opt/{LEAK}/train.py(3): main",
        "args": {"Python id": 3, "Python parent id": 1},
    }
    trace = {
        "schemaVersion": 1, "hostname": LEAK, "environment": {"TOKEN": LEAK}, "with_stack": LEAK, "displayTimeUnit": LEAK,
        "deviceProperties": [{"name": "NVIDIA H200", "numSms": 132, "uuid": LEAK, "note": LEAK}],
        "distributedInfo": {"rank": 3, "world_size": 8, "pg_config": LEAK},
        "traceEvents": [
            event, frame, event | {"extra": LEAK, "id": 7, "bp": LEAK},
            event | {"name": [LEAK], "ts": LEAK}, event | {"ph": LEAK}, LEAK,
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 1, "args": {"name": LEAK}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "ts": 1, "args": {"name": f"thread 7 ({LEAK})"}},
            {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 1, "args": {"labels": "GPU 0"}},
            {"ph": "M", "name": LEAK, "pid": 0, "args": {"name": LEAK}},
        ],
        "traceName": f"/home/{LEAK}/trace.json",
    }  # fmt: skip
    source.write_text(json.dumps(trace))
    text = scrub(source, tmp_path / "out.json").read_text()
    assert LEAK not in text
    copy = json.loads(text)
    assert [e.get("name") for e in copy["traceEvents"]][:3] == ["aten::mm", "train.py(3): main", "aten::mm"]
    assert copy["traceEvents"][0]["args"] == {
        "External id": 1, "correlation": 5, "Concrete Inputs": ["[1, 2]", "", ["0.5"]], "Input type": ["float", ""], "stream": "",
        "dtype": "BFloat16",
    }  # fmt: skip
    assert copy["deviceProperties"] == [{"numSms": 132, "name": "NVIDIA H200"}]
    assert copy["distributedInfo"] == {"rank": 3, "world_size": 8}
    assert '"ts":3845547697238.548,' in text


# --- files ---


def test_it_refuses_to_write_onto_its_input(export, tmp_path):
    before = export.read_bytes()
    link = tmp_path / "link.sqlite"
    link.symlink_to(export)
    hard = tmp_path / "hard.sqlite"
    os.link(export, hard)
    for target in (export, link, hard):
        with pytest.raises(FlopwiseError, match="would be lost"):
            scrub(export, target)
    scrub(export, tmp_path / "out.sqlite")
    assert export.read_bytes() == before


def test_a_failure_leaves_neither_a_copy_nor_a_part_of_one(export, tmp_path):
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / "old.sqlite").write_bytes(b"an older copy")
    with pytest.raises(FlopwiseError, match="exists already"):
        scrub(export, folder / "old.sqlite")
    export.write_bytes(export.read_bytes()[:-5000])
    with pytest.raises(FlopwiseError, match="cut off"):
        scrub(export, folder / "out.sqlite")
    (tmp_path / "in.json").write_text('{"traceEvents": [{"ph": "X"},')
    with pytest.raises(FlopwiseError):
        scrub(tmp_path / "in.json", folder / "out.json.gz")
    assert os.listdir(folder) == ["old.sqlite"]
    assert (folder / "old.sqlite").read_bytes() == b"an older copy"


def test_bad_names_and_places_are_one_line(export, tmp_path):
    for source, target in (
        (export, tmp_path / "out.json"),
        (export, tmp_path / "nowhere" / "out.sqlite"),
        (tmp_path / "absent.sqlite", tmp_path / "out.sqlite"),
        (tmp_path, tmp_path / "out.sqlite"),
    ):
        with pytest.raises(FlopwiseError) as failure:
            scrub(source, target)
        assert "\n" not in failure.value.message
    assert sorted(os.listdir(tmp_path)) == ["in.sqlite"]


def test_mutated_files_are_copied_or_refused(export, tmp_path):
    content, chance, out = export.read_bytes(), random.Random(3), tmp_path / "out.sqlite"
    for _ in range(15):
        mutant = bytearray(content)
        for _ in range(20):
            mutant[chance.randrange(chance.choice((100, 4096, len(mutant))))] = chance.randrange(256)
        export.write_bytes(mutant)
        try:
            scrub(export, out)
        except FlopwiseError:
            assert not out.exists()
        out.unlink(missing_ok=True)


# --- words in places where users do not write ---


def test_names_that_no_reader_needs_are_not_copied(tmp_path):
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 1, "dur": 5}
    events = [
        op | {"tid": f"{LEAK} a"}, op | {"tid": f"{LEAK} b"}, op | {"tid": f"{LEAK} a"},
        op | {"pid": LEAK, "id": LEAK}, op | {"cat": LEAK}, op | {"cat": LEAK, "name": LEAK},
        op | {"args": {"Input type": ["float", LEAK, ["c10::BFloat16", LEAK]], "Collective name": LEAK, "scope": LEAK,
                       "dtype": LEAK, "kernel_backend": LEAK, "kernel_kwargs": LEAK}},
        {"ph": "i", "cat": "cpu_instant_event", "name": LEAK, "pid": 1, "tid": 1, "ts": 1, "s": "t"},
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1, "s": "t"},
        {"ph": "C", "name": LEAK, "pid": 1, "tid": 1, "ts": 1, "args": {LEAK: 1}},
        {"ph": "s", "cat": "ac2g", "name": LEAK, "pid": 1, "tid": 1, "ts": 1, "id": 1},
        op | {"pid": "Spans", "tid": "PyTorch Profiler", "args": {"Collective name": "allreduce", "dtype": "BFloat16"}},
    ]  # fmt: skip
    (tmp_path / "in.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    text = scrub(tmp_path / "in.json", tmp_path / "out.json").read_text()
    assert LEAK not in text
    copy = json.loads(text)["traceEvents"]
    a, b, again = (event["tid"] for event in copy[:3])
    assert a == again != b
    assert copy[6]["args"]["Input type"] == ["float", "", ["c10::BFloat16", ""]]
    assert [copy[i].get("name") for i in (7, 8, 9, 10)] == [None, "[memory]", None, None]
    assert (copy[11]["pid"], copy[11]["args"]) == ("Spans", {"Collective name": "allreduce", "dtype": "BFloat16"})


def test_the_profilers_own_words_stay_and_the_answers_with_them(tmp_path):
    """Of a real trace, every category, type and thread that is not a user's text is copied as it is."""
    out = scrub(COMPILED, tmp_path / "out.json")
    with gzip.open(COMPILED) as file:
        before, after = json.load(file)["traceEvents"], json.loads(out.read_bytes())["traceEvents"]
    for old, new in zip(before, after, strict=True):
        assert all(old.get(key) == new.get(key) for key in ("ph", "cat", "name", "pid", "tid", "id"))
        assert all(new["args"].get(key) == value for key, value in _telling(old).items())
    one, other = (explain_trace(read_kineto(path)) for path in (COMPILED, out))
    assert msgspec.structs.replace(other, path=one.path) == one


def _telling(event):
    keys = ("Input type", "Input Dims", "kernel_backend", "kernel_name", "kernel_kwargs", "scope")
    return {key: event.get("args", {})[key] for key in keys if key in event.get("args", {})}
