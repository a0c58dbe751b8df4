"""`blasst bench masks` on a CPU: the program that a GPU only has to run."""

import json
from pathlib import Path

import pytest
import torch

from blasst.kernels.bench import mask_cases
from blasst.kernels.bench.mask_verb import SECTIONS, find_crossover, markdown
from blasst.kernels.masks.crossover import Crossover
from blasst.server.cli import main

SMALL = ["--device", "cpu", "--heads", "1", "--head-dim", "64", "--rounds", "1", "--small", "64"]


def test_rows_are_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "rows.json", tmp_path / "table.md"
    chosen = [s for s in SECTIONS if s != "score_mod"]
    arguments = ["bench", "masks", *SMALL, "--lengths", "640", "--sections", ",".join(chosen)]
    assert main([*arguments, "--json", str(out), "--markdown", str(table)]) == 0
    found = json.loads(out.read_text())
    assert list(found["sections"]) == chosen
    assert all(found["sections"][name] for name in chosen)
    speed = found["sections"]["speed"]
    assert {row["route"] for row in speed} == {"eager", "sdpa"}
    assert all(row["both_ms"] > 0 for row in speed)
    assert all(row["dq_relative"] < 1e-5 for row in found["sections"]["errors"])
    repeats = found["sections"]["determinism"]
    assert {row["setting"] for row in repeats} == {"off", "warn_only", "strict"}
    rates = [row["skip_rate"] for row in found["sections"]["votes"] if "95%" in row["what"]]
    assert all(rate > 0.3 for rate in rates)
    assert found["crossover"] == []
    assert table.read_text().strip() == capsys.readouterr().out.strip()
    assert "| shared_prefix | 640 | sdpa |" in table.read_text()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--sections", "fast"], 2), (["--lengths", "x"], 2), (["--rounds", "0"], 2)],
)
def test_wrong_usage(arguments: list[str], code: int) -> None:
    assert main(["bench", "masks", *SMALL, *arguments]) == code


def row(tokens: int, mask: str, route: str, forward: float, both: float) -> dict[str, object]:
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
    ]
    table = find_crossover(rows, 9)
    assert table == [
        {"needs_grad": False, "major": 9, "tokens": 4096},
        {"needs_grad": True, "major": 9, "tokens": 8192},
    ]
    out = tmp_path / "rows.json"
    out.write_text(json.dumps({"crossover": table}))
    loaded = Crossover.load(out)
    assert loaded.fa4_from((9, 0), True) == 8192
    assert loaded.fa4_from((9, 0), False) == 4096
    assert loaded.fa4_from((10, 0), True) > 1 << 40
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
