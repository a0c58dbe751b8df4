"""FlashInfer's SM100 kernel with cross-stage P, run as a test of the interpreter, never copied.

python -m blasst.kernels.verify.subjects.flashinfer    fetches the wheel's Python part to the cache
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

from blasst.kernels.types import LOG2_E
from blasst.kernels.verify.build import INSTALL, Recipe, cache_folder
from blasst.kernels.verify.errors import ToolError
from blasst.kernels.verify.subject import Case, Subject
from blasst.kernels.verify.subjects.attention import difference

BUILDER = "blasst.kernels.verify.subjects.flashinfer:build"
PACKAGE = "flashinfer-python==0.7.2.post1"
FMHA = Path("flashinfer", "cute_dsl", "attention", "fmha")
SEED = "if cutlass.const_expr(stage == 1):\n                    inplace_consumer.wait_and_advance()"
"""The second tile's extra wait before its loop, which keeps its P out of the way of Q @ K.T."""
SINGLE = ("mma", "load", "epilogue", "empty")


def locate() -> Path | None:
    """The folder that holds the package flashinfer: installed, or fetched to the cache."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is not None and spec.submodule_search_locations:
        parent = Path(next(iter(spec.submodule_search_locations))).parent
        if (parent / FMHA / "fmha.py").exists():
            return parent
    fetched = cache_folder() / PACKAGE.replace("==", "-")
    return fetched if (fetched / FMHA / "fmha.py").exists() else None


def missing() -> str | None:
    """Why the subject cannot be built here; None: it can."""
    if importlib.util.find_spec("cutlass") is None:
        return f"nvidia-cutlass-dsl is not installed; {INSTALL}"
    if locate() is None:
        return f"{PACKAGE} is not here; run python -P -m {__name__} to fetch it"
    return None


def fetch() -> Path:
    """Downloads the wheel and keeps the attention kernel's Python files."""
    target = cache_folder() / PACKAGE.replace("==", "-")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
        if done.returncode:
            raise ToolError(f"pip download {PACKAGE} failed: {done.stderr.strip()[-500:]}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith(FMHA.as_posix())]
            archive.extractall(target, [n for n in names if n.endswith(".py")])
    return target


def role(warp: int) -> str:
    if warp < 8:
        return f"softmax {warp // 4}"
    return "correction" if warp < 12 else SINGLE[warp - 12]


def subject(*, skip: bool = False, seeded: bool = True) -> Subject:
    """skip: with skip-softmax compiled in. seeded: False removes the seed of the second tile."""
    recipe = Recipe.of("sm_100a", BUILDER, False, skip=skip, seeded=seeded)
    return Subject("flashinfer", recipe, role, scoreboard=True)


def _kernel_class(seeded: bool) -> Any:
    """The class, without running the package's own __init__, which needs much else."""
    root = locate()
    if root is None:
        raise ToolError(missing() or "")
    folder = root / FMHA
    if not seeded:
        source = (folder / "fmha.py").read_text()
        if source.count(SEED) != 1:
            raise ToolError(f"the seed of {PACKAGE} was not found where it was")
        changed = Path.cwd() / "changed"
        for path in folder.rglob("*.py"):
            copy = changed / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
        (changed / "fmha.py").write_text(source.replace(SEED, "pass"))
        folder = changed
    name = "blasst_flashinfer_fmha"
    shell = types.ModuleType(name)
    shell.__path__ = [str(folder)]
    sys.modules[name] = shell
    return importlib.import_module(f"{name}.fmha").BlackwellFusedMultiHeadAttentionForward


def build(options: dict[str, Any]) -> Any:
    """In the compiling process: head_dim 128, not causal, one request after the other."""
    import cutlass
    import cutlass.cute as cute

    kind = _kernel_class(options["seeded"])
    helpers = importlib.import_module(f"{kind.__module__.rsplit('.', 1)[0]}.helpers.fmha_helpers")
    d = 128
    kernel = kind(
        cutlass.Float32, cutlass.Float32, (128, 128), d, False,
        helpers.MaskEnum.RESIDUAL_MASK, False, True, 2.0**-8 if options["skip"] else 8.0, True,
    )  # fmt: skip
    batch, queries, keys, kv_heads, group = (cute.sym_int() for _ in range(5))

    def tensor(shape: tuple[Any, ...]) -> Any:
        return cute.runtime.make_fake_compact_tensor(
            cutlass.BFloat16, shape, stride_order=(4, 3, 2, 1, 0), assumed_align=16
        )

    return cute.compile(
        kernel,
        tensor((batch, queries, kv_heads, group, d)),
        tensor((batch, keys, kv_heads, 1, d)),
        tensor((batch, keys, kv_heads, 1, d)),
        tensor((batch, queries, kv_heads, group, d)),
        (1, 1, 1, 1, 1, 1, d, d),
        *(None, None, None, None),
        *(1.0, 1.0, 1.0),
        cutlass.Float32(0.0) if options["skip"] else None,
        *(None, None, None, None),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        False,
        options="--enable-tvm-ffi",
    )


def case(*, queries: int, keys: int, skip: bool = False, seed: int = 0) -> Case:
    """One request and head; the threshold of `skip` is so small that nothing is skipped."""
    d, generator = 128, torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, n, 1, 1, d, generator=generator).bfloat16() for n in (queries, keys, keys)
    )
    out = torch.full_like(q, torch.nan)
    scale = 1 / math.sqrt(d)
    arguments = [
        q, k, v, out, [1, queries, queries, keys, 1, 1, d, d], *[None] * 4, scale * LOG2_E, scale,
        1.0, -1000.0 if skip else None, *[None] * 4, False, *[None] * 5,
    ]  # fmt: skip
    rows = [t.double().reshape(-1, d) for t in (q, k, v)]
    want = ((rows[0] @ rows[1].T * scale).softmax(-1) @ rows[2]).reshape(out.shape)

    def check() -> list[str]:
        eps = torch.finfo(torch.bfloat16).eps
        return difference("out", out, want, 2 * eps, 2 * eps)

    return Case(f"{queries}x{keys}", arguments, {"q": q, "k": k, "v": v}, {"out": out}, check)


if __name__ == "__main__":
    print(f"{PACKAGE} is in {fetch()}")
