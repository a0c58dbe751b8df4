"""What a Hopper GPU made of seeded problems and of single instructions, kept in one file.

A recording holds kernels, inputs and outputs, so that it can be compared anywhere, at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blasst.kernels.hopper.config import Config
from blasst.kernels.hopper.launch import config_for
from blasst.kernels.verify.build import SUFFIXES, Artifact, build
from blasst.kernels.verify.registers import Array
from blasst.kernels.verify.subject import Case
from blasst.kernels.verify.subjects import hopper
from blasst.kernels.verify.subjects.attention import Shape

_EDGES = ((200, 333), (70, 70), (1, 1), (5, 300))
_MAG = Shape(((256, 1024),), mag=2500, seed=6)
FUNCTIONS = ("ex2.approx.ftz.f32", "lg2.approx.ftz.f32", "rcp.approx.ftz.f32")
MANTISSAS = 1 << 23


def _as_it_is(case: Case) -> None:
    """Inputs as the seed gives them."""


def _flat(case: Case) -> None:
    """All scores 0: every P is 1, so `out` shows the sums of P @ V alone."""
    case.inputs["q"].zero_()


def _bare(case: Case) -> None:
    """One key and a scale of 1: lse is a score times ln 2, so it shows the sum of Q @ K alone."""
    arguments = list(case.arguments)
    arguments[-2] = 1.0
    case.arguments = arguments
    case.check = list


@dataclass(frozen=True)
class Problem:
    """A build (dtype, head_dim, page_size, vote) and a shape. prepare: changes the case."""

    build: tuple[str, int, int, bool]
    shape: Shape
    prepare: Callable[[Case], None] = _as_it_is
    causal: bool = True

    def case(self) -> Case:
        """With seeded inputs."""
        case = hopper.case(self.config, self.shape)
        self.prepare(case)
        return case

    @property
    def config(self) -> Config:
        """What ships for this build."""
        dtype, head_dim, page_size, vote = self.build
        return config_for(
            dtype, head_dim, causal=self.causal, page_size=page_size, vote=vote, count=vote
        )


_DENSE, _VOTE = ("bfloat16", 128, 0, False), ("bfloat16", 128, 0, True)
PROBLEMS: dict[str, Problem] = {
    "dense": Problem(_DENSE, Shape(_EDGES)),
    "vote": Problem(_VOTE, Shape(_EDGES)),
    "vote, other inputs": Problem(_VOTE, Shape(_EDGES, seed=1)),
    "MAG 2500": Problem(_VOTE, _MAG),
    "pages of 16": Problem(("bfloat16", 128, 16, True), Shape(_EDGES)),
    "head_dim 64": Problem(("float16", 64, 0, True), Shape(_EDGES)),
    "head_dim 64, pages of 16": Problem(("float16", 64, 16, True), Shape(_EDGES)),
    "one key": Problem(_DENSE, Shape(((256, 1),) * 4, num_heads=2), _bare, causal=False),
    "flat": Problem(("float16", 64, 0, True), Shape(((64, 512), (64, 64))), _flat),
}


@dataclass(frozen=True)
class Recording:
    """values: the file's arrays by name."""

    values: Mapping[str, Array]

    @property
    def device(self) -> str:
        return str(self.values["device"])

    def artifact(self, problem: str, folder: Path) -> Artifact:
        """The kernel that ran, in `folder`."""
        for suffix in SUFFIXES:
            data = self.values[f"{problem}/kernel/{suffix}"]
            (folder / f"kernel.{suffix}").write_bytes(data.tobytes())
        return Artifact(folder)

    def of_mantissas(self, opcode: str) -> Array:
        """Results of an instruction for the first MANTISSAS of its arguments."""
        values = arguments_of(opcode)[:MANTISSAS].numpy()
        off = self.values[f"functions/{opcode}"][:MANTISSAS]
        found: Array = (exact(opcode, values).view(np.int32) + off).view(np.float32)
        return found

    def case(self, problem: str) -> Case:
        """With the inputs that were used."""
        case = PROBLEMS[problem].case()
        for name, tensor in case.inputs.items():
            tensor.copy_(self._tensor(f"{problem}/inputs/{name}", tensor))
        return case

    def outputs(self, problem: str, case: Case) -> dict[str, torch.Tensor]:
        """What the GPU made of it."""
        return {n: self._tensor(f"{problem}/outputs/{n}", t) for n, t in case.outputs.items()}

    def _tensor(self, key: str, like: torch.Tensor) -> torch.Tensor:
        raw = torch.from_numpy(np.array(self.values[key]))
        return raw.view(like.dtype).reshape(like.shape)


def arguments_of(opcode: str) -> torch.Tensor:
    """Float32 values for an instruction: all of one binade, and a sample of others."""
    every = np.arange(MANTISSAS, dtype=np.uint32)
    if opcode.startswith("ex2"):  # -2 < x <= -1, then down to -64 and up to -2**-12
        exponents = [127 + e for e in (0, -12, -6, -4, -3, -2, -1, 1, 2, 3, 4, 5)]
        sign = np.uint32(1 << 31)
    else:
        exponents, sign = [127 + e for e in (0, -20, -3, -1, 1, 2, 7, 12)], np.uint32(0)
    sampled = every[:: 1 << 9] + np.uint32(77)
    parts = [every, *(sampled for _ in exponents[1:])]
    bits = [(np.uint32(e << 23) + part) | sign for e, part in zip(exponents, parts, strict=True)]
    return torch.from_numpy(np.concatenate(bits).view(np.float32))


def exact(opcode: str, values: Array) -> Array:
    """The function of an instruction, rounded to float32 from float64."""
    wide = values.astype(np.float64)
    function = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal}[opcode[:3]]
    rounded: Array = function(wide).astype(np.float32)
    return rounded


def units(got: Array, want: Array) -> Array:
    """Floats between two float32 values of one sign."""
    return got.view(np.int32).astype(np.int64) - want.view(np.int32)


@dataclass(frozen=True)
class Device:
    """What computes: name, an instruction on float32 values, and a problem (fills its outputs)."""

    name: str
    unary: Callable[[str, torch.Tensor], torch.Tensor]
    launch: Callable[[Problem, Case], None]


def gpu() -> Device:
    """The current CUDA device."""
    from blasst.kernels.hopper.compile import compile_prefill
    from blasst.kernels.verify.device import unary

    def launch(problem: Problem, case: Case) -> None:
        moved = {id(t): t.cuda() for t in (*case.inputs.values(), *case.outputs.values())}
        compile_prefill(problem.config)(*(moved.get(id(a), a) for a in case.arguments))
        torch.cuda.synchronize()
        for tensor in case.outputs.values():
            tensor.copy_(moved[id(tensor)])

    return Device(torch.cuda.get_device_name(), unary, launch)


def record(target: Path, device: Device, say: Callable[[str], None]) -> int:
    """Runs everything on the device; returns how much of it failed."""
    kept: dict[str, Array] = {"device": np.array(device.name)}
    failed = 0
    for opcode in FUNCTIONS:
        try:
            values = arguments_of(opcode)
            off = units(device.unary(opcode, values).numpy(), exact(opcode, values.numpy()))
        except Exception as e:  # the next one may still work, and device time is short
            failed += 1
            say(f"{opcode}: FAILED: {type(e).__name__}: {e}")
            continue
        say(f"{opcode}: {np.count_nonzero(off)} of {off.size} differ, up to {np.abs(off).max()}")
        kept[f"functions/{opcode}"] = np.clip(off, -127, 127).astype(np.int8)
    for name, problem in PROBLEMS.items():
        try:
            case = problem.case()
            artifact = build(hopper.subject(problem.config).recipe)
            device.launch(problem, case)
        except Exception as e:
            failed += 1
            say(f"{name}: FAILED: {type(e).__name__}: {e}")
            continue
        for kind, tensors in (("inputs", case.inputs), ("outputs", case.outputs)):
            kept.update({f"{name}/{kind}/{n}": _bytes(t) for n, t in tensors.items()})
        for suffix in SUFFIXES:
            data = (artifact.folder / f"kernel.{suffix}").read_bytes()
            kept[f"{name}/kernel/{suffix}"] = np.frombuffer(data, np.uint8)
        wrong = case.check()
        say(f"{name}: {'; '.join(wrong) if wrong else 'equals the oracle'}")
    np.savez_compressed(target, allow_pickle=False, **kept)
    return failed


def _bytes(tensor: torch.Tensor) -> Array:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).copy()
