"""Statistics pages: consistent under a writer that never stops, honest about a dead one."""

from __future__ import annotations

import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blasst.kernels.exchange.stats import (
    Field,
    StatsError,
    StatsWriter,
    TornError,
    iter_stats,
    read_stats,
    remove_dead,
)

FIELDS = (Field("tiles", (2, 3, 2)), Field("seconds", (4,), "d"), Field("one", (1,)))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StatsWriter]:
    writer = StatsWriter(tmp_path, "a", kind="rank", labels={"rank": "0"}, fields=FIELDS)
    yield writer
    writer.close()


def test_round_trip(writer: StatsWriter) -> None:
    before = time.time()
    writer.update(tiles=range(12), seconds=[0.5, -1.0, 1e300, 0.0], one=2**62)
    page = read_stats(writer.path)
    assert (page.name, page.kind, page.labels, page.fields) == (
        "a.stats",
        "rank",
        {"rank": "0"},
        FIELDS,
    )
    assert list(page.arrays["tiles"]) == list(range(12))
    assert list(page.arrays["seconds"]) == [0.5, -1.0, 1e300, 0.0]
    assert page.scalar("one") == 2**62
    assert page.shape("tiles") == (2, 3, 2)
    assert page.alive
    assert before <= page.updated_at <= time.time()


def test_a_partial_update_keeps_the_rest(writer: StatsWriter) -> None:
    writer.update(tiles=range(12))
    writer.update(one=5)
    page = read_stats(writer.path)
    assert list(page.arrays["tiles"]) == list(range(12))
    assert page.scalar("one") == 5


def test_raw_bytes_are_taken(writer: StatsWriter) -> None:
    writer.update(seconds=memoryview(b"\0" * 32), one=(3).to_bytes(8, sys.byteorder))
    assert read_stats(writer.path).scalar("one") == 3


@pytest.mark.parametrize("update", [{"tiles": range(11)}, {"one": [1, 2]}, {"seconds": b"1234"}])
def test_a_wrong_size_changes_nothing(writer: StatsWriter, update: dict[str, object]) -> None:
    writer.update(one=1)
    with pytest.raises(ValueError, match="elements"):
        writer.update(**update)  # type: ignore[arg-type]
    assert read_stats(writer.path).scalar("one") == 1


def test_close_removes_the_file(writer: StatsWriter) -> None:
    writer.close()
    writer.close()
    assert not writer.path.exists()
    with pytest.raises(FileNotFoundError):
        read_stats(writer.path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: b"", "0 bytes"),
        (lambda d: d[:20], "20 bytes"),
        (lambda d: b"OTHERFMT" + d[8:], "another layout"),
        (lambda d: d[:-10], "unreadable header"),
        (lambda d: d[:8] + (5).to_bytes(4, "little") + d[12:], "unreadable header"),
        (lambda d: d.replace(b'[2, 3, 2], "q"', b'[2, 3, 9], "q"'), "does not fit"),
        (lambda d: d.replace(b'[2, 3, 2], "q"', b'[2, 3, 2], "z"'), "of type 'z'"),
        (lambda d: d.replace(b"[2, 3, 2]", b"[2,-3, 2]"), "unreadable header"),
        (lambda d: d.replace(b"[2, 3, 2]", b'["x", 2] '), "unreadable header"),
        (lambda d: d.replace(b'"tiles"', b'["til"]'), "unreadable header"),
        (lambda d: d.replace(b'"rank": "0"', b'"rank": 123'), "unreadable header"),
        (lambda d: d.replace(b'{"rank": "0"}', b"[1, 2, 3, 4 ]"), "unreadable header"),
        (lambda d: d[:8] + (60_000).to_bytes(4, "little") + d[12:] + b"[" * 60_000, "unreadable"),
        (lambda d: d[:24] + struct.pack("<d", math.nan) + d[32:], "not a time"),
        (lambda d: d[:16] + (3).to_bytes(8, "little") + d[24:], "its writer died"),
    ],
)
def test_damaged_files_are_named(
    writer: StatsWriter, damage: object, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "b.stats"
    path.write_bytes(damage(writer.path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(StatsError, match=message):
        read_stats(path)
    assert [page.name for page in iter_stats(tmp_path)] == ["a.stats"]


def test_iteration_by_kind(writer: StatsWriter, tmp_path: Path) -> None:
    front = StatsWriter(tmp_path, "b", kind="front", labels={}, fields=FIELDS)
    assert [p.name for p in iter_stats(tmp_path)] == ["a.stats", "b.stats"]
    assert [p.name for p in iter_stats(tmp_path, "front")] == ["b.stats"]
    assert list(iter_stats(tmp_path / "absent")) == []
    front.close()


WRITER = """
import sys, time
from pathlib import Path
from blasst.kernels.exchange.stats import Field, StatsWriter
w = StatsWriter(Path(sys.argv[1]), "w", kind="rank", labels={}, fields=[Field("x", (4096,))])
print("ready", flush=True)
i = 0
while True:
    i += 1
    w.update(x=i.to_bytes(8, sys.byteorder) * 4096)
    time.sleep(0.0002)
"""


@pytest.fixture
def busy_writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_page_is_never_torn(busy_writer: subprocess.Popen[str], tmp_path: Path) -> None:
    read, last = 0, 0.0
    seen: set[float] = set()
    deadline = time.monotonic() + 20
    while (read < 200 or len(seen) < 10) and time.monotonic() < deadline:
        try:
            page = read_stats(tmp_path / "w.stats")
        except StatsError:
            continue
        read += 1
        values = set(page.arrays["x"])
        assert len(values) == 1
        (value,) = values
        assert value >= last
        last = value
        seen.add(value)
    assert read >= 20
    assert len(seen) >= 10


def test_an_update_in_the_middle_of_a_read_is_noticed(
    writer: StatsWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.update(tiles=[1] * 12)
    real = os.pread
    updates = iter([2, 3])

    def slow(fd: int, size: int, at: int) -> bytes:
        if size == 8 or (value := next(updates, 0)) == 0:
            return real(fd, size, at)
        half = real(fd, 80, at)
        writer.update(tiles=[value] * 12)
        return half + real(fd, size - 80, at + 80)

    monkeypatch.setattr(os, "pread", slow)
    assert list(read_stats(writer.path).arrays["tiles"]) == [3] * 12


def test_others_may_read_a_page(writer: StatsWriter) -> None:
    assert writer.path.stat().st_mode & 0o777 == 0o644


def test_a_dead_writer_is_seen(busy_writer: subprocess.Popen[str], tmp_path: Path) -> None:
    for _ in range(50):
        try:
            assert read_stats(tmp_path / "w.stats").alive
            break
        except StatsError:
            continue
    assert remove_dead(tmp_path, 0.0) == []
    busy_writer.send_signal(signal.SIGKILL)
    busy_writer.wait()
    # Killed in mid-update, it leaves an odd sequence.
    torn = int.from_bytes((tmp_path / "w.stats").read_bytes()[16:24], sys.byteorder) & 1
    if torn:
        with pytest.raises(StatsError, match="its writer died"):
            read_stats(tmp_path / "w.stats")
    else:
        assert not read_stats(tmp_path / "w.stats").alive
    assert remove_dead(tmp_path, 3600.0) == []
    assert remove_dead(tmp_path, 0.0) == ["w.stats"]
    assert os.listdir(tmp_path) == []


def _dead_copy(writer: StatsWriter, *, sequence: int = 2, updated_at: float = 0.0) -> Path:
    data = bytearray(writer.path.read_bytes())
    data[16:32] = struct.pack("<Qd", sequence, updated_at)
    path = writer.path.with_name("dead.stats")
    path.write_bytes(data)
    return path


def test_a_torn_page_costs_no_wait_and_is_removed(writer: StatsWriter, tmp_path: Path) -> None:
    path = _dead_copy(writer, sequence=3)
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(TornError):
            read_stats(path)
    # With a wait for the dead writer each read would take 0.1 s.
    assert time.monotonic() - began < 1.0
    assert remove_dead(tmp_path, 3600.0) == []
    assert remove_dead(tmp_path, 0.0) == ["dead.stats"]
    assert os.listdir(tmp_path) == ["a.stats"]


def test_a_dead_page_from_the_future_is_removed_too(writer: StatsWriter, tmp_path: Path) -> None:
    _dead_copy(writer, updated_at=time.time() + 7200)
    assert remove_dead(tmp_path, 10_000.0) == []
    assert remove_dead(tmp_path, 3600.0) == ["dead.stats"]


def test_a_named_pipe_holds_nobody_up(writer: StatsWriter, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.stats")
    assert [page.name for page in iter_stats(tmp_path)] == ["a.stats"]
    assert remove_dead(tmp_path, 0.0) == []


def test_labels_that_are_no_utf8_stay_printable(tmp_path: Path) -> None:
    writer = StatsWriter(tmp_path, "a", kind="k", labels={"m": "a\udc80b"}, fields=FIELDS)
    assert read_stats(writer.path).labels == {"m": "a?b"}
    writer.close()


FILLED = """
import sys
from pathlib import Path
from blasst.kernels.exchange.stats import Field, StatsWriter
try:
    w = StatsWriter(Path(sys.argv[1]), "w", kind="rank", labels={}, fields=[Field("x", (9999,))])
except OSError as e:
    print(e.strerror)
else:
    w.update(x=bytes(8 * 9999))
    print("written")
"""


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A 64 KiB tmpfs; the page of FILLED needs 80."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "blasst-test", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs failed: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_no_sigbus(tiny_disk: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILLED, str(tiny_disk)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr
    assert os.listdir(tiny_disk) == []
