"""Ceilings from probes: a tile model that made the times is found again; curves pass through what was measured."""

from itertools import pairwise

import numpy as np
import pytest

from flopwise.ceilings import Matmul, Probe
from flopwise.cost.calibration import curve, matmul, tiles
from flopwise.cost.roofline import matmul_ns

PROCESSORS = 132
TRUE = Matmul(peak_flops=8e14, tiles=tiles(6.5e12, 3000.0, 1200.0, 0.1), join_ns=4000.0)
GRID = [(1, m, n, k) for m in (512, 2048, 8192) for n in (768, 3072, 10000) for k in (256, 1024, 4096)]


def probes(shapes, noise, seed=0):
    rng = np.random.default_rng(seed)
    for shape in shapes:
        batch, m, n, k = shape
        ns = matmul_ns(*shape, TRUE, PROCESSORS) * float(np.exp(rng.normal(0, noise)))
        yield Probe(what="matmul", dtype="bf16", amount=2.0 * batch * m * n * k, shape=shape, ns=ns)


@pytest.mark.parametrize(("noise", "allowed"), [(0.0, 0.03), (0.02, 0.05)])
def test_the_model_behind_the_times_is_found_well_enough_for_other_shapes(noise, allowed):
    found = matmul(list(probes(GRID, noise)), PROCESSORS)
    others = [(1, 1024, 1600, 6400), (1, 4096, 5120, 1280), (1, 1280, 5120, 2048), (1, 6400, 1600, 4096)]
    ratios = [matmul_ns(*s, found, PROCESSORS) / matmul_ns(*s, TRUE, PROCESSORS) for s in others]
    assert np.median(np.abs(np.log(ratios))) < allowed


def test_a_curve_passes_through_its_probes_and_rises():
    given = [Probe(what="softmax", amount=a, ns=ns) for a, ns in ((1e5, 2e3), (1e6, 2.1e3), (1e8, 4e4))]
    made = curve(given)
    assert [made.at(p.amount) for p in given] == pytest.approx([p.ns for p in given])
    grid = [made.at(a) for a in np.geomspace(1e3, 1e10, 200)]
    assert all(b >= a for a, b in pairwise(grid))
    assert made.at(1e9) == pytest.approx(4e5)
