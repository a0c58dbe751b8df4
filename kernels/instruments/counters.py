"""Nsight Compute: its command line, and what its CSV says of each kernel; nothing is imported."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TENSOR = "cycles_active.avg.pct_of_peak_sustained_elapsed"
STALL = "smsp__average_warps_issue_stalled_"
STALL_END = "_per_issue_active.ratio"
METRICS = (
    "gpu__time_duration.sum",
    "smsp__inst_executed.sum",
    "smsp__inst_executed_pipe_xu.sum",
    "sm__inst_executed_pipe_tensor.sum",
    f"regex:sm__pipe_tensor.*{TENSOR}",
    f"regex:{STALL}.*{STALL_END}",
)
"""exp2 is an instruction of the XU pipe, beside the few reciprocals and logarithms of a tile.
Names differ between chips: a regex that finds nothing is no error to ncu, a name is."""

_NANOSECONDS = {
    "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3,
    "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
}  # fmt: skip
_SCALE = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class Counters:
    """Of one launch. tensor_use: share of the peak, 0..1; None = the chip has no such metric.

    stalls: reason -> warps that wait for it for every instruction that is issued.
    """

    name: str
    time_us: float
    instructions: float
    exp2: float
    products: float
    tensor_use: float | None
    stalls: Mapping[str, float]


def ncu_command(program: Sequence[str], *, ncu: str | None = None) -> list[str]:
    """Profiles what `program` runs between cudaProfilerStart and Stop; CSV on standard output.

    ncu: its path, None = look for it. Raises FileNotFoundError when there is none.
    """
    path = ncu or shutil.which("ncu")
    if path is None or not Path(path).exists():
        raise FileNotFoundError(
            f"Nsight Compute ({ncu or 'ncu'}) is not here; install it (package nsight-compute) or "
            "add its folder to PATH"
        )
    options = ["--csv", "--page", "raw", "--profile-from-start", "off"]
    options += ["--clock-control", "none", "--target-processes", "all"]
    return [path, *options, "--metrics", ",".join(METRICS), *program]


def parse_csv(text: str) -> list[Counters]:
    """The launches in the order they ran. Raises ValueError for text without a table."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        told = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))]
        end = " ".join(text.split())[-200:]
        raise ValueError("ncu printed no table: " + (" ".join(told) or end))
    rows = list(csv.reader(lines[start:]))
    if len(rows) < 3:
        raise ValueError("ncu profiled no kernel: none ran between the profiler's start and stop")
    header, units = rows[0], dict(zip(rows[0], rows[1], strict=False))
    return [_counters(dict(zip(header, row, strict=False)), units) for row in rows[2:] if row]


def _counters(row: Mapping[str, str], units: Mapping[str, str]) -> Counters:
    def number(metric: str, scales: Mapping[str, float]) -> float:
        if metric not in row:
            raise ValueError(f"ncu's table has no column {metric}; its columns: {', '.join(row)}")
        unit = units.get(metric, "")
        if unit in scales:
            return _float(metric, row[metric]) * scales[unit]
        # Counts have units such as "inst" or "Minst".
        prefix = unit[0] if unit[:1] in _SCALE and unit[1:] in ("inst", "warp") else ""
        return _float(metric, row[metric]) * _SCALE[prefix]

    tensor = [
        _float(name, value) / 100
        for name, value in row.items()
        if name.startswith("sm__pipe_tensor") and name.endswith(TENSOR)
    ]
    stalls = {
        name.removeprefix(STALL).removesuffix(STALL_END): _float(name, value)
        for name, value in row.items()
        if name.startswith(STALL) and name.endswith(STALL_END)
    }
    return Counters(
        row.get("Kernel Name", "?"),
        number("gpu__time_duration.sum", _NANOSECONDS) / 1e3,
        number("smsp__inst_executed.sum", {}),
        number("smsp__inst_executed_pipe_xu.sum", {}),
        number("sm__inst_executed_pipe_tensor.sum", {}),
        max(tensor, default=None),
        stalls,
    )


def _float(metric: str, text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise ValueError(
            f"ncu gives {text!r} for {metric}: it could not read the hardware counters"
        ) from None


def markdown(launches: Mapping[str, Counters], *, stalls: int = 6) -> str:
    """One column a launch, in their order; the changes are over the first one."""
    names = list(launches)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]

    def line(label: str, cells: Sequence[str]) -> None:
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    def counts(label: str, values: Sequence[float]) -> None:
        base = values[0]
        change = [f" ({v / base - 1:+.1%})" if base and i else "" for i, v in enumerate(values)]
        line(label, [f"{v:,.4g}{c}" for v, c in zip(values, change, strict=True)])

    every = list(launches.values())
    counts("time, us", [c.time_us for c in every])
    line(
        "tensor pipe, of its peak",
        ["-" if c.tensor_use is None else f"{c.tensor_use:.1%}" for c in every],
    )
    counts("matrix instructions", [c.products for c in every])
    counts("exp2 and other XU instructions", [c.exp2 for c in every])
    counts("instructions", [c.instructions for c in every])
    largest = sorted(
        {reason for c in every for reason in c.stalls},
        key=lambda reason: -max(c.stalls.get(reason, 0.0) for c in every),
    )
    for reason in largest[:stalls]:
        line(f"stalled: {reason}", [f"{c.stalls.get(reason, 0.0):.2f}" for c in every])
    return "\n".join(lines) + "\n"
