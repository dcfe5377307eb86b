"""Where a task's data is: a folder that the user names, or a download kept under ~/.kimad/data."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from compression.errors import ConfigError

VARIABLE = "KIMAD_DATA"


def data_path(task: str, given: str) -> Path | None:
    """The file or folder of a task's data; None where the user names none.

    Args:
        task: name of the task.
        given: the key data-dir. A relative path counts from the folder that KIMAD_DATA names, so that server and
            clients may keep the data in different places; "" means $KIMAD_DATA/TASK where there is one.

    Raises:
        ConfigError: a relative path without KIMAD_DATA, or nothing there.
    """
    root = os.environ.get(VARIABLE, "")
    if not given:
        own = Path(root).expanduser() / task if root else None
        return own if own is not None and own.exists() else None
    path = Path(given).expanduser()
    if not path.is_absolute():
        if not root:
            raise ConfigError(
                f"data-dir is {given!r}: expected an absolute path, because Flower runs the app from a copy; or set "
                f"{VARIABLE}, of server and clients, to the folder that it counts from"
            )
        path = Path(root).expanduser() / path
    if not path.exists():
        raise ConfigError(f"data-dir is {given!r}: there is no {path}")
    return path


def downloaded(task: str, fetch: Callable[[str], object], instead: str) -> Path:
    """The task's folder under ~/.kimad/data, filled by `fetch` the first time.

    A download that fails or is killed leaves nothing that looks like data; of two at the same time, one is kept.

    Args:
        task: name of the task, and of the folder.
        fetch: downloads into the folder it is given.
        instead: what a user without a network can do.

    Raises:
        ConfigError: there is no such folder and the download failed.
    """
    folder = Path.home() / ".kimad" / "data" / task
    if folder.exists():
        return folder
    partial = ""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.mkdtemp(prefix=f".{task}-", dir=folder.parent)
        fetch(partial)
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    except (OSError, RuntimeError) as error:  # URLError is an OSError; torchvision raises both
        said = " ".join(str(error).split())
        raise ConfigError(
            f"task {task}: no data: data-dir is empty and the download failed ({said}); {instead}"
        ) from error
    finally:
        if partial:
            shutil.rmtree(partial, ignore_errors=True)
    return folder
