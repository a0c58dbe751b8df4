"""Compiles a kernel for an architecture without a GPU: PTX, cubin and launcher, kept on disk.

The work is done by another process, because the DSL reads the architecture when it is imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blasst.kernels.verify.errors import ToolError
from blasst.kernels.verify.launch import Region
from blasst.kernels.verify.parse import Module, parse

FUNCTION = "kernel"
SUFFIXES = ("ptx", "cubin", "o")
PACKAGES = ("nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels", "flashinfer-python", "torch")
KERNEL_SOURCES = ("cute", "hopper", "blackwell", "masks", "verify")
SHARED_SOURCES = ("block_lists.py", "types.py")  # whose constants device code takes
LIMIT_S = 600
INSTALL = "install blasst[cuda], or run `make device` in a checkout"


@dataclass(frozen=True)
class Recipe:
    """How to make a kernel. builder: "module:function"; the function gets `options` and returns
    what cute.compile does. options: JSON. lines: keep source lines in the PTX. overlay: packages
    that are taken from other folders.
    """

    arch: str
    builder: str
    options: str = "{}"
    lines: bool = True
    overlay: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, arch: str, builder: str, lines: bool = True, **options: Any) -> Recipe:
        return cls(arch, builder, json.dumps(options, sort_keys=True), lines)


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel. folder: holds kernel.ptx, kernel.cubin and the launcher kernel.o."""

    folder: Path

    @property
    def object_file(self) -> Path:
        return self.folder / f"{FUNCTION}.o"

    @property
    def cubin(self) -> Path:
        return self.folder / f"{FUNCTION}.cubin"

    @cached_property
    def ptx(self) -> str:
        return (self.folder / f"{FUNCTION}.ptx").read_text(errors="replace").replace("\0", "")

    @cached_property
    def module(self) -> Module:
        return parse(self.ptx)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Places in shared memory: from the builder module, or from the compiler's dump."""
        listed = json.loads(_text(self.folder / f"{FUNCTION}.json") or "[]")
        if listed:
            return tuple(Region(*place) for place in listed)
        dump = self.folder / f"{FUNCTION}.mlir"
        fields = re.search(r"smem\.struct_fields = \[(.*?)\]", _text(dump))
        found = re.findall(r'"(\w+):(\d+):(\d+)"', fields[1]) if fields else []
        return tuple(Region(name, int(start), int(size)) for name, size, start in found)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "blasst" / "verify"


def build(recipe: Recipe, cache: Path | None = None) -> Artifact:
    """The kernel, from the cache when its sources have not changed; raises ToolError."""
    folder = (cache or cache_folder()) / _key(recipe)
    if not all((folder / f"{FUNCTION}.{s}").exists() for s in SUFFIXES):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            compile_in_process(recipe, Path(scratch))
            made = Path(scratch) / "made"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                made.rename(folder)
            except OSError:  # another process was faster; its kernel is the same
                if not folder.exists():
                    raise
    return Artifact(folder)


def compile_in_process(recipe: Recipe, scratch: Path, hash_seed: str = "0") -> Artifact:
    """Compiles into scratch/made, never from a cache. hash_seed: of the other process."""
    dump, made = scratch / "dump", scratch / "made"
    dump.mkdir()
    made.mkdir()
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": hash_seed,
        "CUTE_DSL_ARCH": recipe.arch,
        "FLASH_ATTENTION_ARCH": recipe.arch,
        "CUTE_DSL_KEEP": "ptx,cubin,ir",
        "CUTE_DSL_DUMP_DIR": str(dump),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "CUTE_DSL_NO_CACHE": "1",
        "CUTE_DSL_LINEINFO": str(int(recipe.lines)),
    }
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "blasst.kernels.verify.compile_job"),
            *(json.dumps(asdict(recipe)), str(made / f"{FUNCTION}.o")),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=scratch,
    )
    if done.returncode:
        what = f"compiling {recipe.builder} for {recipe.arch}"
        raise ToolError(f"{what} failed:\n{done.stderr[-2000:]}")
    for suffix in ("ptx", "cubin", "mlir"):
        found = sorted(dump.glob(f"*.{suffix}"))
        if suffix != "mlir" and len(found) != 1:
            raise ToolError(f"{recipe.builder} wrote {len(found)} .{suffix} files, not one")
        if found:
            shutil.copyfile(found[0], made / f"{FUNCTION}.{suffix}")
    return Artifact(made)


def _key(recipe: Recipe) -> str:
    """Changes with the recipe, our kernels' sources and the versions of the compilers."""
    digest = hashlib.sha256(repr(recipe).encode())
    kernels = Path(__file__).resolve().parents[1]
    for name in KERNEL_SOURCES:
        for path in sorted((kernels / name).rglob("*.py")):
            if name != "verify" or path.name in ("build.py", "compile_job.py"):
                digest.update(path.read_bytes())
    for name in SHARED_SOURCES:
        digest.update((kernels / name).read_bytes())
    builder = recipe.builder.split(":")[0]
    spec = importlib.util.find_spec(builder)
    if spec is None or spec.origin is None:
        raise ToolError(f"the builder module {builder} was not found")
    digest.update(Path(spec.origin).read_bytes())
    for package in PACKAGES:
        try:
            digest.update(importlib.metadata.version(package).encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()[:24]
