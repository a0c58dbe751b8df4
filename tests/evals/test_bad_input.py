"""Arguments that cannot work: one line with value, rule and remedy, before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blasst.evals.client import Completions
from blasst.evals.errors import InputError
from blasst.evals.sidecar import Sidecar
from blasst.evals.thresholds import point_of
from blasst.server.cli import main

BAD = {
    "generate --lengths 1024 2097152": "length 2097152 is outside 512..1048576",
    "generate --lengths 1024 --count 0": "0 samples",
    "sweep SERVER --timed -3": "--timed -3: give at least 0",
    "sweep SERVER --timeout 0": "--timeout 0: give seconds above 0",
    "sweep SERVER --timeout nan": "--timeout nan",
    "sweep SERVER --min-context -4": "--min-context -4: give at least 0",
    "sweep SERVER --min-context 1000 --lengths 1024": "run dense under every threshold",
    "sweep --url server --sidecar URL": "--url 'server' is not a URL; such as http",
    "sweep --url URL --sidecar localhost:8300": "--sidecar 'localhost:8300' is not a URL",
    "sweep --url http:// --sidecar URL": "--url 'http://' is not a URL; such as http",
    "sweep --url http://h:port --sidecar URL": "--url 'http://h:port' is not a URL (",
    "sweep --url URL --sidecar http://h?token=1": "has more than a path",
    "sweep SERVER --token-file TOKEN": "the token holds characters that no header can",
    "sweep --url URL URL --sidecar URL http://h:1": "twice: one sweep at a time on a server",
    "calibrate --url URL URL --sidecar URL URL": "2 --url and 2 --sidecar: give one of each",
    "calibrate SERVER --target 1.5": "--target 1.5: give a skip rate between 0 and 1",
    "doctor --url URL URL --sidecar URL": "give one of each",
    "preset FILE --from-config NOJSON --geometry cpu:128x128": "is no JSON",
    "preset FILE --from-config LIST --geometry cpu:128x128": "is no JSON object",
    "preset FILE --from-config LIST --geometry cpu:0x128": "is no JSON object",
    "preset FILE --from-config CONFIG --geometry cpu:0x128": "geometry 'cpu:0x128'",
    "preset FILE --from-config STEEP --geometry cpu:128x128 --target 0.3": "no finite scale",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_nothing_is_sent(
    line: str,
    tmp_path: Path,
    fake: Any,
    fake_url: str,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    factor = '{"formula": "a * exp(b * target_sparsity)", "prefill": {"a": 2, "b": 9}}'
    files = {
        "TOKEN": "one\ntwo",
        "NOJSON": "{",
        "LIST": "[1]",
        "CONFIG": f'{{"threshold_scale_factor": {factor}}}',
    }
    files["STEEP"] = files["CONFIG"].replace('"b": 9', '"b": 1e308')
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = line.replace("SERVER", "--url URL --sidecar URL").replace("URL", fake_url).split()
    argv = [str(tmp_path / w) if w in (*files, "FILE") else w for w in words]
    if words[0] != "preset":
        argv += ["--model", str(tiny_model)]
        argv += [] if words[0] == "doctor" else ["--out", str(tmp_path / "out")]
    assert main(["ruler", *argv]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("blasst: error: ")
    assert BAD[line] in error
    assert not fake.prompts
    assert not fake.puts
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(files)


def test_a_length_that_one_task_cannot_have_is_found_before_samples_of_others(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["ruler", "generate", "--model", str(tiny_model), "--out", str(tmp_path / "s")]
    argv += ["--tasks", "niah_single_1", "cwe", "--lengths", "4096", "512", "--count", "100000"]
    assert main(argv) == 2
    assert "length 512 is too short for cwe" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", " "])
def test_a_url_is_read_with_and_without_its_end(end: str) -> None:
    client, sidecar = Completions("http://h:1/x" + end), Sidecar("http://h:1/x" + end)
    assert client.url == sidecar.url == "http://h:1/x"
    client.close()
    sidecar.close()


@pytest.mark.parametrize("key", ["mag:True", "mag:true", "lambda:False", "scale:None", "mag"])
def test_what_is_no_number_is_no_threshold(key: str) -> None:
    with pytest.raises(InputError, match="in the results"):
        point_of(key)
