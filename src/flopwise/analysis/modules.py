"""The same module of every layer under one name."""

import re

import polars as pl

from flopwise.trace.scopes import SEPARATOR

_LAYER = re.compile(r"(?<=[._/])\d+(?=[._/]|$)|(?<=_)\d+$")
_INSTANCE = re.compile(r"^([A-Z]\w*)_\d+$")  # how PyTorch's profiler names modules: Linear_3, the fourth Linear it met


def with_folded_modules(work: pl.DataFrame) -> pl.DataFrame:
    """A column `folded`, empty without a module. Each distinct one is folded once: there are hundreds, and many more rows."""
    distinct = work.select("module", "path").unique()
    folded = [folded_module(module or "", path or "") for module, path in distinct.iter_rows()]
    named = distinct.with_columns(pl.Series("folded", folded, dtype=pl.String))
    return work.join(named, on=["module", "path"], how="left", nulls_equal=True, maintain_order="left")


def folded_module(module: str, path: str = "") -> str:
    """A module's name without the number of its layer; of one that is named by its class, the classes it lies in.

    >>> folded_module("blocks.11.attention.q")
    'blocks.*.attention.q'
    >>> folded_module("Linear_12", "forward pass/Block_3/Attention_3/Linear_12/scores")
    'Block.Attention.Linear'
    """
    if _INSTANCE.match(module) is None:
        return _LAYER.sub("*", module)
    names = path.split(SEPARATOR)
    if module in names:  # ranges further in are no modules
        names = names[: len(names) - names[::-1].index(module)]
    classes = [found[1] for name in names if (found := _INSTANCE.match(name))]
    return ".".join(classes) or _LAYER.sub("*", module)
