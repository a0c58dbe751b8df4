"""For whoever has a B200: is the kernel right there, does it stay right, how fast is it, and why.

python -m blasst.kernels.blackwell.on_hardware [proved] [correctness] [soak] [bench] [timeline]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blasst.kernels.errors import refuse

STEPS = {
    "proved": "is the kernel the one whose PTX was proved",
    "correctness": "every problem of the proof, once, against the oracle",
    "soak": "1000 launches back to back, the same bits each time",
    "bench": "with and without a vote and cross-stage P, at chosen skip rates",
    "timeline": "clocks of the warps of one thread block",
}
CHECKS = ("proved", "correctness", "soak")  # whose lines say that something is wrong


def _missing() -> str | None:
    """Why it cannot run here; None: it can."""
    try:
        import cutlass  # noqa: F401
        import torch
    except ImportError as e:
        return f"{e}; install blasst[cuda]"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; this needs compute capability 10.0 or 10.3"
    found = torch.cuda.get_device_capability()
    if found[0] != 10:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {found[0]}.{found[1]}; this needs 10.0 or 10.3"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing wrong; 1: something is; 2: this is not such a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m blasst.kernels.blackwell.on_hardware",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:12} {what}" for name, what in STEPS.items()),
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; all if none")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for timelines")
    parser.add_argument("--seqlen", type=int, default=8192, help="tokens of a request")
    parser.add_argument("--batch", type=int, default=2, help="requests of the bench")
    parser.add_argument("--causal", action="store_true", help="of the bench")
    options = parser.parse_args(arguments)
    unknown = set(options.steps) - set(STEPS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(STEPS)}")
    reason = _missing()
    if reason is not None:
        return refuse(reason, 2)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    from blasst.kernels.blackwell import hardware_steps as steps

    jobs: dict[str, Callable[[], Iterator[str]]] = {
        "proved": steps.proved,
        "correctness": lambda: steps.correctness(steps.compile_for),
        "soak": lambda: steps.soak(steps.compile_for),
        "bench": lambda: steps.bench(options.seqlen, options.batch, options.causal),
        "timeline": lambda: steps.timeline(options.out, options.seqlen),
    }
    wrong = 0
    for step in options.steps or STEPS:
        print(f"{step}:", flush=True)
        lines = 0
        for line in jobs[step]():
            print(f"  {line}", flush=True)
            lines += 1
        if step in CHECKS:
            print(f"  {lines} wrong" if lines else "  all right")
            wrong += lines
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
