"""The desired-state file: durable, checked, never half read."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from blasst.kernels.exchange import desired
from blasst.kernels.exchange.desired import (
    DENSE,
    FILE_NAME,
    PREVIOUS_NAME,
    DesiredReader,
    DesiredState,
    DesiredStateError,
    parse_desired,
    read_desired,
    write_desired,
)
from blasst.kernels.exchange.schedule import Schedule
from blasst.kernels.threshold import SkipThreshold

STATE = DesiredState(
    generation=7,
    threshold=SkipThreshold("mag", 2500),
    min_context=4096,
    updated_at="2026-11-30T00:00:00Z",
    updated_by="sidecar",
    reason='a "quoted" reason, also in other letters: \u00e4\u4e2d',
)

SCHEDULE = Schedule.parse("16k=off,65536=mag:7000,rest=scale:400")


@pytest.mark.parametrize(
    "state",
    [
        STATE,
        DENSE,
        DesiredState(1, None),
        DesiredState(2, SkipThreshold("lambda", 0.1)),
        DesiredState(3, SkipThreshold("scale", 1 / 3)),
        DesiredState(4, SCHEDULE, 100),
    ],
)
def test_round_trip(tmp_path: Path, state: DesiredState) -> None:
    write_desired(tmp_path, state)
    assert read_desired(tmp_path / FILE_NAME) == state
    assert sorted(os.listdir(tmp_path)) == [FILE_NAME]


def test_the_previous_file_stays_beside(tmp_path: Path) -> None:
    for generation in (1, 2, 3):
        write_desired(tmp_path, DesiredState(generation, None))
    assert read_desired(tmp_path / PREVIOUS_NAME).generation == 2
    assert sorted(os.listdir(tmp_path)) == sorted([FILE_NAME, PREVIOUS_NAME])


def _encoded(tmp_path: Path) -> bytes:
    write_desired(tmp_path, STATE)
    return (tmp_path / FILE_NAME).read_bytes()


def test_a_changed_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    data = _encoded(tmp_path)
    refused = 0
    for position in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            try:
                assert parse_desired(bytes(damaged)) == STATE
            except DesiredStateError:
                refused += 1
    assert refused > 3 * len(data)


def test_every_truncation_is_refused_or_harmless(tmp_path: Path) -> None:
    data = _encoded(tmp_path)
    for size in range(len(data) - 2):
        with pytest.raises(DesiredStateError):
            parse_desired(data[:size])
    assert parse_desired(data.rstrip()) == STATE


def _signed(**changes: object) -> bytes:
    body = json.loads(json.dumps(desired._body(STATE)))
    body.update(changes)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    checksum = "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps({**body, "checksum": checksum}).encode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 4}, "schema_version 4, this release reads 1 to 3"),
        ({"schema_version": 0}, "schema_version 0"),
        ({"schema_version": True}, "schema_version True"),
        ({"schema_version": "1"}, "schema_version '1'"),
        ({"schema_version": 2}, "lacks a field"),
        ({"schema_version": None}, "schema_version None"),
        ({"generation": -1}, "generation"),
        ({"generation": 1 << 60}, "generation"),
        ({"generation": 1.5}, "not a whole number"),
        ({"generation": "7"}, "not a whole number"),
        ({"threshold": {"unit": "mag", "value": -5}}, "outside 0 < MAG"),
        ({"threshold": {"unit": "volts", "value": 5}}, "unknown"),
        ({"threshold": {"unit": "mag"}}, "lacks a field"),
        ({"threshold": 5}, "wrong type"),
        ({"threshold": {"schedule": []}}, "1 to 12 steps"),
        ({"threshold": {"schedule": 5}}, "list of steps"),
        ({"threshold": {"schedule": [{"up_to": 5, "threshold": None}]}}, "longer prompts"),
        ({"threshold": {"schedule": [{"up_to": None}]}}, "up_to and threshold"),
        (
            {"threshold": {"schedule": [{"up_to": None, "threshold": {"unit": "mag"}}]}},
            "unit and value",
        ),
        ({"min_context": -1}, "min_context"),
        ({"min_context": 1 << 40}, "min_context"),
    ],
)
def test_well_signed_nonsense_is_refused(changes: dict[str, object], message: str) -> None:
    assert parse_desired(_signed()) == STATE
    with pytest.raises(DesiredStateError, match=message):
        parse_desired(_signed(**changes))


RELEASE_0_1_0 = b"""{
 "schema_version": 1,
 "generation": 3,
 "threshold": {
  "unit": "mag",
  "value": 2500.0
 },
 "min_context": 16384,
 "updated_at": "2026-11-30T07:30:00.000+00:00",
 "updated_by": "127.0.0.1",
 "reason": "a sweep",
 "checksum": "sha256:71aef1a8a1b930fd136c4f5b99a2b572d5fa8053423ac053dd89134de6b3b54e"
}
"""
"""A file as release 0.1.0 wrote it, byte by byte."""


def test_a_file_of_an_older_release_is_read_and_written_back_alike(tmp_path: Path) -> None:
    state = parse_desired(RELEASE_0_1_0)
    assert state.threshold == SkipThreshold("mag", 2500.0)
    assert (state.generation, state.min_context, state.origin) == (3, 16384, "")
    # What it could say is written so that it can read it again.
    write_desired(tmp_path, state)
    assert (tmp_path / FILE_NAME).read_bytes() == RELEASE_0_1_0
    with pytest.raises(DesiredStateError, match="checksum"):
        parse_desired(RELEASE_0_1_0.replace(b"16384", b"16385"))


def test_only_what_is_new_needs_the_new_schema(tmp_path: Path) -> None:
    state = replace(parse_desired(RELEASE_0_1_0), origin="preset a: target skip rate 0.5")
    write_desired(tmp_path, state)
    assert json.loads((tmp_path / FILE_NAME).read_text())["schema_version"] == 2
    assert read_desired(tmp_path / FILE_NAME) == state


def test_a_schedule_needs_the_newest_schema_and_nothing_else_does(tmp_path: Path) -> None:
    for threshold, origin, version in (
        (SCHEDULE, "", 3),
        (SCHEDULE, "x", 3),
        (SkipThreshold("mag", 5), "x", 2),
        (None, "", 1),
    ):
        write_desired(tmp_path, replace(STATE, threshold=threshold, origin=origin))
        assert json.loads((tmp_path / FILE_NAME).read_text())["schema_version"] == version
        assert read_desired(tmp_path / FILE_NAME).origin == origin


def test_a_future_file_leaves_the_last_good_state_then_dense(tmp_path: Path) -> None:
    write_desired(tmp_path, STATE)
    reader = DesiredReader(tmp_path)
    assert reader.current() == STATE
    (tmp_path / FILE_NAME).write_bytes(_signed(schema_version=99, generation=9))
    assert reader.current() == STATE
    assert (reader.errors, "schema_version 99" in reader.last_error) == (1, True)
    assert DesiredReader(tmp_path).current().threshold is None


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 60_000, b" " * 70_000])
def test_other_content_is_refused(data: bytes) -> None:
    with pytest.raises(DesiredStateError):
        parse_desired(data)


def test_a_missing_folder_or_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_desired(tmp_path / "absent", STATE)
    write_desired(tmp_path, STATE)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_desired(tmp_path, DesiredState(8, None))
    assert read_desired(tmp_path / FILE_NAME) == STATE
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_file_and_folder_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def recorded(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    write_desired(tmp_path, STATE)
    assert Path(synced[0]).name.startswith(desired.TEMP_PREFIX)
    assert synced[1:] == [str(tmp_path)]
    synced.clear()
    write_desired(tmp_path, DesiredState(8, None))
    # The previous copy, too, before the old file is replaced.
    assert [Path(path).name for path in synced[1:-1]] == [f"{Path(synced[0]).name}.previous"]


def test_a_read_only_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_desired(tmp_path, STATE)

    def refused(**_: object) -> tuple[int, str]:
        raise OSError(30, "Read-only file system")

    # Permissions do not bind root, which runs the tests in containers.
    monkeypatch.setattr("tempfile.mkstemp", refused)
    with pytest.raises(OSError, match="Read-only"):
        write_desired(tmp_path, DesiredState(8, None))
    assert read_desired(tmp_path / FILE_NAME) == STATE


def test_a_failed_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_desired(tmp_path, STATE)

    def refused(source: str, target: str) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(PermissionError):
        write_desired(tmp_path, DesiredState(8, None))
    assert read_desired(tmp_path / FILE_NAME) == STATE
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_reader_follows_and_keeps_the_last_good(tmp_path: Path) -> None:
    reader = DesiredReader(tmp_path)
    assert reader.current() == DENSE
    assert reader.errors == 0
    write_desired(tmp_path, STATE)
    assert reader.current() == STATE
    (tmp_path / FILE_NAME).write_bytes(b"{")
    assert reader.current() == STATE
    assert reader.current() == STATE
    assert reader.errors == 1
    assert "not JSON" in reader.last_error
    newer = DesiredState(8, None)
    write_desired(tmp_path, newer)
    assert reader.current() == newer
    assert reader.last_error == ""
    os.unlink(tmp_path / FILE_NAME)
    assert reader.current() == newer
    assert reader.errors == 2
    assert "is gone" in reader.last_error


def test_reader_parses_only_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_desired(tmp_path, STATE)
    calls: list[Path] = []
    real = desired.read_desired

    def counted(path: Path) -> DesiredState:
        calls.append(path)
        return real(path)

    monkeypatch.setattr(desired, "read_desired", counted)
    reader = DesiredReader(tmp_path)
    for _ in range(50):
        assert reader.current() == STATE
    assert len(calls) == 1


def test_a_named_pipe_is_an_error_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    writer = os.open(tmp_path / FILE_NAME, os.O_RDWR)
    for _ in range(2):
        with pytest.raises(DesiredStateError, match="not JSON"):
            read_desired(tmp_path / FILE_NAME)
        os.close(writer)
        writer = os.open("/dev/null", os.O_RDONLY)
    os.close(writer)


def test_no_hard_links_are_needed_and_others_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for generation in (1, 2):
        write_desired(tmp_path, DesiredState(generation, None))
    assert read_desired(tmp_path / PREVIOUS_NAME).generation == 1
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o644


def test_reader_tries_again_after_a_failure_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = DesiredReader(tmp_path)
    write_desired(tmp_path, STATE)

    def refused(path: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(desired, "open_now", refused)
        for _ in range(3):
            assert reader.current() == DENSE
    assert (reader.errors, reader.last_error) == (
        1,
        f"{FILE_NAME} cannot be read: Too many open files",
    )
    assert reader.current() == STATE
    assert (reader.errors, reader.last_error) == (1, "")


def test_reader_survives_an_unreadable_path(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    reader = DesiredReader(tmp_path)
    assert reader.current() == DENSE
    assert reader.errors == 1


@pytest.mark.parametrize(("generation", "min_context"), [(-1, None), (True, None), (1, -1)])
def test_bad_states(generation: int, min_context: int | None) -> None:
    with pytest.raises(ValueError, match=r"generation|min_context"):
        DesiredState(generation, None, min_context)
