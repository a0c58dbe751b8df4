"""`blasst verify`: executes a GPU kernel's PTX on a CPU and reports what held."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from blasst.kernels.errors import BlasstError, refuse

if TYPE_CHECKING:
    from blasst.kernels.verify.plans import Plan

KERNELS = ("sm100", "sm90", "fa4", "flashinfer")
MAX_TOKENS = 1 << 15
T = TypeVar("T", int, float)

_ABOUT = """Compiles a kernel for its GPU without one, executes the PTX on this CPU under unfair,
seeded schedules, looks for races, deadlocks and misuse, compares outputs, log-sum-exp and skip
counts with the oracle, and reads registers and spills from the cubin.

  sm100       our kernel for compute capability 10.x
  sm90        our kernel for compute capability 9.0
  fa4         FlashAttention-4's SM100 kernel: a test of this tool
  flashinfer  FlashInfer's SM100 kernel with cross-stage P: a test of this tool

docs/verify.md says what this proves and what it cannot show."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `blasst verify`."""
    parser.description = _ABOUT
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "exit codes: 0 all held, 1 something is wrong, 2 wrong usage, 3 it cannot run here"
    )
    add = parser.add_argument
    add("kernel", choices=KERNELS, help="what to run")
    add("--shape", type=_shape, action="append", metavar="Q,K[,H,KV]", help="query and key tokens "
        "of one request, q heads and kv heads (default 2,1); may be repeated (default: a set "
        "with ragged ends, several tiles, heads and blocks)")  # fmt: skip
    add("--mag", type=_mag, metavar="M", help="threshold of our kernels as lambda = "
        "2**(-M/1000) (default: unequal ones of 100 to 3000; with --shape "
        "lambda is 0.05)")  # fmt: skip
    add("--skip-rate", type=_rate, metavar="R", help="inputs of our kernels of which this share "
        "of blocks is skipped, 0 to 1; needs --shape")  # fmt: skip
    add("--page-size", type=_page, default=0, metavar="N", help="keys a page, a multiple of 16; "
        "0 = contiguous (default: 0)")  # fmt: skip
    add("--dense", action="store_true", help="our kernels without a vote built in")
    add("--own-p", action="store_true", help="sm100: P in its own scores, not across stages")
    add("--mask", default="", metavar="NAME", help="our kernels under a block mask, such as "
        "shared_prefix, document or 'random blocks'; a wrong name lists them")  # fmt: skip
    add("--seeds", type=_count, default=None, metavar="N", help="schedules of each shape "
        "(default: 3)")  # fmt: skip
    add("--races", action=argparse.BooleanOptionalAction, default=True,
        help="look for races (default: yes)")  # fmt: skip
    add("--coverage", action="store_true", help="list every stretch of PTX that did not run, with "
        "its source line (default: the first ones)")  # fmt: skip
    add("--mutate", type=_count, default=None, metavar="N", help="also leave out every N-th "
        "synchronisation instruction and see whether it is noticed; 1 takes minutes")  # fmt: skip
    add("--timeline", type=Path, default=None, metavar="FILE.svg", help="draw a block of the "
        "first shape: a row a warp, a colour a step; times of a model (SM100 only)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 all held, 1 not, 2 wrong usage, 3 cannot run here."""
    try:
        from blasst.kernels.verify import plans
        from blasst.kernels.verify.report import examine, mutate
    except ImportError as e:
        return refuse(f"blasst verify needs torch and numpy: {e}; install blasst[cuda]", 3)
    reason = plans.missing(args.kernel)
    if reason is not None:
        return refuse(reason, 3)
    reason = _undrawable(args)
    if reason is not None:
        return refuse(reason, 2)
    try:
        plan = plans.make(
            args.kernel, shapes=args.shape, mag=args.mag, skip_rate=args.skip_rate,
            page_size=args.page_size, dense=args.dense, mask=args.mask,
            own_p=args.own_p,
        )  # fmt: skip
    except ValueError as e:
        return refuse(str(e), 2)
    try:
        _say(f"building {plan.subject.name} for {plan.subject.recipe.arch}")
        bench = plan.bench()
        cases = [(case, args.seeds or seeds) for case, seeds in plan.cases]
        report = examine(bench, cases, races=args.races, say=_say)
        if args.mutate and report.ok:
            chosen = [case for case, _ in cases]
            report.mutants, report.mutant_count = mutate(bench, chosen, args.mutate, _say)
        lines = report.lines(args.coverage)
        print(json.dumps(report.as_json(), indent=1) if args.json else "\n".join(lines))
        if not args.json:
            print("all held" if report.ok else "something is WRONG", flush=True)
        for line in _draw(args.timeline, plan) if args.timeline is not None else []:
            _say(line)
    except (BlasstError, OSError) as e:
        return refuse(str(e), 3)
    return 0 if report.ok else 1


def _undrawable(args: argparse.Namespace) -> str | None:
    """Why --timeline cannot be drawn, before minutes of work; None: it can."""
    if args.timeline is None:
        return None
    if args.kernel == "sm90":
        return "--timeline: there is a model of time for SM100 kernels only, not for sm90"
    if not args.timeline.parent.is_dir():
        return f"--timeline: the folder {args.timeline.parent} does not exist; make it first"
    return None


def _draw(target: Path, plan: Plan) -> list[str]:
    """Writes the picture; returns lines to print."""
    from blasst.kernels.instruments.timeline import step_totals, svg
    from blasst.kernels.verify.timing import time_block

    timing = time_block(plan.bench(), plan.cases[0][0])
    target.write_text(svg(timing.timeline))
    totals = sorted(step_totals(timing.timeline).items(), key=lambda item: -item[1].total)
    steps = ", ".join(f"{name} {total.share:.0%}" for name, total in totals[:6])
    return [
        f"{target}: {timing.cycles:,.0f} cycles in the model, tensor core busy "
        f"{timing.core_busy:.0%}; all warps: {steps}"
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shape(text: str) -> tuple[int, ...]:
    try:
        parts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not Q,K or Q,K,H,KV") from None
    if len(parts) not in (2, 4):
        raise argparse.ArgumentTypeError(f"{text!r} is not Q,K or Q,K,H,KV")
    parts = (*parts, 2, 1)[:4]
    if not all(1 <= n <= MAX_TOKENS for n in parts) or parts[2] % parts[3]:
        raise argparse.ArgumentTypeError(
            f"{text!r}: 1 to {MAX_TOKENS} tokens, and q heads a multiple of kv heads"
        )
    return parts


def _number(kind: type[T], text: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number ({kind.__name__})") from None


def _mag(text: str) -> float:
    value = _number(float, text)
    if not 0.0 < value <= 126000.0:
        raise argparse.ArgumentTypeError(f"MAG {text} is outside 0 < MAG <= 126000")
    return value


def _page(text: str) -> int:
    value = _number(int, text)
    if value < 0 or value % 16:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 16 keys, nor 0")
    return value


def _rate(text: str) -> float:
    value = _number(float, text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError("a skip rate must be at least 0 and below 1")
    return value


def _count(text: str) -> int:
    value = _number(int, text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
