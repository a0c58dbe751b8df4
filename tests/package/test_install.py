"""The built wheel and the editable install hold the same modules, entry points and data files."""

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "plugin", "server", "evals", "deploy")


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **env}, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    # From a copy of what git would ship, so that leftovers of a developer's tree cannot help.
    source = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    run(
        sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out),
        cwd=source,
    )  # fmt: skip
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that holds the wheel and nothing else."""
    venv = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=ROOT)
    python = venv / "bin" / "python"
    run(
        sys.executable, "-P", "-m", "pip", "--python", str(python), "install", "-q", "--no-deps",
        "--no-index", str(wheel), cwd=ROOT,
    )  # fmt: skip
    return python


def test_wheel_holds_every_source_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", *PACKAGES, cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        ships = path.suffix in (".py", ".c", ".h") or path.name == "py.typed"
        ships |= path.parent.name in ("static", "templates")
        if path.is_file() and ships:
            assert f"blasst/{name}" in names, f"{name} is missing from the wheel"
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_wheel_imports_and_runs_with_nothing_else_installed(bare_python: Path) -> None:
    code = (
        "import blasst.kernels.threshold as t, blasst.kernels.exchange.layout, blasst.plugin\n"
        "import blasst.server.cli; print(t.__file__, t.mag_to_lambda(1000))"
    )
    printed = run(str(bare_python), "-c", code, cwd=bare_python.parent)
    assert str(bare_python.parents[1]) in printed
    assert printed.split()[-1] == "0.5"
    program = bare_python.parent / "blasst"
    helped = run(str(program), "--help", cwd=bare_python.parent)
    for verb in ("serve", "doctor", "threshold", "ruler", "bench"):
        assert verb in helped


def test_editable_install_resolves_to_this_tree() -> None:
    code = "import blasst.kernels.threshold as t, blasst.evals as e; print(t.__file__, e.__file__)"
    files = run(sys.executable, "-P", "-c", code, cwd=ROOT.parent, PYTHONSAFEPATH="1").split()
    assert files == [str(ROOT / "kernels/threshold.py"), str(ROOT / "evals/__init__.py")]


def test_entry_points_of_the_installed_distribution() -> None:
    groups = {
        "console_scripts": {"blasst"},
        "vllm.general_plugins": {"blasst"},
        "vllm.stat_logger_plugins": {"blasst"},
    }
    found = importlib.metadata.distribution("blasst").entry_points
    for group, names in groups.items():
        assert {e.name for e in found.select(group=group)} == names


def test_hugging_face_kernels_is_not_shadowed_outside_the_root() -> None:
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and s.origin)"
    origin = run(sys.executable, "-P", "-c", code, cwd=ROOT, PYTHONSAFEPATH="1").strip()
    assert not origin.startswith(str(ROOT))
