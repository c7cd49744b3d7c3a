"""Reads chunks of files: Parquet rows, byte ranges of CSV."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable
from typing import IO

import numpy as np
import torch

from graphft.data import ChunkInfo, DataSpec
from graphft.data.formats import Decoded, csv_header, decode_csv, decode_parquet, open_parquet
from graphft.data.urls import REMEDY, DescribedFiles
from graphft.errors import UsageError
from graphft.runtime.data.reader import LISTED, BadRecords, Batch, BatchKey, Reader


class FileReader(Reader):
    """Decodes a chunk once, and keeps it while it is one of the last used. Raises GraphftError when a file is missing,
    or was changed since it was described."""

    def __init__(self, spec: DataSpec, seed: int, cached_chunks: int) -> None:
        super().__init__(spec, seed, cached_chunks)
        self._format, self._urls = spec.source["format"], spec.source["urls"]
        self._described = DescribedFiles(spec.source["stamps"], spec.source["storage_options"])
        self._chunk = functools.lru_cache(cached_chunks)(self._decode)
        for url in spec.fingerprint():
            with self._described.open(url):
                pass

    def _read(self, info: ChunkInfo, order: np.ndarray, key: BatchKey, ahead: bool) -> Batch:
        columns, bad = self._chunk(info)
        if bad.keys() & {int(i) for i in order}:
            listed = sorted(bad)[:LISTED]
            places = self._places(info, listed)
            more = f"; and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
            text = "; ".join(f"{places[i]}: {bad[i]}" for i in listed) + more
            raise BadRecords(text, bad, rule="data", certain=True)
        return {c: torch.from_numpy(a[order]) for c, a in columns.items()}

    def _probe(self, info: ChunkInfo) -> None:
        self._decode(info)  # never from the chunks that are kept

    def _url(self, info: ChunkInfo) -> str:
        return str(self._urls[info.file])

    def _where(self, info: ChunkInfo) -> str:
        return f"{super()._where(info)} of {self._url(info)}"

    def _source(self, info: ChunkInfo) -> str:
        return self._url(info).rpartition("/")[0]

    def _name(self, info: ChunkInfo, position: int) -> str:
        return self._places(info, [position])[position]

    def _places(self, info: ChunkInfo, positions: Iterable[int]) -> dict[int, str]:
        """Returns where records of the chunk are found, by position: their lines, where the format has lines."""
        name = self._url(info).rpartition("/")[2]
        if not info.line:
            return {i: f"record {info.start + i} of {name}" for i in positions}
        with self._described.open(self._url(info)) as f:
            lines, _ = self._lines(f, info)
        numbers = [info.line + i for i, line in enumerate(lines) if not line.isspace()]
        return {i: f"line {numbers[i]:,} of {name}" for i in positions}

    def _decode(self, info: ChunkInfo) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Returns the chunk's columns, of `info.records` rows each; and by position what is wrong with bad records,
        whose rows mean nothing."""
        decoded = self._decoded(info)
        if decoded.records != info.records:
            what = f"there are {decoded.records} records, {info.records} when described"
            raise UsageError(what, rule="data", help=REMEDY)
        columns = {}
        for column, names in self.spec.source["fields"].items():
            values = np.concatenate([decoded.fields[n] for n in names], axis=1)
            columns[column] = values.reshape(-1, *self.spec.record_shape(column))
        return columns, {i: ", ".join(texts.values()) for i, texts in decoded.bad.items()}

    def _decoded(self, info: ChunkInfo) -> Decoded:
        dtypes = {f: self.spec.types[c].dtype for c, fs in self.spec.source["fields"].items() for f in fs}
        with self._described.open(self._url(info)) as f:
            if self._format == "parquet":
                opened = open_parquet(f, self._url(info))
                return decode_parquet(opened, info.start, info.records, dtypes, self.spec.source["lists"])
            lines, header = self._lines(f, info)
        return decode_csv(lines, header, dtypes)

    def _lines(self, f: IO[bytes], info: ChunkInfo) -> tuple[list[bytes], list[str]]:
        """Returns the chunk's lines of CSV, and the fields' names."""
        header = csv_header(f.readline(), self._url(info))
        f.seek(info.offset)
        return io.BytesIO(f.read(info.size)).readlines(), header
