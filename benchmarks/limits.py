"""How far tuned steps are from the power-capped roofline, and what takes the rest: a table, and a picture of each.

    python benchmarks/limits.py 2.7B:16x1024 xl:16x1024 [--kinds bf16-master,fp8] [--set compile=blocks …] [-o DIR]
    python benchmarks/limits.py --draw DIR/limits.json
    python benchmarks/limits.py --run RUN -o DIR

Each step is timed without a profiler, which also gives the clock that the power cap holds, and then traced. DIR gets limits.json
with every number, limits.md with the tables, and a picture of each; --draw makes the pictures again, elsewhere.
--run takes the step that a stored tuning ended with.
"""

import argparse
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from flopwise.api.explain import explain_one, with_gpu_work
from flopwise.api.profile import profile
from flopwise.errors import FlopwiseError
from flopwise.records.limit import StepLimit
from flopwise.render.charts import save
from flopwise.render.limit_view import limit_sentence, limit_table
from flopwise.render.step_charts import limit_chart
from flopwise.render.table import markdown
from flopwise.render.tune_view import tuned_limit
from flopwise.store.tuning import read_tuning

TUNED = {
    "norm": "triton",
    "activation": "triton",
    "rope": "triton",
    "loss": "fused",
    "projections": "fused",
    "attention": "sdpa-cudnn",
    "optimizer": "flopwise-bf16",
    "graph": "on",
}


def limit_of(size: str, batch: int, context: int, levers: dict[str, str], seconds: float, runs: Path) -> StepLimit:
    """Of a step as it was timed and traced."""
    run = profile(size, batch=batch, context=context, seconds=seconds, runs=runs, **levers)
    found = with_gpu_work(explain_one(run.path)).waterfall
    if found is None or found.limit is None:
        raise FlopwiseError("its trace tells no limit", "is it of a GPU whose peaks are known?")
    return found.limit


def told(name: str, found: StepLimit) -> str:
    return f"## {name}\n\n{limit_sentence(found)}\n\n{markdown(limit_table(found))}"


def limit_of_tuning(run: Path) -> tuple[str, StepLimit]:
    """Of the step that a tuning ended with, as the tuning has it; else of its last trace."""
    tuning = read_tuning(run)
    limit = tuned_limit(tuning)
    if limit is None:
        found = with_gpu_work(explain_one(run)).waterfall
        limit = found and found.limit
    if limit is None:
        raise FlopwiseError(f"{run} has no limit of its last step", "tune again, on a GPU whose peaks are known")
    start = tuning.best
    return f"{start.target} {start.batch} x {start.context}, {start.recipe.precision}, tuned", limit


def draw(every: dict[str, Any], folder: Path) -> None:
    """A picture of each, where the packages for it are."""
    for name, numbers in every.items():
        try:
            place = folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)[:80]}.svg"
            save(limit_chart(msgspec.convert(numbers["limit"], StepLimit), name), place)
        except FlopwiseError as error:
            print(f"not drawn: {error.message}; --draw limits.json draws it elsewhere", flush=True)
            return


def keep(every: dict[str, Any], texts: list[str], folder: Path | None) -> None:
    """The numbers first."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "limits.json").write_text(json.dumps(every, indent=1) + "\n")
        (folder / "limits.md").write_text("\n".join(texts))
        draw(every, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="SIZE:BATCHxCONTEXT")
    parser.add_argument("--draw", type=Path, metavar="limits.json")
    parser.add_argument("--run", type=Path, metavar="RUN")
    parser.add_argument("--kinds", default="bf16-master,fp8", help="precisions, one after the other")
    parser.add_argument("--set", nargs="*", default=[], metavar="LEVER=VALUE", help="instead of what TUNED has")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("-o", type=Path, metavar="DIR")
    given = parser.parse_args()
    if given.draw is not None:
        draw(json.loads(given.draw.read_text()), given.draw.parent)
    levers = TUNED | dict(one.split("=") for one in given.set)
    every: dict[str, Any] = {}
    texts: list[str] = []
    if given.run is not None:
        name, found = limit_of_tuning(given.run)
        every[name] = {"limit": msgspec.to_builtins(found)}
        texts.append(told(name, found))
        print(texts[-1])
        keep(every, texts, given.o)
    for step in given.steps:
        size, shape = step.split(":")
        batch, context = map(int, shape.split("x"))
        for kind in given.kinds.split(","):
            name = f"{size} {batch} x {context}, {kind}"
            try:
                with TemporaryDirectory() as runs:
                    chosen = levers | {"precision": kind}
                    found = limit_of(size, batch, context, chosen, given.seconds, Path(runs))
            except FlopwiseError as error:
                print(f"{name}: {error.message}", flush=True)
                continue
            every[name] = {"levers": chosen, "limit": msgspec.to_builtins(found)}
            texts.append(told(name, found))
            print(texts[-1], flush=True)
            keep(every, texts, given.o)


if __name__ == "__main__":
    main()
