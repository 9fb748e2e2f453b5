"""AdamW four ways: the algorithm written out, PyTorch's foreach and fused forms, and our own kernel."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from flopwise.lm.own_kernels import needs_triton
from flopwise.spec.recipe import OWN_OPTIMIZERS, WITH_MASTERS, Recipe

BETAS = (0.9, 0.95)  # as GPT-3 and Llama were trained (Brown et al. 2020, appendix B; Touvron et al. 2023, 2.3)
WEIGHT_DECAY = 0.1


class AdamWLoop(Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2), one parameter at a time and one kernel per operation.

    `capturable` keeps the step count on the device, so that a CUDA graph of the step counts on when replayed.
    `lr` may be a 0-dim tensor, which a replayed graph reads anew. ε is added to √v, as in the paper and in PyTorch; some
    lectures write √(v + ε) (`eps_inside`), which makes the steps of small gradients much shorter: √ε is 1e-4.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        capturable: bool = False,
        eps_inside: bool = False,
    ) -> None:
        self.eps_inside = eps_inside
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device) if group["capturable"] else 0
            state["exp_avg"] = torch.zeros_like(parameter)  # torch.optim's names: the states are interchangeable
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, m, v = state["step"], state["exp_avg"], state["exp_avg_sq"]

        parameter.mul_(1 - lr * group["weight_decay"])  # the decay is decoupled: it never enters the moments
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # Both moments start at zero; dividing by 1 − βᵗ takes that bias out.
        unbias, eps = (1 - beta2**step) ** 0.5, group["eps"]
        denominator = (v + eps).sqrt() / unbias if self.eps_inside else v.sqrt() / unbias + eps
        parameter.sub_(m / denominator * (lr / (1 - beta1**step)))


def make_optimizer(
    model_params: Iterable[nn.Parameter],
    recipe: Recipe,
    lr: float | Tensor,
    graph: bool,
    *,
    betas: tuple[float, float] = BETAS,
    weight_decay: float = WEIGHT_DECAY,
) -> Optimizer:
    """The recipe's optimizer. For a CUDA graph the step count and the learning rate live on the device:
    a schedule then writes `group["lr"].fill_(new)`, for all optimizers that were given one tensor as their `lr`.
    """
    params = list(model_params)
    rate = torch.as_tensor(lr, dtype=torch.float32, device=params[0].device) if graph else lr
    if recipe.optimizer == "adamw-loop":
        return AdamWLoop(params, rate, betas, weight_decay=weight_decay, capturable=graph)
    if recipe.optimizer in OWN_OPTIMIZERS:
        with needs_triton(f"optimizer = '{recipe.optimizer}'"):
            from flopwise.kernels.adamw import AdamW as OwnAdamW
        state = torch.bfloat16 if recipe.optimizer == "flopwise-bf16" else torch.float32
        master = recipe.precision in WITH_MASTERS
        return OwnAdamW(params, rate, betas, weight_decay=weight_decay, state_dtype=state, master=master)
    form = {recipe.optimizer: True}  # foreach=True or fused=True
    return AdamW(params, rate, betas, weight_decay=weight_decay, capturable=graph, **form)
