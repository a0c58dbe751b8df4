"""A file that the sidecar follows: an order each time that it changes, and nothing else."""

from __future__ import annotations

import os

import pytest

from blasst.kernels.exchange.desired import FILE_NAME
from blasst.server.control import ControlService, Wish
from blasst.server.follow import Follower


@pytest.fixture
def followed(tmp_path):
    """A file as Kubernetes mounts it: a link to a link that is swapped."""
    control = ControlService(tmp_path)
    control.open()
    (tmp_path / "threshold.json").symlink_to("data/threshold.json")
    follower = Follower(tmp_path / "threshold.json", control)
    count = iter(range(100))

    def publish(text):
        folder = tmp_path / f"version-{next(count)}"
        folder.mkdir()
        (folder / "threshold.json").write_text(text)
        (tmp_path / "new").symlink_to(folder.name)
        os.replace(tmp_path / "new", tmp_path / "data")
        follower.step()
        return control.read()

    yield follower, publish, control
    control.close()


def test_a_followed_file_rules_when_it_changes_and_only_then(followed):
    follower, publish, control = followed
    assert publish('{"mag": 2500, "reason": "rollout"}').threshold.value == 2500
    assert control.audit.tail(1)[0]["who"] == "file threshold.json"
    control.set(Wish(None, by="operator"), "*")
    follower.step()
    assert control.read().threshold is None
    # The same content under a new link is no change.
    assert publish('{"mag": 2500, "reason": "rollout"}').threshold is None
    assert publish('{"mag": 4000}').threshold.value == 4000
    assert follower.error == ""


@pytest.mark.parametrize(
    "text", ["", "{", '{"mag": -1}', '{"target_skip_rate": 0.5}', "mag: 2500", "x" * 20_000]
)
def test_a_followed_file_that_is_refused_changes_nothing(followed, caplog, text):
    follower, publish, control = followed
    publish('{"mag": 2500}')
    before = control.read()
    assert publish(text) == before
    follower.step()
    assert "threshold.json" in follower.error
    assert len([r for r in caplog.records if "stays as it is" in r.getMessage()]) == 1
    assert publish('{"mag": 3000}').threshold.value == 3000
    assert follower.error == ""


def test_a_corrupt_state_is_repaired_from_the_followed_file(followed, tmp_path):
    follower, publish, control = followed
    before = publish('{"mag": 2500}')
    (tmp_path / FILE_NAME).write_bytes(b"{")
    follower.step()
    assert control.read().threshold == before.threshold
    assert control.read().generation > before.generation
