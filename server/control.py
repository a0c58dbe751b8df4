"""The desired state as a service: one writer a folder, generations that only rise, If-Match."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.desired import (
    DENSE,
    FILE_NAME,
    PREVIOUS_NAME,
    TEMP_PREFIX,
    DesiredState,
    DesiredStateError,
    read_desired,
    write_desired,
)
from blasst.kernels.exchange.schedule import Schedule, Threshold, dump_threshold
from blasst.server.audit import AuditLog, Entry
from blasst.server.problems import Problem
from blasst.server.settings import SettingsError
from blasst.server.tally import Tally

LOCK_NAME = ".control.lock"
_MARK_BYTES = 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK = ("no-space", "state-unwritable")


@dataclass(frozen=True)
class Wish:
    """What a caller wants to be in force; threshold None = dense."""

    threshold: Threshold | None
    min_context: int | None = None
    reason: str = ""
    by: str = ""
    origin: str = ""


class ControlService:
    """Holds the folder's writer lock from `open` to `close`; all methods are thread-safe.

    known_generation: the highest generation that any front end reports, so that a repaired file
    is newer than whatever they still have in force. The lock file holds the highest generation ever
    given out: the two others can be corrupt or gone. refusal: why no layer that runs can skip.
    """

    def __init__(
        self,
        folder: Path,
        known_generation: Callable[[], int] = lambda: 0,
        refusal: Callable[[], str] = lambda: "",
    ) -> None:
        self.folder = folder
        self._known_generation = known_generation
        self._refusal = refusal
        self._lock = threading.Lock()
        self._highest = 0
        self._floor = 0
        self._lock_fd: int | None = None
        self.audit = AuditLog(folder)
        self.tally = Tally()

    def open(self) -> None:
        """Raises SettingsError when another sidecar has this folder."""
        try:
            fd = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise SettingsError(
                f"state folder {self.folder} cannot be used: {e.strerror}; "
                "choose another with --state-dir"
            ) from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise SettingsError(
                f"state folder {self.folder} already has a sidecar; stop that one, "
                "or give this one its own --state-dir"
            ) from None
        self._lock_fd = fd
        text = os.pread(fd, _MARK_BYTES, 0).strip()
        self._floor = int(text) if text.isdigit() and len(text) < _MARK_BYTES - 4 else 0
        # Of a writer killed in mid-write; only the holder of the lock makes such files.
        for leftover in self.folder.glob(TEMP_PREFIX + "*"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        self._audit_what_a_crash_lost()

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def read(self) -> DesiredState:
        """The state on disk. Raises DesiredStateError when it is corrupt, unreadable or lost."""
        try:
            state = read_desired(self.folder / FILE_NAME)
        except FileNotFoundError:
            if self._highest or (self.folder / PREVIOUS_NAME).exists():
                raise DesiredStateError(f"{FILE_NAME} is gone; set the threshold again") from None
            return DENSE
        self._highest = max(self._highest, state.generation)
        return state

    def error(self) -> str:
        """What is wrong with the file; empty when it is good."""
        try:
            self.read()
        except DesiredStateError as e:
            return str(e)
        return ""

    def set(self, wish: Wish, if_match: str | None) -> DesiredState:
        """Write the wish as a new generation, unless it is in force already. Raises Problem."""
        try:
            state, changed = self._set(wish, if_match)
        except Problem as e:
            self.tally.change("failed" if e.kind in _DISK else "refused")
            raise
        self.tally.change("applied" if changed else "unchanged")
        return state

    def _set(self, wish: Wish, if_match: str | None) -> tuple[DesiredState, bool]:
        with self._lock:
            try:
                current: DesiredState | None = self.read()
            except DesiredStateError as e:
                if if_match is None or if_match.strip() != "*":
                    raise unreadable(e) from e
                current = None
            _check_if_match(if_match, current)
            self._check_effect(wish)
            if current is not None and _same(current, wish):
                return current, False
            state = DesiredState(
                generation=self._next_generation(lost=current is None),
                threshold=wish.threshold,
                min_context=wish.min_context,
                updated_at=_now(),
                updated_by=wish.by,
                reason=wish.reason,
                origin=wish.origin,
            )
            entry = Entry(
                who=wish.by,
                old=None if current is None else _brief(current),
                new=_brief(state),
                reason=wish.reason,
                generation=state.generation,
            )
            try:
                self._mark(state.generation)
                self.audit.append(entry)
                self._write(state, entry)
            except OSError as e:
                raise _unwritable(e) from e
            self._highest = state.generation
            return state, True

    def _write(self, state: DesiredState, entry: Entry) -> None:
        try:
            write_desired(self.folder, state)
        except OSError:
            # On a full disk this may fail, too; then the next start finds that it was lost.
            with contextlib.suppress(OSError):
                self.audit.append(dataclasses.replace(entry, result="failed"))
            raise

    def _audit_what_a_crash_lost(self) -> None:
        """A record whose change never reached the disk gets its second line."""
        with contextlib.suppress(OSError, DesiredStateError):
            last = self.audit.tail(1)
            found = self.read().generation
            if not last or last[0].get("result") != "applied":
                return
            announced = last[0].get("generation")
            # Of a line that somebody edited nothing is repeated; it breaks the chain as it is.
            if isinstance(announced, int) and announced > found:
                fields = {f.name: last[0].get(f.name) for f in dataclasses.fields(Entry)}
                self.audit.append(Entry(**{**fields, "result": "lost"}))  # type: ignore[arg-type]

    def _check_effect(self, wish: Wish) -> None:
        why = "" if wish.threshold is None else self._refusal()
        if why:
            raise Problem(
                409,
                "no-effect",
                f"{wish.threshold} cannot take effect: no layer of the running engine can skip "
                f"({why}). Restart it with a configuration that `blasst doctor` accepts, or set "
                "the threshold to off.",
            )

    def _mark(self, generation: int) -> None:
        """Before the write: whatever a crash leaves of it, the next one is higher."""
        assert self._lock_fd is not None
        # Always as long as this: nothing of a longer number stays behind.
        os.pwrite(self._lock_fd, b"%*d\n" % (_MARK_BYTES - 1, generation), 0)
        os.fsync(self._lock_fd)

    def _next_generation(self, *, lost: bool) -> int:
        try:
            previous = read_desired(self.folder / PREVIOUS_NAME).generation
        except (DesiredStateError, FileNotFoundError):
            previous = 0
        if lost:
            # The unreadable file held at least the one after its predecessor's.
            previous += 1
        return max(self._highest, self._floor, previous, self._known_generation()) + 1


def etag(state: DesiredState) -> str:
    return f'"{state.generation}"'


def unreadable(error: DesiredStateError) -> Problem:
    return Problem(
        503,
        "state-unreadable",
        f"{error}. Front ends keep their last good threshold. Cure: PUT the wanted threshold with "
        "If-Match: *",
    )


def _check_if_match(if_match: str | None, current: DesiredState | None) -> None:
    if if_match is None:
        raise Problem(
            428,
            "precondition-required",
            'Send If-Match with the generation you saw, such as If-Match: "3" (the ETag of GET), '
            "or If-Match: * to overwrite whatever is there.",
        )
    wanted = [tag.strip() for tag in if_match.split(",")]
    if current is None or "*" in wanted or etag(current) in wanted:
        return
    raise Problem(
        412,
        "precondition-failed",
        f"The generation is {current.generation}, not what If-Match names: somebody changed it "
        "since you looked. GET it, decide again, and send the new ETag.",
        {"ETag": etag(current)},
    )


def _same(current: DesiredState, wish: Wish) -> bool:
    # Generation 0 was never written: the first wish always is, so that "off" overrules an
    # environment default of the engine.
    wanted = dataclasses.replace(
        current, threshold=wish.threshold, min_context=wish.min_context, origin=wish.origin
    )
    return current.generation > 0 and current == wanted


def _unwritable(error: OSError) -> Problem:
    if error.errno in _FULL:
        return Problem(
            507, "no-space", "The state folder's disk is full; the old threshold stays in force."
        )
    return Problem(
        503,
        "state-unwritable",
        f"The state folder cannot be written ({error.strerror}); the old threshold stays in force.",
    )


def _brief(state: DesiredState) -> dict[str, Any]:
    """A state as the audit log has it; threshold None = dense."""
    threshold = state.threshold
    if isinstance(threshold, Schedule):
        found: dict[str, Any] = {"threshold": None, "schedule": threshold.dump()}
    else:
        found = {"threshold": dump_threshold(threshold)}
    return {**found, "min_context": state.min_context}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
