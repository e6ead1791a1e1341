"""Objects of an object store, or files of any other file system that fsspec has a driver for, by URL.

    memory of a rank's node               object store                          memory of a replica's node
    weights-7/bucket-00001.delta    ->    URL/weights-7/bucket-00001.delta    ->    weights-7/bucket-00001.delta

Credentials and options come from the configuration of fsspec and of its drivers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from async_rl.files.masking import mask_text


class RemoteError(OSError):
    """The store refused a call or did not answer it; names the object."""


def driver_problem(url: str) -> str:
    """Why no driver serves the protocol of `url`, and the way out; empty if one does."""
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        return f"whose driver is not installed: {error}, on all nodes"
    except ValueError:
        return (
            f"but fsspec has no driver for {protocol}://; use one of {', '.join(sorted(fsspec.available_protocols()))}"
        )
    return ""


def upload(file: Path, url: str) -> None:
    """Write an object with the content of `file`.

    Raises:
        RemoteError: the store does not take it.
    """
    with _calling(url, "be written") as (store, path):
        with contextlib.suppress(PermissionError):  # of a bucket that exists
            store.makedirs(store._parent(path), exist_ok=True)
        store.put_file(str(file), path)


def download(url: str, file: Path) -> None:
    """Write `file` with the content of an object.

    Raises:
        RemoteError: there is no such object, or the store does not give it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _calling(url, "be read") as (store, path):
        store.get_file(path, str(file))


def list_names(url: str) -> list[str]:
    """Names of what is directly below `url`; empty if nothing is.

    Raises:
        RemoteError: the store does not answer.
    """
    with _calling(url, "be listed") as (store, path):
        store.invalidate_cache()  # other processes write and remove objects
        try:
            return sorted(found.rstrip("/").rpartition("/")[2] for found in store.ls(path, detail=False))
        except FileNotFoundError:
            return []


def remove(url: str) -> None:
    """Remove an object, or all objects below `url`; do nothing if there is none.

    Raises:
        RemoteError: the store does not remove it.
    """
    with _calling(url, "be removed") as (store, path), contextlib.suppress(FileNotFoundError):
        store.invalidate_cache()
        store.rm(path, recursive=True)


@contextmanager
def _calling(url: str, what: str) -> Generator[tuple[Any, str]]:
    """Yield (file system, path in it) of `url`; an error of the driver, of any type, becomes a RemoteError."""
    try:
        yield url_to_fs(url)
    except Exception as error:
        raise RemoteError(mask_text(f"{url} cannot {what}: {type(error).__name__}: {error}")) from error
