"""One memory-mapped statistics file per process: self-describing header, seqlock, one writer.

Layout: magic | u32 header bytes | u32 zero | u64 sequence | f64 updated_at | arrays | header JSON.
The writer holds an exclusive flock for life, so a reader can tell a live file from a dead one, also
across containers. Arrays are int64 ("q") or float64 ("d"), C order, native byte order.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

MAGIC = b"BLASSTS1"
SUFFIX = ".stats"
_HEAD = struct.Struct("<8sII")
_SEQUENCE = struct.Struct("<Q")
_UPDATED = struct.Struct("<d")
_DATA_AT = 32
_MAX_BYTES = 64 << 20
_READ_TRIES = 200

Code = Literal["q", "d"]


class StatsError(Exception):
    """Not a statistics file, of another layout, or never consistent while it was read."""


class TornError(StatsError):
    """The writer died in the middle of an update: the page can never be read again."""


@dataclass(frozen=True)
class Field:
    """One array: its name, shape, and "q" (int64) or "d" (float64)."""

    name: str
    shape: tuple[int, ...]
    code: Code = "q"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StatsPage:
    """A consistent copy of one file. `alive`: its writer still runs. `arrays`: flat, C order."""

    name: str
    kind: str
    labels: Mapping[str, str]
    fields: tuple[Field, ...]
    arrays: Mapping[str, Sequence[float]]
    updated_at: float
    alive: bool

    def shape(self, name: str) -> tuple[int, ...]:
        return next(f.shape for f in self.fields if f.name == name)

    def scalar(self, name: str, default: float | None = None) -> float:
        """The value of an array of one element. default: of a page without it; None: KeyError."""
        if default is not None and name not in self.arrays:
            return default
        (value,) = self.arrays[name]
        return value


class StatsWriter:
    """Creates `folder/name.stats` and updates it in place; the file goes with `close`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        kind: str,
        labels: Mapping[str, str],
        fields: Sequence[Field],
    ) -> None:
        self.path = folder / (name + SUFFIX)
        self._offsets: dict[str, tuple[int, Field]] = {}
        at = _DATA_AT
        for field in fields:
            self._offsets[field.name] = (at, field)
            at += 8 * field.size
        header = json.dumps(
            {
                "kind": kind,
                "labels": dict(labels),
                "fields": [[f.name, list(f.shape), f.code] for f in fields],
            }
        ).encode()
        self._sequence = 0
        content = bytearray(at) + header
        content[: _HEAD.size] = _HEAD.pack(MAGIC, len(header), 0)
        content[24:32] = _UPDATED.pack(time.time())
        self._file, self._map = _make_file(self.path, bytes(content))

    def update(self, **arrays: Sequence[float] | bytes | memoryview | float) -> None:
        """Write arrays under one sequence step; those not named keep their values.

        A value is a flat sequence of numbers, a number (shape of one element), or the raw bytes of
        the array, native order (what a contiguous tensor or NumPy array gives).
        """
        writes = []
        for name, value in arrays.items():
            at, field = self._offsets[name]
            if isinstance(value, int | float):
                value = (value,)
            data = (
                bytes(value)
                if isinstance(value, bytes | memoryview)
                else struct.pack(f"={len(value)}{field.code}", *value)
            )
            if len(data) != 8 * field.size:
                raise ValueError(
                    f"{name} needs {field.size} elements of 8 bytes, got {len(data)} bytes"
                )
            writes.append((at, data))
        self._step()
        for at, data in writes:
            self._map[at : at + len(data)] = data
        self._map[24:32] = _UPDATED.pack(time.time())
        self._step()

    def keep(self) -> None:
        """Put the file back, with what it held, if someone removed it or its folder. Raises OSError
        when that cannot be; the writer still works then, unseen."""
        if self.path.exists():
            return
        self.path.parent.mkdir(exist_ok=True)
        file, page = _make_file(self.path, self._map[:])
        self.detach()
        self._file, self._map = file, page

    def close(self) -> None:
        """Unmap and remove the file. Safe to call twice."""
        if not self._file.closed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        self.detach()

    def detach(self) -> None:
        """Unmap and leave the file: to readers its counts hold, of a writer that is gone."""
        if not self._file.closed:
            self._map.close()
            self._file.close()

    def _step(self) -> None:
        self._sequence += 1
        self._map[16:24] = _SEQUENCE.pack(self._sequence)


def _make_file(path: Path, content: bytes) -> tuple[IO[bytes], mmap.mmap]:
    """The locked file, complete before it has its name."""
    fd, temp = tempfile.mkstemp(prefix=".stats-", dir=path.parent)
    file = os.fdopen(fd, "r+b")
    try:
        os.fchmod(fd, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Not truncate: on a full disk a hole would kill the engine with SIGBUS when it is
        # written through the map; this raises OSError here.
        os.posix_fallocate(fd, 0, len(content))
        page = mmap.mmap(fd, len(content))
        page[:] = content
        os.replace(temp, path)
    except BaseException:
        file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        raise
    return file, page


def free_name(folder: Path, name: str) -> str:
    """`name`, or the first of name-2, name-3, ... whose page has no running writer: several
    engines of one process."""
    candidate, number = name, 1
    while _written_now(folder / (candidate + SUFFIX)):
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def _written_now(path: Path) -> bool:
    try:
        with open(path, "rb", buffering=0, opener=open_now) as f:
            return not _unlocked(f.fileno())
    except OSError:
        return False


def read_stats(path: Path) -> StatsPage:
    """A consistent copy of one file. Raises StatsError; FileNotFoundError when it is gone."""
    try:
        with open(path, "rb", buffering=0, opener=open_now) as f:
            size = os.fstat(f.fileno()).st_size
            if not _DATA_AT < size <= _MAX_BYTES:
                raise StatsError(f"{path.name}: {size} bytes is not a statistics file")
            data = _consistent(f.fileno(), size, path.name)
            alive = not _unlocked(f.fileno())
    except FileNotFoundError:
        raise
    except OSError as e:
        raise StatsError(f"{path.name} cannot be read: {e.strerror}") from e
    return _parse(path.name, data, alive)


def iter_stats(folder: Path, kind: str | None = None) -> Iterator[StatsPage]:
    """Every readable file of a folder, in name order; unreadable ones are left out."""
    for name in stats_names(folder):
        with contextlib.suppress(StatsError, FileNotFoundError):
            page = read_stats(folder / name)
            if kind is None or page.kind == kind:
                yield page


def remove_dead(folder: Path, older_than_s: float, keep: str | None = None) -> list[str]:
    """Delete files whose writer is gone and that are older than this; the names deleted. keep: how
    the names of those begin that stay."""
    removed = []
    now = time.time()
    for name in stats_names(folder):
        if keep is not None and name.startswith(keep):
            continue
        path = folder / name
        with contextlib.suppress(StatsError, OSError):
            try:
                page = read_stats(path)
                alive, updated_at = page.alive, page.updated_at
            except TornError:
                alive, updated_at = False, path.stat().st_mtime
            # A stamp from the future is of a clock that was set back since: as old as it is new.
            if not alive and abs(now - updated_at) > older_than_s:
                os.unlink(path)
                removed.append(name)
    return removed


def stats_names(folder: Path) -> list[str]:
    """Names of all files of a folder that should be pages, in order."""
    try:
        return sorted(n for n in os.listdir(folder) if n.endswith(SUFFIX) and n[0] != ".")
    except FileNotFoundError:
        return []


def open_now(path: str, flags: int) -> int:
    """Without waiting: a named pipe in the folder must not hold its readers up."""
    return os.open(path, flags | os.O_NONBLOCK)


def _consistent(fd: int, size: int, name: str) -> bytes:
    # pread copies outside the map: a page is taken only if the sequence was even and unchanged
    # around the copy. A writer killed in mid-update leaves an odd one and no lock.
    for _ in range(_READ_TRIES):
        before = os.pread(fd, 8, 16)
        data = os.pread(fd, size, 0)
        after = os.pread(fd, 8, 16)
        if before == after and len(data) == size and not before[0] & 1:
            return data
        if before[0] & 1 and _unlocked(fd):
            raise TornError(f"{name} is torn: its writer died in an update")
        time.sleep(0.0005)
    raise StatsError(
        f"{name} was never consistent in {_READ_TRIES} reads: its writer hangs in an update"
    )


def _unlocked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _parse(name: str, data: bytes, alive: bool) -> StatsPage:
    magic, header_bytes, _ = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise StatsError(f"{name} is of another layout: {magic!r}, not {MAGIC!r}")
    try:
        header = json.loads(data[len(data) - header_bytes :])
        fields = tuple(_field(*entry) for entry in header["fields"])
        kind = _text(header["kind"])
        labels = {_text(key): _text(value) for key, value in dict(header["labels"]).items()}
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise StatsError(f"{name} has an unreadable header: {e!r}") from e
    arrays: dict[str, Sequence[float]] = {}
    at = _DATA_AT
    for f in fields:
        if at + 8 * f.size > len(data) - header_bytes:
            raise StatsError(f"{name}: field {f.name} does not fit the file")
        arrays[f.name] = struct.unpack_from(f"={f.size}{f.code}", data, at)
        at += 8 * f.size
    (updated_at,) = _UPDATED.unpack_from(data, 24)
    if not math.isfinite(updated_at):
        raise StatsError(f"{name} was updated at {updated_at}: not a time")
    return StatsPage(name, kind, labels, fields, arrays, updated_at, alive)


def _field(name: object, shape: list[object], code: object) -> Field:
    sizes = tuple(n for n in shape if isinstance(n, int) and not isinstance(n, bool) and n >= 0)
    if not isinstance(name, str) or len(sizes) != len(shape):
        raise ValueError(f"field {name!r} of shape {shape!r}")
    if code == "q":
        return Field(name, sizes, "q")
    if code == "d":
        return Field(name, sizes, "d")
    raise ValueError(f"field {name} of type {code!r}")


def _text(value: object) -> str:
    """A label; what UTF-8 cannot hold (a path of other bytes) becomes "?"."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value.encode(errors="replace").decode()
