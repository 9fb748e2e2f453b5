"""AdamW inside the backward pass: weights are updated as soon as their gradients are there, and the gradients dropped.

An update only moves memory, and a backward pass mostly computes. On a GPU the update therefore runs on a stream of its own,
together with the matmuls that come next, and never are all gradients in memory at once.

Weights go in groups, a Transformer block each: one launch for many. A group is updated once the last of its gradients has
arrived. autograd hands a weight its gradient once in a backward pass, when every use has added its share, and after the
operation that made the last share was launched: nothing that follows reads the weight. The stream of updates waits for that
moment, and the backward pass for the updates: for those of one group when the next has arrived, for all at the end.

A GPU deals multiprocessors to the kernel that came first: an update would hold up the matmul that comes after it. The
model's own work therefore has a stream of higher priority (`ahead`), and updates get what its kernels leave: the ends of
their waves, and the gaps between them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

KEPT = 1  # groups whose gradients are still held when the next group's have arrived: the update has a block's time
PRIORITY = -1  # of the model's own work; that of updates is 0, CUDA's lowest

Groups = Sequence[Sequence[nn.Parameter]]


def parameter_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """The trained weights of every block together, and each of the others (embedding, head, last norm) alone.

    >>> model = nn.ModuleList([nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> [len(group) for group in parameter_groups(model, [model[1], model[2]])]
    [2, 2, 1]
    """
    groups = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
    grouped = {id(p) for group in groups for p in group}
    alone = [[p] for p in model.parameters() if p.requires_grad and id(p) not in grouped]
    return [group for group in groups if group] + alone


class UpdateInBackward:
    """One optimizer for every group of weights, stepped by the backward pass itself. After it: `finish()`.

    >>> weight = nn.Parameter(torch.ones(1))
    >>> update = UpdateInBackward([[weight]], lambda params: torch.optim.SGD(params, lr=0.25))
    >>> (2 * weight).sum().backward()
    >>> update.finish()
    >>> weight.tolist(), weight.grad
    ([0.5], None)
    """

    def __init__(self, groups: Groups, make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> None:
        self.groups = groups
        self.optimizers = [make(group) for group in groups]
        self.device = groups[0][0].device
        on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None
        self.model_stream = torch.cuda.Stream(self.device, priority=PRIORITY) if on_gpu else None
        self._missing = [len(group) for group in groups]
        # Gradients that an update may still be reading, and the event after it: memory that the backward pass's stream
        # allocates is free for that stream's next tensor once it is dropped.
        self._held: deque[tuple[list[Tensor], torch.cuda.Event | None]] = deque()
        self.hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, number))
            for number, group in enumerate(groups)
            for p in group
        ]

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Around forward, loss and backward: they run on the stream of higher priority, and the current one waits for it."""
        if self.model_stream is None:
            yield
            return
        outer = torch.cuda.current_stream(self.device)
        self.model_stream.wait_stream(outer)
        with torch.cuda.stream(self.model_stream):
            yield
        outer.wait_stream(self.model_stream)

    def finish(self) -> None:
        """The end of a backward pass: what is left is updated, and the current stream waits for all of it."""
        for number, group in enumerate(self.groups):
            if self._missing[number] < len(group):  # some of its weights took no part in this pass
                self._update(number)
        while self._held:
            self._drop_oldest()

    def _arrived(self, number: int, _: Tensor) -> None:
        self._missing[number] -= 1
        if not self._missing[number]:
            self._update(number)

    def _update(self, number: int) -> None:
        """Queue the group's update behind the work that was launched before it, and let go of older gradients."""
        with self._on_update_stream():
            self.optimizers[number].step()
        done = None if self.stream is None else self.stream.record_event()
        self._held.append(([p.grad for p in self.groups[number] if p.grad is not None], done))
        for p in self.groups[number]:
            p.grad = None
        self._missing[number] = len(self.groups[number])
        while len(self._held) > KEPT:
            self._drop_oldest()

    def _on_update_stream(self) -> AbstractContextManager[object]:
        """On the stream of updates, after all that the current one has been given; a CUDA graph's capture goes with it."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def _drop_oldest(self) -> None:
        _, done = self._held.popleft()
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)
