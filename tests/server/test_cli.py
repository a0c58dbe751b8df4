"""The program `blasst`: its verbs, its help, and one line for each error."""

from __future__ import annotations

import subprocess
import sys
import types
from importlib.metadata import EntryPoint, entry_points, version

import pytest

from blasst.server import cli


@pytest.fixture
def verbs(monkeypatch):
    """Replace the installed verbs; returns the function that adds one."""
    points = []
    monkeypatch.setattr(cli.importlib.metadata, "entry_points", lambda group: points)

    def add(name, module_name=None, **members):
        module_name = module_name or f"blasst_test_verb_{name}"
        if members:
            module = types.ModuleType(module_name)
            module.configure = members.pop("configure", lambda parser: None)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, module_name, module)
        points.append(EntryPoint(name, module_name, cli.GROUP))

    return add


def test_help_lists_every_installed_verb_with_a_summary(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    for point in entry_points(group=cli.GROUP):
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {point.name} ")]
        assert len(line.split(None, 1)) == 2


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"blasst {version('blasst')}\n"


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from blasst.server.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'fastapi', 'uvicorn', 'httpx', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("verb", ["serve", "sidecar", "threshold"])
def test_the_servers_verbs_configure_without_any_extra(verb):
    blocked = ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "torch", "vllm")
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "from blasst.server.cli import main\n"
        f"main([{verb!r}, '--help'])"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "exit codes:" in run.stdout


def test_no_arguments_is_usage(capsys):
    assert cli.main([]) == 2
    assert "verbs:" in capsys.readouterr().err


def one_line(capsys):
    err = capsys.readouterr().err
    assert err.startswith("blasst: error: ")
    assert err.count("\n") == 1
    return err


def test_an_unknown_verb_names_the_known(capsys, verbs):
    verbs("serve")
    assert cli.main(["sreve"]) == 2
    assert "choose one of serve" in one_line(capsys)


def test_only_the_verb_that_was_asked_for_is_loaded(verbs):
    verbs("broken", "blasst_test_absent")
    verbs("good", run=lambda args: 5)
    assert cli.main(["good"]) == 5


def test_a_verb_that_is_not_installed(capsys, verbs):
    verbs("doctor", "blasst.plugin.absent")
    assert cli.main(["doctor"]) == 1
    assert "not part of this installation" in one_line(capsys)


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("fastapi", "pip install 'blasst[server]'"),
        ("httpx", "pip install 'blasst[evals]'"),
        ("torch", "pip install 'blasst[cpu]'"),
        ("something_else", "needs the Python package something_else"),
    ],
)
def test_a_missing_dependency_names_the_extra(capsys, verbs, missing, advice):
    def run(args):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    verbs("thing", run=run)
    assert cli.main(["thing"]) == 1
    assert advice in one_line(capsys)


def test_usage_errors_are_one_line_and_exit_2(capsys, verbs):
    def configure(parser):
        parser.add_argument("--number", type=int)

    verbs("thing", configure=configure, run=lambda args: 0)
    for arguments in (["--number", "x"], ["--num", "1"], ["--unknown"], ["extra"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(["thing", *arguments])
        assert exit_.value.code == 2
        one_line(capsys)


def test_unknown_options_go_to_verbs_that_want_them(verbs):
    seen = []
    verbs("thing", ACCEPTS_UNKNOWN=True, run=lambda args: seen.extend(args.extra) or 0)
    assert cli.main(["thing", "MODEL", "--dtype", "float32", "-tp", "2"]) == 0
    assert seen == ["MODEL", "--dtype", "float32", "-tp", "2"]


def test_interruption_is_130(verbs):
    def run(args):
        raise KeyboardInterrupt

    verbs("thing", run=run)
    assert cli.main(["thing"]) == 130


def test_an_output_that_is_full_is_one_line(capsys, verbs):
    def run(args):
        with open("/dev/full", "w") as full:
            print("text", file=full, flush=True)

    verbs("thing", run=run)
    assert cli.main(["thing"]) == 1
    assert "No space left" in one_line(capsys)


def test_a_reader_that_left_is_no_traceback():
    code = (
        "import sys, types, importlib.metadata as m\n"
        "from blasst.server import cli\n"
        "verb = types.ModuleType('v'); verb.configure = lambda p: None\n"
        "verb.run = lambda a: [print('x' * 100, flush=True) for _ in range(10000)] and 0\n"
        "sys.modules['v'] = verb\n"
        "m.entry_points = lambda group: [m.EntryPoint('v', 'v', group)]\n"
        "sys.exit(cli.main(['v']))"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait(10) == 1
