"""Results that somebody edited, or another program wrote: a verdict or one line, never more."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blasst.server.cli import main

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 5, 1e308, 1e999, -1e999, float("nan"), 10**400),
    *("", "x", "\ud800", "dense", "mag:1e9", [], [1], [[]], [None], {}, {"a": 1}),
)
SERVER = {"model": "m", "root": "m", "max_model_len": 4096, "min_context": 512}
PLAN: dict[str, Any] = {
    "kind": "plan",
    "fingerprint": "f",
    "server": SERVER | {"vllm_version": "1", "blasst_version": "1", "record_version": 3},
    "kernels": "cpu:128x128",
    "thresholds": ["dense", "mag:1000.0", "lambda:0.25"],
    "lengths": [2048],
    "tasks": ["vt"],
    "seeds": [42],
    "samples": 3,
    "mode": "balanced",
    "timed": 3,
    "concurrency": 8,
    "data": {"essays": "here"},
    "prompt_format": "chatml",
    "tokenizer_sha256": "0",
    "max_tokens": None,
    "blasst_version": "1",
    "python": "3",
    "machine": "x",
    "notes": ["a note"],
    "command": ["blasst", "ruler"],
    "at": 0.0,
}


def records() -> list[dict[str, Any]]:
    found = [copy.deepcopy(PLAN)]
    for which in ("accuracy", "ttft"):
        for skipped, key in enumerate(PLAN["thresholds"]):
            for index in range(3):
                record: dict[str, Any] = {"kind": "sample", "pass": which, "fingerprint": "f"}
                record |= {"key": f"{which}{key}{index}", "threshold": key, "task": "vt"}
                record |= {"sample": f"vt/{index}", "length": 2048, "index": index}
                record |= {"prompt_sha256": str(index), "prompt_tokens": 2000, "at": 0.0}
                record |= {"visited": 9, "skipped": skipped, "layers": [[0, 9, skipped]]}
                if which == "ttft":
                    record |= {"ttft_s": 1.0, "total_s": 1.0}
                else:
                    record |= {"prediction": "AB", "tokens": ["token_id:1"], "answers": ["AB"]}
                    record |= {"match": 1.0, "gold_nll": 0.5, "budget": 30}
                found.append(record)
    return found


def changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        made, key = value.copy(), rng.choice(keys)
        if rng.random() < 0.15:
            del made[key]
        else:
            made[key] = changed(value[key], rng)
        return made
    return rng.choice(JUNK)


def verbs(file: Path) -> list[list[str]]:
    out = file.parent
    calibrate = ["calibrate", "--results", str(file), "--geometry", "cpu:128x128"]
    return [
        ["verdict", str(file)],
        ["verdict", str(file), "--json"],
        ["recommend", str(file), "--json"],
        ["report", str(file), "--json", "--out", str(out / "report")],
        ["export", str(file), "--length", "2048", "--out", str(out / "export")],
        [*calibrate, "--out", str(out / "preset")],
    ]


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_in_the_file_is_a_verdict_or_one_line(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, found = random.Random(seed), records()
    for _ in range(rng.choice((1, 1, 2))):
        place = 0 if rng.random() < 0.4 else rng.randrange(len(found))
        found[place] = changed(found[place], rng)
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in found))
    for verb in verbs(file):
        code = main(["ruler", *verb])
        said = capsys.readouterr()
        judges = verb[0] in ("verdict", "recommend")
        assert code in ((2, 3) if judges else (0, 2))
        if (code == 3) if judges else (code == 2):
            assert said.err.splitlines()[-1].startswith("blasst: error: ")
        elif "--json" in verb:
            json.loads(said.out, parse_constant=no_constant)


@pytest.mark.parametrize(
    ("name", "value"),
    [("match", float("nan")), ("match", 5.0), ("match", -0.1), ("skipped", 10), ("visited", -1)],
)
def test_numbers_that_no_measurement_gives_are_no_verdict(
    name: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = records()
    found[1][name] = value
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in found))
    assert main(["ruler", "verdict", str(file)]) == 3
    assert f"{name} {value!r}" in capsys.readouterr().err


def test_a_verdict_that_cannot_be_written_is_no_no_go(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records()))
    blasst = str(Path(sys.executable).with_name("blasst"))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [blasst, "ruler", "verdict", str(file)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 3
    assert "the verdict cannot be written: No space left" in done.stderr


def test_a_verdict_into_a_closed_output_is_no_no_go(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records()))
    blasst = str(Path(sys.executable).with_name("blasst"))
    command = f"exec {blasst} ruler verdict {file} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, "standard output is closed" in done.stderr) == (3, True)


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), MemoryError(), AssertionError()])
@pytest.mark.parametrize("verb", ["verdict", "recommend"])
def test_a_fault_of_the_program_is_no_no_go(
    verb: str,
    fault: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records()))

    def faulty(*_: object) -> None:
        raise fault

    monkeypatch.setattr("blasst.evals.cells.collect", faulty)
    assert main(["ruler", verb, str(file)]) == 3
    assert type(fault).__name__ in capsys.readouterr().err
