"""Stands in for nsys in the tests: runs what it is given, or fails as FAKE_NSYS says; exports the file FAKE_NSYS_EXPORT."""

import hashlib
import itertools
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

    counts = itertools.count()

    def say(event, **fields):
        head, body = f"step {next(counts)}".encode(), json.dumps({"event": event} | fields).encode()
        digest = hashlib.blake2b(head + body, key=job["key"].encode(), digest_size=8).hexdigest()
        with open(job["events"], "ab") as events:
            events.write(b"%s %s %s\n" % (head, digest.encode(), body))

    code = subprocess.run(command, check=False).returncode if MODE == "run" else pretend(say, job)
    if MODE != "no-report":
        Path(option("output").replace("%%", "%") + ".nsys-rep").write_text("a report")
    else:
        print("Generated:\n\tNo reports were generated")
    return code


def pretend(say, job):
    """What the process under nsys would say."""
    if MODE == "hangs":
        # A step outside the group of nsys, which nsys's own end would not end.
        words = (sys.executable, "-c", "import time; time.sleep(100)", "flopwise.capture.nsys_target")
        pid = subprocess.Popen(words, start_new_session=True).pid
        Path(os.environ["FAKE_NSYS_PID"]).write_text(f"{pid}\n")  # the test waits for it
        time.sleep(100)
    if MODE == "writes-anywhere":
        Path(job["events"]).write_bytes(b'{"event": "Done", "status": "ok"}\n')
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
