"""Levers applied to a user's step without changing its code: to what its factory built, and around its phases."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from flopwise import torch_private
from flopwise.capture.built_objects import BuiltObjects
from flopwise.capture.model_step import check_supported
from flopwise.errors import Unsupported, one_line
from flopwise.lm.precision import apply_fp32_matmul
from flopwise.patch.levers import AUTOCAST, BACKENDS, PatchedModel
from flopwise.spec.recipe import REPLAYED, Recipe, levers_to_apply

Phases = dict[str, Callable[[], object]]

# The backward pass runs in its forward ops' dtypes, the update in the weights'.
NOT_AUTOCAST = ("backward", "optimizer")


class AppliedLevers:
    """One step's levers: those in which the recipe differs from the step as it is written."""

    def __init__(
        self, recipe: Recipe, built: BuiltObjects, device: torch.device, written: Recipe | None = None
    ) -> None:
        self.recipe, self.built, self.device = recipe, built, device
        self.levers = levers_to_apply(recipe, written or Recipe())
        self.model = PatchedModel(built.roots, built.optimizers, self.levers)
        self._compiled, self._graphs_before, self._frames_before, self._skips_before = False, 0, 0, 0

    @property
    def checkpointed(self) -> int:
        """Blocks that are computed again for the backward pass."""
        return self.model.checkpointed

    def apply(self, phases: Phases) -> Phases:
        """Change what was built, and return the phases that run under the levers."""
        if not self.levers:
            return phases
        check_supported(self.recipe, self.device)
        if self.levers.get("precision") == "fp16":
            self._check_scaler(phases)
        if self.levers.get("precision") == "tf32":
            apply_fp32_matmul(self.recipe)
        self.model.install()
        if not self.model.compiles_after_first_step:
            self._compile()
        around = {name: self._around(name, run, not n) for n, (name, run) in enumerate(phases.items())}
        return self._first_steps_checked(around)

    def _compile(self) -> None:
        """Once; what Dynamo had done before is not the step's."""
        if not self._compiled:
            self._compiled = True
            self._graphs_before, self._frames_before = torch_private.compiled_graphs(), torch_private.compiled_frames()
            self._skips_before = torch_private.skipped_graphs()
            self.model.compile()

    # --- precision and attention: around the phases

    def _around(self, name: str, run: Callable[[], object], first: bool) -> Callable[[], object]:
        backend = BACKENDS.get(self.levers.get("attention", ""))
        dtype = AUTOCAST.get(self.levers.get("precision", ""))
        ahead = self.model.overlapped[0].ahead if self.model.overlapped and name != "optimizer" else None
        begins = first and self.levers.get("compile") == REPLAYED

        def phase() -> object:
            if begins:  # what the compiler's graphs have left of the last step may be written over
                torch.compiler.cudagraph_mark_step_begin()
            with ExitStack() as stack:
                stack.enter_context(self._failures_explained())
                if ahead is not None:
                    stack.enter_context(ahead())
                if dtype is not None and name not in NOT_AUTOCAST:
                    stack.enter_context(torch.autocast(self.device.type, dtype=dtype))
                if backend is not None:
                    stack.enter_context(sdpa_kernel(backend))
                return run()

        return phase

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """A lever that the step cannot run under becomes `Unsupported`, which names the lever."""
        try:
            yield
        except torch_private.compiler_error() as error:
            if "compile" not in self.levers:
                raise
            raise Unsupported(
                f"compile = '{self.recipe.compile}' fails on this step: {one_line(str(error), 200)}",
                "compile = off; or compile in your own code the part that can be",
                ("compile",),
            ) from error
        except RuntimeError as error:
            if self.levers.get("attention") in BACKENDS and "No available kernel" in str(error):
                raise Unsupported(
                    f"attention = '{self.recipe.attention}' cannot run this step's attention",
                    "try precision = bf16 with it, or attention = sdpa, which picks a backend that can",
                    ("attention",),
                ) from error
            raise

    def _check_scaler(self, phases: Phases) -> None:
        trains = bool(self.built.optimizers) or "backward" in phases
        if trains and not self.built.scales_losses:
            raise Unsupported(
                "precision = 'fp16' needs a loss scaler, and the step has none: small gradients would become zero",
                "use torch.amp.GradScaler in the step, or precision = bf16",
            )

    # --- what only a step that has run can show

    def _first_steps_checked(self, phases: Phases) -> Phases:
        """The second step is the first that can run compiled: in the first, replaced modules are compared and ops watched."""
        first, last = next(iter(phases)), next(reversed(phases))
        before: list[Tensor] = []
        done = 0

        def begin() -> object:
            if not done and self._replays_recomputation:
                before[:] = [torch.cuda.get_rng_state(self.device)]
            return phases[first]() if first != last else end()

        def end() -> object:
            nonlocal done
            result = phases[last]()
            done += 1
            if done == 1:
                self._check_random(before)
                self._compile()
            elif done == 2:
                self._check_compiled()
            return result

        return phases | {last: end} | {first: begin}

    @property
    def _replays_recomputation(self) -> bool:
        return bool(self.checkpointed) and self.recipe.graph == "on" and self.device.type == "cuda"

    def _check_compiled(self) -> None:
        made = torch_private.compiled_graphs() > self._graphs_before
        if self.levers.get("compile") == REPLAYED and torch_private.skipped_graphs() > self._skips_before:
            raise Unsupported(
                f"compile = '{REPLAYED}': the compiler could not put all of the step into CUDA graphs",
                "compile = default; TORCH_LOGS=perf_hints says why (inputs that are written to, tensors on the CPU)",
                ("compile",),
            )
        # Where another model was compiled before, this one may use its graphs.
        if "compile" not in self.levers or made or self._graphs_before:
            return
        nothing = f"compile = '{self.recipe.compile}' compiled nothing"
        if torch_private.compiled_frames() > self._frames_before:
            text = "the compiler takes none of the step's modules (nn.LSTM, nn.GRU and nn.RNN are such)"
            raise Unsupported(f"{nothing}: {text}", "compile = off", ("compile",))
        raise Unsupported(
            f"{nothing}: the step calls no module that its factory built",
            "call the module itself, not its forward, and build it in the factory",
            ("compile",),
        )

    def _check_random(self, before: list[Tensor]) -> None:
        if before and not torch.equal(before[0], torch.cuda.get_rng_state(self.device)):
            raise Unsupported(
                "checkpoint with graph = 'on' cannot recompute random numbers (dropout), and this step draws some",
                "switch dropout off, or omit one of the two",
                ("checkpoint", "graph"),
            )
