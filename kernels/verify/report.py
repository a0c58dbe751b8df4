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
    """One case under its schedules. digests: different outputs, one when all is well."""

    name: str
    schedules: int
    digests: list[str]
    problems: list[str]
    blocks: int
    instructions: int
    products: int
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems and len(self.digests) == 1

    def line(self) -> str:
        state = "ok" if self.ok else "WRONG"
        return (
            f"{state:5} {self.name}: {self.schedules} schedules, {self.blocks} blocks, "
            f"{self.instructions:,} warp instructions, {self.products} products, "
            f"{self.seconds:.1f} s"
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
    digests: dict[str, int] = {}
    problems: list[str] = []
    steps = products = 0
    for seed in range(seeds):
        verdict = bench.run(case, seed=seed, races=races)
        digests[verdict.digest] = seed
        problems += [f"schedule {seed}: {line}" for line in verdict.describe()]
        steps, products = verdict.run.steps, verdict.run.products
        ran.append(verdict.run.findings)
    blocks = len(bench.launch(case).blocks)
    seconds = time.perf_counter() - started
    return CaseReport(case.name, seeds, [*digests], problems, blocks, steps, products, seconds)


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
