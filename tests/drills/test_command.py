"""The drills' command line refuses in one line what cannot work."""

from __future__ import annotations

import json

import pytest

from blasst.deploy.drills.__main__ import main


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kill", "--model", "nothing-here"), "has no config.json"),
        (("soak", "--model", "nothing-here"), "has no config.json"),
        (("dashboard", "--prometheus", "http://127.0.0.1:1"), "Prometheus at http://127.0.0.1:1"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("drills: ")
    assert words in err


def test_more_kills_than_changes(model, capsys):
    assert main(["kill", "--model", str(model), "--changes", "10"]) == 2
    assert "29 kills need more than 10 changes" in capsys.readouterr().err


def test_help_says_what_a_drill_does(capsys):
    for drill in ("kill", "soak", "dashboard"):
        with pytest.raises(SystemExit) as ended:
            main([drill, "--help"])
        assert ended.value.code == 0
        assert "--" in capsys.readouterr().out
