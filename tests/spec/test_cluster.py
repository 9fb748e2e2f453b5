"""Clusters: the facts agree with the GPUs', files are refused in one line."""

import pytest

from flopwise.errors import FlopwiseError
from flopwise.spec.cluster import CLUSTERS, cluster
from flopwise.spec.gpu import gpu


@pytest.mark.parametrize("one", CLUSTERS, ids=lambda one: one.name)
def test_a_gpu_sends_one_way_half_of_what_its_datasheet_states(one):
    assert one.inside_bytes_s == gpu(one.gpu).link_bytes_s / 2
    assert one.between_bytes_s < one.inside_bytes_s
    assert one.domain % one.host == 0
    assert one.sources


def test_names_are_unique_and_each_gpu_has_a_usual_cluster():
    assert len({one.name for one in CLUSTERS}) == len(CLUSTERS)
    assert {name: cluster(name).name for name in ("h100", "A100", "gb200", "NVIDIA H200")} == {
        "h100": "dgx-h100",
        "A100": "dgx-a100",
        "gb200": "gb200-nvl72",
        "NVIDIA H200": "dgx-h200",
    }


def test_links_are_replaced():
    one = cluster("dgx-h100", link="nvlink3,25GB/s")
    assert (one.inside_bytes_s, one.between_bytes_s) == (300e9, 25e9)
    assert cluster("rtx4090", link="pcie4,eth100").gpu == "rtx4090"


def test_a_file_says_what_differs(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('like = "grand-teton"\nlink = "nvlink4,ib200"\nprice = 2.5\n')
    one = cluster(str(path))
    assert (one.name, one.spine, one.between_bytes_s, one.price) == ("ours", 3072, 25e9, 2.5)
    path.write_text('gpu = "h200"\ndomain = 4\nlink = "pcie5,eth100"\n')
    assert (cluster(str(path)).gpu, cluster(str(path)).domain) == ("h200", 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu = 'h100'", "domain is missing"),
        ("like = 'dgx-h100'\nnodes = 4", "a cluster has no field 'nodes'"),
        ("like = 'dgx-h101'", "there is no cluster 'dgx-h101'"),
        ("like = 'other.toml'", "is a file"),
        ("like = 3", "like = 3 is not allowed"),
        ("like = 'dgx-h100'\ngpu = 'h101'", "there is no GPU 'h101'"),
        ("like = 'dgx-h100'\ndomain = 0", "domain = 0 is not allowed"),
        ("like = 'dgx-h100'\nprice = nan", "price = nan is not allowed"),
        ("like = 'dgx-h100'\nprice = -1.0", "price = -1.0 is not allowed"),
        ("like = 'dgx-h100'\nmemory_bytes = 1.5", "memory_bytes = 1.5 is not allowed"),
        ("like = 'dgx-h100'\nlink = 'string'", "there is no link 'string'"),
        ("like = 'dgx-h100'\nsources = 'me'", "sources = 'me' is not allowed"),
        ("like =", "is not valid TOML"),
        ("# " + "x" * 2**20, "too large for a cluster file"),
        ("x = " + "[" * 100_000, "it is nested too deep"),
        ("x = " + "9" * 10_000, "a number has too many digits"),
        ("# " + "." * 300 + "\n" + "a." * 200_000 + "b = 1", "a name in it has too many parts"),  # gigabytes, once
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(FlopwiseError) as error:
        cluster(str(path))
    assert says in error.value.message
    assert "\n" not in error.value.message
    assert error.value.hint


def test_an_unknown_cluster_is_refused():
    with pytest.raises(FlopwiseError, match="there is no cluster 'dgx-h10'") as error:
        cluster("dgx-h10")
    assert error.value.hint.startswith("did you mean 'dgx-h100'?")
    with pytest.raises(FlopwiseError, match="no cluster of GeForce RTX 4090"):
        cluster("rtx4090")
    with pytest.raises(FlopwiseError, match="cannot read /nowhere"):
        cluster("/nowhere.toml")
