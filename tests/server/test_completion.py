"""`blasst completion`: the scripts complete in the real shells."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from blasst.server import cli
from blasst.server.verbs.completion import completions


@pytest.fixture
def script(capsys):
    def make(shell):
        assert cli.main(["completion", shell]) == 0
        return capsys.readouterr().out

    return make


def complete(script, line):
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{w}'" for w in words)
    code = f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _blasst; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("blasst thr", ["threshold"]),
        ("blasst threshold ", ["--help", "get", "set", "watch"]),
        ("blasst threshold set --m", ["--mag", "--min-context"]),
        ("blasst sidecar --tls", ["--tls-cert", "--tls-key"]),
        ("blasst serve MODEL --sidecar-u", ["--sidecar-uds"]),
        ("blasst completion ", ["--help", "bash", "fish", "zsh"]),
        ("blasst nothing ", []),
    ],
)
def test_bash_completes(script, line, offered):
    assert sorted(complete(script("bash"), line)) == offered


def test_file_options_complete_files(script, tmp_path):
    (tmp_path / "token").touch()
    line = f"blasst sidecar --token-file {tmp_path}/to"
    assert complete(script("bash"), line) == [str(tmp_path / "token")]


def test_zsh_accepts_the_script(script, tmp_path):
    text = script("zsh")
    assert text.startswith("#compdef blasst\n")
    assert '"threshold set") words_=(' in text
    if not shutil.which("zsh"):
        pytest.skip("no zsh here: its script was read, not run (apt-get install zsh)")
    path = tmp_path / "_blasst"
    path.write_text(text)
    subprocess.run(["zsh", "-n", path], check=True, timeout=30)


def test_fish_completes(script, tmp_path):
    text = script("fish")
    assert "case 'threshold set'" in text
    if not shutil.which("fish"):
        pytest.skip("no fish here: its script was read, not run (apt-get install fish)")
    path = tmp_path / "blasst.fish"
    path.write_text(text)
    for line, offered in (
        ("blasst thr", ["threshold"]),
        ("blasst threshold set --m", ["--mag", "--min-context"]),
        ("blasst serve MODEL --sidecar-u", ["--sidecar-uds"]),
        (f"blasst sidecar --token-file {tmp_path}/bl", [str(path)]),
    ):
        code = f"source {path}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", code], capture_output=True, text=True, timeout=30
        )
        assert (done.stderr, sorted(w.split("\t")[0] for w in done.stdout.splitlines())) == (
            "",
            offered,
        )


def test_every_verb_is_offered_and_nothing_needs_quoting():
    words = completions()
    assert {"serve", "sidecar", "threshold", "completion"} <= set(words[""])
    for key, offered in words.items():
        assert all(w.replace("-", "").replace("_", "").isalnum() for w in offered), (key, offered)
