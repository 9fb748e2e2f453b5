"""Who owns each storage of a tape: what is labelled is known; the rest follows from shape, place and lifetime."""

from typing import Any

from flopwise.capture.watch.tape import ALLOC, FREE, Storage, Tape
from flopwise.spec.model import ModelSpec
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import Workload
from flopwise.work.operation import ACTIVATIONS, INPUTS, LOGITS, MATMUL, OPTIMIZER, SCORES, TEMPORARY

_COMPUTED = ("forward", "loss", "recompute")


def owners(tape: Tape, context: int = 0, vocab: int = 0, all_is_attention: bool = False) -> list[str]:
    """The owner of every storage, by its number.

    `context` and `vocab`, where they are known, tell scores and logits by their shape; else the vocabulary is read off
    the loss, and scores are square matrices inside a module that is called attention. Logits are what the head's matmul and
    the loss make: an MLP as wide as the vocabulary makes none.
    """
    vocab = vocab or _vocabulary(tape)
    head = _around_the_head(tape, vocab)
    saved, before_first_step = _saved_for_backward(tape), _built(tape)
    found = []
    for number, storage in enumerate(tape.storages):
        if storage.label:
            owner = storage.label
        elif number in before_first_step:
            owner = INPUTS
        elif _is_scores(tape, storage, context, all_is_attention):
            owner = SCORES
        elif _is_logits(tape, storage, vocab, head):
            owner = LOGITS
        else:
            owner = ACTIVATIONS if number in saved else TEMPORARY
        found.append(owner)
    return found


def _built(tape: Tape) -> set[int]:
    """What building left behind: nothing has computed it, so it is an input."""
    there: set[int] = set()
    for kind, number in tape.build.events:
        if kind == ALLOC:
            there.add(number)
        elif kind == FREE:
            there.discard(number)
    return there


def _saved_for_backward(tape: Tape) -> set[int]:
    """What was computed going forward and was still there when something ran backward: autograd has kept it."""
    saved, born, backward_ops = set(), {}, 0
    for section in (*tape.first, *tape.steady):
        for kind, number in section.events:
            if kind == ALLOC:
                if tape.ops[tape.storages[number].op].work.phase in _COMPUTED:
                    born[number] = backward_ops
            elif kind == FREE:
                if born.pop(number, backward_ops) < backward_ops:
                    saved.add(number)
            elif tape.ops[number].work.phase == "backward":
                backward_ops += 1
    return saved | {number for number, then in born.items() if then < backward_ops}


def _vocabulary(tape: Tape) -> int:
    for op in tape.ops:
        if op.work.op.startswith("nll_loss_forward"):
            return op.work.shapes[0][-1]
    return 0


def _is_scores(tape: Tape, storage: Storage, context: int, all_is_attention: bool) -> bool:
    if len(storage.shape) < 2 or storage.shape[-1] != storage.shape[-2] or storage.shape[-1] < 2:
        return False
    if context and storage.shape[-1] != context:
        return False
    innermost = tape.ops[storage.op].work.module.rpartition(".")[2].lower()
    return all_is_attention or "attention" in innermost or "attn" in innermost


def _around_the_head(tape: Tape, vocab: int) -> set[str]:
    """The module whose matmul is the last going forward that is as wide as the vocabulary, those it is in, and the loss's."""
    near = {""}
    for work in (op.work for op in reversed(tape.ops)):
        if work.phase == "loss":
            near.add(work.module)
        if work.phase in _COMPUTED and work.kind == MATMUL and work.shapes and work.shapes[-1][-1:] == (vocab,):
            parts = work.module.split(".")
            return near | {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
    return near


def _is_logits(tape: Tape, storage: Storage, vocab: int, head: set[str]) -> bool:
    work = tape.ops[storage.op].work
    if work.phase == "loss" and not storage.shape:
        return True
    wide = bool(vocab) and len(storage.shape) >= 2 and storage.shape[-1] == vocab
    return wide and work.phase != OPTIMIZER and work.module in head


def known_shapes(workload: Workload) -> dict[str, Any]:
    """What is known of the shapes of scores and logits."""
    match workload.subject:
        case ModelSpec():
            return {"context": workload.context, "vocab": workload.subject.vocab}
        case OpSpec():
            known = workload.subject.name == "attention"
            return {"context": workload.context if known else 0, "all_is_attention": known}
        case _:
            return {}
