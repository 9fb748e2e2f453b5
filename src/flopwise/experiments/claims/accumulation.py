"""`accumulation`: 0.01 added a thousand times, by the format of the sum, of the terms, and by the way of adding.

Two errors are separated. What a format holds instead of 0.01 is wrong by the same share in every term; and each addition rounds
the sum. The first is the stored term times a thousand, computed in fp64, against ten; the second is the result against that.
Every way of adding rounds after each operation to the format of the sum, on the device that is measured.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, columns, line, scatter, table_of
from flopwise.experiments.rows import Row, fields, select
from flopwise.experiments.verdict import Check, each, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

LINE = (
    "1000 × 0.01 in fp32, fp16 and bf16: one by one, with Kahan's correction, pair by pair, by torch's sum and product."
)
CLAIM = (
    "The sum needs the bits, not its terms: a running sum in fp16 or bf16 loses what it adds, and the same 16-bit terms add up "
    "well in fp32, or in 16 bits with Kahan's correction or pair by pair."
)
TERM, COUNT, TRUE = 0.01, 1000, 10.0
LOOP, CAST, KAHAN, PAIRS = "one by one", "one by one, cast", "Kahan", "pair by pair"
LIBRARY, PRODUCT = "torch.sum", "matrix product"
HALVES = ("fp16", "bf16")
EVERY = 10  # one in so many of the running sums is kept
SIDE = 64  # of the matrix product's result: enough that it is a product, not a sum
STEP_AT_TEN = {"fp16": 2.0**-7, "bf16": 2.0**-4}  # from ten to the next number: 8 times the format's step at 1
WELL = 2.0  # such steps: no result in 16 bits can be much nearer than one half
TIMES_BETTER = 10  # the fp32 sum of 16-bit terms, against the 16-bit sum of them


class Sum(Row, frozen=True, tag_field="part", tag="result"):
    way: str
    sum: str  # its format
    terms: str  # their format
    result: float
    held_term: float
    step: float  # from ten to the next number in the sum's format
    term_share: float  # errors as shares of ten: of the terms, of the additions, of both, the largest on the way
    adding_share: float
    off_share: float
    worst_share: float | None
    adding_off: float

    @property
    def error(self) -> float:
        """The error of the additions alone."""
        return abs(self.result - self.held_term * COUNT)

    @property
    def consistent(self) -> bool:
        """Whether the stored error and step are those of the result and its format."""
        step = STEP_AT_TEN.get(self.sum, self.step)
        return math.isclose(self.adding_off, self.error, abs_tol=1e-9) and self.step == step


class Running(Row, frozen=True, tag_field="part", tag="running"):
    way: str
    sum: str
    terms: str
    added: int
    running: float

    @property
    def differs(self) -> bool:
        """Whether it is drawn: all others lie on the straight line."""
        return self.way == LOOP and (self.sum == self.terms or (self.sum, self.terms) == ("fp32", "bf16"))


Rows = Sequence[Sum | Running]


def measure(bench: "Bench") -> Iterator[Sum | Running]:
    import torch

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    ways = [(LOOP, "fp32", "fp32"), (LOOP, "fp32", "fp16"), (CAST, "fp32", "fp16"), (LOOP, "fp16", "fp32")]
    ways += [(LOOP, "fp16", "fp16"), (LOOP, "fp32", "bf16"), (LOOP, "bf16", "bf16")]
    ways += [(way, name, name) for name in dtypes for way in (KAHAN, PAIRS, LIBRARY, PRODUCT)]
    for way, of_sum, of_terms in ways:
        bench.doing(f"{way}, a sum in {of_sum} of terms in {of_terms}")
        term = torch.tensor(TERM, dtype=torch.float64).to(dtypes[of_terms]).to(bench.device)
        held = term.double().item()
        bench.fp32_matmul()
        sums = _at_once(term, way) if way in (PAIRS, LIBRARY, PRODUCT) else _one_by_one(term, way, dtypes[of_sum])
        result, step = sums[-1], _step(dtypes[of_sum], bench.device)
        error = result - held * COUNT
        worst = max(abs(s - held * n) for n, s in enumerate(sums, 1)) / TRUE if len(sums) > 1 else None
        shares = (held * COUNT / TRUE - 1, error / TRUE, result / TRUE - 1, worst)
        yield Sum(way, of_sum, of_terms, result, held, step, *shares, adding_off=abs(error))
        for n in range(EVERY, len(sums) + 1, EVERY):  # none, where all are added at once
            yield Running(way, of_sum, of_terms, n, sums[n - 1])


def _step(dtype: "torch.dtype", device: "torch.device") -> float:
    """How far the next number after ten lies, in the format."""
    import torch

    ten = torch.tensor(TRUE, dtype=dtype, device=device)
    step = 8.0  # the power of two below ten
    while (ten + step / 2).double().item() > TRUE:
        step /= 2
    return step


def _one_by_one(term: "torch.Tensor", way: str, dtype: "torch.dtype") -> list[float]:
    """The running sums. Kahan: what an addition rounded off is kept and goes into the next term, all in the sum's format."""
    import torch

    s, lost = torch.zeros((), dtype=dtype, device=term.device), torch.zeros_like(term)
    sums = torch.zeros(COUNT, dtype=dtype, device=term.device)
    for n in range(COUNT):
        if way == KAHAN:
            y = term - lost
            t = s + y
            lost = (t - s) - y
            s = t
        else:
            s += term.to(dtype) if way == CAST else term  # `s += x` keeps the sum's format whatever the term's
        sums[n] = s
    return sums.double().tolist()


def _at_once(term: "torch.Tensor", way: str) -> list[float]:
    """All terms in a tensor, added by halves, by the library's sum, or as the inner dimension of a product with ones."""
    import torch

    terms = term.repeat(COUNT)
    if way == PRODUCT:
        ones = torch.ones(COUNT, SIDE, dtype=term.dtype, device=term.device)
        terms = (terms.repeat(SIDE, 1) @ ones)[0, :1]
    elif way == LIBRARY:
        terms = terms.sum().reshape(1)
    while len(terms) > 1:
        left_over = terms[len(terms) // 2 * 2 :]
        terms = torch.cat([terms[0 : len(terms) - len(left_over) : 2] + terms[1::2], left_over])
    return terms.double().tolist()


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    found = {(row.way, row.sum, row.terms): row for row in select(rows, Sum)}
    wanted = [(LOOP, of_sum, terms) for terms in HALVES for of_sum in (terms, "fp32")]
    wanted += [(way, half, half) for half in HALVES for way in (KAHAN, PAIRS)]
    yield require("all sums", set(wanted) <= set(found), f"only {len(found)} of the sums were measured.")
    odd = "; ".join(_label(found[key]) for key in wanted if not found[key].consistent)
    yield require("consistent rows", not odd, f"the stored errors are not those of the results: {odd}.")
    fp16, bf16 = ({way: found[way, half, half] for way in (LOOP, KAHAN, PAIRS)} for half in HALVES)
    wide = {half: found[LOOP, "fp32", half] for half in HALVES}
    yield said(
        f"one by one, 1000 × 0.01 is {fp16[LOOP].result:.6g} in fp16 and {bf16[LOOP].result:.6g} in bf16; the same terms in "
        f"an fp32 sum give {wide['fp16'].result:.6g} and {wide['bf16'].result:.6g}, of which "
        f"{units.percent(wide['fp16'].term_share, 3)} and {units.percent(wide['bf16'].term_share, 3)} come from the terms "
        f"themselves. In 16 bits, Kahan's sum gives {fp16[KAHAN].result:.6g} (fp16) and {bf16[KAHAN].result:.6g} (bf16), pair "
        f"by pair {fp16[PAIRS].result:.6g} and {bf16[PAIRS].result:.6g}; numbers there lie {fp16[LOOP].step:.2g} and "
        f"{bf16[LOOP].step:.2g} apart. On the way, the plain fp16 sum is off by up to "
        f"{units.percent(fp16[LOOP].worst_share or 0.0)} of ten."
    )
    for half, ways in (("fp16", fp16), ("bf16", bf16)):
        plain, limit = ways[LOOP].error, WELL * STEP_AT_TEN[half]
        yield each("plain sum loses", {half: plain > limit and plain > TIMES_BETTER * wide[half].error})
        yield each("others add up", {_label(row): row.error <= limit for row in (wide[half], ways[KAHAN], ways[PAIRS])})


def _label(row: Sum | Running) -> str:
    terms = "" if row.sum == row.terms else f" of {row.terms} terms"
    return f"{row.sum}{terms}, {row.way}"


def draw(rows: Rows, place: Place) -> list[Picture]:
    running = [fields(row) | {"label": _label(row)} for row in select(rows, Running) if row.differs]
    errors = [
        {"label": _label(row), "error": source, "wrong": abs(share)}
        for row in select(rows, Sum)
        for source, share in (("of the additions", row.adding_share), ("of the terms", row.term_share))
        if share != 0
    ]
    added, ten = Axis("added", "terms of 0.01 added"), (Rule("y", TRUE, "10"),)
    return [
        line(running, added, Axis("running", "sum so far"), colour="label", rules=ten).titled(
            "The running sum",
            "A straight line is right. Where a 16-bit sum is large, its steps are too wide for 0.01: it bends, or stops.",
        ),
        scatter(errors, Axis("wrong", "error, as a share of ten", log=True), Axis("label"), colour="error").titled(
            "Error of the sum of 1000 × 0.01", "As a share of ten; what is exact has no point."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns("sum", "terms", way="added", shown="1000 × 0.01", held="0.01 is held as")
    headings |= columns(wrong_terms="error of the terms", wrong_adding="error of the additions")
    headings |= columns(wrong_worst="at worst on the way", step="steps at ten")
    shown = [
        {"sum": row.sum, "terms": row.terms, "way": row.way, "step": row.step}
        | {
            "shown": f"{row.result:.8g}",
            "held": f"{row.held_term:.8g}",
            "wrong_terms": f"{100 * row.term_share:+.2g} %",
        }
        | {"wrong_adding": f"{100 * row.adding_share:+.2g} %"}
        | {"wrong_worst": "" if row.worst_share is None else f"{100 * row.worst_share:.2g} %"}
        for row in select(rows, Sum)
    ]
    return [table_of("0.01 added a thousand times", headings, shown)]


EXPERIMENT = Experiment(5, "accumulation", LINE, CLAIM, (Sum, Running), measure, judge, draw, tabulate)
