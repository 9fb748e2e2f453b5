"""`flopwise run script.py`, killed or interrupted, ends all that the script started; one that ends by itself leaves it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys, time

out = os.dup(1)
if os.fork() == 0:
    os.setsid()
    daemon = os.fork()
    if daemon:
        os.write(out, b"%d\\n" % daemon)
        os._exit(0)
    os.closerange(0, 100)
    time.sleep(600)
os.wait()
nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
command = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, **nowhere)
print(command.pid, flush=True)
try:
    while True:  # as a script does that waits for all of its own
        os.waitpid(-1, os.WNOHANG)
        sys.stdin.read()
        break
except ChildProcessError:
    print("no children", flush=True)
"""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def script(tmp_path):
    """`flopwise run` of it, and the processes that it has started."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "flopwise", "run", "--runs", str(tmp_path / "runs"), str(tmp_path / "script.py")]
    program = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    started = [int(program.stdout.readline()) for _ in range(2)]
    yield program, started
    for pid in (program.pid, *started):
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)
    program.stdout.close()
    program.stdin.close()
    program.wait()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_killed_script_takes_all_along(script, sign):
    program, started = script
    assert all(map(_runs, started))
    time.sleep(0.2)  # the script reads
    while program.poll() is None:
        program.send_signal(sign)
        with suppress(subprocess.TimeoutExpired):  # one just before a system call is not seen until it returns
            program.wait(30)
    deadline = time.monotonic() + 60
    while any(map(_runs, started)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in started if _runs(pid)] == []


def test_what_a_script_left_on_purpose_stays(script):
    program, started = script
    program.stdin.close()
    program.wait()
    time.sleep(0.5)
    assert all(map(_runs, started))
