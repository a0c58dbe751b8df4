"""Compiled kernels kept on disk, so that other ranks and later starts load them in a moment.

An object lies in the user's cache folder under a name that depends on the kernel's configuration,
our device code, the compiler's version and the GPU. Several processes may ask at once: one
compiles, the others wait for it. Whatever goes wrong here, the kernel is compiled as if for itself.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch

from blasst.kernels.native.build import BuildError, cache_folder, seal, whole

logger = logging.getLogger("blasst.kernels")

SYMBOL = "blasst"
_SOURCES = Path(__file__).parents[1]


def kept(kernel: str, config: object, compiled: Callable[[], Any]) -> Any:
    """What `compiled` gives, or the same function loaded from the disk.

    kernel: the folder of its device code, beside this one; config: says in its repr what is built.
    """
    try:
        folder = cache_folder("cute")
        path = folder / f"{kernel}-{digest(kernel, config)}.o"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _load(path)
            if found is None:
                found = compiled()
                _keep(found, path)
            return found
    except (BuildError, OSError) as e:
        logger.warning("compiled kernels are not kept: %s", e)
        return compiled()


def digest(kernel: str, config: object) -> str:
    """Names a build: everything that its object depends on."""
    found = hashlib.sha256(_fingerprint(kernel).encode())
    found.update(repr(config).encode())
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        found.update(f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}".encode())
    found.update(os.environ.get("CUTE_DSL_ARCH", "").encode())
    return found.hexdigest()[:32]


@functools.cache
def _fingerprint(kernel: str) -> str:
    found = hashlib.sha256(f"{sys.version_info[:2]} {cutlass.__version__}".encode())
    folders = ("", "cute/", f"{kernel}/")
    for source in sorted(p for at in folders for p in _SOURCES.glob(f"{at}*.py")):
        found.update(source.name.encode() + source.read_bytes())
    return found.hexdigest()


def _load(path: Path) -> Any:
    """The function; None where there is none, or a damaged one."""
    if not path.exists():
        return None
    if not whole(path):
        logger.warning("%s is damaged and is made again", path)
        return None
    try:
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), SYMBOL)
    except RuntimeError as e:
        logger.warning("%s cannot be loaded and is made again: %s", path, e)
        return None


def _keep(compiled: Any, path: Path) -> None:
    """Puts the object there with its checksum behind it, whole or not at all."""
    made = path.with_suffix(f".{os.getpid()}.o")
    try:
        compiled.export_to_c(object_file_path=str(made), function_name=SYMBOL)
        seal(made)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)
