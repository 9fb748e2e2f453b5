"""The host's side of a trace as one list of spans (ranges and ops), and the lookups that attribution needs."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from flopwise.trace.columns import first_rows
from flopwise.trace.nesting import Flags, Ints, Nesting
from flopwise.trace.phases import BACKWARD, PHASES, is_iteration, is_step, phase_of_range
from flopwise.trace.tables import MODULE, NO_ID, STEP, Trace
from flopwise.work.kernel_spelling import LONGEST_MATCHED

_BACKWARD_NODE = re.compile(
    r"^autograd::engine::evaluate_function: |(^|:: ?)AccumulateGrad$|^\w*Backward\d*$|CopyBackwards$"
)
_LOSS_OP = re.compile(r"cross_entropy|nll_loss|log_softmax|\w_loss(_\w+)?$|kl_div")
_OPTIMIZER_OP = re.compile(
    r"_fused_(adam|sgd|adagrad)|::_foreach_(?!copy_)|^Optimizer\."
)  # copies: also FSDP's, servers'
_NO_SCOPE = re.compile(
    r"^((torch::)?autograd::|\w+Backward\d+$|nccl:|c10d::|record_param_comms|enumerate\(DataLoader\)|PyTorch Profiler)"
)
SEPARATOR = "/"  # between the ranges of a path
_DEEPEST = 64  # ranges nested deeper are left out of the path: no model is, a hostile file may be
_MOST_CHARACTERS = 32_000_000  # of all paths: beyond, a path is its innermost range
_DOTTED, _NUMBERED = re.compile(r"^\w+(\.\w+)+$"), re.compile(r"\.\d+(\.|$)")  # layers.0.attn; one would backtrack
_WRAPPED = re.compile(r"^(?:nn\.Module: (.+)|## Call (CompiledFxGraph \S+) ##|Optimizer\.\w+#(.+))$")
_SCOPE_OP = re.compile(r"^Torch-Compiled Region|^## Call CompiledFxGraph |^Optimizer\.\w+#")  # as good as a module


@dataclass(frozen=True)
class Points:
    """Places on the host: a thread (its lane, -1 for none) and a time."""

    lane: Ints
    time: Ints


class Host:
    """Ops and ranges of every thread, nested. A span is known by its position in the order of a `Nesting`.

    Columns are numpy's and as narrow as they can be: of a long trace there are millions of spans, and what polars has once
    held it does not give back.
    """

    def __init__(self, trace: Trace) -> None:
        self.names = trace.names
        self._matched = [name[:LONGEST_MATCHED] for name in trace.names]
        self.lanes = _lanes(trace)
        self._n_ranges = trace.ranges.height
        # Ranges before ops: of two that coincide, the range is the outer one.
        spans = (trace.ranges, trace.ops)
        lane = np.concatenate([self.lanes_of(table["process"], table["thread"]) for table in spans])
        start, end = (np.concatenate([table[name].to_numpy() for table in spans]) for name in ("start_ns", "end_ns"))
        self._spans = Nesting(lane, start, end)
        del start, end  # the nesting knows them
        order = self._spans.order
        self.lane: NDArray[np.int32] = lane.astype(np.int32)[order]
        del lane
        name = np.concatenate([table["name"].to_numpy() for table in spans])
        self.name: NDArray[np.uint32] = name[order]
        none = np.full(self._n_ranges, NO_ID)
        self._sequence = _narrowed(np.concatenate([none, trace.ops["sequence"].to_numpy()]))[order]
        self._forward_thread = trace.ops["forward_thread"]
        self._place(trace, name)

    def _place(self, trace: Trace, name: NDArray[np.uint32]) -> None:
        """Classify each span; a name is looked at once."""
        whole = self._spans
        kinds = trace.ranges["kind"]
        n_ops = trace.ops.height

        def of_kind(kind: str) -> Flags:
            return np.concatenate([(kinds == kind).to_numpy(), np.zeros(n_ops, dtype=bool)])

        is_op = np.arange(self._n_ranges + n_ops) >= self._n_ranges
        around = self._names_where(lambda text: is_step(text) or is_iteration(text))
        module, step = of_kind(MODULE), of_kind(STEP) | around[name]
        sequenced = np.empty(len(name), dtype=bool)
        sequenced[whole.order] = self._sequence != NO_ID
        backward = self._named(_BACKWARD_NODE)[name]
        backward[: self._n_ranges] = False
        backward[self._n_ranges :] |= trace.ops["backward"].to_numpy()
        named = (phase_of_range(text) for text in self._matched)
        by_name = np.fromiter((-1 if phase is None else PHASES.index(phase) for phase in named), dtype=np.int8)
        phase = np.where(module | (is_op & ~self._named(_OPTIMIZER_OP)[name]), np.int8(-1), by_name[name])
        annotation = ~is_op & ~step & (phase < 0) & ~self._named(_NO_SCOPE)[name]
        scope = module | annotation | self._named(_SCOPE_OP)[name]
        forward = is_op & ~backward & sequenced
        self.phase: NDArray[np.int8] = phase[whole.order]
        self.is_module: Flags = module[whole.order]
        self.backward = whole.subset(backward)
        self.forward = whole.subset(forward)
        self.losses = whole.subset(is_op & self._named(_LOSS_OP)[name])
        self.optimizers = whole.subset(is_op & self._named(_OPTIMIZER_OP)[name])
        self.phases = whole.subset(phase >= 0)
        self.scopes = whole.subset(scope)
        self._is_backward: Flags = backward[whole.order]
        self._is_forward: Flags = forward[whole.order]
        self._is_mark: Flags = (step | (phase >= 0))[whole.order]
        self._is_op: Flags = is_op[whole.order]

    def ops(self) -> Nesting:
        """All ops; built on demand, as nearly every span is one and they are only queried twice."""
        is_op = np.zeros(len(self.lane), dtype=bool)
        is_op[self._spans.order] = self._is_op
        return self._spans.subset(is_op)

    def _named(self, pattern: re.Pattern[str]) -> Flags:
        return self._names_where(lambda text: pattern.search(text) is not None)

    def _names_where(self, holds: Callable[[str], bool]) -> Flags:
        return np.fromiter((holds(text) for text in self._matched), dtype=bool, count=len(self.names))

    def lanes_of(self, process: pl.Series, thread: pl.Series) -> Ints:
        """The lanes of threads; -1 where a thread is null."""
        known = (self.lanes["process"].to_numpy(), self.lanes["thread"].to_numpy())
        lane = first_rows((process.to_numpy(), thread.fill_null(NO_ID).to_numpy()), known)
        if thread.null_count():
            lane[thread.is_null().to_numpy()] = -1
        return lane

    def points(self, process: pl.Series, thread: pl.Series, time: pl.Series) -> Points:
        """Where calls were made; null threads give lane -1."""
        return Points(self.lanes_of(process, thread), time.fill_null(0).to_numpy())

    def at_start(self, positions: Ints) -> Points:
        """Where spans begin; -1 stays nowhere."""
        known = positions >= 0
        if len(self.lane) == 0:
            return Points(np.full(len(positions), -1), np.zeros(len(positions), dtype=np.int64))
        lane = np.where(known, self.lane[positions], -1).astype(np.int64)
        return Points(lane, np.where(known, self._spans.starts(positions), 0))

    def op_rows(self, positions: Ints) -> Ints:
        """The rows of ops in the Trace's table; -1 stays none."""
        if len(self.lane) == 0:
            return positions
        return np.where(positions >= 0, self._spans.order[positions] - self._n_ranges, -1)

    @cached_property
    def only_ops(self) -> bool:
        """No gradients and no ranges that name a phase: inference, as far as the trace shows."""
        return not self._is_backward.any() and not (self.phase >= 0).any()

    @cached_property
    def autograd_lanes(self) -> Flags:
        """Threads that run gradients, and outside these no forward op, phase or step: what they launch is backward."""
        flags = np.zeros(len(self.lanes), dtype=bool)
        flags[self.lane[self._is_backward]] = True
        ours = np.flatnonzero((self._is_forward | self._is_mark) & flags[self.lane])
        outside = self.backward.innermost(self.lane[ours].astype(np.int64), self._spans.starts(ours)) < 0
        flags[self.lane[ours[outside]]] = False
        return flags

    @cached_property
    def lanes_with_ops(self) -> Flags:
        flags = np.zeros(len(self.lanes), dtype=bool)
        flags[self.lane[self._is_op]] = True
        return flags

    @cached_property
    def _processes(self) -> Ints:
        """The process of each lane, numbered from 0."""
        return np.unique(self.lanes["process"].to_numpy(), return_inverse=True)[1]

    def inside_backward_range(self, at: Points) -> Flags:
        """Whether some thread of the same process was in a range named 'backward' at the time."""
        process = self._processes
        ranges = np.flatnonzero(self.phase == PHASES.index(BACKWARD))
        by_process = Nesting(process[self.lane[ranges]], self._spans.starts(ranges), self._spans.ends(ranges))
        lane = np.where(at.lane >= 0, process[at.lane] if len(process) else -1, -1)
        return by_process.innermost(lane, at.time) >= 0

    def forward_of(self, positions: Ints) -> Ints:
        """The forward op of each backward node: same sequence number, on the thread the node names (on any, if it names
        none), the last to start before it. Several ops carry one number, as each shows the number that the *next* node will
        get; the op that made the node is the last. On real traces: right for 4054 of 4066 nodes, the first for 2704."""
        forward = np.full(len(positions), -1, dtype=np.int64)
        rows = np.flatnonzero(positions >= 0)
        if len(rows) == 0:
            return forward
        nodes, inverse = np.unique(self._numbered(positions[rows]), return_inverse=True)
        result = np.full(len(nodes), -1, dtype=np.int64)
        asking = np.flatnonzero(self._sequence[nodes] != NO_ID)
        wanted = nodes[asking]
        process = self._processes[self.lane[wanted]]
        thread = self._forward_thread[self.op_rows(wanted)]  # on which backward nodes say that their forward ops ran
        named = self.lanes_of(self.lanes["process"][self.lane[wanted]], thread)
        for by, lane in zip(self._forward_sequences, (process, named), strict=True):
            # where the named thread has one, it replaces the other
            last = by.last_before(lane, self._sequence[wanted], self._spans.starts(wanted))
            result[asking[last >= 0]] = last[last >= 0]
        forward[rows] = result[inverse]
        return forward

    @cached_property
    def _forward_sequences(self) -> tuple["_Sequences", "_Sequences"]:
        """The forward ops by process, and by lane."""
        forward = np.flatnonzero(self._is_forward)
        lane, sequence, start = (
            self.lane[forward].astype(np.int64),
            self._sequence[forward],
            self._spans.starts(forward),
        )
        by_process = _Sequences(forward, self._processes[lane], sequence, start)
        return by_process, _Sequences(forward, lane, sequence, start)

    def _numbered(self, positions: Ints) -> Ints:
        """The node whose sequence number stands for an unnumbered one; all positions are nodes.

        NVTX numbers the node and not the engine's call around it (`evaluate_function: …`): the call takes that of the node in it.
        AccumulateGrad has no number at all. The engine runs it right after the node that made the gradient (it has the
        highest priority in the queue), so it takes that of the numbered node before it on its thread."""
        sequence = self._sequence
        numbered = np.flatnonzero(self._is_backward & (sequence != NO_ID))
        if len(numbered) == 0:
            return positions
        place = np.searchsorted(numbered, positions, side="right")
        after = numbered[np.minimum(place, len(numbered) - 1)]
        before = numbered[np.maximum(place - 1, 0)]
        lane = self.lane[positions]
        begins_inside = self._spans.starts(after) < self._spans.ends(positions)
        inside = (after > positions) & (self.lane[after] == lane) & begins_inside
        earlier = (before < positions) & (self.lane[before] == lane)
        stand_in = np.where(inside, after, np.where(earlier, before, positions))
        return np.where(sequence[positions] == NO_ID, stand_in, positions)


class _Sequences:
    """Forward ops by (group, sequence number), each group in order of start; of two that start together the later counts."""

    def __init__(self, positions: Ints, group: Ints, sequence: NDArray[np.int32 | np.int64], start: Ints) -> None:
        self._numbers, number = np.unique(sequence, return_inverse=True)
        group = group * max(len(self._numbers), 1) + number
        order = np.lexsort((start, group))
        self._group, self._start, self._positions = group[order], start[order], positions[order]

    def last_before(self, group: Ints, sequence: NDArray[np.int32 | np.int64], time: Ints) -> Ints:
        """The op of a group with this number that started last at or before the time; -1 without one."""
        if len(self._group) == 0:
            return np.full(len(group), -1, dtype=np.int64)
        number = np.minimum(np.searchsorted(self._numbers, sequence), len(self._numbers) - 1)
        asked = np.where((self._numbers[number] == sequence) & (group >= 0), group * len(self._numbers) + number, -1)
        low, high = (np.searchsorted(self._group, asked, side=side) for side in ("left", "right"))
        begin = low.copy()
        while (low < high).any():  # halve all groups at once: the first op of each that starts after the time
            middle = (low + high) // 2
            later = self._start[np.minimum(middle, len(self._start) - 1)] > time
            high = np.where(later & (low < high), middle, high)
            low = np.where(~later & (low < high), middle + 1, low)
        return np.where(low > begin, self._positions[np.maximum(low - 1, 0)], -1)


def _narrowed(values: Ints) -> NDArray[np.int32 | np.int64]:
    fits = len(values) == 0 or -(2**31) <= int(values.min()) <= int(values.max()) < 2**31
    return values.astype(np.int32) if fits else values


def _lanes(trace: Trace) -> pl.DataFrame:
    nodes = trace.graph_nodes.with_columns(process="host")
    tables = (trace.launches, trace.graph_launches, trace.ops, trace.ranges, nodes)
    threads = pl.concat([_threads(table) for table in tables]).unique().sort("process", "thread")
    return threads.with_columns(lane=pl.int_range(pl.len(), dtype=pl.Int64))


def _threads(table: pl.DataFrame) -> pl.DataFrame:
    """The distinct threads; a table mostly holds long runs of one and the same."""
    process, thread = table["process"].to_numpy(), table["thread"].to_numpy()
    first = np.ones(len(thread), dtype=bool)
    first[1:] = (thread[1:] != thread[:-1]) | (process[1:] != process[:-1])
    return pl.DataFrame({"process": process[first], "thread": thread[first]}).unique()


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
        left = _MOST_CHARACTERS
        path = np.zeros(len(chain[0]), dtype=np.int64)
        count = len(self._texts) + 1
        for places in reversed(chain):
            here = np.flatnonzero(places >= 0)
            keys, number = np.unique(path[here] * count + self._name(places[here]), return_inverse=True)
            path[here] = len(texts) + number
            pairs = [(texts[key // count], self._texts[key % count]) for key in keys.tolist()]
            for outer, inner in pairs:
                longer = inner if outer is None or left < len(outer) else outer + SEPARATOR + inner
                left -= len(longer)
                texts.append(longer)
        return path, texts

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
