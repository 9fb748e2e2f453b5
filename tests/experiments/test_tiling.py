"""tiling: the count follows the loops, the verdict the times; on the CPU every way gives the right product."""

import msgspec
import pytest
from made_rows import measured, on_the_wall, timed

from flopwise.errors import Unsupported
from flopwise.experiments import host_code
from flopwise.experiments.claims import tiling
from flopwise.experiments.claims.tiling import (
    CPU_TILES,
    EXPERIMENT,
    LIBRARY,
    NAIVE,
    SCATTERED,
    SIDE,
    TILES,
    WRONG,
    asked_bytes,
    draw,
    gpu_source,
)
from flopwise.records.experiment import Place
from flopwise.records.run import Environment, Gpu

CHIP = Gpu(name="NVIDIA H200", memory_bytes=141 * 10**9, sm_count=132, l2_bytes=60 * 2**20, capability="9.0")
GPU = Place(device="cuda:0", environment=Environment(flopwise="1", python="3.12", torch="2.11", gpu=CHIP))
CPU = Place(device="cpu")


def made(gain=lambda tile: tile**0.5, off=1e-6):
    """Rows of a GPU on which the naive product takes 25 ms, and a tile makes it some times faster."""
    times = {SCATTERED: (1, 0.1), NAIVE: (1, 1.0)}
    times |= {f"tiles of {t}": (t, gain(t)) for t in TILES} | {LIBRARY: (None, 9.0)}
    rows = []
    for way, (tile, by) in times.items():
        about = {"way": way, "tile": tile, "rows": SIDE, "side": SIDE, "off": off, "done_flops_per_s": 5e12 * by}
        asked = None if tile is None else asked_bytes(SIDE, SIDE, tile)
        rows.append({**about, "asked_bytes": asked, "device_ns": 25e6 / by, **timed(25e6 / by)})
    return rows


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "Tiles of 32 in shared memory alone take 4.42 ms: 5.66 times as fast." in yes.why
    assert (
        "Tiles of 128, with several results in the registers of each thread, take 2.21 ms: 11.3 times as fast."
        in yes.why
    )
    assert "the registers do" not in yes.why
    late = pure(EXPERIMENT, made(gain=lambda tile: 1.2 if tile <= 32 else 6.0), GPU)
    assert (
        "Shared memory alone, judged by itself, does not make it several times faster here: the registers do."
        in late.why
    )
    assert "caches serve most of it" in yes.why  # 550 GB in 25 ms
    assert pure(EXPERIMENT, made(gain=lambda tile: 1.0), GPU).word == "refuted here"
    assert pure(EXPERIMENT, made(gain=lambda tile: 1.5), GPU).word == "inconclusive"
    slow = pure(EXPERIMENT, made(gain=lambda tile: 6.0 if tile == 128 else 0.5), GPU)
    assert slow.word == "refuted here"
    assert "Slower than the naive one: tiles of 16, tiles of 32, tiles of 64." in slow.why
    wrong = pure(EXPERIMENT, made(off=0.5), GPU)
    assert wrong.word == "inconclusive"
    assert wrong.why == f"wrong products: {', '.join(row['way'] for row in made())}."


def test_the_count_is_a_formula_and_rows_that_deny_it_decide_nothing(pure):
    naive = asked_bytes(SIDE, SIDE)
    odd = [{**row, "asked_bytes": row["asked_bytes"] and naive} for row in made()]
    left = pure(EXPERIMENT, odd, GPU)
    assert left.word == "inconclusive"
    assert "tiles of 16: the bytes in its row are not those that its loops ask for" in left.why
    assert "counted, not measured" in pure(EXPERIMENT, made(), GPU).why


@pytest.mark.parametrize("without", [NAIVE, "tiles of 128", LIBRARY])
def test_a_part_of_the_evidence_is_left_open(pure, without):
    assert pure(EXPERIMENT, [row for row in made() if row["way"] != without], GPU).word == "inconclusive"


def test_unsteady_times_decide_nothing(pure):
    left = pure(EXPERIMENT, [on_the_wall(row, samples=2) for row in made()], CPU)
    assert left.word == "inconclusive"
    assert "Too uncertain to tell: naive takes 25.0 ms" in left.why


def test_the_memory_is_drawn_where_it_is_known():
    rows = EXPERIMENT.read(made())
    assert [rule.label for picture in draw(rows, GPU) for rule in picture.rules] == ["memory"]
    unknown = msgspec.structs.replace(GPU, environment=None)
    assert not any(picture.rules for picture in draw(rows, unknown))


@pytest.mark.parametrize("tile", [1, 2, 4])
def test_the_count_is_that_of_the_loops(tile):
    rows, n, loads = 4, 8, 0
    for _ in range(0, rows, tile):
        for _ in range(0, n, tile):
            for _ in range(0, n, tile):
                loads += 2 * tile * tile
    assert asked_bytes(rows, n, tile) == 4 * (loads + rows * n)


def test_every_tile_fits_its_loops():
    for tile, (depth, each) in TILES.items():
        threads = (tile // each) ** 2
        assert tile % each == 0
        assert threads <= 1024
        assert tile * depth % threads == 0
        assert f"product<{tile}, {depth}, {each}>" in gpu_source()
    assert gpu_source().isascii()


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr(tiling, "CPU_QUICK_SIDE", 64)
    monkeypatch.setattr(tiling, "CPU_QUICK_ROWS", 64)
    try:
        rows = measured(EXPERIMENT)
    except Unsupported as error:
        pytest.skip(error.message)
    assert [row["way"] for row in rows] == [NAIVE, *(f"tiles of {tile}" for tile in CPU_TILES), LIBRARY]
    assert all(row["off"] < WRONG for row in rows)
    assert pure(EXPERIMENT, rows, CPU).why


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(host_code.shutil, "which", lambda name: None)
    with pytest.raises(Unsupported, match="a product needs a C compiler on a CPU, and none is found"):
        host_code.compile_host("", "a product")


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_fails_is_named(monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(Unsupported, match=compiler):
        host_code.compile_host("", "a product")
