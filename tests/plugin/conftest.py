"""Tiny models and engine scripts; each script is a process of its own, started once a session."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"

RunScript = Callable[..., dict[str, Any]]


def without_settings(extra: Mapping[str, str]) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_BLASST_")}
    return {**env, "PYTHONSAFEPATH": "1", **extra}


@pytest.fixture(scope="session")
def clean_environment() -> Callable[[Mapping[str, str]], dict[str, str]]:
    """The environment of a child process: this one without our settings, plus the given."""
    return without_settings


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


def make_model(folder: Path, changes: dict[str, Any] | None = None) -> None:
    arguments = [] if changes is None else [json.dumps(changes)]
    subprocess.run(
        [sys.executable, SCRIPTS / "make_model.py", folder, *arguments],
        check=True,
        env=without_settings({}),
        timeout=120,
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """A model folder with a changed configuration; it has no weights (load them as dummies)."""

    def make(changes: dict[str, Any]) -> Path:
        folder = tmp_path_factory.mktemp("model") / "changed"
        make_model(folder, changes)
        return folder

    return make


@pytest.fixture(scope="session")
def run_script(tiny_model: Path) -> RunScript:
    """Run scripts/NAME; its RESULT line as a dict, with the log under "log"."""

    def run(
        name: str, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, SCRIPTS / name],
            env=without_settings({"TINY_MODEL": str(tiny_model), **(env or {})}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        results = [s for s in done.stdout.splitlines() if s.startswith("RESULT ")]
        assert done.returncode == 0, done.stdout[-6000:]
        assert len(results) == 1, done.stdout[-6000:]
        result: dict[str, Any] = json.loads(results[0].removeprefix("RESULT "))
        return {**result, "log": done.stdout}

    return run


OVERLAY_EXTRAS = ("orjson",)
"""Pure additions that another release imports and the installed one does not need."""


@pytest.fixture(scope="session")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """PYTHONPATH of another vLLM release: its Python over the installed release's binaries.

    The wheels are downloaded once, into the user's cache. An unsupported mixture, which shows that
    the interfaces we use exist there and behave the same.
    """
    made: dict[str, str] = {}

    def path(version: str) -> str:
        if version not in made:
            folder = tmp_path_factory.mktemp(f"vllm-{version}")
            with zipfile.ZipFile(cached_wheel("vllm", version)) as wheel:
                wheel.extractall(
                    folder,
                    [n for n in wheel.namelist() if n.startswith("vllm/") and n[-3:] != ".so"],
                )
            for extra in OVERLAY_EXTRAS:
                if importlib.util.find_spec(extra) is None:
                    with zipfile.ZipFile(cached_wheel(extra)) as wheel:
                        wheel.extractall(folder)
            for library in installed_vllm().glob("*.so"):
                (folder / "vllm" / library.name).symlink_to(library)
            made[version] = str(folder)
        return made[version]

    return path


def installed_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent


def cached_wheel(name: str, version: str = "") -> Path:
    """The wheel from the cache, downloaded at the first use; a skip with the reason otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(base) / "blasst" / "wheels"
    pattern = f"{name}-{version or '*'}-*.whl"
    if not list(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        wanted = f"{name}=={version}" if version else name
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", cache, wanted],
            capture_output=True,
            text=True,
            timeout=500,
        )
        if done.returncode != 0:
            pytest.skip(f"{wanted} cannot be downloaded: {done.stderr.strip()[-200:]}")
    return next(cache.glob(pattern))
