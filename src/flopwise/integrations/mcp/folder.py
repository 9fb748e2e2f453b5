"""What the server may read: files below the folder given at start, and runs below the folder of runs."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.redact import redacted_line
from flopwise.store import StoredRun, find, runs_root
from flopwise.trace.input_file import check_file
from flopwise.trace.read import is_trace_file

_REPORT = ".nsys-rep"  # reading one runs nsys, which writes a file
_PATHS = "give a path below the folder that the server was started with (flopwise mcp --root DIR)"
_RUNS = "give a run's id, a tag, last or last~1; the tool `runs` lists them"


@dataclass(frozen=True)
class Folder:
    """The two places, without links in them."""

    root: Path
    runs: Path

    @classmethod
    def at(cls, root: str | Path, runs: str | Path | None = None) -> "Folder":
        """The folder `root`; runs are below `runs`, else FLOPWISE_RUNS, else the root's own .flopwise/runs."""
        place = Path(root).expanduser().resolve()
        if not place.is_dir():
            raise FlopwiseError(f"cannot serve {root}: it is not a folder", "--root takes a folder that exists")
        beside = Path.cwd() if runs or os.environ.get("FLOPWISE_RUNS") else place
        return cls(place, (beside / runs_root(runs)).resolve())

    def target(self, name: str) -> Path | StoredRun:
        """The trace's file or the run that a name means."""
        return self.trace(name) if is_trace_file(Path(name)) else self.run(name)

    def trace(self, name: str) -> Path:
        """A trace's file."""
        if name.lower().endswith(_REPORT):
            raise FlopwiseError(
                f"{name} is a report, and reading it runs nsys", "export it first: nsys export --type sqlite"
            )
        return self.file(name)

    def file(self, name: str) -> Path:
        """A regular file below the root; links are followed before that is checked."""
        path = self.below(name)
        check_file(path, _PATHS)
        return path

    def run(self, name: str) -> StoredRun:
        """A run below the folder of runs, none of whose files lies elsewhere."""
        if os.sep in name:
            place = self.below(name)
            if place.parent != self.runs:
                raise FlopwiseError(f"{name} is not a run in the folder of runs", _RUNS)
            name = place.name
        path = find(name, self.runs)
        self.check_run(path)
        return StoredRun.load(path)

    def check_run(self, path: Path) -> None:
        """Raise if a run's folder, or a link in it, leads out of the folder of runs."""
        if path.resolve().parent != self.runs:
            raise FlopwiseError(f"{path.name} is not a run in the folder of runs", _RUNS)
        for place, folders, files in os.walk(path):
            for one in (*folders, *files):
                if not Path(place, one).resolve().is_relative_to(self.runs):
                    raise FlopwiseError(f"the run {path.name} has a link that leads out of the folder of runs", _RUNS)

    def below(self, name: str) -> Path:
        """A path below the root, links followed."""
        if not name or ".." in Path(name).parts:
            raise FlopwiseError(f"'{name}' is refused: '..' and empty paths are not allowed", _PATHS)
        try:
            path = (self.root / name).resolve()  # an absolute name stands for itself
        except (OSError, ValueError, RuntimeError):  # too long, a null character, links in a circle
            raise FlopwiseError(f"'{name[:100]}' cannot be a path", _PATHS) from None
        if not path.is_relative_to(self.root):
            raise FlopwiseError(f"'{name}' is refused: it lies outside the server's folder", _PATHS)
        return path

    def without_folders(self, text: str) -> str:
        """A text that names files as the client may, and not where on this machine they lie."""
        for place in (self.root, self.runs):
            text = re.sub(rf"{re.escape(str(place))}(?:/|(?![\w.-]))", "", text)
        return redacted_line(text)

    def shown(self, path: Path) -> str:
        """A file's path as the client may give it again."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else path.name
