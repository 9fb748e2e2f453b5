"""The phases of a training step, and the names of ranges that mark a phase or a whole step."""

import re

FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER = "forward", "loss", "backward", "recompute", "optimizer", "other"
PHASES = (FORWARD, LOSS, BACKWARD, RECOMPUTE, OPTIMIZER, OTHER)

_PASS = r"(?:[ _-]?(?:pass|phase|step))?"
_WORDS = {
    FORWARD: rf"(?:forward|fwd){_PASS}",
    LOSS: rf"(?:(?:compute[ _])?loss|criterion){_PASS}",
    BACKWARD: rf"(?:backward|bwd|loss\.backward)(?:\(\))?{_PASS}",
    RECOMPUTE: rf"recompute{_PASS}",
    OPTIMIZER: rf"(?:optimi[sz]er|optim|opt)(?:[ _.]?step)?(?:\(\))?{_PASS}"
    r"|optimizer\.(?:step|zero_grad)#.*|zero_grad|clip_grad\w*|grad_clip",
}
_LIGHTNING = r"\[pl\]\[profile\]\[Strategy\]\w+\."  # its own profiler's ranges
_WORDS[FORWARD] += rf"|{_LIGHTNING}(?:training|validation|test|predict)_step"
_WORDS[BACKWARD] += rf"|{_LIGHTNING}backward"
_RANGES = {
    phase: re.compile(
        rf"^(?:## )?(?:flopwise[./: ])?(?:(?:train|model)[./: _])?(?:{words})(?:[ _#:=-]+\d+)?(?: ##)?$", re.IGNORECASE
    )
    for phase, words in _WORDS.items()
}
_LOOP = (
    r"(?:train(?:ing)?|test|eval(?:uation)?|val(?:id(?:ation)?)?|infer(?:ence)?|predict(?:ion)?|global|decode|prefill)"
)
_STEP = re.compile(
    rf"^(?:ProfilerStep#\d+|(?:## )?(?:flopwise[./: ])?(?:{_LOOP}[ _./-]?)?(?:step|iteration|iter|(?:mini[ _-]?)?batch)"
    r"[ _#:=./-]*\d*(?: ##)?)$"
    rf"|^(?:\[pl\]\[profile\]run_training_batch|{_LIGHTNING}(?:training|validation|test|predict)_step)$",
    re.IGNORECASE,
)
# One pass of a serving engine's loop: vLLM (`execute_new_1_cached_3`, `execute_context_1(12)_generation_3(3)`), SGLang
# (`step[DECODE bs=32]`), TensorRT-LLM (`[Executor] _forward_step 7: …`).
_ITERATION = re.compile(
    r"^(?:execute_(?:\d+_)?(?:new|context|generation|model)(?:_.*|\(.*)?|step\[[^\]]*\]|\[Executor\] _forward_step \d+.*)$"
)
_STEP_FUNCTION = re.compile(
    r"\): (?:train(?:ing)?_(?:step|batch)|(?:validation|test|predict(?:ion)?)_step|execute_model)$"
)
_CAPTURE = re.compile(r"^(?:cuda_?|hip_?)?(?:graph_?)?capture(?:_|$)", re.IGNORECASE)
_COMPILER = re.compile(
    r"torch/_dynamo/convert_frame\.py\(|torch/_inductor/(?:compile_fx|async_compile)\.py\(|torch/utils/cpp_extension\.py\("
    r"|triton/compiler/compiler\.py\(\d+\): compile$|triton/runtime/autotuner\.py\(\d+\): (?:_bench|benchmark)$"
)
_WARM_UP = re.compile(r"^warm(ing)?[ _-]?up([ _-]?(steps?|phase|iterations?|iters?|loop))?[ _#:=-]*\d*$", re.IGNORECASE)
_AROUND_UPDATE = re.compile(r"zero_grad|clip_grad|grad_clip", re.IGNORECASE)


def phase_of_range(name: str) -> str | None:
    """The phase that a range of this name marks, None for other ranges.

    >>> [phase_of_range(name) for name in ("flopwise.forward", "## backward ##", "Optimizer.step#AdamW.step", "layers.0")]
    ['forward', 'backward', 'optimizer', None]
    >>> [phase_of_range(name) for name in ("Forward Pass 3", "optimizer_step", "backward_hook")]
    ['forward', 'optimizer', None]
    """
    return next((phase for phase, pattern in _RANGES.items() if pattern.search(name)), None)


def is_step(name: str) -> bool:
    """Whether a range of this name is around a whole step.

    >>> [is_step(name) for name in ("ProfilerStep#3", "step 0", "train_step", "iteration 7", "batch 2", "optimizer step")]
    [True, True, True, True, True, False]
    """
    return _STEP.match(name) is not None


def is_warm_up(name: str) -> bool:
    """Whether a range of this name is around steps that are not measured.

    >>> [is_warm_up(name) for name in ("warmup", "Warm-up steps", "linear_warmup_schedule")]
    [True, True, False]
    """
    return _WARM_UP.match(name) is not None


def is_iteration(name: str) -> bool:
    """Whether a range of this name is around one iteration of a serving engine.

    >>> [is_iteration(name) for name in ("execute_new_1_cached_3", "step[DECODE bs=32]", "execute_query", "decode")]
    [True, True, False, False]
    """
    return _ITERATION.match(name) is not None


def is_step_function(name: str) -> bool:
    """Whether a Python function of this name runs one step.

    >>> is_step_function("trainer.py(3612): training_step"), is_step_function("train.py(95): main")
    (True, False)
    """
    return _STEP_FUNCTION.search(name) is not None


def is_capture_range(name: str) -> bool:
    """Whether a range of this name is around the capture of a CUDA graph.

    >>> is_capture_range("capture_32_DECODE"), is_capture_range("captured_output")
    (True, False)
    """
    return _CAPTURE.match(name) is not None


def is_optimizer_step(name: str) -> bool:
    """Whether a range of this name is around the optimizer's update: what prepares it may happen at any time of a step.

    >>> is_optimizer_step("Optimizer.step#AdamW.step"), is_optimizer_step("Optimizer.zero_grad#AdamW.zero_grad")
    (True, False)
    """
    return phase_of_range(name) == OPTIMIZER and _AROUND_UPDATE.search(name) is None


def is_compiler_function(name: str) -> bool:
    """Whether a Python function of this name compiles, or tries out what was compiled.

    >>> is_compiler_function("torch/_dynamo/convert_frame.py(1372): __call__"), is_compiler_function("torch/cuda/graphs.py(9): f")
    (True, False)
    """
    return _COMPILER.search(name) is not None
