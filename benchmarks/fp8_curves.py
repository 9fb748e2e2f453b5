"""Losses of `small` on real text, 2,000 steps, in bf16 and in fp8, from several seeds: is fp8 inside bf16's own spread?

    python benchmarks/fp8_curves.py --kinds bf16-master,bf16,fp8,fp8+dW --seeds 0,1,2 [--text FILE] -o DIR
    python benchmarks/fp8_curves.py --draw DIR/fp8_curves.json FILE.svg

Text is read byte by byte: without --text, the Python source of the standard library and of torch. One seed sets the weights
and the order of the text, whatever the kind: kinds are compared pairwise. `bf16` (autocast) beside bf16-master shows what
another rounding alone does. Runs that -o has already are not run again, so that a long comparison may be split.
"""

import argparse
import json
import statistics
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

from flopwise.capture.model_step import ModelStep, model_step
from flopwise.capture.step import captured
from flopwise.kernels import fp8_linear
from flopwise.spec.workload import workload

LEVERS = {"optimizer": "flopwise", "norm": "triton", "activation": "triton", "rope": "triton", "loss": "fused"}
HELD_OUT, LAST = 0.02, 100  # the share of the text that is not trained on; steps whose mean loss is reported
NAMES = {"fp8": "fp8, dW in bf16", "fp8+dW": "fp8", "fp8-rowwise+dW": "fp8-rowwise"}  # in the chart: as the levers are
EVALUATED = 40  # batches


def text(path: Path | None) -> Tensor:
    """Bytes, on the GPU."""
    if path is not None:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    folders = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(files), generator=generator).tolist()
    return torch.frombuffer(bytearray(b"".join(files[n].read_bytes() for n in order)), dtype=torch.uint8)


class Kept(ModelStep):
    """Within reach, for its tokens."""

    last: "Kept"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        Kept.last = self


def train(kind: str, seed: int, steps: int, data: Tensor, asked: argparse.Namespace) -> dict[str, object]:
    precision, *more = kind.split("+")
    fp8_linear.usual_scaling = lambda by_rows: fp8_linear.Scaling(by_rows, "dW" in more, "fast" in more)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    sizes = {"batch": asked.batch, "context": asked.context}
    levers = LEVERS | {"graph": "on" if device.type == "cuda" else "off"}
    torch.manual_seed(seed)
    made = model_step(workload(asked.model, set={"vocab": 256}, precision=precision, **sizes, **levers), device, Kept)
    own, begun = Kept.last, time.monotonic()
    data = data.to(device)
    border = int(len(data) * (1 - HELD_OUT))
    places = torch.Generator().manual_seed(1000 + seed)
    window = torch.arange(asked.context + 1, device=device)

    def fill(low: int, high: int) -> None:
        starts = torch.randint(low, high - asked.context - 1, (asked.batch, 1), generator=places).to(device)
        batch = data[starts + window].long()
        own.tokens.copy_(batch[:, :-1])
        own.targets.copy_(batch[:, 1:])

    fill(0, border)
    step = captured(made, device) if device.type == "cuda" else made  # its warm-up are steps, too: on the first batch
    losses = []
    for _ in range(steps):
        fill(0, border)
        for phase in step.phases.values():
            phase()
        losses.append(step.loss().detach().clone())  # type: ignore[union-attr]
    held: list[Tensor] = []
    places.manual_seed(7)
    with torch.no_grad():
        for _ in range(EVALUATED):
            fill(border, len(data))
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                logits = own.model(own.tokens)
            held.append(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), own.targets.flatten()))
    found = torch.stack(losses).tolist()
    return {
        "kind": kind,
        "seed": seed,
        "losses": [round(one, 5) for one in found],
        "last": statistics.fmean(found[-LAST:]),
        "held_out": float(torch.stack(held).mean()),
        "seconds": round(time.monotonic() - begun, 1),
    }


def verdict(runs: list[dict], first: str) -> None:
    """Each kind's held-out loss, its pairwise difference from the first kind's, and whether it is inside that one's spread."""
    by = {(one["kind"], one["seed"]): one for one in runs}
    base = [one["held_out"] for one in runs if one["kind"] == first]
    print("\n| kind | seeds | held-out loss | range | minus the same seed's " + first + " | inside its range |")
    print("| :-- | --: | --: | --: | --: | :-- |")
    for kind in dict.fromkeys(one["kind"] for one in runs):
        mine = [one for one in runs if one["kind"] == kind]
        held = [one["held_out"] for one in mine]
        pairs = [one["held_out"] - by[first, one["seed"]]["held_out"] for one in mine if (first, one["seed"]) in by]
        spread = f"{min(held):.4f}-{max(held):.4f}"
        differences = " ".join(f"{one:+.4f}" for one in pairs)
        inside = bool(base) and min(base) <= statistics.fmean(held) <= max(base)
        print(f"| {kind} | {len(held)} | {statistics.fmean(held):.4f} | {spread} | {differences} | {inside} |")


def draw(runs: list[dict], chart: Path, first: str = "bf16-master", window: int = 100) -> None:
    """Losses, and how far each run is from the mean of the first kind's seeds; both as means of a window of steps."""
    import altair as alt

    from flopwise.render.charts import save

    means = {
        (one["kind"], one["seed"]): [
            statistics.fmean(one["losses"][n : n + window]) for n in range(0, len(one["losses"]), window)
        ]
        for one in runs
    }
    base = [
        statistics.fmean(at) for at in zip(*(found for (kind, _), found in means.items() if kind == first), strict=True)
    ]
    values = [
        {
            "step": (n + 1) * window,
            "loss": loss,
            "off": loss - base[n],
            "kind": NAMES.get(kind, kind),
            "run": f"{kind} {seed}",
        }
        for (kind, seed), found in means.items()
        for n, loss in enumerate(found)
    ]
    colours = alt.Scale(
        domain=list(dict.fromkeys(NAMES.get(kind, kind) for kind, _ in means)),
        range=["#000000", "#0072B2", "#D55E00", "#009E73"],
    )
    lines = (
        alt.Chart(alt.Data(values=values))
        .mark_line(strokeWidth=1.3, opacity=0.8, clip=True)
        .encode(x=alt.X("step:Q"), color=alt.Color("kind:N", title=None, scale=colours), detail="run:N")
        .properties(width=720, height=200)
    )
    top = lines.encode(
        y=alt.Y("loss:Q", title=f"loss, mean of {window} steps", scale=alt.Scale(type="log", nice=False))
    )
    low = lines.encode(y=alt.Y("off:Q", title=f"minus {first}'s mean", scale=alt.Scale(domain=[-0.06, 0.06])))
    save(alt.vconcat(top, low), chart)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kinds", default="bf16-master,bf16,fp8,fp8+dW,fp8-rowwise,fp8-rowwise+dW")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds: no run is begun after them")
    parser.add_argument(
        "--also", type=Path, nargs="*", default=[], metavar="FILE", help="runs of other calls, for the table"
    )
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("RUNS", "CHART"), help="of runs that were stored")
    parser.add_argument("-o", type=Path, default=Path())
    asked = parser.parse_args()
    if asked.draw:
        draw(json.loads(asked.draw[0].read_text()), asked.draw[1])
        return
    file, begun = asked.o / "fp8_curves.json", time.monotonic()
    runs = json.loads(file.read_text()) if file.exists() else []
    data = text(asked.text)
    print(f"{len(data) / 1e6:.1f} MB of text, {asked.model} {asked.batch} x {asked.context}, {asked.steps} steps")
    for seed in map(int, asked.seeds.split(",")):
        for kind in asked.kinds.split(","):
            if (
                any((one["kind"], one["seed"]) == (kind, seed) for one in runs)
                or time.monotonic() - begun > asked.budget
            ):
                continue
            runs.append(train(kind, seed, asked.steps, data, asked))
            told = runs[-1]
            print(
                f"{kind} seed {seed}: last {told['last']:.4f}, held out {told['held_out']:.4f}, {told['seconds']} s",
                flush=True,
            )
            file.write_text(json.dumps(runs))
    runs += [one for other in asked.also for one in json.loads(other.read_text())]
    verdict(runs, asked.kinds.split(",")[0])


if __name__ == "__main__":
    main()
