"""`blasst trace`: what the warps of the Hopper kernel do, and what the hardware counts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from blasst.kernels.errors import refuse
from blasst.kernels.instruments import counters
from blasst.kernels.instruments.record import Recording
from blasst.kernels.instruments.steps import NAMES, Step
from blasst.kernels.instruments.timeline import (
    Timeline,
    chrome_trace,
    early_share,
    step_totals,
    svg,
)

EARLY = 60.0
"""Cycles of a wait for scores that were there already: its instructions and the clock's."""

_ABOUT = """Timelines of one thread block of the Hopper kernel, from clocks in a build of its own.

Writes into --out: recording.json, trace.json (open it in Perfetto or chrome://tracing) and
trace.svg (one row a warp, one colour a step; a red tick is a product that was left out).
Prints the time in each step, waits for scores among them. The clocks cost time themselves: read
structure here, and magnitudes from `blasst bench` and --counters.

--counters runs dense and votes under Nsight Compute instead: tensor pipe, exp2, stall reasons."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `blasst trace`."""
    parser.description = _ABOUT
    parser.epilog = (
        "exit codes: 0 done, 1 it cannot run here or a file cannot be read, 2 wrong usage"
    )
    add = parser.add_argument
    add("--problem", default="16k", metavar="NAME", help="as of `blasst bench attention` on a GPU "
        "(default: 16k)")  # fmt: skip
    add("--skip-rate", type=_rate, action="append", metavar="R", help="share of blocks to skip, "
        "0 to 1, or `dense`: no vote built in; several with --counters (default 0.75)")  # fmt: skip
    add("--block", type=_block, default=(0, 8, 0), metavar="H,M,G", help="thread block: head of "
        "the group, query tile from the last one, kv head (default: 0,8,0)")  # fmt: skip
    add("--visits", type=int, default=128, help="key blocks to record, from the tile's first "
        "(default: 128)")  # fmt: skip
    add("--window", type=_window, default=None, metavar="A,B", help="cycles to draw, from the "
        "first clock read (default: all)")  # fmt: skip
    add("--from", dest="source", type=Path, default=None, metavar="FILE",
        help="draw a recording.json again; needs no GPU")  # fmt: skip
    add("--out", type=Path, default=None, metavar="FOLDER", help="where the files go (default: "
        "print numbers alone)")  # fmt: skip
    add("--counters", action="store_true", help="run under Nsight Compute instead")
    add("--impl", default="hopper", help="of --counters: hopper or triton (default: hopper)")
    add("--ncu", default=None, metavar="PATH", help="Nsight Compute (default: found on PATH)")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, 1 cannot run, 2 wrong usage."""
    if args.visits < 1:
        return refuse("--visits must be at least 1", 2)
    rates = args.skip_rate or [0.75]
    try:
        if args.counters:
            return _count(args, [rate for rate in rates if rate is not None])
        if args.source is not None:
            recording = Recording.load(args.source)
        else:
            if len(rates) > 1:
                return refuse("one --skip-rate at a time, unless with --counters", 2)
            recording = _record(args, rates[0])
    except (OSError, ValueError, RuntimeError, ImportError) as e:
        return refuse(str(e), 2 if isinstance(e, _Usage) else 1)
    timeline = recording.timeline()
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        recording.save(args.out / "recording.json")
        (args.out / "trace.json").write_text(json.dumps(chrome_trace(timeline)))
        (args.out / "trace.svg").write_text(svg(timeline, window=args.window))
    print(json.dumps(_numbers(timeline), indent=1) if args.json else _table(timeline))
    return 0


def _record(args: argparse.Namespace, rate: float | None) -> Recording:
    from blasst.kernels.bench.problems import PROBLEMS
    from blasst.kernels.instruments import capture

    _known(args.problem, [name for name, shape in PROBLEMS.items() if shape.on == "cuda"])
    return capture.record(args.problem, rate, args.visits, args.block)


def _count(args: argparse.Namespace, rates: Sequence[float]) -> int:
    from blasst.kernels.bench.problems import PROBLEMS
    from blasst.kernels.instruments import capture

    _known(args.problem, [name for name, shape in PROBLEMS.items() if shape.on == "cuda"])
    program = [sys.executable, "-P", "-m", capture.__name__, args.problem, args.impl]
    command = counters.ncu_command([*program, *map(str, rates)], ncu=args.ncu)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        launches = counters.parse_csv(done.stdout)
    except ValueError as e:
        last = " ".join(done.stderr.strip().splitlines()[-1:])
        raise ValueError(f"{e} (exit code {done.returncode}) {last}".strip()) from e
    names = capture.launch_names(rates)
    if len(launches) != len(names):
        raise ValueError(f"ncu saw {len(launches)} launches, {len(names)} ran: {', '.join(names)}")
    found = dict(zip(names, launches, strict=True))
    if args.json:
        print(json.dumps({name: asdict(c) for name, c in found.items()}, indent=1))
    else:
        print(counters.markdown(found), end="")
    return 0


class _Usage(ValueError):
    """An option names what does not exist."""


def _known(problem: str, names: Sequence[str]) -> None:
    if problem not in names:
        raise _Usage(f"problem {problem!r} is unknown; choose from {', '.join(names)}")


def _numbers(timeline: Timeline) -> dict[str, object]:
    early, waits = early_share(timeline, NAMES[Step.WAIT_SCORES], EARLY)
    return {
        "title": timeline.title,
        "unit": timeline.unit,
        "steps": {step: asdict(total) for step, total in step_totals(timeline).items()},
        "scores_early": early,
        "waits_for_scores": waits,
        "products_left_out": len(timeline.marks),
    }


def _table(timeline: Timeline) -> str:
    early, waits = early_share(timeline, NAMES[Step.WAIT_SCORES], EARLY)
    lines = [
        timeline.title,
        "",
        "| step | times | cycles | median | share |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {step} | {t.count} | {t.total:.0f} | {t.median:.0f} | {t.share:.1%} |"
        for step, t in step_totals(timeline).items()
    ]
    lines += ["", f"Scores were there already in {early} of {waits} visits; products left out: "
              f"{len(timeline.marks)}."]  # fmt: skip
    return "\n".join(lines)


def _rate(text: str) -> float | None:
    if text == "dense":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError("must be at least 0 and below 1, or `dense`")
    return value


def _block(text: str) -> tuple[int, int, int]:
    try:
        head, tile, group = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not H,M,G such as 0,8,0") from None
    return head, tile, group


def _window(text: str) -> tuple[float, float]:
    try:
        first, last = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not A,B such as 20000,32000") from None
    if not first < last:
        raise argparse.ArgumentTypeError("must be a start before an end")
    return first, last
