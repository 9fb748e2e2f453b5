"""Data parallelism to read: four ways to average gradients, a sharded optimizer, and fully sharded weights.

Read them in this order: naive_ddp, flat_ddp, ddp, bucketed_ddp, sharded_optimizer, fsdp. Each computes on every rank's own
part of the batch what one process computes on all of it. They use torch.distributed's default process group:

    wrap = BucketedDDP(model, 25)
    loss = loss_of(wrap(tokens), targets)
    loss.backward()
    wrap.finish_gradient_synchronization()
    optimizer.step()
"""

from flopwise.lm.parallel.bucketed_ddp import BucketedDDP
from flopwise.lm.parallel.ddp import DDP
from flopwise.lm.parallel.flat_ddp import FlatDDP
from flopwise.lm.parallel.fsdp import FSDP
from flopwise.lm.parallel.naive_ddp import NaiveDDP
from flopwise.lm.parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["DDP", "FSDP", "BucketedDDP", "FlatDDP", "NaiveDDP", "ShardedOptimizer"]
