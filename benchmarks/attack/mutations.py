"""Files changed at random, of every format that flopwise reads: counts of answers, refusals and what must not be.

    python benchmarks/attack/mutations.py [NAME ...] [--seconds 60] [--seed 1] [--guided] [--keep]

Each file is read as the verbs do, with all its rendering, in this process; tests/fuzzing.py says what must hold. `--guided`: a
change that reaches a line of flopwise for the first time is changed again. `--keep`: it is made as small as it can be and
still reach such a line, and added to tests/corpora.
"""

import argparse
import collections
import gzip
import hashlib
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from fuzzing import CORPORA, TARGETS, Outcome, Target, lines_run, mutated, tried

Lines = set[tuple[str, int]]


def reached(target: Target, content: bytes, scratch: Path) -> tuple[Outcome, Lines]:
    with lines_run() as lines:
        outcome = tried(target, content, scratch)
    return outcome, lines


def attack(target: Target, seconds: float, seed: int, guided: bool, keep: bool) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    chance = random.Random(f"{target.name} {seed}")
    pool = list(target.corpus.values())
    known: Lines = set()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        for content in 2 * pool if guided else ():  # what is imported or kept when first used is no find
            known |= reached(target, content, scratch)[1]
        begun = len(known)
        while time.monotonic() < end:
            content = mutated(chance.choice(pool), chance, pool)
            outcome, lines = reached(target, content, scratch) if guided else (tried(target, content, scratch), set())
            counts["files"] += 1
            counts["refused" if outcome.refused else "wrong" if outcome.wrong else "answered"] += 1
            if outcome.wrong:
                name = Path(tempfile.gettempdir()) / f"flopwise-{target.name}-{digest(content)}"
                name.write_bytes(content)
                print(f"{target.name}: {outcome.wrong}\n  {name}", flush=True)
            if new := lines - known:
                known |= new
                pool.append(content)
                if keep:
                    store(target, smaller(target, content, new, scratch))
        counts["new lines"] = len(known) - begun
    return counts


def smaller(target: Target, content: bytes, new: Lines, scratch: Path) -> bytes:
    """Without the pieces that it takes not to reach these lines; the more often, the smaller the pieces."""
    size = len(content) // 2
    tries = 60
    while size and tries:
        at = 0
        while at < len(content) and tries:
            shorter = content[:at] + content[at + size :]
            tries -= 1
            if shorter and new <= reached(target, shorter, scratch)[1]:
                content = shorter
            else:
                at += size
        size //= 2
    return content


def store(target: Target, content: bytes) -> None:
    path = CORPORA / target.name / f"{digest(content)}{Path(target.file).suffix}"
    if path.suffix == ".sqlite":
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content, mtime=0))
    else:
        path.write_bytes(content)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("name", nargs="*", help="of a format; all of them")
    words.add_argument("--seconds", type=float, default=60, help="for each format")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--guided", action="store_true")
    words.add_argument("--keep", action="store_true")
    asked = words.parse_args()
    print(
        "| format | files | answered | refused in one line | wrong | lines reached first |\n|---|---:|---:|---:|---:|---:|"
    )
    wrong = 0
    for target in TARGETS:
        if not asked.name or target.name in asked.name:
            found = attack(target, asked.seconds, asked.seed, asked.guided or asked.keep, asked.keep)
            wrong += found["wrong"]
            row = (found[name] for name in ("files", "answered", "refused", "wrong", "new lines"))
            print(f"| {target.name} | " + " | ".join(f"{count:,}" for count in row) + " |", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
