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
        if read is not None and len({f.digest() for _, f in self._files}) == 1:
            raise SettingsError(
                f"token files {write} and {read} hold the same token: readers could write; "
                "make another with `openssl rand -hex 32`"
            )

    def role(self, token: bytes) -> Role | None:
        """What this token may do. Every file is compared, so time tells nothing of which fits."""
        given = _digest(token)
        found: Role | None = None
        for role, file in reversed(self._files):
            if secrets.compare_digest(given, file.digest()):
                found = role
        return found

    def errors(self) -> list[str]:
        """What is wrong with files that changed; empty when all is well."""
        for _, file in self._files:
            file.digest()
        return [file.error for _, file in self._files if file.error]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
