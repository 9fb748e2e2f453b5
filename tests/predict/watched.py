"""What PyTorch really allocates and computes for a step on the CPU, phase by phase."""

import math
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

BLOCK = 512


def _storages(values):
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)}


class Watch(TorchDispatchMode):
    """Counts the bytes of every storage that an op returns for as long as it lives, rounded as CUDA's allocator does."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.ops = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (_storages(x) for x in (args, out))
        for storage in made.values():
            self.see(storage)
        # A view makes nothing, and a range in the profile is no op.
        self.ops += bool(func._schema.is_mutable or made.keys() - given.keys()) and func.namespace in (
            "aten",
            "flopwise",
        )
        return out

    def see(self, storage):
        place, n_bytes = storage._cdata, math.ceil(storage.nbytes() / BLOCK) * BLOCK
        if place in self.known or not n_bytes:
            return
        self.known.add(place)
        self.live += n_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.gone, place, n_bytes)

    def gone(self, place, n_bytes):
        self.known.discard(place)
        self.live -= n_bytes


def measured(step):
    """Per phase start, peak and end in bytes, ops and FLOPs of a step's second run; what lived before it counts as nothing."""
    for run in step.phases().values():
        run()
    watch, figures = Watch(), {}
    state = [value for optimizer in step.optimizers for value in optimizer.state.values()]
    lasting = [*step.model.parameters(), *step.model.buffers(), step.tokens, step.targets, *tree_leaves(state)]
    watch.known |= {x.untyped_storage()._cdata for x in lasting if isinstance(x, torch.Tensor)}
    # The last step's gradients are counted, so that their end is seen.
    for parameter in step.model.parameters():
        if parameter.grad is not None:
            watch.see(parameter.grad.untyped_storage())
    for kept in (step.output, step.loss):
        if kept is not None:
            watch.see(kept.untyped_storage())
        del kept
    for phase, run in step.phases().items():
        start = watch.peak = watch.live
        watch.ops = 0
        with watch:
            run()
        figures[phase] = (start, watch.peak, watch.live, watch.ops)
    # Another step for the FLOPs: their counter holds on to tensors.
    for phase, run in step.phases().items():
        counter = FlopCounterMode(display=False)
        with counter:
            run()
        figures[phase] += (counter.get_total_flops(),)
    return figures
