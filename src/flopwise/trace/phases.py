"""The phases of a training step, and how a range's name tells one, or tells a whole step."""

import re

FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = "forward", "loss", "backward", "recompute", "optimizer", "other"
PHASES = (FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER)

_PREFIX = r"^(?:flopwise[./: ])?(?:train[./: _])?"
_SUFFIX = r"(?:[ _-]?(?:pass|phase))?$"
_RANGES = (
    (FORWARD, re.compile(_PREFIX + r"(?:forward|fwd)" + _SUFFIX, re.IGNORECASE)),
    (LOSS, re.compile(_PREFIX + r"(?:(?:compute[ _])?loss|criterion)" + _SUFFIX, re.IGNORECASE)),
    (BACKWARD, re.compile(_PREFIX + r"(?:backward|bwd|loss\.backward)(?:\(\))?" + _SUFFIX, re.IGNORECASE)),
    (RECOMPUTE, re.compile(_PREFIX + r"recompute" + _SUFFIX, re.IGNORECASE)),
    (OPTIMIZER, re.compile(_PREFIX + r"(?:optimi[sz]er|optim|opt)(?:[ _.]?step)?(?:\(\))?" + _SUFFIX, re.IGNORECASE)),
    (
        OPTIMIZER,
        re.compile(_PREFIX + r"(?:optimizer\.(?:step|zero_grad)#.*|zero_grad|clip_grad\w*|grad_clip)$", re.IGNORECASE),
    ),
)
_STEP = re.compile(
    r"^(ProfilerStep#\d+|(flopwise[./: ])?(train(ing)?[ _./-]?)?(step|iteration|iter)[ _#:=./-]*\d*)$", re.IGNORECASE
)
_AROUND_UPDATE = re.compile(r"zero_grad|clip_grad|grad_clip", re.IGNORECASE)


def phase_of_range(name: str) -> str | None:
    """The phase that a range of this name marks, None for other ranges.

    >>> phase_of_range("flopwise.forward"), phase_of_range("Optimizer.step#AdamW.step"), phase_of_range("layers.0")
    ('forward', 'optimizer', None)
    """
    return next((phase for phase, pattern in _RANGES if pattern.search(name)), None)


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
