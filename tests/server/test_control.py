"""The writer of the desired state alone: its generations over damage and restarts."""

from __future__ import annotations

import pytest

from blasst.kernels.exchange.desired import FILE_NAME, PREVIOUS_NAME, read_desired
from blasst.kernels.exchange.prometheus import PagesCollector
from blasst.server import audit
from blasst.server.control import LOCK_NAME, ControlService, Wish
from blasst.server.observe import highest_generation


def test_a_repair_is_newer_than_what_front_ends_and_the_previous_copy_know(tmp_path, fake_engine):
    engine = fake_engine()
    engine.front(42, generation=17)
    cache = PagesCollector(tmp_path / "stats").cache
    (tmp_path / FILE_NAME).write_bytes(b"{")
    service = ControlService(tmp_path, lambda: highest_generation(cache.pages()))
    service.open()
    assert service.set(Wish(None), "*").generation == 18
    service.set(Wish(None, min_context=1), "*")
    (tmp_path / FILE_NAME).write_bytes(b"{")
    assert read_desired(tmp_path / PREVIOUS_NAME).generation == 18
    assert restarted(service).set(Wish(None), "*").generation == 20


def test_a_damaged_page_does_not_use_up_the_generations(tmp_path, fake_engine):
    engine = fake_engine()
    engine.front(42, generation=17)
    engine.front(43, generation=1 << 62)
    cache = PagesCollector(tmp_path / "stats").cache
    service = ControlService(tmp_path, lambda: highest_generation(cache.pages()))
    service.open()
    assert service.set(Wish(None), "*").generation == 18
    service.close()


@pytest.mark.parametrize(
    "line",
    ['{"result": "applied"}', '{"result": "applied", "generation": "5"}', "[" * 100_000],
)
def test_a_damaged_last_line_of_the_audit_log_keeps_nobody_from_starting(tmp_path, line):
    (tmp_path / audit.FILE_NAME).write_text(line + "\n")
    service = ControlService(tmp_path)
    service.open()
    assert service.set(Wish(None), "*").generation == 1
    assert service.audit.tail(1)[0]["generation"] == 1
    service.close()


def restarted(service):
    service.close()
    after = ControlService(service.folder)
    after.open()
    return after


def test_generations_never_fall_however_often_the_file_is_corrupted(tmp_path):
    service = ControlService(tmp_path)
    service.open()
    for n in range(1, 20):
        assert service.set(Wish(None, min_context=n), "*").generation == n
    good = read_desired(tmp_path / PREVIOUS_NAME)
    for generation in (20, 21, 22):
        (tmp_path / FILE_NAME).write_bytes(b"{")
        service = restarted(service)
        assert service.set(Wish(None), "*").generation == generation
        assert read_desired(tmp_path / PREVIOUS_NAME) == good
    (tmp_path / PREVIOUS_NAME).write_bytes(b"{")
    (tmp_path / FILE_NAME).unlink()
    service = restarted(service)
    assert service.set(Wish(None), "*").generation == 23
    service.close()


@pytest.mark.parametrize("text", ["x", "-4", "9" * 20])
def test_a_damaged_mark_of_the_highest_generation_is_ignored(tmp_path, text):
    (tmp_path / LOCK_NAME).write_text(text)
    service = ControlService(tmp_path)
    service.open()
    assert service.set(Wish(None), "*").generation == 1
    service.close()
