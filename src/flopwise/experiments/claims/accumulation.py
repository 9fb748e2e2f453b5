"""`accumulation`: 0.01 added a thousand times, by the format of the sum, of the terms, and by the way of adding.

Two errors are told apart. What is held instead of 0.01 is wrong by the same share in every term, whoever adds them; and each
addition rounds the sum. The first is the stored term times a thousand, computed in fp64, against ten; the second is the result
against that. Every way of adding rounds after each operation to the format of the sum, on the device that is measured.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import (
    CONFIRMED,
    INCONCLUSIVE,
    REFUTED,
    Experiment,
    Picture,
    Row,
    Rows,
    Rule,
    TableOf,
    Verdict,
    part,
)
from flopwise.records.experiment import Place

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

CLAIM = (
    "The sum needs the bits, not its terms: a running sum in fp16 or bf16 loses what it adds, and the same 16-bit terms add up "
    "well in fp32, or in 16 bits with Kahan's correction or pair by pair."
)
TERM, COUNT, TRUE = 0.01, 1000, 10.0
LOOP, CAST, KAHAN, PAIRS, LIBRARY, PRODUCT = (
    "one by one", "one by one, cast", "Kahan", "pair by pair", "torch.sum", "matrix product",
)  # fmt: skip
EVERY = 10  # of the running sums, one in so many is kept
SIDE = 64  # of the matrix product's result: enough that it is a product, not a sum
STEP_AT_TEN = {"fp16": 2.0**-7, "bf16": 2.0**-4}  # from ten to the next number: 8 times the format's step at 1
WELL = 2.0  # such steps: no result in 16 bits can be much nearer than one half
TIMES_BETTER = 10  # the fp32 sum of 16-bit terms, against the 16-bit sum of them


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    ways: list[tuple[str, torch.dtype, torch.dtype]] = [
        (LOOP, fp32, fp32), (LOOP, fp32, fp16), (CAST, fp32, fp16), (LOOP, fp16, fp32), (LOOP, fp16, fp16),
        (LOOP, fp32, bf16), (LOOP, bf16, bf16),
        *((way, dtype, dtype) for dtype in (fp32, fp16, bf16) for way in (KAHAN, PAIRS, LIBRARY, PRODUCT)),
    ]  # fmt: skip
    for way, of_sum, of_terms in ways:
        about = {"way": way, "sum": _name(of_sum), "terms": _name(of_terms)}
        bench.doing(f"{way}, a sum in {about['sum']} of terms in {about['terms']}")
        term = torch.tensor(TERM, dtype=torch.float64).to(of_terms).to(bench.device)
        held = term.double().item()
        if way in (LOOP, CAST):
            running = [float(s) for s in _one_by_one(term, of_sum, cast=way == CAST)]
        elif way == KAHAN:
            running = [float(s) for s in _kahan(term)]
        else:
            running = [_at_once(term, way)]
        result = running[-1]
        yield {
            "part": "result", **about, "result": result, "held_term": held, "step": _step(of_sum, bench.device),
            "term_share": held * COUNT / TRUE - 1, "adding_share": (result - held * COUNT) / TRUE,
            "off_share": result / TRUE - 1, "adding_off": abs(result - held * COUNT),
            "worst_share": max(abs(s - held * n) for n, s in enumerate(running, 1)) / TRUE if len(running) > 1 else None,
        }  # fmt: skip
        for n in range(EVERY, len(running) + 1, EVERY):  # none, where all are added at once
            yield {"part": "running", **about, "added": n, "running": running[n - 1]}


def _name(dtype: "torch.dtype") -> str:
    from flopwise.spec.dtypes import dtype_name

    return dtype_name(dtype)


def _step(dtype: "torch.dtype", device: "torch.device") -> float:
    """How far the next number after ten lies, in the format."""
    import torch

    ten = torch.tensor(TRUE, dtype=dtype, device=device)
    step = 8.0  # the power of two below ten
    while (ten + step / 2).double().item() > TRUE:
        step /= 2
    return step


def _one_by_one(term: "torch.Tensor", of_sum: "torch.dtype", cast: bool) -> list[float]:
    """The running sums. `s += x` keeps the sum's format whatever the term's."""
    import torch

    s = torch.zeros((), dtype=of_sum, device=term.device)
    sums = torch.zeros(COUNT, dtype=of_sum, device=term.device)
    for n in range(COUNT):
        s += term.to(of_sum) if cast else term
        sums[n] = s
    return sums.double().tolist()


def _kahan(term: "torch.Tensor") -> list[float]:
    """What an addition rounded off is kept beside the sum and goes into the next term, all in the term's format."""
    import torch

    s, lost = torch.zeros_like(term), torch.zeros_like(term)
    sums = torch.zeros(COUNT, dtype=term.dtype, device=term.device)
    for n in range(COUNT):
        y = term - lost
        t = s + y
        lost = (t - s) - y
        s = t
        sums[n] = s
    return sums.double().tolist()


def _at_once(term: "torch.Tensor", way: str) -> float:
    """All terms in a tensor, added by halves, by the library's sum, or as the inner dimension of a product with ones."""
    import torch

    if way == PRODUCT:
        from flopwise.lm.precision import apply_fp32_matmul
        from flopwise.spec.recipe import Recipe

        apply_fp32_matmul(Recipe())  # fp32, not TF32
        rows = term.expand(SIDE, COUNT).contiguous()
        return (rows @ torch.ones(COUNT, SIDE, dtype=term.dtype, device=term.device))[0, 0].double().item()
    terms = term.repeat(COUNT)
    if way == LIBRARY:
        return terms.sum().double().item()
    while len(terms) > 1:
        left_over = terms[len(terms) // 2 * 2 :]
        terms = torch.cat([terms[0 : len(terms) - len(left_over) : 2] + terms[1::2], left_over])
    return terms[0].double().item()


def _found(rows: Rows) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {(row["way"], row["sum"], row["terms"]): row for row in part(rows, "result")}


def _off(row: Mapping[str, Any]) -> float:
    """By how much the adding alone is off."""
    return float(abs(row["result"] - row["held_term"] * COUNT))


def _agrees(row: Mapping[str, Any]) -> bool:
    """Whether the row's error and step, which the table shows, are those of its result and its format."""
    step = STEP_AT_TEN.get(row["sum"], row["step"])
    return math.isclose(row["adding_off"], _off(row), abs_tol=1e-9) and row["step"] == step


def judge(rows: Rows, place: Place) -> Verdict:
    found = _found(rows)
    wanted = [(LOOP, of_sum, terms) for terms in ("fp16", "bf16") for of_sum in (terms, "fp32")]
    wanted += [(way, half, half) for half in ("fp16", "bf16") for way in (KAHAN, PAIRS)]
    if any(key not in found for key in wanted):
        return Verdict(INCONCLUSIVE, f"only {len(found)} of the sums were measured.")
    if odd := [_label(found[key]) for key in wanted if not _agrees(found[key])]:
        return Verdict(INCONCLUSIVE, f"what is stored beside the result is not what follows from it: {'; '.join(odd)}.")
    holds = True
    for half in ("fp16", "bf16"):
        naive, in_fp32 = _off(found[LOOP, half, half]), _off(found[LOOP, "fp32", half])
        well = WELL * STEP_AT_TEN[half]
        holds &= naive > well and naive > TIMES_BETTER * in_fp32
        holds &= all(off <= well for off in (in_fp32, *(_off(found[way, half, half]) for way in (KAHAN, PAIRS))))
    fp16, bf16 = found[LOOP, "fp16", "fp16"], found[LOOP, "bf16", "bf16"]
    wide, exact = found[LOOP, "fp32", "fp16"], found[LOOP, "fp32", "bf16"]
    return Verdict(
        CONFIRMED if holds else REFUTED,
        f"one by one, 1000 × 0.01 is {fp16['result']:.6g} in fp16 and {bf16['result']:.6g} in bf16; the same terms in an fp32 "
        f"sum give {wide['result']:.6g} and {exact['result']:.6g}, of which {units.percent(wide['term_share'], 3)} and "
        f"{units.percent(exact['term_share'], 3)} come from the terms themselves. In 16 bits, Kahan's sum gives "
        f"{found[KAHAN, 'fp16', 'fp16']['result']:.6g} (fp16) and {found[KAHAN, 'bf16', 'bf16']['result']:.6g} (bf16), pair by "
        f"pair {found[PAIRS, 'fp16', 'fp16']['result']:.6g} and {found[PAIRS, 'bf16', 'bf16']['result']:.6g}; numbers there lie "
        f"{fp16['step']:.2g} and {bf16['step']:.2g} apart. On the way, the plain fp16 sum is off by up to "
        f"{units.percent(fp16['worst_share'])} of ten.",
    )


def _label(row: Mapping[str, Any]) -> str:
    terms = "" if row["sum"] == row["terms"] else f" of {row['terms']} terms"
    return f"{row['sum']}{terms}, {row['way']}"


def draw(rows: Rows, place: Place) -> list[Picture]:
    running = [{**row, "label": _label(row)} for row in part(rows, "running") if _is_shown(row)]
    off = [
        {**row, "label": _label(row), "error": word, "wrong": abs(row[key])}
        for row in part(rows, "result")
        for word, key in (("of the adding", "adding_share"), ("of the terms", "term_share"))
        if row[key] != 0
    ]
    pictures = [
        Picture(
            title="The running sum", kind="line", rows=running, x="added", y="running", colour="label",
            caption="A straight line is right. Where a 16-bit sum is large, its steps are too wide for 0.01: it bends, or stops.",
            x_title="terms of 0.01 added", y_title="sum so far", rules=(Rule("y", TRUE, "10"),),
        ),
        Picture(
            title="How wrong the sum of 1000 × 0.01 is", kind="scatter", rows=off, x="wrong", y="label", colour="error",
            caption="The share of ten by which each is off; what is exact has no point.",
            x_title="off, as a share of ten", y_title="", x_log=True,
        ),
    ]  # fmt: skip
    return [picture for picture in pictures if picture.rows]


def _is_shown(row: Mapping[str, Any]) -> bool:
    """Of the running sums, those that differ: the rest lie on the straight line."""
    return row["way"] == LOOP and (row["sum"] == row["terms"] or (row["sum"], row["terms"]) == ("fp32", "bf16"))


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {
        "sum": "sum", "terms": "terms", "way": "added", "shown": "1000 × 0.01", "held": "0.01 is held as",
        "wrong_terms": "off by the terms", "wrong_adding": "off by the adding", "wrong_worst": "at worst on the way",
        "step": "steps at ten",
    }  # fmt: skip
    told = [
        {
            **row, "shown": f"{row['result']:.8g}", "held": f"{row['held_term']:.8g}",
            "wrong_worst": "" if row["worst_share"] is None else f"{100 * row['worst_share']:.2g} %",
            "wrong_terms": f"{100 * row['term_share']:+.2g} %", "wrong_adding": f"{100 * row['adding_share']:+.2g} %",
        }
        for row in part(rows, "result")
    ]  # fmt: skip
    return [TableOf("0.01 added a thousand times", columns, told)]


EXPERIMENT = Experiment(
    name="accumulation",
    number=5,
    line="1000 × 0.01 in fp32, fp16 and bf16: one by one, with Kahan's correction, pair by pair, by torch's sum and product.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
