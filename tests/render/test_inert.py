"""A comment of ours calls nobody and links nowhere, whatever the names in it are."""

import html
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.render.report.markdown import _plain
from flopwise.render.table import escaped

# What GitHub makes a link of, by its own documentation: users and teams, issues, commits, addresses.
LIVE = (
    r"(?<![\w`])@[A-Za-z0-9][\w-]*",
    r"[\w-]@[\w-]+\.\w",
    r"#\d+",
    r"\bGH-\d+",
    r"\b(?=\d*[a-f])[0-9a-f]{7,40}\b",
    r"(?:https?|ftp)://",
    r"www\.",
    r"(?:mailto|xmpp):\w",
    r"(?<!\\)\]\(",
    r"</?\w",
)
WORDS = (
    *("@eve", "eve@example.com", "#12", "o/r#3", "GH-4", "gh-5", "0123abc9", "f" * 40, "o/r@0123abc9", "http://x.org"),
    *("HTTPS://x", "www.x.org", "ftp://x", "mailto:a", "[a](b)", "<b>", "!6", "&#64;eve", "\\@eve", "&commat;eve"),
    *("_", "*", "`", "://", "&", "#", "1"),
)
NAME = " ".join(WORDS)


def live(text):
    """Outside of code, as a reader of Markdown decodes it."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", re.sub(r"(?ms)^ *(```+).*?^ *\1$", "", text))
    text = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text.replace("\\[", "").replace("\\]", ""))
    tags = re.sub(r"</?(?:details|summary|sub)(?: open)?>", "", text)
    return [found for one in LIVE[:-1] for found in re.findall(one, html.unescape(tags))] + re.findall(LIVE[-1], tags)


def test_what_is_live_is_seen():
    assert all(live(word) for word in ("@eve", "eve@x.org", "o/r#3", "GH-4", "0123abc9", "http://x", "www.x", "<b>"))


@given(st.lists(st.sampled_from(WORDS), max_size=8).map("".join))
def test_no_name_is_live(name):
    assert live(escaped(name)) == []


def test_numbers_and_names_of_kernels_stay_as_they_are():
    for name in (
        "1234567",
        "12,345,678",
        "triton_poi_fused_0d1d2d3de",
        "ampere_bf16_s16816gemm_128x64",
        "a @ b",
        "50 %",
    ):
        assert _plain(name) == name


@pytest.mark.parametrize("words", [("explain",), ("roofline",)])
def test_tables(cli, tmp_path, words):
    (tmp_path / "t.json").write_text(json.dumps(trace(NAME)))
    for more in ((), ("--against", "t.json")) if words == ("explain",) else ((),):
        ended = cli(*words, "t.json", *more, "--format", "markdown", cwd=tmp_path)
        assert (ended.returncode, live(ended.stdout)) == (0, [])


def test_a_comment(cli, tmp_path):
    name = NAME.replace("/", " ") + ".json"
    (tmp_path / name).write_text(json.dumps(trace(NAME)))
    ended = cli("report", name, "-o", "comment.md", "--pictures", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    comment = (tmp_path / "comment.md").read_text()
    comment = re.sub(r"!\[.*?\]\(comment\.pictures/[\w.%-]+\)", "", comment)  # our own pictures
    assert "eve" in comment
    assert live(comment) == []


def trace(name):
    """A step with one matmul, every name of it the given one."""
    ids = {"correlation": 1, "External id": 1}
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16"] * 2}

    def event(cat, called, ts, dur, tid, pid, **args):
        return {"ph": "X", "cat": cat, "name": called, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}

    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": [
            event("user_annotation", name, 0, 50, 5, 100),
            event("python_function", f"nn.Module: {name}_0", 0, 45, 5, 100, **{"Python id": 1, "Python module id": 0}),
            event("cpu_op", "aten::mm", 1, 40, 5, 100, **{"External id": 1}, **shapes),
            event("cuda_runtime", "cudaLaunchKernel", 2, 2, 5, 100, **ids),
            event("kernel", f"gemm {name}", 5, 10, 7, 0, device=0, stream=7, **ids),
        ],
    }
