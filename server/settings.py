"""The one configuration door of the sidecar: command-line options end up here, nothing else."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8300
STATS_FOLDER = "stats"
PRESETS_FOLDER = "presets"
MIN_TOKEN_CHARS = 16
_MAX_TOKEN_BYTES = 4096


class SettingsError(ValueError):
    """An option that cannot work; one line that names the value and the remedy."""


@dataclass(frozen=True)
class Settings:
    """state_dir: folder with desired.json and stats/. port 0: any free one. token_file: a file
    whose one line is the bearer token that /v1/* then needs; that of read_token_file may only read.
    uds: a Unix socket to listen on instead. tls_cert, tls_key: PEM files. presets_dir: calibration
    presets; None: the folder presets/ of the state folder. follow: a file whose threshold is set
    at the start and whenever it changes. canary: its plan, a TOML file. vllm_metrics: show vLLM's
    /metrics, too. engine_url: vLLM's base address, for these two. otlp_endpoint: where traces go,
    "" nowhere."""

    state_dir: Path
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    read_token_file: Path | None = None
    uds: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    presets_dir: Path | None = None
    follow: Path | None = None
    canary: Path | None = None
    engine_url: str = ""
    vllm_metrics: bool = False
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"sidecar port {self.port} is outside 0..65535")
        if self.read_token_file is not None and self.token_file is None:
            raise SettingsError("--read-token-file needs --token-file: else anybody could write")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("--tls-cert and --tls-key go together; give both or none")
        if self.uds is not None and self.tls_cert is not None:
            raise SettingsError("--tls-cert is for a port; a Unix socket (--uds) needs none")
        for name, url in (
            ("--engine-url", self.engine_url),
            ("--otlp-endpoint", self.otlp_endpoint),
        ):
            if url:
                check_url(url, name)
        if (self.vllm_metrics or self.canary is not None) and not self.engine_url:
            raise SettingsError(
                "--vllm-metrics and --canary need vLLM's address, which its options do not say; "
                "give --engine-url"
            )
        if self.token_file is None and self.uds is None and not is_loopback(self.host):
            raise SettingsError(
                f"the sidecar will not listen on {self.host} without a token: anybody there could "
                "set the threshold; give --token-file, or listen on 127.0.0.1"
            )

    @property
    def stats_dir(self) -> Path:
        return self.state_dir / STATS_FOLDER

    @property
    def presets_folder(self) -> Path:
        return self.presets_dir or self.state_dir / PRESETS_FOLDER

    def check_tls(self) -> None:
        """Raises SettingsError for a certificate or key that no listener could use."""
        if self.tls_cert is None or self.tls_key is None:
            return
        check_private(self.tls_key, "TLS key")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
        except OSError as e:
            raise SettingsError(
                f"TLS files {self.tls_cert} and {self.tls_key} cannot be used: "
                f"{e.strerror or e}; give a PEM certificate and its own unencrypted key"
            ) from e


def check_url(url: str, what: str) -> str:
    """The address without its last slash. Raises SettingsError unless it is of http or https."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise SettingsError(f"{what} {url!r} must look like http://127.0.0.1:8000")
    return url.rstrip("/")


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
    check_private(path, "token file")
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


def check_private(path: Path, what: str) -> None:
    """Raises SettingsError where others could read or change the secret; a missing file passes.

    Readable by a group is what Kubernetes makes of a secret with fsGroup: allowed to root's files.
    """
    try:
        found = os.stat(path)
    except OSError:
        return
    allowed = 0o640 if found.st_uid == 0 and os.geteuid() != 0 else 0o600
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 & ~allowed:
        raise SettingsError(
            f"{what} {path} has mode {mode:04o}: others can read or change the secret; "
            f"`chmod {allowed:o} {path}`, and make a new one if anybody could have read it"
        )


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
