"""The interpreter against a real GPU: same kernel, same inputs, outputs compared.

python -m blasst.kernels.verify.calibrate record FILE.npz     on a Hopper GPU
python -m blasst.kernels.verify.calibrate compare FILE.npz    anywhere
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blasst.kernels.verify import numerics
from blasst.kernels.verify.errors import VerifyError
from blasst.kernels.verify.plans import missing
from blasst.kernels.verify.recording import (
    FUNCTIONS,
    PROBLEMS,
    Problem,
    Recording,
    gpu,
    record,
)
from blasst.kernels.verify.registers import Array
from blasst.kernels.verify.subject import Workbench
from blasst.kernels.verify.subjects import hopper

WORST = 3  # units: larger differences are counted together
LIMIT = 0.01  # share of values that may differ by WORST units or more


@dataclass(frozen=True)
class Agreement:
    """Of one output or instruction. by_units: share of values that are 0, 1, 2, >= 3 units off.

    A unit is the distance of neighbouring numbers of the type; of values below 1 in magnitude,
    for log-sum-exp, that at 1.
    """

    what: str
    values: int
    by_units: tuple[float, ...]
    largest: int

    def __str__(self) -> str:
        shares = ", ".join(
            f"{share:.3%} by {n}{' or more' if n == WORST else ''}"
            for n, share in enumerate(self.by_units)
            if n and share
        )
        return (
            f"{self.what}: {self.by_units[0]:.3%} of {self.values} values equal"
            f"{'; off ' + shares if shares else ''}; at most {self.largest}"
        )


def agreement(what: str, off: Array) -> Agreement:
    """off: differences in units."""
    size = np.abs(off.astype(np.int64)).reshape(-1)
    counts = np.bincount(np.minimum(size, WORST), minlength=WORST + 1)
    return Agreement(what, size.size, tuple(float(c) for c in counts / size.size), int(size.max()))


def units_apart(got: torch.Tensor, want: torch.Tensor) -> Array:
    """In units of the type; of float32 below 1, in units at 1."""
    if not got.is_floating_point():
        return (got - want).numpy()
    if got.dtype == torch.float32:
        scale = torch.finfo(got.dtype).eps * want.abs().clamp(min=1.0).log2().floor().exp2()
        same = (got == want) | (got.isnan() & want.isnan())
        off = torch.where(same, 0.0, (got.double() - want.double()) / scale)
        return off.round().long().numpy()
    bits = [t.view(torch.int16).int() for t in (got, want)]
    ordered = [torch.where(b < 0, -(b & 0x7FFF), b) for b in bits]
    return (ordered[0] - ordered[1]).numpy()


def compare(recording: Recording, as_hopper: bool = False) -> Iterator[Agreement]:
    """Executes the kernels that ran on the inputs that were used; as_hopper: with its rounding."""
    rounding: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if as_hopper:
        ex2, _, rcp = (recording.of_mantissas(opcode) for opcode in FUNCTIONS)
        rounding = numerics.hopper(ex2, rcp)
    with rounding:
        for name, problem in PROBLEMS.items():
            if f"{name}/kernel/ptx" in recording.values:
                yield from _compare(recording, name, problem, as_hopper)


def _compare(
    recording: Recording, name: str, problem: Problem, as_hopper: bool
) -> Iterator[Agreement]:
    case = recording.case(name)
    with tempfile.TemporaryDirectory() as folder:
        artifact = recording.artifact(name, Path(folder))
        if as_hopper:
            path = artifact.folder / "kernel.ptx"
            path.write_text(numerics.contracted(path.read_text().replace("\0", "")))
        verdict = Workbench(hopper.subject(problem.config), artifact).run(case, races=False)
    if not verdict.ok:
        raise VerifyError(f"{name}: {'; '.join(verdict.describe())}")
    for output, want in recording.outputs(name, case).items():
        yield agreement(f"{name}, {output}", units_apart(case.outputs[output], want))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: recorded, or counters are equal and few outputs far from it; 1: not."""
    parser = argparse.ArgumentParser(prog="python -m blasst.kernels.verify.calibrate")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--as-hopper", action="store_true", help="compare: round as the GPU does")
    options = parser.parse_args(arguments)
    if options.action == "compare" and not options.file.is_file():
        parser.error(f"{options.file} does not exist; `record` writes it on a Hopper GPU")
    reason = missing("sm90")
    if reason is not None:
        parser.error(reason)
    if options.action == "record":
        if not torch.cuda.is_available():
            parser.error("`record` needs a Hopper GPU, and torch finds none here")
        return int(record(options.file, gpu(), print) > 0)
    bad = False
    with np.load(options.file) as kept:
        recording = Recording(kept)
        print(f"recorded on {recording.device}")
        for opcode in FUNCTIONS:
            if f"functions/{opcode}" in kept:
                print(agreement(opcode, kept[f"functions/{opcode}"]))
        for found in compare(recording, options.as_hopper):
            print(found, flush=True)
            limit = 0 if found.what.endswith("counters") else LIMIT
            bad |= found.by_units[-1] > limit
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
