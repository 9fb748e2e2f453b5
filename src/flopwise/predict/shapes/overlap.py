"""AdamW inside the backward pass, on shapes: lm/overlap.py's groups, held gradients and updates; and what time it hides."""

from collections.abc import Sequence

from flopwise.predict.fusion import block_of_module
from flopwise.predict.shapes import adamw
from flopwise.predict.shapes.tape import Parameter, Tape, Tensor
from flopwise.spec.recipe import Recipe


def updates_in_backward(recipe: Recipe) -> bool:
    """Whether weights are updated while the backward pass goes on. Compiled whole, it gives all gradients at its end.

    >>> updates_in_backward(Recipe(overlap="on")), updates_in_backward(Recipe(overlap="on", compile="default"))
    (True, False)
    """
    return recipe.overlap == "on" and recipe.compile in ("off", "blocks")


class UpdateInBackward:
    """A group (a block's weights, or one other weight) is updated when its last gradient has arrived. Its gradients live
    until the next group's have arrived.
    """

    def __init__(self, t: Tape, parameters: Sequence[Parameter], recipe: Recipe) -> None:
        self.t, self.recipe = t, recipe
        self.groups: dict[str, list[Parameter]] = {}
        for p in parameters:
            self.groups.setdefault(_group(p), []).append(p)
        self.missing = {name: len(group) for name, group in self.groups.items()}
        self.held: list[Tensor | None] = []
        t.on_gradient = self._arrived

    def finish(self) -> None:
        self.held = []

    def _arrived(self, parameter: Parameter) -> None:
        name = _group(parameter)
        self.missing[name] -= 1
        if self.missing[name]:
            return
        t, group = self.t, self.groups[name]
        phase, module = t.phase, t.module
        t.phase, t.module = "optimizer", ""
        adamw.step(t, group, self.recipe)
        t.phase, t.module = phase, module
        self.held = [p.gradient for p in group]
        for p in group:
            p.gradient = None
        self.missing[name] = len(group)


def _group(parameter: Parameter) -> str:
    return block_of_module(parameter.name) or parameter.name
