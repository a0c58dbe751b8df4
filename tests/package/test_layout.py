"""The package list, import directions and lazy imports that pyproject and DESIGN promise."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "plugin", "server", "evals", "deploy")
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())

MAY_IMPORT = {
    # package -> prefixes of our own modules that it may import, itself aside
    "kernels": (),
    "plugin": ("blasst.kernels",),
    "server": ("blasst.kernels.threshold", "blasst.kernels.exchange"),
    "evals": ("blasst.kernels.threshold", "blasst.kernels.exchange.presets"),
    # Drills watch the files of a deployment and record what the plugin decides.
    "deploy": ("blasst.kernels.threshold", "blasst.kernels.exchange", "blasst.plugin"),
}

NEEDS_VLLM = {
    # Modules that subclass vLLM's classes; vLLM itself loads them.
    "blasst.plugin.backend",
    "blasst.plugin.client_error",
    "blasst.plugin.cpu_backend",
    "blasst.plugin.cuda_backend",
    "blasst.plugin.stat_logger",
}

DEVICE_CODE = (
    "blasst.kernels.triton.device",
    "blasst.kernels.cute.",
    "blasst.kernels.instruments.plants",
    *(f"blasst.kernels.hopper.{m}" for m in ("compile", "consume", "epilogue", "prefill", "seen")),
    *(
        f"blasst.kernels.blackwell.{m}"
        for m in ("compile", "correction", "edges", "epilogue", "mma", "prefill", "softmax")
    ),
)
"""Modules that hold kernels; the launch module beside each loads them on demand."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("blasst", *(p for p in parts if p != "__init__")))


MODULES = sorted({module_name(p) for package in PACKAGES for p in sources(package)})


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module_name(path).split(".")
                keep = len(up) - node.level + (path.name == "__init__.py")
                base = ".".join([*up[:keep], *([base] if base else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def test_every_package_folder_is_listed() -> None:
    folders = {
        module_name(init.parent / "__init__.py")
        for package in PACKAGES
        for init in (ROOT / package).rglob("__init__.py")
    }
    assert folders == set(CONFIG["tool"]["setuptools"]["packages"])


def test_no_source_file_outside_a_listed_package() -> None:
    for package in PACKAGES:
        for path in sources(package):
            assert (path.parent / "__init__.py").exists(), path


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    allowed = (f"blasst.{package}", *MAY_IMPORT[package])
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imported(path)
        if name.startswith("blasst.")
        and not any(name == a or name.startswith(a + ".") for a in allowed)
        and not any(a.startswith(name + ".") and name != "blasst" for a in allowed[1:])
    ]
    assert wrong == []


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "plugin"])
def test_only_the_plugin_imports_vllm(package: str) -> None:
    allowed = {ROOT / "kernels/bench/peers.py"}
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources(package)
        if path not in allowed and any(n == "vllm" or n.startswith("vllm.") for n in imported(path))
    ]
    assert wrong == []


BLOCKER = "import sys\nfor name in BLOCKED: sys.modules[name] = None"
"""An import of such a name fails as if it were not installed, and find_spec finds nothing."""


def run_blocked(blocked: set[str], code: str) -> None:
    program = f"BLOCKED = {blocked!r}\n{BLOCKER}\n{code}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


HEAVY = {"vllm", "triton", "cutlass", "flash_attn", "quack", "cuda"}


def test_everything_imports_without_vllm_and_device_packages() -> None:
    names = [m for m in MODULES if m not in NEEDS_VLLM and not m.startswith(DEVICE_CODE)]
    assert len(names) > 30
    run_blocked(HEAVY, f"import importlib\nfor n in {names!r}: importlib.import_module(n)")


def test_light_modules_import_with_the_standard_library_alone() -> None:
    light = [
        "blasst.kernels",
        "blasst.kernels.threshold",
        "blasst.kernels.exchange.desired",
        "blasst.kernels.exchange.stats",
        "blasst.kernels.exchange.layout",
        "blasst.kernels.exchange.presets",
        "blasst.plugin",
        "blasst.server.cli",
        "blasst.evals",
    ]
    blocked = HEAVY | {"torch", "numpy", "fastapi", "transformers", "prometheus_client", "httpx"}
    run_blocked(blocked, f"import importlib\nfor n in {light!r}: importlib.import_module(n)")


def test_tests_collect_without_vllm_and_device_packages() -> None:
    run_blocked(
        HEAVY,
        "import pytest\n"
        "raise SystemExit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider']))",
    )


def test_verbs_exist_and_configure() -> None:
    import argparse
    import importlib

    verbs = CONFIG["project"]["entry-points"]["blasst.verbs"]
    for name, target in verbs.items():
        module = importlib.import_module(target)
        parser = argparse.ArgumentParser(name)
        module.configure(parser)
        assert parser.format_help().strip()
        assert callable(module.run)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600


CAPS = {"kernels/blackwell": 500, "kernels/hopper": 500, "kernels/cute": 500}


def test_files_stay_within_their_line_caps() -> None:
    too_long = {}
    for package in PACKAGES:
        for path in sources(package):
            folder = path.relative_to(ROOT).parent.as_posix()
            lines = len(path.read_text().splitlines())
            if lines > CAPS.get(folder, 450):
                too_long[str(path.relative_to(ROOT))] = lines
    assert too_long == {}
