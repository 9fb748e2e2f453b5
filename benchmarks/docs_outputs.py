"""Outputs of commands that the documentation quotes: made again, in place. No GPU.

python benchmarks/docs_outputs.py     # what lies between `<!-- output: flopwise … -->` and `<!-- end -->` on any page
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = re.compile(r"(?<=<!-- output: flopwise )([^\n]+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def filled(page: str, output: Callable[[list[str]], str]) -> str:
    """The page with what each command prints now."""

    def block(match: re.Match[str]) -> str:
        printed = "\n".join(line.rstrip() for line in output(match[1].split()).splitlines())
        return f"{match[1]} -->\n\n```text\n$ flopwise {match[1]}\n{printed}\n```\n\n"

    return OUTPUT.sub(block, page)


def printed(words: list[str]) -> str:
    """What `flopwise WORDS` prints into a pipe, in the repository's root."""
    command = [sys.executable, "-m", "flopwise", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        sys.exit(f"flopwise {' '.join(words)}: {ended.stderr}")
    return ended.stdout


def main() -> None:
    for path in sorted((ROOT / "docs").rglob("*.md")):
        before = path.read_text(encoding="utf-8")
        if (after := filled(before, printed)) != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
