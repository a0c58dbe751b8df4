"""The machine in one line."""

from __future__ import annotations

import re
from pathlib import Path

from blasst.evals.machine import cpu_model, describe_machine


def test_the_line_holds_model_cores_and_load() -> None:
    assert re.fullmatch(
        r"[^,]+, \d+ cores?, \w+ \w+, load average \d+\.\d at the start", describe_machine()
    )


def test_a_cpu_without_a_name_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Fast CPU 1\nmodel name\t: Fast CPU 2\n")
    assert cpu_model(file) == "Fast CPU 1"
    file.write_text("processor\t: 0\n")
    assert cpu_model(file) == cpu_model(tmp_path / "none") == "unknown CPU"
