"""Files by URL: which ones a pattern stands for, opening them, and whether they are what they were when described."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from graphft.data.spec import DIGITS, digest
from graphft.errors import GraphftError, UsageError, describe

CHANGED = "data-changed"
"""Rule of errors that neither reading again nor discarding a chunk can mend."""
REMEDY = "put the file back as it was (with its modification time: cp -p, rsync -t), or describe data and job again"
MARKS = ("ETag", "etag", "e_tag", "md5Hash", "CRC", "mtime", "LastModified", "last_modified", "updated", "created")
"""Entries of a file system's description of a file that change with it, the best first."""

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Says what a file was: its `size` in bytes, its ETag or modification time (`name value`, "" where there is none),
    and the `checksum` of its contents where it was read whole."""

    size: int
    mark: str
    checksum: str = ""

    @property
    def fingerprint(self) -> str:
        return digest(f"{self.size} {self.checksum or self.mark}")


class DescribedFiles:
    """Opens files that were described, and refuses those that were changed since: by their size, then by modification
    time or ETag, and where these differ by the checksum, if there is one (CSV)."""

    def __init__(self, stamps: Mapping[str, Sequence[Any]], options: Mapping[str, Any]) -> None:
        self._stamps = {url: Stamp(*stamp) for url, stamp in stamps.items()}
        self._options = options

    @contextlib.contextmanager
    def open(self, url: str) -> Iterator[IO[bytes]]:
        """Opens the file at its beginning. Raises UsageError[data-changed] if it was changed, also while it was
        read: then what was read may be neither the old contents nor the new."""
        with open_url(url, self._options) as (file, found):
            self._check(url, file, found)
            yield file
            if found.mark.startswith("mtime"):  # no object of a store, which is replaced as a whole
                with open_url(url, self._options) as (_, now):
                    if now != found:
                        raise UsageError(f"{url} was changed while it was read", rule=CHANGED, help=REMEDY)

    def _check(self, url: str, file: IO[bytes], found: Stamp) -> None:
        described, changed = self._stamps[url], ""
        if found.size != described.size:
            changed = f"size {found.size}, {described.size}"
        elif found.mark != described.mark and not described.checksum:
            changed = f"{found.mark}, {described.mark}"
        elif found.mark != described.mark and (checksum := _checksum_of(file)) != described.checksum:
            changed = f"checksum {checksum}, {described.checksum}"
        if changed:
            text = f"{url} was changed: it has {changed} when the job was described"
            raise UsageError(text, rule=CHANGED, help=REMEDY)
        self._stamps[url] = replace(described, mark=found.mark)


@contextlib.contextmanager
def open_url(url: str, options: Mapping[str, Any]) -> Iterator[tuple[IO[bytes], Stamp]]:
    """Opens the file at `url` for reading bytes; yields it with its stamp. Raises GraphftError when it cannot be
    opened, or read inside the block."""
    import fsspec

    opened: Any = None
    try:
        opened = fsspec.open(url, "rb", **options)  # kept: a zip file closes when its file system goes
        with opened as file:
            yield file, _stamp_of(opened, file)
    except ImportError as e:
        text = f"{url} needs a package that is not installed"
        raise GraphftError(text, rule="missing-package", help=str(e)) from e
    except (OSError, EOFError, zlib.error, KeyError, ValueError) as e:
        text, help = f"cannot read {url}: {describe(e)}", "is the URL right, may this machine read it?"
        if opened and isinstance(e, IsADirectoryError | FileNotFoundError) and opened.fs.isdir(opened.path):
            text, help = f"{url} is a folder, expected a file", "give its files, by a pattern: FOLDER/*"
        raise UsageError(text, rule="missing-file", help=help) from e.with_traceback(None)  # of a library's frames


def _stamp_of(opened: Any, file: IO[bytes]) -> Stamp:
    """Returns size and mark of a file that fsspec opened."""
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(opened.fs, LocalFileSystem):
        found = os.stat(opened.path)
        return Stamp(found.st_size, f"mtime {found.st_mtime_ns}")
    info: Mapping[str, Any] = getattr(file, "details", None) or opened.fs.info(opened.path)
    return Stamp(int(info["size"] or 0), next((f"{name} {info[name]}" for name in MARKS if info.get(name)), ""))


def _checksum_of(file: IO[bytes]) -> str:
    """Returns the checksum of the whole content; leaves the file at its beginning."""
    made = hashlib.sha256()
    for line in file:
        made.update(line)
    file.seek(0)
    return made.hexdigest()[:DIGITS]


def expand_urls(urls: Urls, options: Mapping[str, Any]) -> list[str]:
    """Returns URLs and absolute paths, with `~` as the user's home, and patterns replaced by the files that match them
    now, by name. Raises UsageError[missing-file] where there are none."""
    import fsspec

    found: list[str] = []
    for given in [urls] if isinstance(urls, str | os.PathLike) else urls:
        url = os.fspath(given)
        url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
        if not any(c in url for c in "*?[") or "::" in url or os.path.exists(url):
            found.append(url)
            continue
        try:
            fs, path = fsspec.core.url_to_fs(url, **options)
            matching = sorted(one for one, info in fs.glob(path, detail=True).items() if info["type"] == "file")
        except (ImportError, OSError, ValueError) as e:
            text, help = f"cannot look for {url}: {describe(e)}", "check the URL, or list the files"
            raise UsageError(text, rule="missing-file", help=help) from e
        if not matching:
            help = "* stands for any part of a name, ** for folders, too"
            raise UsageError(f"no file matches {url}", rule="missing-file", help=help)
        found += [fs.unstrip_protocol(one) if "://" in url else one for one in matching]
    if not found:
        raise UsageError("no files are given", rule="missing-file", help="give at least one URL")
    return found
