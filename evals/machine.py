"""The machine that a measurement ran on, in one line."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """CPU model, cores that this process may use, platform, load average of the last minute."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{cpu_model()}, {cores} core{'' if cores == 1 else 's'}, {platform.machine()} "
        f"{platform.system()}, load average {load:.1f} at the start"
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the kernel names it; "unknown CPU" where it names none (some ARM machines)."""
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or "unknown CPU"
