"""The desired-state file: which threshold a deployment wants (DESIGN section 3).

Written by one sidecar, atomically; read by every vLLM front end at request admission.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.schedule import (
    Schedule,
    Threshold,
    dump_threshold,
    load_threshold,
)
from blasst.kernels.exchange.stats import open_now
from blasst.kernels.threshold import ThresholdError

FILE_NAME = "desired.json"
PREVIOUS_NAME = "desired.previous.json"
TEMP_PREFIX = ".desired-"
SCHEMA_VERSION = 3
"""Newest that is read. 1: no `origin`, no schedule; 2: no schedule. Written is the oldest that can
say it all, so that a release before this one reads it after a rollback."""
MAX_BYTES = 65_536
MIN_CONTEXT_MAX = 1 << 24
_GENERATION_MAX = 1 << 53


class DesiredStateError(Exception):
    """The file is unreadable, corrupt or of another schema; the message says which and the cure."""


@dataclass(frozen=True)
class DesiredState:
    """threshold None = dense. min_context: prompt tokens below which requests run dense (None: the
    engine's own setting). generation 0 = nothing was ever written. origin: how the threshold came
    about, where that is not the caller's own number (a preset and its target)."""

    generation: int
    threshold: Threshold | None
    min_context: int | None = None
    updated_at: str = ""
    updated_by: str = ""
    reason: str = ""
    origin: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.generation, bool) or not 0 <= self.generation <= _GENERATION_MAX:
            raise ValueError(f"generation is outside 0..{_GENERATION_MAX}")
        if self.min_context is not None and not 0 <= self.min_context <= MIN_CONTEXT_MAX:
            raise ValueError(
                f"min_context {self.min_context} is outside 0..{MIN_CONTEXT_MAX} prompt tokens"
            )


DENSE = DesiredState(generation=0, threshold=None)


def write_desired(folder: Path, state: DesiredState) -> None:
    """Replace the file durably: temp + fsync + rename + folder fsync; the old file stays beside it
    if it is a good one.

    Raises OSError (folder read-only, disk full): the old file is then still in place.
    """
    body = _body(state)
    record = {**body, "checksum": _checksum(body)}
    data = (json.dumps(record, indent=1) + "\n").encode()
    target = folder / FILE_NAME
    fd, temp = tempfile.mkstemp(prefix=TEMP_PREFIX, dir=folder)
    try:
        with os.fdopen(fd, "wb") as f:
            # Read by a front end of another user too; the folder says who gets here.
            os.fchmod(fd, 0o644)
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        if _is_good(target):
            link = Path(temp + ".previous")
            # A copy: not every file system has hard links.
            shutil.copyfile(target, link)
            with open(link, "rb") as f:
                os.fsync(f.fileno())
            os.replace(link, folder / PREVIOUS_NAME)
        os.replace(temp, target)
    except BaseException:
        for leftover in (temp, temp + ".previous"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leftover)
        raise
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _is_good(path: Path) -> bool:
    try:
        read_desired(path)
    except (DesiredStateError, FileNotFoundError):
        return False
    return True


def read_desired(path: Path) -> DesiredState:
    """Parse one file. Raises DesiredStateError; FileNotFoundError when there is none."""
    try:
        with open(path, "rb", buffering=0, opener=open_now) as f:
            data = f.read(MAX_BYTES + 1) or b""
    except FileNotFoundError:
        raise
    except OSError as e:
        raise DesiredStateError(f"{path.name} cannot be read: {e.strerror}") from e
    return parse_desired(data, path.name)


def parse_desired(data: bytes, name: str = FILE_NAME) -> DesiredState:
    """Raises DesiredStateError, naming what is wrong."""
    if len(data) > MAX_BYTES:
        raise DesiredStateError(
            f"{name} is larger than {MAX_BYTES} bytes: not a desired-state file"
        )
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise DesiredStateError(f"{name} is not JSON ({e}); set the threshold again") from e
    if not isinstance(record, dict):
        raise DesiredStateError(f"{name} holds no JSON object; set the threshold again")
    version: Any = record.get("schema_version")
    known = isinstance(version, int) and not isinstance(version, bool)
    if not known or not 1 <= version <= SCHEMA_VERSION:
        raise DesiredStateError(
            f"{name} has schema_version {version!r}, this release reads 1 to {SCHEMA_VERSION}: it "
            "was written by another release; set the threshold again with this one"
        )
    body = {k: v for k, v in record.items() if k != "checksum"}
    if record.get("checksum") != _checksum(body):
        raise DesiredStateError(f"{name} fails its checksum: cut off or edited; set it again")
    try:
        return DesiredState(
            generation=_whole(body["generation"]),
            threshold=load_threshold(body["threshold"]),
            min_context=None if body["min_context"] is None else _whole(body["min_context"]),
            updated_at=str(body["updated_at"]),
            updated_by=str(body["updated_by"]),
            reason=str(body["reason"]),
            origin=str(body["origin"]) if version >= 2 else "",
        )
    except ThresholdError as e:
        raise DesiredStateError(f"{name}: {e}") from e
    except (KeyError, TypeError, ValueError) as e:
        raise DesiredStateError(f"{name} lacks a field or has a wrong type: {e!r}") from e


class DesiredReader:
    """Cheap repeated reads for one folder: one stat a call, a parse only when the file changed.

    On any error the last good state stays in force (dense, if there was none) and `errors` counts
    the failed reads of each changed file; `last_error` is "" again after the next good read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self.errors = 0
        self.last_error = ""
        self._state = DENSE
        self._seen: tuple[int, int, int] | str | None = "never"
        self._lock = threading.Lock()

    def current(self) -> DesiredState:
        """The state in force now. Never raises."""
        with self._lock:
            try:
                stat = os.stat(self.path)
                seen: tuple[int, int, int] | str | None = (
                    stat.st_mtime_ns,
                    stat.st_ino,
                    stat.st_size,
                )
            except FileNotFoundError:
                seen = None
            except OSError as e:
                seen = f"{self.path.name} cannot be read: {e.strerror}"
            if seen != self._seen:
                self._seen = seen
                self._reload(seen)
            return self._state

    def _reload(self, seen: tuple[int, int, int] | str | None) -> None:
        try:
            if isinstance(seen, str):
                raise DesiredStateError(seen)
            if seen is None:
                if self._state.generation:
                    raise DesiredStateError(f"{self.path.name} is gone; the last good value stays")
                return
            self._state = read_desired(self.path)
            self.last_error = ""
        except FileNotFoundError:
            self._seen = "never"
        except DesiredStateError as e:
            if isinstance(e.__cause__, OSError):
                # The file may be good: too many open files, a share that was away.
                self._seen = "never"
                if self.last_error == str(e):
                    return
            self.errors += 1
            self.last_error = str(e)


def _body(state: DesiredState) -> dict[str, Any]:
    scheduled = isinstance(state.threshold, Schedule)
    version = 3 if scheduled else 2 if state.origin else 1
    return {
        "schema_version": version,
        "generation": state.generation,
        "threshold": dump_threshold(state.threshold),
        "min_context": state.min_context,
        "updated_at": state.updated_at,
        "updated_by": state.updated_by,
        "reason": state.reason,
        **({"origin": state.origin} if version >= 2 else {}),
    }


def _checksum(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value
