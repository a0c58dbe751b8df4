"""A kernel under test: what to build, whose warps do what, and cases with an oracle."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from blasst.kernels.verify.build import Artifact, Recipe, build
from blasst.kernels.verify.capture import Launcher, link
from blasst.kernels.verify.evidence import Evidence
from blasst.kernels.verify.execute import Executor, Run
from blasst.kernels.verify.launch import Launch, Region
from blasst.kernels.verify.memory import Storage
from blasst.kernels.verify.program import Program


@dataclass(frozen=True)
class Subject:
    """roles: a warp's name. regions: names of places in dynamic shared memory. scoreboard: as in
    Launch."""

    name: str
    recipe: Recipe
    roles: Callable[[int], str]
    regions: tuple[Region, ...] = ()
    scoreboard: bool = False


@dataclass
class Case:
    """One launch. arguments: of the launcher, in order, torch CPU tensors among them.

    inputs, outputs: the tensors by name; outputs are put back to what they held before each run.
    check: after a run, what differs from the oracle, one line each.
    """

    name: str
    arguments: Sequence[Any]
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    check: Callable[[], list[str]]
    before: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = {name: t.clone() for name, t in self.outputs.items()}

    def reset(self) -> None:
        for name, tensor in self.outputs.items():
            tensor.copy_(self.before[name])

    def digest(self) -> str:
        """Of the outputs, bit for bit."""
        digest = hashlib.sha256()
        for name in sorted(self.outputs):
            digest.update(self.outputs[name].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def buffers(self) -> list[Storage]:
        """The memory behind the tensors; tensors that share memory are one buffer."""
        named = [(n, t, True) for n, t in self.outputs.items()]
        named += [(n, t, False) for n, t in self.inputs.items()]
        found: dict[int, Storage] = {}
        for name, tensor, writable in named:
            memory = tensor.untyped_storage()
            if memory.nbytes() and memory.data_ptr() not in found:
                raw = (ctypes.c_ubyte * memory.nbytes()).from_address(memory.data_ptr())
                data = np.ctypeslib.as_array(raw)
                found[memory.data_ptr()] = Storage(name, memory.data_ptr(), data, writable)
        return list(found.values())


@dataclass
class Verdict:
    """run: races, misuse, errors; wrong: differences to the oracle; digest: of the outputs."""

    seed: int
    run: Run
    wrong: list[str]
    digest: str

    @property
    def ok(self) -> bool:
        return self.run.clean and not self.wrong

    def describe(self) -> list[str]:
        return [*self.run.describe(), *self.wrong]


class Workbench:
    """A built subject, ready to run cases. artifact: built unless it is given."""

    def __init__(self, subject: Subject, artifact: Artifact | None = None) -> None:
        self.subject = subject
        self.artifact = artifact or build(subject.recipe)
        self.program = Program(self.artifact.module)
        self.launcher: Launcher = link(self.artifact.object_file, "kernel", self.artifact.module)
        self.executor = Executor(self.program)
        self.regions = subject.regions or self.artifact.regions

    def launch(self, case: Case) -> Launch:
        """Grid, parameters and descriptors that the kernel's own launcher makes of the case."""
        found = self.launcher.capture(case.arguments, self.subject.roles, self.regions)
        found.scoreboard = self.subject.scoreboard
        return found

    def run(
        self,
        case: Case,
        *,
        seed: int = 0,
        races: bool = True,
        evidence: Evidence | None = None,
        blocks: Sequence[tuple[int, int, int]] | None = None,
    ) -> Verdict:
        """One seeded schedule over all blocks; the outputs stay for a look."""
        case.reset()
        run = self.executor.run(
            self.launch(case), case.buffers, seed=seed, races=races, evidence=evidence,
            blocks=blocks,
        )  # fmt: skip
        return Verdict(seed, run, [] if run.error else case.check(), case.digest())
