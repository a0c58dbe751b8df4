"""The bearer tokens in force: read again when their files change, compared in constant time."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blasst.server.settings import SettingsError, read_token

Role = Literal["read", "write"]
log = logging.getLogger("blasst.server")


@dataclass
class TokenFile:
    """One file and the digest of its token. A file that turns bad leaves the last good token in
    force, as a half-done rotation must lock nobody out; `error` says what is wrong with it.

    Raises SettingsError at construction."""

    path: Path
    on_error: Callable[[str], None] = lambda message: None
    error: str = ""
    _digest: bytes = b""
    _seen: tuple[int, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._seen = self._identity()
        self._digest = _digest(read_token(self.path).encode())

    def digest(self) -> bytes:
        """SHA-256 of the token in force."""
        with self._lock:
            seen = self._identity()
            if seen != self._seen:
                self._seen = seen
                self._read()
            return self._digest

    def _read(self) -> None:
        try:
            self._digest = _digest(read_token(self.path).encode())
        except SettingsError as e:
            self.error = str(e)
            self.on_error(self.error)
            log.error("the old token stays in force: %s", e)
            return
        self.error = ""
        log.warning("token file %s was read again: its token is in force now", self.path)

    def _identity(self) -> tuple[int, ...]:
        try:
            stat = os.stat(self.path)
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size


class Tokens:
    """write: the token that may do all. read: one that may GET and HEAD only; None for none."""

    def __init__(
        self,
        write: Path,
        read: Path | None = None,
        on_error: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._files: list[tuple[Role, TokenFile]] = [("write", TokenFile(write, on_error))]
        if read is not None:
            self._files.append(("read", TokenFile(read, on_error)))
        self._on_error = on_error
        self._same = (
            f"token files {write} and {read} hold the same token: readers could write; make "
            "another with `openssl rand -hex 32`"
        )
        self._told = False
        if self._equal():
            raise SettingsError(self._same)

    def role(self, token: bytes) -> Role | None:
        """What this token may do; one that a rotation put into both files may only read. Every file
        is compared, so time tells nothing of which fits."""
        given = _digest(token)
        found: Role | None = None
        for role, file in self._files:
            if secrets.compare_digest(given, file.digest()):
                found = role
        return found

    def errors(self) -> list[str]:
        """What is wrong with files that changed; empty when all is well."""
        equal = self._equal()
        if equal and not self._told:
            self._on_error(self._same)
            log.error("nobody may write: %s", self._same)
        self._told = equal
        return [file.error for _, file in self._files if file.error] + [self._same] * equal

    def _equal(self) -> bool:
        return len({file.digest() for _, file in self._files}) < len(self._files)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
