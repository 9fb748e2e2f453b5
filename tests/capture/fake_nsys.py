"""Stands in for nsys in the tests: runs what it is given, or fails as FAKE_NSYS says; exports the file FAKE_NSYS_EXPORT."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

MODE = os.environ.get("FAKE_NSYS", "run")


def option(name):
    return next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}="))


def profile():
    if "--help" in sys.argv:
        print("usage: nsys profile\n" + ("" if MODE == "old" else "\t--discard-environment=\n"))
        return 0
    command = sys.argv[next(i for i, word in enumerate(sys.argv) if i > 1 and not word.startswith("--")) :]
    Path(os.environ["FAKE_NSYS_SAW"]).write_text(json.dumps(sys.argv))
    if MODE == "refuse":
        print("FATAL ERROR: the injection library cannot be loaded\nclosing")
        return 1
    job = json.loads(Path(command[-1]).read_text())

    def say(event, **fields):
        with open(job["events"], "a") as events:
            events.write(json.dumps({"event": event} | fields) + "\n")

    code = subprocess.run(command, check=False).returncode if MODE == "run" else pretend(say)
    if MODE != "no-report":
        Path(option("output").replace("%%", "%") + ".nsys-rep").write_text("a report")
    else:
        print("Generated:\n\tNo reports were generated")
    return code


def pretend(say):
    """What the process under nsys would say."""
    if MODE == "hangs":
        # A step outside the group of nsys, which nsys's own end would not end.
        words = (sys.executable, "-c", "import time; time.sleep(100)", "flopwise.capture.nsys_target")
        say("Started", pid=subprocess.Popen(words, start_new_session=True).pid)  # the test waits for this line
        time.sleep(100)
    say("Started", pid=2**22)
    if MODE == "crashes":
        print("Segmentation fault")
        return 139
    if MODE == "oom":
        say("Done", status="oom", reason="OutOfMemoryError: CUDA out of memory", hint="a smaller batch")
        return 1
    say("TraceWritten", path="", step_ns=1_000_000)
    say("Done", status="ok")
    return 0


def export():
    if MODE == "export-fails":
        print("ERROR: the database or disk is full")
        return 1
    if MODE == "export-hangs":
        Path("exporting").touch()
        time.sleep(100)
    if MODE != "export-nothing":
        shutil.copyfile(os.environ["FAKE_NSYS_EXPORT"], option("output"))
    if MODE == "export-garbage":
        Path(option("output")).write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 100)
    return 0


if __name__ == "__main__":
    if "--version" in sys.argv:
        print("NVIDIA Nsight Systems version 2026.2.1.1")
    else:
        sys.exit({"profile": profile, "export": export}[sys.argv[1]]())
