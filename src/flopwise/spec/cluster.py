"""Clusters by their names, by their GPU's, or from a file."""

from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.cluster_facts import Cluster as Cluster
from flopwise.spec.cluster_table import CLUSTERS as CLUSTERS
from flopwise.spec.gpu import Gpu, find_gpu, gpu
from flopwise.spec.links import LINKS, links
from flopwise.spec.recipe import read_toml

_HINT = "a file has gpu, domain, link (or like = 'dgx-h100' and what differs); see docs/how-to/plan.md"


def cluster(name: str, link: str = "") -> Cluster:
    """The cluster of this name, of this file (`my.toml`), or the usual one of a GPU's name; `link` replaces its links.

    >>> cluster("h100").domain, cluster("h100", link="nvlink4,ib200").between_bytes_s
    (8, 25000000000.0)
    """
    if name.endswith(".toml"):
        found: Cluster | None = read_cluster(name)
    else:
        found = next((one for one in CLUSTERS if one.name == name.lower()), None) or _usual(name, link)
    if found is None:
        names = [one.name for one in CLUSTERS]
        near = fields.did_you_mean(name.lower(), names)
        raise FlopwiseError(
            f"there is no cluster {fields.show(name)}", f"{near}known: {', '.join(names)}; or a file.toml"
        )
    return with_links(found, link) if link else found


def _usual(name: str, link: str) -> Cluster | None:
    """Of a GPU; hosts of eight where no cluster of it is known, and its links are given."""
    if (one := find_gpu(name)) is None:
        return None
    known = next((c for c in CLUSTERS if c.gpu == one.name), None)
    if known is not None or one.peaks == {}:
        return known
    if not link:
        raise FlopwiseError(f"no cluster of {one.title} is known", f"say how they are connected: --link {_likely(one)}")
    return Cluster(
        name=one.name, title=f"8 × {one.title}", gpu=one.name, domain=8, inside_bytes_s=1e9, between_bytes_s=1e9
    )


def _likely(card: Gpu) -> str:
    """Links as such a GPU usually has: NVLink by its datasheet, or the slot."""
    if "PCIe" in card.title or not card.link_bytes_s:
        return "pcie4,eth100"
    one_way = card.link_bytes_s / 2
    named = next((name for name, rate in LINKS.items() if name.startswith("nvlink") and rate == one_way), None)
    return f"{named or f'{one_way / 1e9:g}GB/s'},ib400"


def with_links(one: Cluster, link: str) -> Cluster:
    """The same GPUs, connected otherwise."""
    found = links(link)
    same = (found.inside, found.between) == (one.inside_bytes_s, one.between_bytes_s)
    title = one.title if same else f"{one.title} with other links"
    return msgspec.structs.replace(one, title=title, inside_bytes_s=found.inside, between_bytes_s=found.between)


def read_cluster(path: str | Path) -> Cluster:
    """A cluster from a TOML file: its fields, `link` for both rates, and `like` for what is not said."""
    table = read_toml(path, "a cluster file", "docs/how-to/plan.md")
    try:
        return _from_table(table, Path(path).stem)
    except FlopwiseError as error:
        raise FlopwiseError(f"{path}: {error.message}", error.hint) from None


def _from_table(table: dict[str, Any], name: str) -> Cluster:
    fields.known("a cluster", table, (*Cluster.__struct_fields__, "like", "link"))
    given = {"name": name, "title": table.get("name", name), **table}
    like, link = given.pop("like", None), given.pop("link", None)
    for field, value in (("like", like), ("link", link), ("gpu", given.get("gpu"))):
        if value is not None:
            fields.text(field, value)
    if like is not None:
        if like.endswith(".toml"):
            raise FlopwiseError(f"like = {fields.show(like)} is a file", "like names a cluster that is known")
        given = msgspec.structs.asdict(cluster(like)) | given
    if link is not None:
        both = links(link)
        given |= {"inside_bytes_s": both.inside, "between_bytes_s": both.between}
    needed = [field for field in ("gpu", "domain", "inside_bytes_s", "between_bytes_s") if field not in given]
    if needed:
        raise FlopwiseError(f"{needed[0]} is missing", _HINT)
    sources = given.get("sources", ())
    if not isinstance(sources, list | tuple) or not all(isinstance(one, str) for one in sources):
        raise FlopwiseError(f"sources = {fields.show(sources)} is not allowed", "allowed: a list of texts")
    return Cluster(**given | {"gpu": gpu(given["gpu"]).name, "sources": tuple(sources)})
