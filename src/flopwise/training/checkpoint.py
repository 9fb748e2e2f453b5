"""Checkpoints: whole files or none, read without running anything that is in them."""

import contextlib
import os
import pickle
import re
import secrets
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from flopwise.atomic import sync_folder
from flopwise.errors import FlopwiseError, one_line
from flopwise.spec.model import ModelSpec
from flopwise.store.files import explain_errors

FOLDER = "checkpoints"
KEPT = 2  # the newest, and the one before it
_NAME = re.compile(r"step-(\d{1,12})\.pt")
_SCHEMA = 1


def save(run: Path, step: int, spec: ModelSpec, state: dict[str, Any]) -> Path:
    """Write a run's checkpoint through to the disk, then remove the oldest beyond KEPT."""
    folder = run / FOLDER
    path = folder / f"step-{step:08d}.pt"
    content = {"schema": _SCHEMA, "spec": msgspec.json.encode(spec).decode(), "step": step, "state": state}
    building = folder / f".{path.name}-{secrets.token_hex(4)}"
    with explain_errors("write a checkpoint to", folder):
        folder.mkdir(exist_ok=True)
        try:
            with building.open("wb") as file:
                try:
                    torch.save(content, file)
                except RuntimeError as error:  # PyTorch's writer tells of a full disk in its own way
                    raise _cause(error) from None
                file.flush()
                os.fsync(file.fileno())
            os.replace(building, path)
        except BaseException:
            with contextlib.suppress(OSError):
                building.unlink(missing_ok=True)
            raise
        sync_folder(folder)
    left = [path for path in folder.glob(".step-*") if path != building]  # of a process that was killed
    for old in [*checkpoints(run)[:-KEPT], *left]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path


def checkpoints(run: Path) -> list[Path]:
    """A run's, the oldest first."""
    found = [(int(match[1]), path) for path in (run / FOLDER).glob("*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest(run: Path) -> Path:
    """A run's last."""
    found = checkpoints(run)
    if not found:
        raise FlopwiseError(f"{run.name} has no checkpoint", "train it anew; --checkpoint-every writes them on the way")
    return found[-1]


def read(path: Path, spec: ModelSpec | None = None) -> tuple[ModelSpec, int, dict[str, Any]]:
    """The model, the step and the state; `spec` is the model that it has to be of."""
    try:
        with explain_errors("read", path):
            _check_archive(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            _check_sums(path)
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        saved = msgspec.json.decode(content["spec"], type=ModelSpec)
        step, state = int(content["step"]), content["state"]
        _check_state(step, state)
    except pickle.UnpicklingError:
        text = f"{path} holds more than weights and numbers: it could run code, and is not read"
        raise FlopwiseError(text, "use checkpoints that flopwise train wrote") from None
    except (
        RuntimeError,
        zipfile.BadZipFile,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        msgspec.MsgspecError,
    ) as error:
        text = f"{path} is no whole checkpoint of flopwise: {one_line(str(error), 100)}"
        raise FlopwiseError(text, "remove it, and --resume takes the one before it") from None
    if spec is not None and saved != spec:
        pairs = zip(msgspec.structs.asdict(saved).items(), msgspec.structs.asdict(spec).values(), strict=True)
        other = ", ".join(f"{name} {old} instead of {new}" for (name, old), new in pairs if old != new)
        raise FlopwiseError(f"{path} is of another model: {other}", "resume the run that it is of")
    return saved, step, state


def _check_archive(path: Path) -> None:
    """PyTorch stores tensors as they are: an archive of less than it says it holds is none of its own."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in members):
        raise ValueError("it is compressed, which no checkpoint is")
    if sum(one.file_size for one in members) > path.stat().st_size:
        raise ValueError("it says that it holds more than it does")


def _check_sums(path: Path) -> None:
    """PyTorch writes a checksum of every tensor, and does not look at it."""
    with zipfile.ZipFile(path) as archive:
        if (changed := archive.testzip()) is not None:
            raise ValueError(f"{changed} has changed since it was written")


def _check_state(step: int, state: Any) -> None:
    missing = {"model", "optimizers", "scaler", "steps"} - set(state if isinstance(state, dict) else ())
    if missing:
        raise ValueError(f"its state has no {', '.join(sorted(missing))}")
    if step < 0 or state["steps"] != step:
        raise ValueError(f"it is of step {step}, and its state of step {state['steps']}")


def _cause(error: RuntimeError) -> OSError:
    """The error of the file system behind it."""
    before = error.__context__
    return before if isinstance(before, OSError) else OSError(None, one_line(str(error), 160))
