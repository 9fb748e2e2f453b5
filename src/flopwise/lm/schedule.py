"""The learning rate as a function of the step."""

import math


def warmup_cosine(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
    """Linear from 0 to `peak` over the warm-up, half a cosine down to `floor` at `total_steps`, then `floor`.

    >>> [round(warmup_cosine(s, peak=1.0, floor=0.1, warmup_steps=2, total_steps=6), 3) for s in (0, 1, 2, 4, 6, 99)]
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if step >= total_steps:
        return floor
    progress = (step - warmup_steps) / (total_steps - warmup_steps)  # 0 … 1
    return floor + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - floor)
