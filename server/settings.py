"""The one configuration door of the sidecar: command-line options end up here, nothing else."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8300
STATS_FOLDER = "stats"
MIN_TOKEN_CHARS = 16
_MAX_TOKEN_BYTES = 4096


class SettingsError(ValueError):
    """An option that cannot work; one line that names the value and the remedy."""


@dataclass(frozen=True)
class Settings:
    """state_dir: folder with desired.json and stats/. port 0: any free one. token_file: a file
    whose one line is the bearer token that /v1/* then needs."""

    state_dir: Path
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"sidecar port {self.port} is outside 0..65535")
        if self.token_file is None and not is_loopback(self.host):
            raise SettingsError(
                f"the sidecar will not listen on {self.host} without a token: anybody there could "
                "set the threshold; give --token-file, or listen on 127.0.0.1"
            )

    @property
    def stats_dir(self) -> Path:
        return self.state_dir / STATS_FOLDER

    def token_digest(self) -> bytes | None:
        """SHA-256 of the bearer token; None when no token is configured."""
        return None if self.token_file is None else read_token_digest(self.token_file)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine (or pod) can reach a listener on this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> str:
    """The token in a file. Raises SettingsError, never showing what the file holds."""
    try:
        with open(path, "rb") as f:
            data = f.read(_MAX_TOKEN_BYTES + 1)
    except OSError as e:
        raise SettingsError(
            f"token file {path} cannot be read: {e.strerror}; correct --token-file, or make one: "
            "`(umask 077; openssl rand -hex 32 > FILE)`"
        ) from e
    token = data.strip().decode("ascii", errors="replace")
    printable = all("!" <= c <= "~" for c in token)
    if len(data) > _MAX_TOKEN_BYTES or len(token) < MIN_TOKEN_CHARS or not printable:
        raise SettingsError(
            f"token file {path} must hold one line of {MIN_TOKEN_CHARS} to {_MAX_TOKEN_BYTES} "
            "printable ASCII characters without spaces; `openssl rand -hex 32` makes one"
        )
    return token


def read_token_digest(path: Path) -> bytes:
    return hashlib.sha256(read_token(path).encode()).digest()


def default_state_dir(served_port: int) -> Path:
    """$XDG_STATE_HOME/blasst/<port of vLLM>, so that two servers of one user stay apart. Raises
    SettingsError for a user without a home folder."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    except RuntimeError:
        raise SettingsError("this user has no home folder; give --state-dir") from None
    return root / "blasst" / str(served_port)


def prepare_state_dir(folder: Path) -> None:
    """Make the folder (0700, if it is new) and its stats/, and prove that both can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / STATS_FOLDER).mkdir(exist_ok=True)
        for place in (folder, folder / STATS_FOLDER):
            probe_writable(place)
    except OSError as e:
        raise SettingsError(
            f"state folder {folder} cannot be used: {e.strerror}; choose another with --state-dir"
        ) from e


def probe_writable(folder: Path) -> None:
    """Write and remove one small file. Raises OSError: read-only, full, missing."""
    with tempfile.TemporaryFile(prefix=".probe-", dir=folder) as f:
        f.write(bytes(4096))
        f.flush()
