"""The phases of a training step, and the names of ranges that mark a phase or a whole step."""

import re

FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = "forward", "loss", "backward", "recompute", "optimizer", "other"
PHASES = (FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER)

_PASS = r"(?:[ _-]?(?:pass|phase))?"
_WORDS = {
    FORWARD: rf"(?:forward|fwd){_PASS}",
    LOSS: rf"(?:(?:compute[ _])?loss|criterion){_PASS}",
    BACKWARD: rf"(?:backward|bwd|loss\.backward)(?:\(\))?{_PASS}",
    RECOMPUTE: rf"recompute{_PASS}",
    OPTIMIZER: rf"(?:optimi[sz]er|optim|opt)(?:[ _.]?step)?(?:\(\))?{_PASS}"
    r"|optimizer\.(?:step|zero_grad)#.*|zero_grad|clip_grad\w*|grad_clip",
}
_RANGES = {
    phase: re.compile(rf"^(?:flopwise[./: ])?(?:train[./: _])?(?:{words})$", re.IGNORECASE)
    for phase, words in _WORDS.items()
}
_STEP = re.compile(
    r"^(ProfilerStep#\d+|(flopwise[./: ])?(train(ing)?[ _./-]?)?(step|iteration|iter)[ _#:=./-]*\d*)$", re.IGNORECASE
)
_AROUND_UPDATE = re.compile(r"zero_grad|clip_grad|grad_clip", re.IGNORECASE)


def phase_of_range(name: str) -> str | None:
    """The phase that a range of this name marks, None for other ranges.

    >>> phase_of_range("flopwise.forward"), phase_of_range("Optimizer.step#AdamW.step"), phase_of_range("layers.0")
    ('forward', 'optimizer', None)
    """
    return next((phase for phase, pattern in _RANGES.items() if pattern.search(name)), None)


def is_step(name: str) -> bool:
    """Whether a range of this name is around a whole step.

    >>> [is_step(name) for name in ("ProfilerStep#3", "step 0", "train_step", "iteration 7", "optimizer step")]
    [True, True, True, True, False]
    """
    return _STEP.match(name) is not None


def is_optimizer_step(name: str) -> bool:
    """Whether a range of this name is around the optimizer's update: what prepares it may happen at any time of a step.

    >>> is_optimizer_step("Optimizer.step#AdamW.step"), is_optimizer_step("Optimizer.zero_grad#AdamW.zero_grad")
    (True, False)
    """
    return phase_of_range(name) == OPTIMIZER and _AROUND_UPDATE.search(name) is None
