"""Documents of deploy/, and the programs that check them where they are installed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def deploy() -> Path:
    return DEPLOY


@pytest.fixture
def load() -> Callable[[str], list[dict[str, Any]]]:
    """All documents of one YAML file below deploy/."""

    def documents(name: str) -> list[dict[str, Any]]:
        return [d for d in yaml.safe_load_all((DEPLOY / name).read_text()) if d is not None]

    return documents


@pytest.fixture
def entry() -> Callable[[str], list[str]]:
    """The entry point of one of our images."""

    def words(image: str) -> list[str]:
        text = (DEPLOY / "images" / f"{image}.Dockerfile").read_text()
        found: list[str] = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)[-1])
        return found

    return words


@pytest.fixture
def program() -> Callable[[str], str]:
    """The path of promtool, prometheus or hadolint; the test is skipped where there is none."""

    def find(name: str) -> str:
        beside = Path(sys.executable).with_name(name)
        found = str(beside) if beside.exists() else shutil.which(name)
        if found is None:
            pytest.skip(f"no {name} here (make test fetches it: .ci/promtool, deploy/cpu/lock.txt)")
        return found

    return find
