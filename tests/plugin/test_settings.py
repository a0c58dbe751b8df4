"""The settings: frozen names and defaults, one table in the docs, every bad value refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from blasst.kernels.threshold import SkipThreshold
from blasst.plugin.settings import NAMES, Settings, SettingsError, check_state_dir

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"

FROZEN = {
    "VLLM_BLASST_STATE_DIR": "unset",
    "VLLM_BLASST_MAG": "unset",
    "VLLM_BLASST_LAMBDA": "unset",
    "VLLM_BLASST_SCALE": "unset",
    "VLLM_BLASST_MIN_CONTEXT": "8192",
    "VLLM_BLASST_STRICT": "0",
    "VLLM_BLASST_SHARE_PREFIX_CACHE": "0",
    "VLLM_BLASST_IMPL": "auto",
    "VLLM_BLASST_STATS_INTERVAL_S": "0.5",
    "VLLM_BLASST_PRIVATE_STATS_DIR": "unset",
}


def test_names_are_frozen() -> None:
    assert set(NAMES) == set(FROZEN)


def test_documentation_has_every_name_with_its_default() -> None:
    rows = re.findall(r"^\| `(VLLM_BLASST_\w+)` \|.*\| ([^|]*) \|$", DOCS.read_text(), re.M)
    documented = {name: default.split(":")[0].strip("`") for name, default in rows}
    assert documented == FROZEN


def test_defaults() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"VLLM_BLASST_MAG": " ", "OTHER": "x"}) == Settings()
    assert Settings() == Settings(
        state_dir=None,
        private_stats_dir=None,
        threshold=None,
        min_context=8192,
        strict=False,
        share_prefix_cache=False,
        impl="auto",
        stats_interval_s=0.5,
    )


def test_every_setting_is_read() -> None:
    settings = Settings.from_env(
        {
            "VLLM_BLASST_STATE_DIR": "/srv/blasst",
            "VLLM_BLASST_PRIVATE_STATS_DIR": "/tmp/stats",
            "VLLM_BLASST_SCALE": "500",
            "VLLM_BLASST_MIN_CONTEXT": "0",
            "VLLM_BLASST_STRICT": "1",
            "VLLM_BLASST_SHARE_PREFIX_CACHE": "1",
            "VLLM_BLASST_IMPL": "cpu",
            "VLLM_BLASST_STATS_INTERVAL_S": "0.1",
        }
    )
    changed = [
        f.name for f in dataclasses.fields(Settings) if getattr(settings, f.name) == f.default
    ]
    assert changed == []
    assert settings.threshold == SkipThreshold("scale", 500)
    assert settings.stats_dir == Path("/srv/blasst/stats")


def test_statistics_go_to_the_private_folder_without_a_state_folder() -> None:
    private = Settings.from_env({"VLLM_BLASST_PRIVATE_STATS_DIR": "/tmp/stats"})
    assert private.stats_dir == Path("/tmp/stats")
    assert Settings().stats_dir is None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"MAG": "2500", "SCALE": "1"}, "are both set"),
        ({"MAG": "-1"}, "MAG -1"),
        ({"MAG": "0"}, "MAG 0"),
        ({"MAG": "1e9"}, "126000"),
        ({"MAG": "inf"}, "inf"),
        ({"LAMBDA": "1"}, "0 <= lambda < 1"),
        ({"LAMBDA": "nan"}, "nan"),
        ({"SCALE": "-2"}, "negative"),
        ({"SCALE": "x"}, "'x' is not a number"),
        ({"MIN_CONTEXT": "8k"}, "whole number of prompt tokens"),
        ({"MIN_CONTEXT": "99999999"}, "0..16777216"),
        ({"STRICT": "true"}, "must be 0 or 1"),
        ({"SHARE_PREFIX_CACHE": "2"}, "must be 0 or 1"),
        ({"IMPL": "CPU"}, "choose one of auto"),
        ({"STATS_INTERVAL_S": "0"}, "0.05..60"),
        ({"STATS_INTERVAL_S": "nan"}, "0.05..60"),
        ({"STATE_DIR": "relative/path"}, "absolute path"),
        ({"MGA": "2500"}, "is not a setting of blasst"),
    ],
)
def test_bad_values_are_refused_by_name(env: dict[str, str], words: str) -> None:
    given = {f"VLLM_BLASST_{k}": v for k, v in env.items()}
    with pytest.raises(SettingsError) as refused:
        Settings.from_env(given)
    message = str(refused.value)
    assert words in message
    assert any(name in message for name in given)
    assert "\n" not in message


def test_state_folder_is_prepared(tmp_path: Path) -> None:
    check_state_dir(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["stats"]
    assert list((tmp_path / "stats").iterdir()) == []


def test_state_folder_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stats").write_text("in the way")
    with pytest.raises(SettingsError, match=r"cannot take statistics pages .*create it"):
        check_state_dir(tmp_path)
