"""Results on disk: one JSON object a line, only ever appended, each line synced before the next.

A process killed at any byte leaves at most one torn last line, which the next run cuts off.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from blasst.evals.errors import MALFORMED, InputError

Record = dict[str, Any]


class Store(Protocol):
    """Where a runner keeps records and looks for those that are there."""

    records: list[Record]

    def __contains__(self, key: str) -> bool: ...

    def append(self, record: Record) -> None: ...


class ResultStore:
    """The open file of one run; a second run on the same file is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._lock = threading.Lock()
        self._made = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(path, "a+b", 0)  # noqa: SIM115 - held until close()
        except OSError as e:
            raise InputError(f"{path} cannot be written: {e.strerror}") from e
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise InputError(
                f"{path} is no ordinary file, which a resume needs; give another --out"
            )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_there():  # the run before ended empty and took it away just now
                raise BlockingIOError
            self.records = self._repair()
        except BlockingIOError as e:
            self._file.close()
            raise InputError(f"{path} is in use by another run; wait, or give another --out") from e
        except BaseException:
            self._file.close()
            raise
        self._keys = {r["key"] for r in self.records if "key" in r}

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def append(self, record: Record) -> None:
        """On disk when this returns. Raises InputError when it cannot be (disk full)."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=True) + "\n"
        rest = memoryview(line.encode())
        with self._lock:
            size = os.fstat(self._file.fileno()).st_size
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except OSError as e:
                # Another thread may still find room, and its line must not follow half of this.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), size)
                raise InputError(
                    f"{self.path} cannot be written: {e.strerror}; what was measured before is in "
                    "it, the same command resumes"
                ) from e
            self.records.append(record)
            if "key" in record:
                self._keys.add(record["key"])

    def close(self) -> None:
        """A run that failed before its first record leaves no file."""
        if self._made and not self._file.closed and not self.records and self._is_there():
            self.path.unlink()
        self._file.close()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def _repair(self) -> list[Record]:
        self._file.seek(0)
        data = self._file.read()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            self._file.truncate(complete)
        return parse_lines(data[:complete], self.path)


def read_results(path: Path) -> list[Record]:
    """All complete lines, without changing the file. Raises InputError."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}") from e
    return parse_lines(data[: data.rfind(b"\n") + 1], path)


def parse_lines(data: bytes, path: Path) -> list[Record]:
    """Raises InputError naming the line that is no JSON object with a `kind`."""
    records = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = json.loads(line)
            if not isinstance(record["kind"], str):
                raise TypeError("kind")
        except MALFORMED as e:
            raise InputError(
                f"{path}, line {number}, is not a result ({e!r}): the file was edited or is of "
                "another program; give another --out"
            ) from e
        records.append(record)
    return records
