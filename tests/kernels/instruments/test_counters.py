"""Nsight Compute: its command line, and CSV in its form, written here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blasst.kernels.instruments.counters import METRICS, markdown, ncu_command, parse_csv

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"
OTHER = "sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_elapsed"
COLUMNS = {
    "ID": "",
    "Kernel Name": "",
    "gpu__time_duration.sum": "msecond",
    "smsp__inst_executed.sum": "inst",
    "smsp__inst_executed_pipe_xu.sum": "inst",
    "sm__inst_executed_pipe_tensor.sum": "Minst",
    TENSOR: "%",
    OTHER: "%",
    STALL.format("long_scoreboard"): "",
    STALL.format("barrier"): "",
}
ROWS = (
    ("0", "dense", "2.890", "1,022,747,540", "280,000,000", "33.816576", "83.33", "0", "1.5", "0"),
    ("1", "vote", "1.445", "600,000,000", "16,800,000", "17.1", "60.00", "0", "2.25", "0.75"),
)


def table(rows: tuple[tuple[str, ...], ...] = ROWS, units: dict[str, str] = COLUMNS) -> str:
    lines = ["==PROF== Connected to process 1", "a line of the program"]
    for row in (tuple(units), tuple(units.values()), *rows):
        lines.append(",".join(f'"{cell}"' for cell in row))
    return "\n".join(lines) + "\n"


def test_every_launch_is_read_with_its_units() -> None:
    dense, vote = parse_csv(table())
    assert (dense.name, vote.name) == ("dense", "vote")
    assert dense.time_us == 2890
    assert dense.instructions == 1022747540
    assert dense.products == 33816576
    assert dense.tensor_use == pytest.approx(0.8333)
    assert vote.exp2 / dense.exp2 == pytest.approx(0.06)
    assert vote.stalls == {"long_scoreboard": 2.25, "barrier": 0.75}


def test_dense_against_skipping_is_a_table() -> None:
    dense, vote = parse_csv(table())
    lines = markdown({"dense": dense, "95%": vote}).splitlines()
    assert lines[0] == "| | dense | 95% |"
    assert "| time, us | 2,890 | 1,445 (-50.0%) |" in lines
    assert "| tensor pipe, of its peak | 83.3% | 60.0% |" in lines
    assert "| exp2 and other XU instructions | 2.8e+08 | 1.68e+07 (-94.0%) |" in lines
    assert lines[-2:] == [
        "| stalled: long_scoreboard | 1.50 | 2.25 |",
        "| stalled: barrier | 0.00 | 0.75 |",
    ]


def test_a_chip_without_the_tensor_metric() -> None:
    units = {k: v for k, v in COLUMNS.items() if k not in (TENSOR, OTHER)}
    rows = tuple((*row[:6], *row[8:]) for row in ROWS)
    (dense, _) = parse_csv(table(rows, units))
    assert dense.tensor_use is None
    assert "| tensor pipe, of its peak | - |" in markdown({"dense": dense})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "printed no table: ==ERROR== ERR_NV"),
        ("Traceback\nRuntimeError: no GPU\n", "printed no table: .*no GPU"),
        (table(()), "profiled no kernel"),
        (table((("0", "k", "n/a", *ROWS[0][3:]),)), "'n/a' for gpu__time_duration.sum"),
        (table(tuple((r[0], *r[2:]) for r in ROWS), {k: v for k, v in COLUMNS.items()
         if k != "gpu__time_duration.sum"}), "no column gpu__time_duration.sum"),
    ],
)  # fmt: skip
def test_what_ncu_could_not_do_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_csv(text)


def test_the_command_asks_for_every_metric(tmp_path: Path) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text("")
    command = ncu_command(["python", "-c", "pass"], ncu=str(ncu))
    assert command[0] == str(ncu)
    assert command[-3:] == ["python", "-c", "pass"]
    assert command[command.index("--metrics") + 1].split(",") == list(METRICS)
    assert "--csv" in command


def test_an_absent_ncu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PATH", "")
    with pytest.raises(FileNotFoundError, match=r"Nsight Compute \(ncu\) is not here; install it"):
        ncu_command(["true"])
    with pytest.raises(FileNotFoundError, match="/no/ncu"):
        ncu_command(["true"], ncu="/no/ncu")
