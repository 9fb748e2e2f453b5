"""What it costs to learn a byte-pair encoding: flopwise compared with the trainer of `tokenizers`, on the same text.

    python benchmarks/tokenizer.py [--mb 100] [--merges 10000] [--repeat 3] [--text FILE]

The text, unless one is given, is made of the documentation and source files of the Python that runs this and of the
packages in it: nothing is downloaded. Each trainer runs in a process of its own, in turns; imports are counted. CPU seconds
are user + system with those of its children, as the kernel counted them. Peak memory is the resident set; of flopwise, which
starts a process per core, it is the parent's and that of as many children as there are cores, each as large as the largest.
Bytes per token: how well the merges of each compress the text's first 10 MB. Both merge the most frequent pair. They
differ in which of two equally frequent ones is first, and in that `tokenizers` reads a file line by line: none of its words
spans two lines, as an empty line or a line's indentation does in GPT-2's pattern.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
SPECIAL = "<|endoftext|>"
FLOPWISE = """
from flopwise.lm.tokenizer import train
train(text, size).save(out)
"""
TOKENIZERS = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
model = Tokenizer(models.BPE())
model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
model.train([text], trainers.BpeTrainer(
    vocab_size=size, special_tokens=[special], initial_alphabet=alphabet, show_progress=False))
model.save(out)
"""
MEASURED = """
import json, resource, sys, time
began = time.perf_counter()
text, size, special, out, cores = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
{program}
wall = time.perf_counter() - began
own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
cpu = sum(used.ru_utime + used.ru_stime for used in (own, children))
peak = own.ru_maxrss + children.ru_maxrss * cores
print(json.dumps(dict(wall=wall, cpu=cpu, peak_mb=peak * 1024 / 1e6)))
"""
TRAINERS = {"flopwise": FLOPWISE, "tokenizers": TOKENIZERS}


def make_text(path: Path, size: int) -> None:
    """Prose first: what documentation there is, then source files, until there is enough."""
    folders = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "stdlib")]
    found = (
        file for end in ("md", "rst", "txt", "py") for folder in folders for file in sorted(folder.rglob(f"*.{end}"))
    )
    left = size
    with path.open("wb") as out:
        for file in found:
            try:
                content = file.read_text(encoding="utf-8").encode()[:left].decode("utf-8", "ignore").encode()
            except (OSError, UnicodeDecodeError):
                continue
            left -= out.write(content)
            if left < 4:
                return
    sys.exit(f"the installed packages have only {(size - left) / 1e6:.0f} MB of text: use --mb or --text")


def run(name: str, text: Path, size: int, out: Path) -> dict[str, float]:
    program = MEASURED.format(program=TRAINERS[name])
    command = [sys.executable, "-c", program, str(text), str(size), SPECIAL, str(out), str(os.cpu_count())]
    paths = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": paths})
    measured: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return measured


def bytes_per_token(file: Path, text: Path) -> float:
    sys.path.insert(0, str(SOURCE))
    from flopwise.lm.tokenizer import read

    with text.open("rb") as opened:
        sample = opened.read(10_000_000).decode("utf-8", "ignore")
    return len(sample.encode()) / len(read(file).encode_array(sample))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--merges", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "regex", "tokenizers"))
    print(f"Python {platform.python_version()}, {versions}; {platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or Path(folder, "text.txt")
        if options.text is None:
            make_text(text, options.mb * 1_000_000)
        size = 256 + options.merges + 1
        print(f"{options.merges:,} merges on {text.stat().st_size / 1e6:.0f} MB, median of {options.repeat}", end="")
        print(f"; load before it {os.getloadavg()[0]:.1f}\n")
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in TRAINERS}
        for _ in range(options.repeat):
            for name in TRAINERS:
                runs[name].append(run(name, text, size, Path(folder, f"{name}.json")))
        print(
            "| trainer | CPU s (least–most) | wall s (least–most) | peak MB | bytes per token |\n|---|---:|---:|---:|---:|"
        )
        for name, measured in runs.items():
            cells = [
                f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})" for values in column(measured)
            ]
            peak = max(one["peak_mb"] for one in measured)
            print(
                f"| {name} | {' | '.join(cells)} | {peak:,.0f} | {bytes_per_token(Path(folder, f'{name}.json'), text):.4f} |"
            )
        ours, theirs = (column(runs[name]) for name in TRAINERS)
        cpu, wall = (statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs, strict=True))
        print(f"\nflopwise / tokenizers: {cpu:.2f} of the CPU time, {wall:.2f} of the wall time")


def column(measured: list[dict[str, float]]) -> list[list[float]]:
    return [[one[key] for one in measured] for key in ("cpu", "wall")]


if __name__ == "__main__":
    main()
