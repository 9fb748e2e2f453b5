"""Batches of windows of tokens: which windows a batch holds follows from its number, so resuming needs nothing else."""

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flopwise.errors import FlopwiseError
from flopwise.lm.data.corpus import Corpus
from flopwise.lm.data.shuffle import shuffled
from flopwise.records.corpus import TRAIN

Batch = tuple[Tensor, Tensor]  # inputs and targets, both [B, T] of int64


class Batches:
    """Batches of one rank. Number n is its n-th: with gradient accumulation, step · accumulation + micro-step.

    An epoch is every window once, in an order that follows from the seed and the epoch. All ranks together take the same
    windows in the same order whatever their number, if `batch` · `world` is the same.
    """

    def __init__(
        self,
        corpus: Corpus,
        part: str = TRAIN,
        *,
        batch: int,
        context: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch < 1 or context < 1 or not 0 <= rank < world:
            text = f"no batches with batch = {batch}, context = {context}, rank = {rank} of {world}"
            raise FlopwiseError(text, "use batch and context from 1, and a rank below the number of ranks")
        self.tokens = corpus.part(part)
        self.windows = (len(self.tokens) - 1) // context  # in an epoch
        if self.windows < 1:
            text = f"the {part} part of {corpus.folder} has {len(self.tokens):,} tokens, too few for a context of {context:,}"
            raise FlopwiseError(text, "use more text, a shorter context, or hold out more of it")
        self.batch, self.context, self.seed, self.rank, self.world = batch, context, seed, rank, world
        self.device = torch.empty(0, device=device).device  # with its index: another thread has another current GPU

    @property
    def per_epoch(self) -> int:
        """Whole batches of this rank in an epoch; 0 where all windows are fewer than a batch of all ranks."""
        return self.windows // (self.batch * self.world)

    def positions(self, number: int) -> list[int]:
        """Where in the part each window of a batch begins."""
        first = (number * self.world + self.rank) * self.batch
        epoch, index = np.divmod(np.arange(first, first + self.batch), self.windows)
        return [int(window) * self.context for window in shuffled(index, self.windows, self.seed, epoch)]

    def at(self, number: int) -> Batch:
        """One batch, on the device when this returns."""
        both = self._read(number).to(self.device)
        return both[0], both[1]

    def stream(self, start: int = 0, ahead: int = 4) -> "Stream":
        """Batches from `start` on without end, read ahead by a thread. Close it, or use it in a `with`.

        Open it after a CUDA graph is captured, or capture with `capture_error_mode="thread_local"`: the thread allocates.
        """
        return Stream(self, start, ahead)

    def _read(self, number: int) -> Tensor:
        """Inputs and targets of a batch, [2, B, T]; pinned for a GPU."""
        both = torch.empty((2, self.batch, self.context), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        out, window = both.numpy(), np.empty(self.context + 1, np.int64)
        for row, start in enumerate(self.positions(number)):
            self.tokens.read(start, window)
            out[0, row], out[1, row] = window[:-1], window[1:]
        return both


class Stream(Iterator[Batch]):
    """Batches in order. `waited_seconds`: how long the last one kept its consumer waiting; `number`: the next one's."""

    def __init__(self, batches: Batches, start: int, ahead: int) -> None:
        self.number, self.waited_seconds = start, 0.0
        self._ready: queue.Queue[Any] = queue.Queue(ahead)
        self._stop = threading.Event()
        arguments = (batches, start, self._ready, self._stop)  # not the stream: one that is forgotten ends its thread
        self._thread = threading.Thread(target=_fill, args=arguments, name="flopwise-batches", daemon=True)
        self._end = weakref.finalize(self, _finish, self._ready, self._stop, self._thread)
        self._thread.start()

    def __next__(self) -> Batch:
        if not self._end.alive:
            raise StopIteration
        began = time.perf_counter()
        both, copied = self._ready.get()
        self.waited_seconds = time.perf_counter() - began
        if isinstance(both, BaseException):
            self.close()
            raise both
        if copied is not None:
            consumer = torch.cuda.current_stream(both.device)
            consumer.wait_event(copied)
            both.record_stream(consumer)  # its memory is not used again before the consumer is done
        self.number += 1
        return both[0], both[1]

    def close(self) -> None:
        """End the thread; nothing more can be read."""
        self._end()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(batches: Batches, number: int, ready: "queue.Queue[Any]", stop: threading.Event) -> None:
    try:
        stream = None
        if batches.device.type == "cuda":
            torch.cuda.set_device(batches.device)  # of this thread: pinned memory would else be made for GPU 0
            stream = torch.cuda.Stream(batches.device)
        while not stop.is_set():
            _put(ready, stop, _copied(batches._read(number), batches.device, stream))
            number += 1
    except BaseException as error:  # noqa: BLE001 — whatever it is, the consumer raises it
        _put(ready, stop, (error, None))


def _copied(both: Tensor, device: torch.device, stream: "torch.cuda.Stream | None") -> tuple[Tensor, Any]:
    """The batch on its device, and the event after its copy: a GPU's is made on a stream of its own, next to the step."""
    if stream is None:
        return both.to(device), None
    with torch.cuda.stream(stream):
        both = both.to(device, non_blocking=True)
        return both, stream.record_event()


def _put(ready: "queue.Queue[Any]", stop: threading.Event, item: tuple[Any, Any]) -> None:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
            return
        except queue.Full:
            continue


def _finish(ready: "queue.Queue[Any]", stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    while True:
        try:
            ready.get_nowait()
        except queue.Empty:
            break
    if thread is not threading.current_thread():
        thread.join()
