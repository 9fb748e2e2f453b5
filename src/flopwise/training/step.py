"""One update of a model's weights, from one batch or several: the recipe's levers, clipping, accumulation, DDP, a CUDA graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flopwise.capture.model_step import ModelStep
from flopwise.capture.step import GRAPH_WARMUPS, capture_failure
from flopwise.errors import FlopwiseError
from flopwise.lm.loss import hidden_loss, loss_full
from flopwise.lm.precision import autocast
from flopwise.lm.schedule import warmup_cosine
from flopwise.records.training import Settings
from flopwise.spec.recipe import REPLAYED, Recipe
from flopwise.spec.workload import Workload

Batch = tuple[Tensor, Tensor]  # inputs and targets, [B, T] each
State = dict[str, Any]


class TrainingStep(ModelStep):
    """`train_on` is one update. After it `last_loss` and `norm` hold the mean loss and the gradients' norm, on the device."""

    def __init__(self, workload: Workload, device: torch.device, settings: Settings) -> None:
        check(workload.recipe, settings)
        super().__init__(workload, device)
        self.settings = settings
        self.last_loss, self.norm = torch.zeros(2, device=device).unbind()
        self.loss_module: nn.Module = _Loss(self.model, self._loss_of)
        if settings.world > 1:
            ids = [device] if device.type == "cuda" else None
            self.loss_module = DistributedDataParallel(self.loss_module, device_ids=ids, gradient_as_bucket_view=True)
        self._first: Callable[[], object] = lambda: self._accumulate(True)
        self._next: Callable[[], object] = lambda: self._accumulate(False)
        self._end: Callable[[], object] = self._finish
        if workload.recipe.graph == "on":
            self._capture()

    def learning_rate(self, step: int) -> float:
        s = self.settings
        return warmup_cosine(
            step, peak=s.rate, floor=s.floor * s.rate, warmup_steps=s.warmup_steps, total_steps=s.steps
        )

    def train_on(self, batches: Sequence[Batch]) -> None:
        """One step; nothing waits for the device."""
        self.set_learning_rate()
        for number, (tokens, targets) in enumerate(batches):
            if self.recipe.graph == "on":  # it reads from where it was captured
                self.tokens.copy_(tokens, non_blocking=True)
                self.targets.copy_(targets, non_blocking=True)
            else:
                self.tokens, self.targets = tokens, targets
            with self._ahead(), self._joined(number == len(batches) - 1):
                (self._next if number else self._first)()
        self._end()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """The mean loss, by the model as it is written: a forward pass of its own is not worth compiling."""
        total = torch.zeros((), device=self.device)
        for tokens, targets in batches:
            with autocast(self.recipe, self.device.type):
                if self.recipe.loss == "full":
                    total += loss_full(self.model(tokens), targets)
                else:
                    loss = hidden_loss(self.recipe.loss)
                    total += loss(self.model.hidden(tokens), self.model.head_weight, targets)
        return total / len(batches)

    def state(self) -> State:
        """Everything that the next step depends on, apart from its batches."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
        }

    def restore(self, state: State) -> None:
        """Go on from a state; in place, where a CUDA graph reads and writes these tensors."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            if self.recipe.graph == "on":
                _put_back(optimizer, saved["state"])
            else:
                optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        self.steps = state["steps"]

    def _loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.recipe, self.device.type):
            if self.recipe.loss == "full":
                return self.loss_of(self.logits_of(tokens), targets)
            return self.loss_of(self.hidden_of(tokens), self.model.head_weight, targets)

    def _accumulate(self, first: bool) -> None:
        """Forward and backward of one batch; the first begins with no gradients."""
        if first:
            self.begin()
            self.model.zero_grad(set_to_none=True)
        share = self.settings.accumulate
        loss = self.loss_module(self.tokens, self.targets)
        self.scaler.scale(loss / share).backward()
        if first:
            self.last_loss.copy_(loss.detach() / share)
        else:
            self.last_loss.add_(loss.detach() / share)

    def _finish(self) -> None:
        """The update, from all gradients; where the backward pass makes it, what is left of it."""
        if self.overlapped is not None:
            self.overlapped.finish()
            return
        optimizer = self.optimizers[0]
        if self.settings.clip:
            self.scaler.unscale_(optimizer)
            self.norm.copy_(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip))
        self.scaler.step(optimizer)
        self.scaler.update()

    def _ahead(self) -> AbstractContextManager[object]:
        return self.overlapped.ahead() if self.overlapped is not None else nullcontext()

    def _joined(self, last: bool) -> AbstractContextManager[object]:
        """Processes exchange gradients once per update: with the last batch."""
        if last or not isinstance(self.loss_module, DistributedDataParallel):
            return nullcontext()
        return self.loss_module.no_sync()

    def _capture(self) -> None:
        """The same as CUDA graphs, which share their memory. What its warm-up did to the weights is undone."""
        before = _copied(self.state())

        def whole() -> None:
            with self._ahead():
                self._accumulate(True)
            self._finish()

        with self._on_a_side_stream():
            for _ in range(GRAPH_WARMUPS):
                self.set_learning_rate()
                whole()
                if self.settings.accumulate > 1:
                    self._accumulate(False)
        pool = torch.cuda.graph_pool_handle()
        try:
            if self.settings.accumulate == 1:
                self._first, self._end = _graph(whole, pool), lambda: None
            else:
                self._first = _graph(lambda: self._accumulate(True), pool)
                self._next = _graph(lambda: self._accumulate(False), pool)
                self._end = _graph(self._finish, pool)
        except RuntimeError as error:
            raise capture_failure(error) from error
        self.restore(before)

    @contextmanager
    def _on_a_side_stream(self) -> Iterator[None]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            yield
            torch.cuda.synchronize(self.device)
        torch.cuda.current_stream(self.device).wait_stream(side)


class _Loss(nn.Module):
    """A batch's loss as a module: what DDP wraps."""

    def __init__(self, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss_of(tokens, targets)


def check(recipe: Recipe, settings: Settings) -> None:
    """Refuse settings that do not go together, before anything is built."""
    if recipe.overlap == "on":
        for name, value, why in (
            ("--clip", settings.clip, "the norm of all gradients is known when the last has arrived"),
            ("--accumulate", settings.accumulate - 1, "every backward pass updates the weights"),
            ("several processes", settings.world - 1, "gradients are updated before they are exchanged"),
        ):
            if value:
                hint = "--clip 0, or --overlap off" if name == "--clip" else "--overlap off"
                raise FlopwiseError(f"overlap = 'on' and {name} do not go together: {why}", hint)
    if recipe.compile == REPLAYED and (settings.accumulate > 1 or settings.world > 1):
        text = (
            f"compile = '{REPLAYED}' is for one process and one batch an update: the next replay writes over gradients"
        )
        raise FlopwiseError(text, "--compile default")
    if recipe.parallel != "off":
        text = f"parallel = '{recipe.parallel}' is for bench, profile and memory; a training's ranks are torchrun's, with DDP"
        raise FlopwiseError(text, "torchrun --nproc-per-node N -m flopwise train …")
    if recipe.graph == "on" and settings.world > 1:
        text = "graph = 'on' is for one process: DDP's exchange of gradients is not captured"
        raise FlopwiseError(text, "--graph off")


def _graph(run: Callable[[], object], pool: Any) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


def _copied(state: Any) -> Any:
    """The same on the host, apart from the original."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list | tuple) else state


def _put_back(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Copy a saved state into the tensors that there are; what was not saved was zero."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, weight in enumerate(weights):
        for name, value in optimizer.state.get(weight, {}).items():
            old = saved.get(number, {}).get(name)
            if isinstance(value, Tensor):
                value.zero_() if old is None else value.copy_(torch.as_tensor(old))
