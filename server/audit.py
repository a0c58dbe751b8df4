"""The audit log: one JSON line a change, appended and synced before the change is made.

Every record carries a digest over itself and its predecessor: a line that was edited, removed or
put in breaks the chain there. Nothing here ever deletes a line.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "audit.jsonl"
_TAIL_BYTES = 1 << 20
_FIRST = "0" * 64


@dataclass(frozen=True)
class Entry:
    """old, new: a threshold as {"unit", "value"} with min_context, or None where unknown.
    result: applied; failed: the disk refused it; lost: a crash came before the change."""

    who: str
    old: dict[str, Any] | None
    new: dict[str, Any]
    reason: str
    generation: int
    result: str = "applied"


class AuditLog:
    """Of one state folder; the holder of the folder's lock alone appends. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def append(self, entry: Entry) -> None:
        """Durable on return. Raises OSError, and then the file is as it was before."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A line without its end is of a crash in mid-append: what it announced never happened.
            size = _whole_lines(fd)
            record = {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                **vars(entry),
            }
            record["chain"] = chain(_last_chain(fd, size), record)
            try:
                _write_all(fd, (json.dumps(record) + "\n").encode(), size)
                os.ftruncate(fd, size + len(json.dumps(record)) + 1)
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)

    def tail(self, limit: int) -> list[dict[str, Any]]:
        """The newest `limit` records, newest last; damaged lines are left out. Raises OSError."""
        try:
            with open(self.path, "rb") as f:
                size = f.seek(0, os.SEEK_END)
                start = f.seek(max(0, size - _TAIL_BYTES))
                lines = f.read().split(b"\n")
        except FileNotFoundError:
            return []
        return list(_records(lines[1:] if start else lines))[-limit:]

    def verify(self) -> int:
        """How many records there are. Raises ValueError at the first that breaks the chain."""
        before, number = _FIRST, 0
        for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
            try:
                record = json.loads(line)
                given = record.pop("chain")
            except (ValueError, KeyError, AttributeError) as e:
                raise ValueError(f"line {number} of {self.path} is no record: {e!r}") from e
            if given != chain(before, record):
                raise ValueError(f"line {number} of {self.path} breaks the chain: log was edited")
            before = given
        return number


def chain(before: str, record: dict[str, Any]) -> str:
    """The digest of a record (without its own) that follows one whose digest is `before`."""
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256((before + canonical).encode()).hexdigest()


def _records(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _whole_lines(fd: int) -> int:
    """Bytes up to the end of the last line that has one."""
    size = os.fstat(fd).st_size
    start = max(0, size - _TAIL_BYTES)
    return start + os.pread(fd, size - start, start).rfind(b"\n") + 1


def _last_chain(fd: int, size: int) -> str:
    start = max(0, size - _TAIL_BYTES)
    for record in reversed(list(_records(os.pread(fd, size - start, start).splitlines()[-1:]))):
        return str(record.get("chain", _FIRST))
    return _FIRST


def _write_all(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written
