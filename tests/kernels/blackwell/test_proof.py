"""The programs that run the proof and the mutation score: what they do, skip and say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blasst.kernels.blackwell import mutation, proof, proved
from blasst.kernels.blackwell.problems import VOTING, Part, mutated, parts
from blasst.kernels.verify.subjects.attention import Shape

SMALL = Shape(((128, 128),), num_heads=1)
LARGE = Shape(((256, 640),), num_heads=4)
PART = Part("one", VOTING, (SMALL, LARGE), 14)
CASE, LARGE_CASE = "128x128, 1/1 heads", "256x640, 4/1 heads"


def row(seeds: list[int], digest: str = "d", **more: object) -> proof.Row:
    found = {"part": "one", "case": CASE, "ptx": "p", "seeds": seeds, "digests": [digest],
             "where": proof.environment(), "wrong": [], "seconds": 1.0}  # fmt: skip
    return {**found, **more}


def test_what_ran_is_not_run_again_unless_the_kernel_changed() -> None:
    rows = [row([0, 1]), row([2], ptx="another"), row([3], where="another")]
    found = proof.Proof([PART], {VOTING: "p"}, rows)
    tasks = list(found.tasks())
    assert [t.seeds for t in tasks if t.shape == SMALL] == [tuple(range(2, 14))]
    seeds = [t.seeds for t in tasks if t.shape == LARGE]
    assert seeds == [tuple(range(6)), tuple(range(6, 12)), (12, 13)]
    assert proof.Proof([PART], {VOTING: "p"}, rows, seeds=1).outcome(PART, CASE).ok


def test_a_problem_is_ok_when_all_schedules_ran_and_agree() -> None:
    found = proof.Proof([PART], {VOTING: "p"}, [row(list(range(12)))])
    assert not found.outcome(PART, CASE).ok
    assert "14 are wanted" in str(found.outcome(PART, CASE))
    found.add(row([12, 13]))
    assert found.outcome(PART, CASE).ok
    found.add(row([14], digest="e"))
    assert not found.outcome(PART, CASE).ok
    assert "WRONG, 2 outputs" in str(found.outcome(PART, CASE))
    raced = proof.Proof([PART], {VOTING: "p"}, [row(list(range(14)), wrong=["a race"])])
    assert "WRONG, 1 outputs: a race" in str(raced.outcome(PART, CASE))
    lines = list(proof.table([raced.outcome(PART, CASE), raced.outcome(PART, LARGE_CASE)]))
    assert lines[2:] == ["| one | p | 2 | 14 | 2 |"]


def test_problems_of_a_part_have_names_of_their_own() -> None:
    pytest.importorskip("cutlass", reason="the table of barriers needs nvidia-cutlass-dsl")
    from blasst.kernels.verify.subjects import blackwell

    for part in parts():
        names = [blackwell.case(part.config, shape).name for shape in part.shapes]
        assert len(set(names)) == len(names), part.name


def test_the_program_resumes_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    part = Part("one", VOTING, (SMALL,), 3)
    monkeypatch.setattr(proof, "parts", lambda: [part, replace(part, name="other")])
    out = tmp_path / "rows.jsonl"
    words = ["--part", "one", "--out", str(out)]
    assert proof.main([*words, "--limit", "0"]) == 1
    assert "1 wrong or not finished" in capsys.readouterr().out
    assert proof.main([*words, "--seeds", "1"]) == 0
    assert proof.main(words) == 0
    assert "3 schedules" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["seeds"] for r in rows] == [[0], [1, 2]]
    assert len({r["ptx"] for r in rows}) == 1
    assert len(rows[0]["ptx"]) == 64


@pytest.mark.parametrize("program", [proof.main, mutation.main])
def test_wrong_usage(program: object) -> None:
    assert callable(program)
    with pytest.raises(SystemExit) as stop:
        program(["--workers", "0"])
    assert stop.value.code == 2


def test_mutants_are_kept_counted_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    target = replace(mutated()[0], shapes=(SMALL,))
    monkeypatch.setattr(mutation, "mutated", lambda: [target])
    out = tmp_path / "rows.jsonl"
    words = ["--every", "40", "--out", str(out)]
    assert mutation.main(words) == mutation.main(words)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["number"] for r in rows] == list(range(0, 160, 40))
    assert all(bool(r["caught"]) != bool(r["why"]) for r in rows)
    said = capsys.readouterr().out
    caught = sum(bool(r["caught"]) for r in rows)
    assert said.count(f"| vote | {rows[0]['ptx'][:16]} | 4 | {caught}: ") == 2


def test_kinds_are_counted() -> None:
    assert mutation.kinds(["race: a", "race: b", "tail: c"]) == "2 race, 1 tail"


def test_every_build_of_the_proof_was_proved() -> None:
    first = {part.config: part.name for part in reversed(parts())}
    assert set(proved.PTX) == set(first.values())
    assert all(len(ptx) == 32 for ptx in proved.PTX.values())
