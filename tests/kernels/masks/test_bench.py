"""`blasst bench masks` on a CPU: the program that a GPU only has to run."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from blasst.kernels.bench import mask_cases
from blasst.kernels.bench.mask_verb import SECTIONS, find_crossover, markdown
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.masks.crossover import Crossover
from blasst.server.cli import main

SMALL = ["--device", "cpu", "--heads", "1", "--head-dim", "64", "--rounds", "1", "--small", "64"]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's C++ compiler takes longer than all the rest."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_rows_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "rows.json", tmp_path / "table.md"
    arguments = ["bench", "masks", *SMALL, "--lengths", "640"]
    assert main([*arguments, "--json", str(out), "--markdown", str(table)]) == 0
    chosen = list(SECTIONS)
    found = json.loads(out.read_text())
    assert list(found["sections"]) == chosen
    assert all(found["sections"][name] for name in chosen)
    speed = found["sections"]["speed"]
    assert {row["route"] for row in speed} == {"eager", "blasst", "sdpa", "sdpa-causal"}
    assert {row["mask"] for row in speed if row["route"] == "sdpa-causal"} == {"causal"}
    assert all(row["forward_ms"] > 0 for row in speed)
    assert all((row["both_ms"] or 0) > 0 or row["route"] == "blasst" for row in speed)
    errors = found["sections"]["errors"]
    assert all(row["out_relative"] < 1e-5 for row in errors)
    assert all(row["dq_relative"] < 1e-5 for row in errors if row["route"] != "blasst")
    (score,) = found["sections"]["score_mod"]
    assert score["left_out"] is None
    assert score["forward_difference"] < 1e-5
    assert score["forward_ratio"] > 0
    repeats = found["sections"]["determinism"]
    assert {row["setting"] for row in repeats} == {"off", "warn_only", "strict"}
    forms = found["sections"]["settings"]
    assert {row["form"] for row in forms} == {"mask", "score", "plain"}
    assert all(row["out_differ"] == 0 and row["repeats"] == 12 for row in (*repeats, *forms))
    axes = found["sections"]["invariance"]
    assert len(axes) == 3 * 2 * 3
    assert all(row["out"] == row["out_floor"] == 0 for row in axes)
    rates = [row["skip_rate"] for row in found["sections"]["votes"] if "95%" in row["what"]]
    assert all(rate > 0.3 for rate in rates)
    assert found["crossover"] == []
    assert table.read_text().strip() == capsys.readouterr().out.strip()
    assert "| shared_prefix | 640 | sdpa |" in table.read_text()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--sections", "fast"], 2),
        (["--masks", "causal,round"], 2),
        (["--lengths", "x"], 2),
        (["--rounds", "0"], 2),
    ],
)
def test_wrong_usage(arguments: list[str], code: int) -> None:
    assert main(["bench", "masks", *SMALL, *arguments]) == code


def row(
    tokens: int, mask: str, route: str, forward: float, both: float | None
) -> dict[str, object]:
    return {
        "tokens": tokens, "mask": mask, "route": route, "forward_ms": forward, "both_ms": both,
    }  # fmt: skip


def test_crossover_needs_every_mask_and_every_longer_length(tmp_path: Path) -> None:
    rows = [
        row(2048, "causal", "flex-fa4", 2.0, 1.0),
        row(2048, "causal", "flex-triton", 1.0, 2.0),
        row(4096, "causal", "flex-fa4", 2.0, 3.0),
        row(4096, "causal", "flex-triton", 3.0, 2.0),
        row(8192, "causal", "flex-fa4", 2.0, 2.0),
        row(8192, "causal", "flex-triton", 3.0, 3.0),
        row(8192, "strip", "flex-fa4", 2.0, 2.0),
        row(8192, "strip", "flex-triton", 3.0, 3.0),
        {"tokens": 8192, "mask": "strip", "route": "fa4", "left_out": "no"},
        *(row(n, "causal", "blasst", 1.5, None) for n in (2048, 4096, 8192)),
        *(row(n, "causal", "fa4", 1.6, 9.0) for n in (2048, 4096, 8192)),
        row(8192, "strip", "fa4", 3.0, 9.0),
        row(8192, "strip", "blasst", 1.9, None),
    ]
    table = find_crossover(rows, 9)
    assert table == [
        {"route": "flex-fa4", "needs_grad": False, "major": 9, "tokens": 4096},
        {"route": "flex-fa4", "needs_grad": True, "major": 9, "tokens": 8192},
        {"route": "blasst", "needs_grad": False, "major": 9, "tokens": 4096},
    ]
    assert find_crossover([*rows, row(8192, "strip", "blasst", 2.0, None)], 9)[2:] == []
    direct = [row(8192, mask, "fa4", 1.8, 1.0) for mask in ("causal", "strip")]
    assert find_crossover([*rows, *direct], 9) == [
        {"route": "fa4", "needs_grad": False, "major": 9, "tokens": 4096},
        {"route": "fa4", "needs_grad": True, "major": 9, "tokens": 8192},
        *table[:2],
    ]
    out = tmp_path / "rows.json"
    out.write_text(json.dumps({"crossover": [r | {"head_dim": 64} for r in table]}))
    loaded = Crossover.load(out)
    assert loaded.first("flex-fa4", (9, 0), True, 64) == 8192
    assert loaded.first("flex-fa4", (9, 0), False, 64) == 4096
    assert loaded.first("flex-fa4", (10, 0), True, 64) > 1 << 40
    assert loaded.first("blasst", (9, 0), False, 64) == 4096
    assert loaded.first("blasst", (9, 0), True, 64) > 1 << 40
    assert loaded.first("blasst", (9, 0), False, 128) > 1 << 40
    assert "4096" in markdown({"where": {}, "sections": {}, "crossover": table}, "blasst")


def test_layouts_of_the_benchmark() -> None:
    layout = mask_cases.segments(64)
    assert layout.segment_ids[0].unique_consecutive().tolist() == [0, 1, 2, 3]
    assert layout.turn_ids[0].unique_consecutive().tolist() == [0, 1, 2, 3]
    pinned = mask_cases.documents([16, 20, 28], 64)
    assert pinned.document_ids[0].unique_consecutive(return_counts=True)[1].tolist() == [16, 20, 28]
    own = mask_cases.packed("strip_thinking", pinned, "cpu").dense()[0, :16, :16]
    alone = mask_cases.bound(mask_cases.Case("strip_thinking", 16, device="cpu")).dense()[0]
    assert torch.equal(own, alone)


def test_the_exact_lane_is_a_contender() -> None:
    """On a CPU it is refused by name, like every lane that needs a GPU."""
    case = mask_cases.Case("causal", 64, 1, 2, 64, "cpu", torch.float32)
    attend = mask_cases.attend(mask_cases.EXACT, mask_cases.bound(case))
    assert mask_cases.EXACT in mask_cases.ROUTES
    with pytest.raises(UnsupportedError, match="flex-triton: tensors are on cpu"):
        attend(*mask_cases.inputs(case)[0])
