"""Figures in the documentation are those of the results that a page links or of the traces that it names; outputs are remade."""

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest

from in_process import in_process

ROOT = Path(__file__).parents[1]
DOCS, FIXTURES = ROOT / "docs", ROOT / "tests" / "trace" / "fixtures"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "reference"]
UNITS = {
    "ns": ("s", 1e-9),
    "µs": ("s", 1e-6),
    "ms": ("s", 1e-3),
    "s": ("s", 1.0),
    "KiB": ("B", 2**10),
    "MiB": ("B", 2**20),
    "GiB": ("B", 2**30),
    "MB": ("B", 1e6),
    "GB": ("B", 1e9),
    "GB/s": ("B/s", 1e9),
    "TB/s": ("B/s", 1e12),
    "TFLOP/s": ("F/s", 1e12),
    "%": ("share", 0.01),
}
NUMBER = r"(?<![\w.,²^#-])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?![\d.,]*\d)"
FIGURE = re.compile(NUMBER + rf"(?:\s?(?:CPU )?({'|'.join(sorted(UNITS, key=len, reverse=True))})(?![\w/]))?")
RESULT = re.compile(r"\]\((?:\.\./)*(benchmarks/results/[^)#\s]+)")
CODE = re.compile(r"^```.*?^```$|^ {4}[^\n]*$|`[^`\n]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
MADE = re.compile(r"<!-- (?:output|measured): .*?<!-- end -->", re.DOTALL)

DERIVED = {  # from other figures of the same page
    "appendix/course-tables.md": {
        "2.6 times": "56.6 / 21.9",
        "5.3 times": "1025 / 192",
        "1.4 times": "271 / 192",
        "17 ms": "67.3 - 50.4",
        "1,600 steps": "27 / 0.0169",
        "51.0": "12.8 + 25.4 + 12.7",  # weights, state, gradients: course-memory-2026-11.md
        "38.3 GiB": "12.8 + 25.4",
        "18.1 GiB": "12.8 + 5.23",  # and what is kept for backward
        "24.3 GiB": "12.8 + 11.5",
    },
    "explanation/memory.md": {"600 MiB": "18.9 * 1024 / 32"},
    "explanation/waterfall.md": {"9.2 ms": "7.78 + 1.41", "4.4 ms": "0.83 + 0.06 + 0.47 + 1.97 + 1.04", "100 %": "100"},
}
OTHER = {  # neither measured nor derived: limits that the code has, arithmetic that the page shows, words of somebody else
    "appendix/course-report.md": {
        "27.5 ms",
        "52.7 ms",
        "36.1 %",
        "22.5 %",
        "5.6 ms",
        "31.1 ms",
        "1.9 %",
    },  # the report's, 31.1 = 25.5 + 5.6; 5 / (4 · 64 + 5)
    "appendix/course-tables.md": {"0.953", "0.302", "0.0316", "0.00316", "0.999"},  # tests/lm/test_optimizer.py
    "appendix/lab.md": {"228 KiB"},  # the H200's data sheet, in spec
    "decisions/0001-libraries.md": {"0.2 s"},
    "explanation/accounting.md": {"128 KiB", "26.2 GB"},  # tests/predict/test_known_answers.py
    "explanation/statistics.md": {
        "0.5 %",
        "38 %",
        "90 %",
        "95 %",
        "97 %",
    },  # the rule's own; tests/analysis/test_calibration.py
    "explanation/tuning.md": {"1.1"},  # tests/advice/test_constants.py
    "how-to/agents.md": {"95 %"},
    "how-to/ci.md": {"0", "1", "2", "3", "3 %"},
    "how-to/plan.md": {"43 %", "7 %"},  # the Llama 3 paper's; spec/gpu.py
    "tutorial.md": {"95 %"},
}
QUOTED = [  # a page's words, the result that holds them, and its words
    ("| 26 | 0.09 % | 3.8 % |", "prediction-memory", "26 of them", "Median error 0.09 %, worst 3.8 %"),
    ("| 147 | 0.04 % | 4.0 % |", "prediction-memory", "147 eager steps: median error 0.04 %, worst 4.0 %"),
    (
        "| 95 | 0 | 0.24 % |",
        "dry-run-memory",
        "of the 95 cases below, measured afterwards, 59 are exact, and the worst is 0.24 %",
    ),
    ("| 29 | 5.2 % | 26.9 % |", "prediction-time", "| step time, all | 29 | **5.2 %, 26.9 %** |", "**6.8 %**, 34.5 %"),
    ("| 29 | 6.8 % | 34.5 % |", "prediction-time", "**6.8 %**, 34.5 %"),
    ("| 12 | 3.1 % | 6.7 % |", "prediction-time", "busy for 90 % of it | 12 | 3.1 %, 6.7 %"),
    ("| 17 | 9.1 % | 26.9 % |", "prediction-time", "waited for launches | 17 | 9.1 %, 26.9 %"),
    ("| 27 | 3.8 % | 7.4 % |", "prediction-time", "| 27 | 3.8 %, 7.4 %"),
    ("Kineto trace | 46 | 2.9 % | 429 % |", "untraced", "| kineto | 46,", "| 2.9%, 429% |"),
    ("nsys trace | 24 | 3.4 % | 48 % |", "untraced", "| nsys | 24,", "| 3.4%, 48% |"),
    ("| 10.4 % | 429 % |", "untraced", "| 10.4%, 429% | 93.2%"),
    ("| 12.3 % | 48 % |", "untraced", "| 12.3%, 48% | 127.1%"),
    ("Of 72 levers in ten runs of flopwise's own models, 58 (81 %)", "tune", "| all ten runs | 72 | 58 (81 %) |"),
    (
        "it was 40 of 46 after `doctor --calibrate`, 35 of 46",
        "user-models",
        "**40 of 46 (87 %)**",
        "| 35 of 46 (76 %) |",
    ),
    ("0 of 100 comparisons on an H200 and 2 of 268 on a CPU", "verdicts", "**CPU: 2 of 268. H200: 0 of 100.**"),
    (
        "1 % more work is found in 9 of 12, 3 and 10 % in all 12",
        "verdicts",
        "1 % found in 9 of 12, 3 and 10 % in all 12",
    ),
    ("all 208 right steps", "agreement", "| all | 208 | 0 |"),
]


def outputs():
    spec = importlib.util.spec_from_file_location("docs_outputs", ROOT / "benchmarks" / "docs_outputs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(words):
    ended = in_process(*words, cwd=ROOT, COLUMNS="80")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("page", [p for p in PAGES if "<!-- output: " in p.read_text()], ids=lambda path: path.name)
def test_outputs_are_what_the_commands_print(page):
    text = page.read_text(encoding="utf-8")
    assert text == outputs().filled(text, printed), "make pages"


def figures(text):
    """(as written, value, its last digit's place, unit) of each number."""
    for match in FIGURE.finditer(text):
        value = float((match[1] + (match[2] or "")).replace(",", ""))
        yield match[0].strip(), value, 10.0 ** -max(0, len(match[2] or "") - 1), match[3] or ""


KEPT = {"waterfall", "phases", "classes", "untraced_step", "attention", "matmul_share", "window_ns", "busy_ns", "idle"}


def in_json(value, name=""):
    """Times and shares, told by their names."""
    match value:
        case dict():
            for key, inner in value.items():
                yield from in_json(inner, key)
        case list():
            for inner in value:
                yield from in_json(inner, name)
        case int() | float() if name.endswith("ns"):
            yield value / 1e6, "ms"
        case float() if name.endswith("share") or name in ("mfu", "hfu", "forward", "step", "inference"):
            yield 100 * value, "%"


@cache
def explained(trace):
    """What `explain` says of a trace, without kernels and modules: with thousands of numbers any figure would be among them."""
    (whole,) = json.loads(printed(["explain", FIXTURES / trace, "--format", "json"]))["traces"]
    if "kineto" in trace:
        whole["idle"]["covered_share"] = json.loads(printed(["roofline", FIXTURES / trace, "--format", "json"]))[
            "covered_share"
        ]
    return list(in_json({name: value for name, value in whole.items() if name in KEPT}))


@cache
def numbers_in(path):
    if path.is_dir():
        return [one for file in sorted(path.iterdir()) if file.suffix in (".md", ".json") for one in numbers_in(file)]
    if path.suffix == ".json":
        return list(in_json(json.loads(path.read_text(encoding="utf-8"))))
    return [(value, unit) for _, value, _, unit in figures(path.read_text(encoding="utf-8"))]


def sources(text):
    """What the page's figures may come from: results that it links, traces that it names."""
    found = [one for name in sorted(set(RESULT.findall(text))) for one in numbers_in(ROOT / name)]
    return found + [
        one for name in sorted(set(re.findall(r"h200-[\w.-]+\.(?:json|sqlite)\.gz", text))) for one in explained(name)
    ]


def measured(text):
    """Figures with a unit anywhere, and all numbers in a table's right-aligned columns."""
    plain = CODE.sub(" ", MADE.sub(" ", text))
    right = []
    for line in plain.splitlines():
        cells = line.strip().strip("|").split("|") if line.startswith("|") else []
        if cells and set("".join(cells)) <= set(" :-"):
            right = [cell.strip().endswith(":") for cell in cells]
        for n, cell in enumerate(cells or [line]):
            aligned = bool(cells) and n < len(right) and right[n]
            yield from (one for one in figures(cell) if one[3] or aligned)


def held(figure, found):
    _, value, place, unit = figure
    for other, its in found:
        if unit and its:
            (kind, scale), (kind_2, scale_2) = UNITS[unit], UNITS[its]
            near = kind == kind_2 and abs(value * scale - other * scale_2) <= 0.5001 * place * scale
        else:
            near = abs(value - other) <= 0.5001 * place
        if near:
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_figures_are_those_of_the_results(page):
    text, name = page.read_text(encoding="utf-8"), page.relative_to(DOCS).as_posix()
    known = {*DERIVED.get(name, ()), *OTHER.get(name, ())}
    found = sources(text)
    missing = {one[0] for one in measured(text) if one[0] not in known and not held(one, found)}
    assert missing == set(), "link the results that hold them, or say in DERIVED or OTHER why they are right"


def test_a_figure_that_no_result_holds_is_seen():
    text = (DOCS / "explanation" / "kernels.md").read_text(encoding="utf-8")
    wrong = list(measured(text.replace("| 0.507 | 0.508 | 0.504 |", "| 0.507 | 0.508 | 0.511 |")))
    assert [one[0] for one in wrong if not held(one, sources(text))] == ["0.511"]
    assert len(wrong) > 40


@pytest.mark.parametrize(("page", "figure"), [(page, figure) for page, known in DERIVED.items() for figure in known])
def test_derived_figures_follow_from_their_page(page, figure):
    text, expression = (DOCS / page).read_text(encoding="utf-8"), DERIVED[page][figure]
    ((_, value, _, _),) = figures(figure)
    assert figure in " ".join(text.split())
    assert eval(expression) == pytest.approx(value, rel=0.01)


def test_known_figures_are_on_their_pages():
    """What is excused is there; what is gone is excused no longer."""
    for page, known in OTHER.items():
        assert known <= {one[0] for one in measured((DOCS / page).read_text(encoding="utf-8"))}, page


@pytest.mark.parametrize(("said", "result", "words"), [(said, result, words) for said, result, *words in QUOTED])
def test_the_accuracy_page_says_what_the_results_do(said, result, words):
    page, source = (
        " ".join(path.read_text(encoding="utf-8").split())
        for path in (DOCS / "explanation" / "accuracy.md", ROOT / "benchmarks" / "results" / f"{result}-2026-11.md")
    )
    assert said in page
    assert all(word in source for word in words)
