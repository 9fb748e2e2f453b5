"""The module and the path of ranges around a piece of work, as text."""

import re

import numpy as np
import polars as pl

from flopwise.trace.host import Host
from flopwise.trace.nesting import Flags, Ints

SEPARATOR = "/"
_DEEPEST = 64  # ranges nested deeper are left out of the path: no model is, a hostile file may be
_DOTTED, _NUMBERED = re.compile(r"^\w+(\.\w+)+$"), re.compile(r"\.\d+(\.|$)")  # layers.0.attn; one would backtrack
_WRAPPED = re.compile(r"^(?:nn\.Module: (.+)|## Call (CompiledFxGraph \S+) ##|Optimizer\.\w+#(.+))$")


class Scopes:
    """Names of scopes: modules, compiled graphs and annotations, without steps and phases.

    The module is the innermost module range; in a trace without module ranges, the innermost annotation that reads like a
    module's path (layers.0.attn); else the innermost annotation.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._texts = [_unwrapped(name) for name in host.names]
        like_module = np.fromiter((_like_module(name) for name in host.names), dtype=bool, count=len(host.names))
        self._is_module: Flags = host.is_module if host.is_module.any() else like_module[host.name]

    def of(self, positions: Ints) -> tuple[pl.Series, pl.Series]:
        """(module, path) of the scope at each position, null at -1."""
        places, inverse = np.unique(positions, return_inverse=True)
        chain = self._chain(places)
        module = self._module(chain)
        path, paths = self._path(chain)
        modules = pl.Series("module", [*self._texts, None], dtype=pl.Categorical).gather(module[inverse])
        return modules, pl.Series("path", paths, dtype=pl.Categorical).gather(path[inverse])

    def _chain(self, places: Ints) -> list[Ints]:
        """The scope itself, the one around it, and so on, until none is left."""
        chain = [places]
        while len(chain) < _DEEPEST and (chain[-1] >= 0).any():
            chain.append(self._host.scopes.parents(chain[-1]))
        return chain

    def _module(self, chain: list[Ints]) -> Ints:
        """The name of the innermost module of each chain, of its innermost scope where it has none."""
        nothing = len(self._texts)
        names = [np.where(places >= 0, self._name(places), nothing) for places in chain]
        module = names[0].copy()
        missing = np.ones(len(module), dtype=bool)
        for places, name in zip(chain, names, strict=True):
            here = missing & (places >= 0)
            here[here] = self._is_module[places[here]]
            module[here] = name[here]
            missing &= ~here
        return module

    def _path(self, chain: list[Ints]) -> tuple[Ints, list[str | None]]:
        """One number per distinct path, and the paths by number; from the outermost scope inwards, all rows at a time."""
        texts: list[str | None] = [None]
        path = np.zeros(len(chain[0]), dtype=np.int64)
        count = len(self._texts) + 1
        for places in reversed(chain):
            here = np.flatnonzero(places >= 0)
            longer, number = np.unique(path[here] * count + self._name(places[here]), return_inverse=True)
            path[here] = len(texts) + number
            texts += [self._joined(texts[int(key) // count], int(key) % count) for key in longer]
        return path, texts

    def _joined(self, outer: str | None, name: int) -> str:
        return self._texts[name] if outer is None else outer + SEPARATOR + self._texts[name]

    def _name(self, places: Ints) -> Ints:
        return self._host.name[places].astype(np.int64) if len(self._host.name) else places


def _like_module(name: str) -> bool:
    """
    >>> [_like_module(name) for name in ("layers.0.attn", "h.11", "torch.mm", "0.attn", "a b.0")]
    [True, True, False, False, False]
    """
    return _NUMBERED.search(name) is not None and _DOTTED.match(name) is not None


def _unwrapped(name: str) -> str:
    """Without what profilers put around a name.

    >>> [_unwrapped(name) for name in ("nn.Module: Linear_3", "## Call CompiledFxGraph fqh7 ##", "Optimizer.step#AdamW.step")]
    ['Linear_3', 'CompiledFxGraph fqh7', 'AdamW.step']
    """
    match = _WRAPPED.match(name)
    return next(filter(None, match.groups())) if match else name
