"""Makes memory snapshots with known truth: a caching allocator under training steps of a small model.

The allocator does what PyTorch's does where a snapshot shows it: requests rounded to 512 bytes, small and large segments,
best fit, blocks split and merged, segments kept. Every allocation remembers its true owner.

    python gen_snapshot.py OUT.pickle --events 200000
"""

import argparse
import pickle
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
SITE = "/venv/lib/python3.11/site-packages/torch"
FRAMES: dict[tuple[str, int, str], dict[str, Any]] = {}


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return FRAMES.setdefault((file, line, name), {"filename": file, "line": line, "name": name})


TRAIN = (frame("/home/me/train.py", 80, "main"), frame("/home/me/train.py", 99, "<module>"))
CALL = (
    frame(f"{SITE}/nn/modules/module.py", 1779, "_call_impl"),
    frame(f"{SITE}/nn/modules/module.py", 1768, "_wrapped_call_impl"),
)
SETUP = (frame(f"{SITE}/nn/modules/module.py", 1340, "convert"), frame(f"{SITE}/nn/modules/module.py", 927, "_apply"),
         frame(f"{SITE}/nn/modules/module.py", 1355, "to"), *TRAIN)  # fmt: skip
BATCH = (frame("/home/me/train.py", 20, "get_batch"), *TRAIN)
LOSS = (frame(f"{SITE}/nn/functional.py", 3494, "cross_entropy"), *TRAIN)
BACKWARD = (
    frame(f"{SITE}/autograd/graph.py", 841, "_engine_run_backward"),
    frame(f"{SITE}/_tensor.py", 648, "backward"),
    *TRAIN,
)
ENGINE = (frame("??", 0, "at::native::mm(at::Tensor const&)"), frame("??", 0, "torch::autograd::Engine::thread_main"))
INIT_GROUP = (frame(f"{SITE}/optim/adamw.py", 151, "_init_group"), frame(f"{SITE}/optim/adamw.py", 231, "step"), *TRAIN)
ADAMW = (
    frame(f"{SITE}/optim/adamw.py", 560, "_multi_tensor_adamw"),
    frame(f"{SITE}/optim/adamw.py", 243, "step"),
    *TRAIN,
)
ZERO_GRAD = (frame(f"{SITE}/optim/optimizer.py", 1010, "zero_grad"), *TRAIN)
RECOMPUTE = (
    frame(f"{SITE}/utils/checkpoint.py", 1130, "unpack_hook"),
    frame(f"{SITE}/utils/checkpoint.py", 1500, "recompute_fn"),
)
CUBLAS = (frame("??", 0, "at::cuda::getCurrentCUDABlasHandle()"), *TRAIN)


def forward(block: int, line: int, *inner: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    # One line of code runs for every block; deeper blocks do not have deeper stacks.
    return (
        *inner,
        frame("/home/me/gpt.py", line, "forward"),
        *CALL,
        frame("/home/me/gpt.py", 200, "forward"),
        *CALL,
        *TRAIN,
    )


LINEAR = (frame(f"{SITE}/nn/modules/linear.py", 134, "forward"), *CALL)
SOFTMAX = (frame(f"{SITE}/nn/functional.py", 2133, "softmax"), frame("/home/me/gpt.py", 60, "attention"))


@dataclass
class Piece:
    """One allocation and the truth about it. `start` and `end` are numbers of events; -1: before; the last + 1: still there."""

    start: int
    end: int
    requested: int
    block: int  # bytes of its block
    owner: str
    address: int
    stack: tuple[dict[str, Any], ...]


@dataclass
class Options:
    steps: int = 5
    blocks: int = 3
    dim: int = 96
    batch: int = 2
    context: int = 64
    vocab: int = 500
    stacks: str = "python"  # of backward: 'python' has none, 'all' C++ ones, 'cpu' the Python call
    recompute: bool = False
    leak_bytes: int = 0
    oom_at_step: int | None = None
    optimizer: bool = True
    annotations: bool = False
    old: bool = False  # torch 2.1: no clock, blocks without address
    keep: int | None = None  # events, as a ring buffer of that many
    frees_have_stacks: bool = True
    frees_repeat_stacks: bool = False  # context='alloc': a free has the stack of its allocation


@dataclass
class Generator:
    options: Options
    events: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    clock_us: int = 1_700_000_000_000_000
    segments: dict[int, tuple[int, bool]] = field(default_factory=dict)  # address -> bytes, small
    free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})  # (bytes, address)
    sizes: dict[int, int] = field(default_factory=dict)  # address -> bytes of its block, free or not
    ends: dict[int, int] = field(default_factory=dict)  # end address of a free block -> its address
    used: set[int] = field(default_factory=set)
    pool: dict[int, bool] = field(default_factory=dict)  # address of a block -> small
    home: dict[int, int] = field(default_factory=dict)  # address of a block -> its segment
    next_address: int = 0x7F00_0000_0000

    def event(self, action: str, stack: tuple[dict[str, Any], ...] | None, size: int, **more: Any) -> None:
        self.clock_us += 7
        entry: dict[str, Any] = {"action": action, **more, "size": size, "stream": 0}
        if not self.options.old:
            entry |= {"time_us": self.clock_us, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
        if stack is not None:
            entry["frames"] = list(stack)
        self.events.append(entry)

    def alloc(self, size: int, owner: str, stack: tuple[dict[str, Any], ...]) -> Piece:
        rounded = max(512, -(-size // 512) * 512)
        small = rounded <= MIB
        address = self._take(rounded, small, stack)
        piece = Piece(len(self.events), -1, size, self.sizes[address], owner, address, stack)
        self.event("alloc", stack, size, addr=address)
        self.pieces.append(piece)
        return piece

    def release(self, piece: Piece, stack: tuple[dict[str, Any], ...]) -> None:
        stack = piece.stack if self.options.frees_repeat_stacks else stack
        said = stack if self.options.frees_have_stacks else None
        piece.end = len(self.events)
        self.event("free_requested", said, piece.requested, addr=piece.address)
        self.event("free_completed", said, piece.requested, addr=piece.address)
        self._give(piece.address)

    def _take(self, size: int, small: bool, stack: tuple[dict[str, Any], ...]) -> int:
        free = self.free[small]
        i = bisect_left(free, (size, 0))
        if i == len(free):
            segment = 2 * MIB if small else (20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB)
            address = self.next_address
            self.next_address += segment
            self.event("segment_alloc", stack, segment, addr=address)
            self.segments[address] = segment, small
            self.home[address] = address
            self._put(address, segment, small)
            i = bisect_left(free, (size, 0))
        found, address = free.pop(i)
        del self.ends[address + found]
        rest = found - size
        if rest >= 512 if small else rest > MIB:
            self.home[address + size] = self.home[address]
            self._put(address + size, rest, small)
            found = size
        self.sizes[address] = found
        self.pool[address] = small
        self.used.add(address)
        return address

    def _put(self, address: int, size: int, small: bool) -> None:
        insort(self.free[small], (size, address))
        self.sizes[address], self.pool[address] = size, small
        self.ends[address + size] = address

    def _give(self, address: int) -> None:
        self.used.discard(address)
        size, small, home = self.sizes[address], self.pool[address], self.home[address]
        after = address + size
        if after in self.home and self.home[after] == home and after not in self.used:
            size += self._absorb(after, small)
        before = self.ends.get(address)
        if before is not None and self.home[before] == home:
            size += self._absorb(before, small)
            address = before
        self.home[address] = home
        self._put(address, size, small)

    def _absorb(self, address: int, small: bool) -> int:
        size = self.sizes.pop(address)
        self.free[small].remove((size, address))
        del self.ends[address + size], self.home[address]
        return size

    def mark(self, name: str, stage: str) -> None:
        self.clock_us += 1
        if self.options.annotations:
            self.annotations.append({"name": name, "stage": stage, "device": 0, "time_us": self.clock_us})

    # The model.

    def train(self) -> None:
        o = self.options
        back = {"python": (), "all": ENGINE, "cpu": BACKWARD}[o.stacks]
        shapes = [4 * o.dim * 3 * o.dim, 4 * o.dim * o.dim, 4 * o.dim * 4 * o.dim, 4 * o.dim * 4 * o.dim] * o.blocks
        shapes += [4 * o.vocab * o.dim]
        for size in shapes:
            self.alloc(size, "parameters", SETUP)
        states: list[Piece] = []
        for step in range(o.steps):
            batch = self.alloc(8 * o.batch * o.context, "inputs", BATCH)
            saved = self._forward(step)
            if saved is None:
                return
            gradients = self._backward(saved, shapes, back)
            self.release(batch, TRAIN)
            if o.optimizer:
                self._optimize(shapes, states, gradients)
            else:
                for piece in gradients:
                    self.release(piece, TRAIN)

    def _forward(self, step: int) -> list[Piece] | None:
        o = self.options
        tokens = 4 * o.batch * o.context * o.dim
        saved = [self.alloc(tokens, "activations", forward(0, 10))]
        if step == 0 and o.stacks == "all":
            self.alloc(8_519_680, "workspace", CUBLAS)
        for block in range(o.blocks):
            hold = [] if o.recompute else saved
            kept = self._block(block, hold, forward, "forward", ())
            if o.recompute:
                for piece in kept:
                    self.release(piece, forward(block, 44))
                saved.append(self.alloc(tokens, "activations", forward(block, 41)))
            if o.oom_at_step == step and block == o.blocks - 1:
                self.event("oom", forward(block, 31, *LINEAR), 64 * MIB, device_free=3 * MIB)
                return None
        if o.leak_bytes:
            self.alloc(o.leak_bytes, "activations", forward(0, 77))
        logits = 4 * o.batch * o.context * o.vocab
        saved.append(self.alloc(logits, "logits", forward(0, 90, *LINEAR)))
        saved.append(self.alloc(logits, "logits", LOSS))
        saved.append(self.alloc(512, "logits", LOSS))
        return saved

    def _block(self, block: int, saved: list[Piece], stack: Any, phase: str, outer: tuple[Any, ...]) -> list[Piece]:
        """One block's forward. What is kept goes to `saved`, or, where the block is checkpointed, is returned to be freed."""
        o = self.options
        tokens, scores = 4 * o.batch * o.context * o.dim, 4 * o.batch * 4 * o.context**2
        own = "activations" if saved or phase == "recompute" else "temporary"
        kept: list[Piece] = []
        kept.append(self.alloc(3 * tokens, own, (*stack(block, 31, *LINEAR), *outer)))
        product = self.alloc(scores, "temporary", (*stack(block, 58), *outer))
        kept.append(self.alloc(scores, "attention scores", (*stack(block, 60, *SOFTMAX), *outer)))
        self.release(product, (*stack(block, 61), *outer))
        kept.append(self.alloc(4 * tokens, own, (*stack(block, 33, *LINEAR), *outer)))
        kept.append(self.alloc(tokens, own, (*stack(block, 34, *LINEAR), *outer)))
        if saved:
            saved += kept
        return kept

    def _backward(self, saved: list[Piece], shapes: list[int], back: tuple[Any, ...]) -> list[Piece]:
        o = self.options
        self.mark("backward", "START")
        flowing = self.alloc(4 * o.batch * o.context * o.vocab, "logits", back)
        gradients: list[Piece] = []
        for i, size in enumerate(reversed(shapes)):
            following = self.alloc(4 * o.batch * o.context * o.dim, "temporary", back)
            if o.recompute and i and (i - 1) % 4 == 0:
                again = self._block(o.blocks - 1 - (i - 1) // 4, [], forward, "recompute", (*RECOMPUTE, *back))
                for piece in again:
                    self.release(piece, back)
            gradients.append(self.alloc(size, "gradients", back))
            self.release(flowing, back)
            flowing = following
            if saved:
                self.release(saved.pop(), back)
        self.release(flowing, back)
        while saved:
            self.release(saved.pop(), back)
        self.mark("backward", "END")
        return gradients

    def _optimize(self, shapes: list[int], states: list[Piece], gradients: list[Piece]) -> None:
        self.mark("Optimizer.step#AdamW.step", "START")
        if not states:
            states += [self.alloc(size, "optimizer state", INIT_GROUP) for size in shapes for _ in range(2)]
        for size in shapes:
            self.release(self.alloc(size, "temporary", ADAMW), ADAMW)
        self.mark("Optimizer.step#AdamW.step", "END")
        for piece in gradients:
            self.release(piece, ZERO_GRAD)


@dataclass
class Truth:
    """What an answer must be: allocations as the reader should find them, with their owners."""

    pieces: list[Piece]
    events: int

    def bytes_at(self, moment: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for piece in self.pieces:
            if piece.start < moment <= piece.end:
                found[piece.owner] = found.get(piece.owner, 0) + piece.block
        return found


def made(**options: Any) -> tuple[dict[str, Any], Truth]:
    """A snapshot and its truth."""
    generator = Generator(Options(**options))
    generator.train()
    return snapshot(generator), truth(generator)


def snapshot(generator: Generator) -> dict[str, Any]:
    o = generator.options
    living = {piece.address: piece for piece in generator.pieces if piece.end == -1}
    segments = []
    for address, (size, small) in generator.segments.items():
        blocks, at = [], address
        while at < address + size:
            piece = living.get(at)
            block: dict[str, Any] = {"size": generator.sizes[at], "state": "active_allocated" if piece else "inactive"}
            block["requested_size"] = piece.requested if piece else 0
            block["frames"] = list(piece.stack) if piece else []
            if not o.old:
                block["address"] = at
            blocks.append(block)
            at += generator.sizes[at]
        segments.append({"device": 0, "address": address, "total_size": size, "stream": 0,
                         "segment_type": "small" if small else "large", "blocks": blocks})  # fmt: skip
    cut = len(generator.events) - (o.keep or len(generator.events))
    raw = {"segments": segments, "device_traces": [generator.events[max(cut, 0) :]]}
    if not o.old:
        raw |= {"external_annotations": generator.annotations, "allocator_settings": {"expandable_segments": False}}
    return raw


def truth(generator: Generator) -> Truth:
    """As the snapshot can show it: a freed block's size is its request rounded up; of what lies before a cut and is freed
    after it the stack is lost, and with it the owner, save for gradients: their sizes are those of the parameters."""
    total = len(generator.events)
    cut = max(total - (generator.options.keep or total), 0)
    found = []
    for p in generator.pieces:
        lives = p.end == -1
        if not lives and p.end < cut:
            continue
        before, size = p.start < cut, max(512, -(-p.requested // 512) * 512)
        found.append(
            Piece(
                start=-1 if before else p.start - cut,
                end=total - cut if lives else p.end - cut,
                requested=p.requested,
                block=p.block if lives else size,
                owner="unknown" if before and not lives and p.owner != "gradients" else p.owner,
                address=p.address,
                stack=p.stack,
            )
        )
    return Truth(found, total - cut)


def sized(events: int) -> dict[str, Any]:
    """About that many events with stacks as a real program's: some forty frames, thousands of different ones."""
    deep = [frame(f"/venv/lib/python3.11/site-packages/launcher/run{i}.py", 10 + i, f"call{i}") for i in range(24)]
    lines = [frame("/home/me/trainer.py", line, f"call{line}") for line in range(2000)]
    per_step = len(made(steps=3, blocks=24)[0]["device_traces"][0]) - len(
        made(steps=2, blocks=24)[0]["device_traces"][0]
    )
    raw, _ = made(steps=max(1, events // per_step), blocks=24, leak_bytes=4096, stacks="all")
    engine = [frame("??", 0, f"torch::autograd::step{i}(int)") for i in range(2000)]
    for number, entry in enumerate(raw["device_traces"][0]):
        place = number % per_step % 1900
        python = len(entry["frames"]) > 2  # the engine's thread has no Python below it
        entry["frames"] += [lines[place], *deep] if python else engine[place : place + 36]
    return raw


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--events", type=int, default=200_000)
    arguments = parser.parse_args()
    content = sized(arguments.events)
    with open(arguments.out, "wb") as file:
        pickle.dump(content, file)
    print(len(content["device_traces"][0]))
