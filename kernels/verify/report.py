"""Runs a kernel under many schedules and says what held: the work behind `blasst verify`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from blasst.kernels.verify.coverage import Coverage, coverage
from blasst.kernels.verify.findings import Findings
from blasst.kernels.verify.mutate import Mutant, candidates, mutants
from blasst.kernels.verify.subject import Case, Workbench
from blasst.kernels.verify.witness import Witness, witness

MISSED_SHOWN = 8


@dataclass
class CaseReport:
    """One case under its schedules. digests: different outputs, one when all is well.

    instructions, products, exp2: of one schedule, instructions of a warp. shared_bytes: dynamic
    shared memory of a thread block. visits: of blocks by tiles, None where nothing counts them.
    """

    name: str
    schedules: int
    digests: list[str]
    problems: list[str]
    blocks: int
    instructions: int
    products: int
    exp2: int
    shared_bytes: int
    visits: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems and len(self.digests) == 1

    def line(self) -> str:
        state = "ok" if self.ok else "WRONG"
        each = ""
        if self.visits:
            products, exp2 = self.products / self.visits, self.exp2 / self.visits
            each = f", a visited block {products:.1f} products and {exp2:.0f} exp2 of warps"
        return (
            f"{state:5} {self.name}: {self.schedules} schedules, {self.blocks} blocks, "
            f"{self.instructions:,} warp instructions{each}, {self.seconds:.1f} s"
        )


@dataclass
class Report:
    """Of one kernel. mutants: empty unless they were asked for."""

    kernel: str
    arch: str
    witness: Witness
    cases: list[CaseReport] = field(default_factory=list)
    covered: Coverage | None = None
    mutants: list[Mutant] = field(default_factory=list)
    mutant_count: int = 0

    @property
    def ok(self) -> bool:
        return all(case.ok for case in self.cases) and not self.witness.problems()

    def lines(self, all_missed: bool = False) -> list[str]:
        """For people; all_missed: every stretch of instructions that did not run."""
        out = [f"{self.kernel} for {self.arch}", *(f"  {t}" for t in self.witness.describe())]
        out += [f"  PROBLEM: {t}" for t in self.witness.problems()]
        if self.cases:
            most = max(case.shared_bytes for case in self.cases)
            out.append(f"  dynamic shared memory of a block: {most} bytes")
        for case in self.cases:
            out.append(f"  {case.line()}")
            out += [f"        {problem}" for problem in case.problems[:12]]
            if len(case.digests) > 1:
                out.append(f"        {len(case.digests)} different outputs over the schedules")
        if self.covered is not None:
            out += self._coverage(
                self.covered, len(self.covered.missed) if all_missed else MISSED_SHOWN
            )
        if self.mutants:
            caught = sum(bool(m.caught) for m in self.mutants)
            out.append(
                f"  mutation score: {caught} of {len(self.mutants)} synchronisation instructions "
                f"({self.mutant_count} in all) are missed when they are left out; the others:"
            )
            out += [f"    {m}" for m in self.mutants if not m.caught]
        return out

    def _coverage(self, covered: Coverage, most: int) -> list[str]:
        out = [
            f"  coverage: {covered.reached} of {covered.total} PTX instructions "
            f"({covered.share:.1%})"
        ]
        out += [f"    not reached: {i.opcode} at {i.where}" for i in covered.missed[:most]]
        left = len(covered.missed) - most
        return [*out, f"    and {left} more stretches (--coverage)"] if left > 0 else out

    def as_json(self) -> dict[str, Any]:
        covered = self.covered
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "ok": self.ok,
            "witness": {**vars(self.witness), "problems": self.witness.problems()},
            "cases": [{**asdict(case), "ok": case.ok} for case in self.cases],
            "coverage": None
            if covered is None
            else {
                "reached": covered.reached,
                "total": covered.total,
                "missed": [f"{i.opcode} at {i.where}" for i in covered.missed],
                "opcodes": dict(covered.opcodes),
            },
            "mutants": [
                {
                    "instruction": m.ins.opcode,
                    "where": m.ins.where,
                    "caught": m.caught,
                    "why": m.why,
                }
                for m in self.mutants
            ],
        }


def examine(
    bench: Workbench,
    cases: Sequence[tuple[Case, int]],
    *,
    races: bool,
    say: Callable[[str], None],
) -> Report:
    """Every case under its number of schedules, seeds 0 and up."""
    subject = bench.subject
    report = Report(subject.name, subject.recipe.arch, witness(bench.artifact))
    ran: list[Findings] = []
    for case, seeds in cases:
        say(f"running {case.name} under {seeds} schedules")
        report.cases.append(_run_case(bench, case, seeds, races, ran))
    report.covered = coverage(bench.program, ran)
    return report


def _run_case(
    bench: Workbench, case: Case, seeds: int, races: bool, ran: list[Findings]
) -> CaseReport:
    started = time.perf_counter()
    launch = bench.launch(case)
    digests: dict[str, int] = {}
    problems: list[str] = []
    for seed in range(seeds):
        verdict = bench.run(case, seed=seed, races=races)
        digests[verdict.digest] = seed
        problems += [f"schedule {seed}: {line}" for line in verdict.describe()]
        ran.append(verdict.run.findings)
    counters = case.outputs.get("counters")
    return CaseReport(
        case.name, seeds, [*digests], problems,
        blocks=len(launch.blocks),
        instructions=verdict.run.steps,
        products=verdict.run.products,
        exp2=coverage(bench.program, ran[-1:]).count("ex2"),
        shared_bytes=launch.shared_bytes,
        visits=None if counters is None else int(counters[:, 0].sum()),
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def mutate(
    bench: Workbench, cases: Sequence[Case], every: int, say: Callable[[str], None]
) -> tuple[list[Mutant], int]:
    """(results of every n-th synchronisation instruction, how many there are)."""
    total = len(candidates(bench.program.instructions))
    found = []
    for mutant in mutants(bench, cases, chosen=lambda index: index % every == 0):
        found.append(mutant)
        say(f"{len(found)} of {-(-total // every)}: {mutant}")
    return found, total
