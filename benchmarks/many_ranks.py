"""Many ranks: traces with a planted straggler, read together and compared with the truth. No GPU.

python benchmarks/many_ranks.py                    # 8 ranks of every case, then 1,000 ranks of two
python benchmarks/many_ranks.py --ranks 64         # another number
python benchmarks/many_ranks.py --write DIR --ranks 8 --case host      # only write the files
python benchmarks/many_ranks.py --public DIR       # the eight ranks of param_dlrm that others have published, in DIR

A job is simulated to the nanosecond: layers of three kernels, an all-reduce among the ranks of a host, one across hosts, an
exchange between neighbours, and at the end of the step one all-reduce over all ranks. Every rank's clock is off by up to 5 ms.
The truth of a case is the same job simulated without its straggler.
"""

import argparse
import gzip
import json
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

CASES = ("none", "clock", "work", "host", "input", "link", "missing")
CAUSES = {"clock": "slower clock", "work": "more compute", "host": "host late", "input": "input", "link": "link"}
KERNEL_NS, LAUNCH_NS, INPUT_NS = 200_000, 6_000, 100_000
INNER_NS, OUTER_NS, PAIR_NS, WORLD_NS = 40_000, 60_000, 15_000, 300_000
INNER_BYTES, OUTER_BYTES, PAIR_BYTES, WORLD_BYTES = 4 << 20, 2 << 20, 1 << 20, 64 << 20
BASE_NS = 1_790_000_000_000_000_000
KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)"
NCCL = {"allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}
NCCL |= dict.fromkeys(("send", "recv"), "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")


@dataclass(frozen=True)
class Job:
    """What is simulated. `inner` ranks are on a host; `outer` hosts are in a block."""

    ranks: int = 8
    inner: int = 2
    outer: int = 2
    steps: int = 3
    layers: int = 4
    case: str = "none"
    straggler: int = 5
    offset_ns: int = 5_000_000  # clocks are off by at most this
    named: bool = True  # collectives carry their group and sequence number
    overlap: bool = False  # gradients are reduced over all ranks while the next layer is computed, as DDP does
    jitter: float = 0.0  # kernels take up to this share more or less, collectives end up to 3 µs apart
    seed: int = 1


@dataclass
class Rank:
    """What a rank did: spans of its GPU, its host and its collectives."""

    kernels: list[tuple[int, int, int]] = field(default_factory=list)  # start, duration, launched
    collectives: list[tuple[int, int, int, str, str, list[int], int, int, int, int]] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)


class Simulation:
    """Ranks that compute, and wait for each other in collectives."""

    def __init__(self, job: Job, straggles: bool = True) -> None:
        self.job = job
        self.slow = job.straggler if straggles and job.case not in ("none", "missing") else -1
        self.ranks = [Rank() for _ in range(job.ranks)]
        self.now = [1_000_000] * job.ranks  # when each rank's GPU is free
        self.talking = [0] * job.ranks  # when its stream of collectives is free, of a job that overlaps
        self.host = [0] * job.ranks  # when each rank's host launched something last: it runs ahead of the GPU
        self.sequence: dict[str, int] = {}
        self.chance = [random.Random(job.seed * 1_000_003 + rank) for rank in range(job.ranks)]
        for _ in range(job.steps):
            self._step()

    def _step(self) -> None:
        job, began = self.job, list(self.now)
        for rank in range(job.ranks):
            wait = INPUT_NS * (11 if self._is(rank, "input") else 1)
            self.ranks[rank].loads.append((self.now[rank], wait - 10_000))
            self.now[rank] += wait
            self.host[rank] = self.now[rank] - LAUNCH_NS
        for layer in range(job.layers):
            for rank in range(job.ranks):
                self._compute(rank, 3)
            if job.overlap:
                self._collective("world", list(range(job.ranks)), "allreduce", WORLD_NS, WORLD_BYTES)
                continue
            self._groups("inner", INNER_NS, INNER_BYTES)
            self._groups("outer", OUTER_NS, OUTER_BYTES)
            if layer % 2:
                self._pairs()
        self._collective("world", list(range(job.ranks)), "allreduce", WORLD_NS, WORLD_BYTES)
        for rank in range(job.ranks):
            self.now[rank] = max(self.now[rank], self.talking[rank])
            self._compute(rank, 1)
            self.ranks[rank].marks.append((began[rank], self.now[rank] - began[rank]))

    def _is(self, rank: int, case: str) -> bool:
        return rank == self.slow and self.job.case == case

    def _compute(self, rank: int, n: int) -> None:
        if self._is(rank, "host"):
            self.now[rank] += 150_000
        late = self._is(rank, "host")
        for place in range(n + int(self._is(rank, "work"))):
            more = 1 + self.job.jitter * self.chance[rank].uniform(-1, 1) if place < n else 1
            took = int(KERNEL_NS * more * (1.25 if self._is(rank, "clock") else 1))
            self.ranks[rank].kernels.append((self.now[rank], took, self._launched(rank, self.now[rank], late)))
            self.now[rank] += took
            late = False

    def _launched(self, rank: int, start: int, late: bool = False) -> int:
        """When the host launches what begins at `start`: soon after what it launched before, unless it is late."""
        latest = start - LAUNCH_NS
        self.host[rank] = latest if late else min(self.host[rank] + LAUNCH_NS, latest)
        return self.host[rank]

    def groups(self, which: str) -> list[list[int]]:
        job = self.job
        if which == "inner":
            return [list(range(low, min(low + job.inner, job.ranks))) for low in range(0, job.ranks, job.inner)]
        block = job.inner * job.outer
        return [
            list(range(low + place, min(low + block, job.ranks), job.inner))
            for low in range(0, job.ranks, block)
            for place in range(job.inner)
        ]

    def _groups(self, which: str, took: int, n_bytes: int) -> None:
        for number, members in enumerate(self.groups(which)):
            if len(members) > 1:
                self._collective(f"{which}{number}", members, "allreduce", took, n_bytes)

    def _pairs(self) -> None:
        for low in range(0, self.job.ranks - 1, 2):
            self._collective("world", [low, low + 1], "send", PAIR_NS, PAIR_BYTES)

    def _collective(self, group: str, members: list[int], kind: str, took: int, n_bytes: int) -> None:
        slow = self.slow in members and self.job.case == "link" and len(members) < self.job.ranks
        overlaps = self.job.overlap
        begin = {rank: max(self.now[rank], self.talking[rank] if overlaps else 0) for rank in members}
        end = max(begin.values()) + took * (3 if slow else 1)
        direct = kind == "send"
        key = f"{group} {members if direct else ''}"
        self.sequence[key] = number = self.sequence.get(key, 0) + 1
        whole = list(range(self.job.ranks)) if direct else members
        for rank in members:
            name = "recv" if direct and rank != members[0] else kind
            ends = tuple(members) if direct else (-1, -1)
            done = end + (int(self.chance[rank].uniform(0, 3_000)) if self.job.jitter else 0)
            launched = self._launched(rank, begin[rank])
            row = (begin[rank], done - begin[rank], n_bytes, name, group, whole, number, *ends, launched)
            self.ranks[rank].collectives.append(row)
            if overlaps:
                self.talking[rank] = done
            else:
                self.now[rank] = done

    @property
    def end_ns(self) -> int:
        return max(self.now)

    def step_saving_ns(self) -> float:
        """What a steady step would save without the straggler: the truth."""
        usual = Simulation(self.job, straggles=False)
        lasts = [max(a + b for a, b in (rank.marks[-1] for rank in one.ranks)) for one in (self, usual)]
        firsts = [min(rank.marks[1][0] for rank in one.ranks) for one in (self, usual)]
        return ((lasts[0] - firsts[0]) - (lasts[1] - firsts[1])) / (self.job.steps - 1)


def offsets(job: Job) -> list[int]:
    """How far each rank's clock is ahead."""
    source = random.Random(job.seed)
    return [source.randint(-job.offset_ns, job.offset_ns) for _ in range(job.ranks)]


def write(job: Job, folder: Path) -> Simulation:
    """The files of a job, one for each rank; of the case 'missing' without one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Simulation(job)
    for rank, ahead in enumerate(offsets(job)):
        if job.case == "missing" and rank == job.straggler:
            continue
        text = json.dumps(_trace(job, made, rank, ahead), separators=(",", ":")).encode()
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text, 1, mtime=0))
    return made


def _trace(job: Job, made: Simulation, rank: int, ahead: int) -> dict[str, object]:
    events: list[dict[str, object]] = []
    correlation = 0

    def span(cat: str, name: str, start: int, took: int, tid: int, **args: object) -> None:
        pid = rank % job.inner if cat == "kernel" else 1000 + rank
        times = {"ts": (start + ahead + 10**12) / 1e3, "dur": took / 1e3}
        events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def launch(launched: int, op: str) -> int:
        nonlocal correlation
        correlation += 1
        span("cpu_op", op, launched - 1_000, 5_000, 1)
        span("cuda_runtime", "cudaLaunchKernel", launched, 2_000, 1, correlation=correlation)
        return correlation

    done = made.ranks[rank]
    for number, (start, took) in enumerate(done.marks):
        span("user_annotation", f"ProfilerStep#{number + 5}", start, took, 1)
    for start, took in done.loads:
        span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, took, 1)
    work = [(one[0], 0, one) for one in done.kernels] + [(one[0], 1, one) for one in done.collectives]
    for start, talks, one in sorted(work, key=lambda item: item[:2]):
        if not talks:
            number = launch(one[2], "aten::add")
            span("kernel", KERNEL, start, one[1], 7, correlation=number, stream=7, device=rank % job.inner)
            continue
        _, took, n_bytes, kind, group, members, sequence, source, target, asked = one
        number = launch(asked, "record_param_comms")
        args: dict[str, object] = {}
        if job.named:
            args = {"Collective name": kind, "In msg nelems": n_bytes // 2, "Out msg nelems": n_bytes // 2}
            args |= {"dtype": "BFloat16", "Group size": len(members), "Process Group Name": group, "Seq": sequence}
            shown = members if len(members) <= 30 else [*members[:29], "...", members[-1]]
            args["Process Group Ranks"] = f"[{', '.join(map(str, shown))}]"
            args |= {"Src Rank": source, "Dst Rank": target} if source >= 0 else {}
        stream = {"world": 20, "inner": 24, "outer": 28}.get(group.rstrip("0123456789"), 32)
        span(
            "kernel",
            NCCL[kind],
            start,
            took,
            stream,
            correlation=number,
            stream=stream,
            device=rank % job.inner,
            **args,
        )
    gpu = {"id": rank % job.inner, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85 * 10**9}
    info = {"backend": "nccl", "rank": rank, "world_size": job.ranks}
    head = {"deviceProperties": [gpu], "distributedInfo": info, "baseTimeNanoseconds": BASE_NS}
    return {**head, "host_name": f"host{rank // job.inner}", "traceEvents": events}


def peak_mb() -> float:
    both = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(both) / 1024


def cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def compare(job: Job, folder: Path) -> bool:
    """Read a job's files, print what is found beside the truth, and say whether they agree."""
    from flopwise.api.explain import explain

    made = write(job, folder)
    began, wall = cpu_s(), time.monotonic()
    found = explain(folder)
    took, wall = cpu_s() - began, time.monotonic() - wall
    ahead = offsets(job)
    there = [one.rank for one in found.ranks]
    off = max(abs(one.clock_ahead_ns - (ahead[one.rank] - ahead[there[0]])) for one in found.ranks)
    who = found.straggler
    expected = CAUSES.get(job.case, "")
    truth = made.step_saving_ns() if expected else 0.0
    saved = who.saving_ns if who is not None else 0.0
    right = (who is None) if not expected else who is not None and (who.rank, who.cause) == (job.straggler, expected)
    allowed = 0.1 if job.jitter else 0.03 if job.overlap else 0.0001  # launches take time of their own
    right &= abs(saved - truth) <= allowed * max(truth, 1e5) and off <= (10_000 if job.jitter else 1_000)
    right &= found.missing == ((job.straggler,) if job.case == "missing" else ())
    named = f"rank {who.rank}, {who.cause}" if who is not None else "nobody"
    how = (", overlap" if job.overlap else "") + (", jitter" if job.jitter else "")
    missing = f", missing {found.missing}" if found.missing else ""
    print(
        f"{job.ranks:>5} ranks, {job.case + how:<16} {named + missing:<24} saves {saved / 1e6:.4f} ms (truth {truth / 1e6:.4f}), "
        f"clocks within {off:.0f} ns, {took:.1f} CPU-s, {wall:.1f} s, peak {peak_mb():.0f} MB  {'ok' if right else 'WRONG'}",
        flush=True,
    )
    return right


def public(folder: Path) -> None:
    """The eight ranks of a DLRM step."""
    from flopwise.api.explain import explain

    began = cpu_s()
    found = explain(sorted(folder.glob("param_dlrm_rank*.json.gz")))
    print(f"param_dlrm, 8 ranks: {cpu_s() - began:.2f} CPU-s, peak {peak_mb():.0f} MB")
    print(found.verdict)
    print(found.straggler)


def job_of(ranks: int, case: str) -> Job:
    return Job(ranks=ranks, case=case, inner=8, outer=5) if ranks >= 40 else Job(ranks=ranks, case=case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--public", type=Path)
    given = parser.parse_args()
    if given.public:
        public(given.public)
        return
    if given.write:
        write(job_of((given.ranks or [8])[0], given.case or "clock"), given.write)
        return
    many = {8: CASES, 1000: ("clock", "link")}
    wanted = {n: many.get(n, CASES) for n in given.ranks or many}
    jobs = [job_of(n, case) for n, cases in wanted.items() for case in ((given.case,) if given.case else cases)]
    few = [job for job in jobs if job.ranks < 40 and job.case in ("clock", "work", "host", "input")]
    jobs[len(jobs) - sum(job.ranks >= 40 for job in jobs) :] = [
        *(replace(job, **other) for other in ({"overlap": True}, {"jitter": 0.05}) for job in few),
        *(job for job in jobs if job.ranks >= 40),
    ]
    right = True
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            right &= compare(job, Path(folder))
    sys.exit(not right)


if __name__ == "__main__":
    main()
