"""The interpreter against a real GPU: same kernel, same inputs, outputs compared.

python -m blasst.kernels.verify.calibrate record FILE.npz     on a Hopper GPU
python -m blasst.kernels.verify.calibrate compare FILE.npz    anywhere
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blasst.kernels.hopper.config import Config
from blasst.kernels.verify.errors import VerifyError
from blasst.kernels.verify.plans import missing
from blasst.kernels.verify.registers import Array
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.subjects import hopper
from blasst.kernels.verify.subjects.attention import Shape

_EDGES = ((200, 333), (70, 70), (1, 1), (5, 300))
PROBLEMS: dict[str, tuple[Config, Shape]] = {
    "dense": (Config("bfloat16", 128, True, 0, False, False), Shape(_EDGES)),
    "vote": (Config("bfloat16", 128, True, 0, True, True), Shape(_EDGES)),
    "mag": (
        Config("bfloat16", 128, True, 0, True, True),
        Shape(((256, 1024),), mag=2500, seed=6),
    ),
    "paged": (Config("float16", 64, True, 16, True, True), Shape(_EDGES)),
}


@dataclass(frozen=True)
class Agreement:
    """Of one output. different: share of its values; largest: difference in `unit`."""

    problem: str
    output: str
    different: float
    largest: float
    unit: str

    def __str__(self) -> str:
        return (
            f"{self.problem}, {self.output}: {self.different:.3%} of the values differ, by at most "
            f"{self.largest:.3g} {self.unit}"
        )


def record(target: Path) -> None:
    """Runs every problem on the current CUDA device and keeps inputs' digests and outputs."""
    from blasst.kernels.hopper.compile import compile_prefill

    kept: dict[str, Array] = {"device": np.array(torch.cuda.get_device_name())}
    for name, (config, shape) in PROBLEMS.items():
        case = hopper.case(config, shape)
        moved = {id(t): t.cuda() for t in (*case.inputs.values(), *case.outputs.values())}
        arguments = [moved[id(a)] if isinstance(a, torch.Tensor) else a for a in case.arguments]
        compile_prefill(config)(*arguments)
        torch.cuda.synchronize()
        kept[f"{name}/inputs"] = np.array(_digest(case))
        for output, tensor in case.outputs.items():
            kept[f"{name}/{output}"] = _numbers(moved[id(tensor)].cpu())
    np.savez_compressed(target, allow_pickle=False, **kept)


def compare(source: Path) -> list[Agreement]:
    """Executes the PTX for the same inputs; raises VerifyError when they are not the same."""
    found = []
    with np.load(source) as kept:
        for name, (config, shape) in PROBLEMS.items():
            case = hopper.case(config, shape)
            if str(kept[f"{name}/inputs"]) != _digest(case):
                raise VerifyError(f"{source}: {name} was recorded with other inputs; record again")
            verdict = Workbench(hopper.subject(config)).run(case)
            if not verdict.ok:
                raise VerifyError(f"{name}: {'; '.join(verdict.describe())}")
            for output, tensor in case.outputs.items():
                got, want = _numbers(tensor), kept[f"{name}/{output}"]
                found.append(_agreement(name, output, got, want, tensor.dtype))
    return found


def _agreement(problem: str, output: str, got: Array, want: Array, dtype: torch.dtype) -> Agreement:
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    difference = np.where(same, 0.0, np.abs(got.astype(np.float64) - want))
    unit = "units"
    if dtype in (torch.bfloat16, torch.float16):
        # In units of the last place of the larger value.
        exponent = np.floor(np.log2(np.maximum(np.maximum(np.abs(got), np.abs(want)), 2.0**-14)))
        difference = difference / (torch.finfo(dtype).eps * 2.0**exponent)
        unit = "units in the last place"
    return Agreement(problem, output, float(1 - same.mean()), float(difference.max()), unit)


def _numbers(tensor: torch.Tensor) -> Array:
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()


def _digest(case: Case) -> str:
    digest = hashlib.sha256()
    for name in sorted(case.inputs):
        digest.update(case.inputs[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: recorded, or counters equal and outputs within one unit in the last place."""
    parser = argparse.ArgumentParser(prog="python -m blasst.kernels.verify.calibrate")
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if options.action == "compare" and not options.file.is_file():
        parser.error(f"{options.file} does not exist; `record` writes it on a Hopper GPU")
    reason = missing("sm90")
    if reason is not None:
        parser.error(reason)
    if options.action == "record" and not torch.cuda.is_available():
        parser.error("`record` needs a Hopper GPU, and torch finds none here")
    if options.action == "record":
        record(options.file)
        return 0
    found = compare(options.file)
    for agreement in found:
        print(agreement)
    bad = [a for a in found if a.output == "counters" and a.different]
    bad += [a for a in found if a.output == "out" and a.largest > 1.0]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
