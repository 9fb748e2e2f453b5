"""A function over many arguments in processes of their own, results in order. No `if __name__ == "__main__"` is needed."""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from flopwise.errors import FlopwiseError
from flopwise.keeper import die_with_parent

Result = TypeVar("Result")
_CHILD = "import sys; sys.path[:] = {path!r}; from flopwise.lm.jobs import serve; serve({owner})"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(
    function: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], processes: int | None
) -> Generator[Result, None, None]:
    """`function(*job)` of every job; one process, or one job, runs here."""
    count = min(cores() if processes is None else processes, len(jobs))
    if count < 2:
        for job in jobs:
            yield function(*job)
        return
    children: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
    started = [_start() for _ in range(count)]
    for child in started:
        children.put(child)
    pool = ThreadPoolExecutor(count)
    try:
        ahead: deque[Future[Any]] = deque()
        for job in jobs:  # no more results wait than there are processes
            ahead.append(pool.submit(_ask, children, function, job))
            if len(ahead) > count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in started:
            child.kill()
            child.wait()
        pool.shutdown()


def _start() -> subprocess.Popen[bytes]:
    command = (sys.executable, "-c", _CHILD.format(path=sys.path, owner=os.getpid()))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(children: "SimpleQueue[subprocess.Popen[bytes]]", function: Callable[..., Any], job: tuple[Any, ...]) -> Any:
    child = children.get()
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        pickle.dump((function, job), child.stdin)
        child.stdin.flush()
        result = pickle.load(child.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        code = child.wait()
        hint = "the system may have stopped it for lack of memory: use fewer processes"
        raise FlopwiseError(f"a process that reads files ended with exit code {code}", hint) from None
    finally:
        children.put(child)
    if isinstance(result, BaseException):
        raise result
    return result


def serve(owner: int) -> None:
    """The child: answer jobs until the parent closes the pipe. What a job prints goes to stderr."""
    die_with_parent(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = function(*job)
        except FlopwiseError as error:
            result = error
        pickle.dump(result, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()
