"""Builds attention.c once per machine, with the C compiler that is there, and loads it.

The result lies in the user's cache folder under a name that depends on the sources, the compiler,
its flags and the CPU. Several processes may ask at once: one compiles, the others wait for it.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blasst.kernels.errors import UnsupportedError

logger = logging.getLogger("blasst.kernels")

SOURCE = Path(__file__).with_name("attention.c")
COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "clang++")
FLAGS = (
    *("-x", "c", "-std=gnu11", "-O3", "-shared", "-fPIC"),
    # No -ffast-math: NaN and infinity must stay what they are.
    *("-ffp-contract=fast", "-fno-strict-aliasing"),
)
_SECONDS = 120
_INSTALL = "install one (apt install gcc), or set CC to its path"


class BuildError(UnsupportedError):
    """The library cannot be had here; the message says why and what to do about it."""

    def __init__(self, reason: str) -> None:
        super().__init__([reason])


@dataclass(frozen=True)
class Compiler:
    """command: the program and options of CC; version: the first line that it prints."""

    command: tuple[str, ...]
    version: str


@functools.cache
def reasons() -> tuple[str, ...]:
    """Why the library cannot be had; empty: it is loaded."""
    try:
        library()
    except BuildError as e:
        return e.reasons
    return ()


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; compiles it, which takes seconds, unless that was done. BuildError."""
    compiler = find_compiler()
    flags = (*FLAGS, native_flag())
    folder = cache_folder()
    path = folder / f"attention-{_digest(compiler, flags)}.so"
    try:
        # Without the lock, which a folder that cannot be written does not give: a library appears
        # whole or not at all.
        if path.exists() and whole(path):
            return load(path)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                if whole(path):
                    return load(path)
                logger.warning("%s is damaged and is made again", path)
            compile_library(compiler, flags, path)
            return load(path)
    except OSError as e:
        raise BuildError(f"the compiled kernel cannot be used: {e}; {_move()}") from e
    except AttributeError as e:
        raise BuildError(f"{path} lacks a function: {e}; remove it and check CC") from e


def find_compiler() -> Compiler:
    """CC when it is set, else the first of COMPILERS that runs. BuildError."""
    given = os.environ.get("CC", "").strip()
    failed = []
    for name in [given] if given else COMPILERS:
        try:
            command = shlex.split(name)
        except ValueError as e:
            raise BuildError(f"CC={name} cannot be read as a command: {e}; {_INSTALL}") from e
        if shutil.which(command[0]) is None:
            continue
        try:
            done = _run([*command, "--version"])
        except (OSError, subprocess.TimeoutExpired) as e:
            failed.append(f"{name}: {e}")
            continue
        if done.returncode == 0:
            return Compiler(tuple(command), (done.stdout.splitlines() or [""])[0])
        failed.append(f"{name} --version exits with {done.returncode}")
    tried = f"CC={given}" if given else ", ".join(COMPILERS)
    told = "; ".join(failed) or "not found"
    raise BuildError(f"no C compiler runs ({tried}: {told}); {_INSTALL}")


def native_flag() -> str:
    """What makes a compiler use all of this CPU."""
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def cache_folder(kind: str = "native") -> Path:
    """Made when missing; refused where another user could put a library. BuildError."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        # The specification of XDG_CACHE_HOME ignores relative paths.
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "blasst" / kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, RuntimeError) as e:
        raise BuildError(f"no cache folder for the compiled kernel: {e}; {_move()}") from e
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise BuildError(
            f"{folder} belongs to user {state.st_uid} with mode {state.st_mode & 0o777:o}, but "
            f"only user {os.geteuid()} may write there: chmod 700 it, or {_move()}"
        )
    return folder


def _move() -> str:
    return "set XDG_CACHE_HOME to a folder of this user that can be written"


def compile_library(compiler: Compiler, flags: Sequence[str], path: Path) -> None:
    """Puts the library there, whole or not at all. BuildError with the compiler's words."""
    made = path.with_suffix(f".{os.getpid()}")
    command = [*compiler.command, *flags, str(SOURCE), "-o", str(made), "-lm"]
    started = time.monotonic()
    try:
        done = _run(command)
        if done.returncode != 0:
            said = " ".join(done.stderr.split())[:400] or f"exit code {done.returncode}"
            raise BuildError(
                f"{shlex.join(compiler.command)} ({compiler.version}) cannot compile the kernel: "
                f"{said}; set CC to another compiler"
            )
        seal(made)
        made.replace(path)
    except subprocess.TimeoutExpired as e:
        raise BuildError(f"{e}; set CC to another compiler") from e
    finally:
        made.unlink(missing_ok=True)
    seconds = time.monotonic() - started
    logger.info("compiled the CPU kernel in %.1f s: %s, %s", seconds, compiler.version, path)


def seal(path: Path) -> None:
    """Appends its checksum: to load half a library kills the process."""
    with open(path, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o700)


def whole(path: Path) -> bool:
    """Whether the file ends with its checksum."""
    data = path.read_bytes()
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def load(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions declared. OSError."""
    library = ctypes.CDLL(str(path))
    library.blasst_open.restype = ctypes.c_void_p
    library.blasst_drain.argtypes = [ctypes.c_void_p]
    library.blasst_item.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.blasst_close.argtypes = [ctypes.c_void_p]
    library.blasst_close.restype = None
    library.blasst_exp2.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.blasst_exp2.restype = None
    return library


def _digest(compiler: Compiler, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE.parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    digest.update("\0".join([*compiler.command, compiler.version, *flags, _cpu()]).encode())
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """What -march=native depends on: homes are shared between unlike machines."""
    lines = [platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return lines[0]
    for line in text.split("\n\n")[0].splitlines():
        name = line.split(":")[0].strip()
        if name in ("model name", "flags", "Features", "CPU part", "CPU implementer"):
            lines.append(line)
    return "\n".join(lines)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """stdout and stderr as text, whatever bytes a compiler writes."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        check=False,
    )
