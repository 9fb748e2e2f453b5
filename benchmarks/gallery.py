"""The pictures of docs/appendix/gallery.md, from traces and runs that are in the repository: make gallery. No GPU."""

from pathlib import Path

from flopwise.api.report import gather
from flopwise.render.charts import save
from flopwise.render.report import Report
from flopwise.render.report.markdown import pictures_of

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "appendix" / "gallery"
TRACES, RESULTS = ROOT / "tests" / "trace" / "fixtures", ROOT / "benchmarks" / "results"
SHOWN = {
    "small-fp32-naive": (TRACES / "h200-small-fp32-naive-2steps.kineto.json.gz", ("gpu-time",)),
    "small-bf16-compiled": (TRACES / "h200-small-bf16-compiled-2steps.kineto.json.gz", ("timeline", "roofline")),
    "tune-small": (RESULTS / "h200-2026-11-tune-final" / "small-4x512", ("staircase", "predicted-measured")),
    "course-attention": (RESULTS / "h200-2026-11" / "course-attention", ("sweep-wall_ms",)),
}


def main() -> None:
    for name, (target, keys) in SHOWN.items():
        drawn = pictures_of(Report(parts=(gather(target),)))
        for key in keys:
            save(drawn[key].draw(), PICTURES / f"{name}-{key}.svg")
            print(f"{name}-{key}.svg")


if __name__ == "__main__":
    main()
