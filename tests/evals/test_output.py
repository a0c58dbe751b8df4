"""Files of two runs are never side by side, whatever happens."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from blasst.evals.errors import InputError
from blasst.evals.output import OutputFolder

NAMES = ("index.html", "results.jsonl")


def write(folder: Path, text: str) -> None:
    for name in NAMES:
        (folder / name).write_text(text)


def run(folder: Path, text: str) -> None:
    with OutputFolder(folder, NAMES) as output:
        write(output.partial, text)
        output.publish()


def fail(folder: Path) -> None:
    with OutputFolder(folder, NAMES) as output:
        (output.partial / NAMES[0]).write_text("half")
        raise ZeroDivisionError


def test_a_second_run_takes_the_place_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    for text in ("first", "second"):
        run(tmp_path, text)
        assert [(tmp_path / name).read_text() for name in NAMES] == [text] * 2
    assert {p.name for p in tmp_path.iterdir()} == {*NAMES, "mine.txt"}


def test_a_run_that_fails_leaves_the_earlier_report_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "first")
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path)
    assert [(tmp_path / name).read_text() for name in NAMES] == ["first"] * 2
    assert f"what this run wrote is in {tmp_path / 'unfinished'};" in capsys.readouterr().err
    with OutputFolder(tmp_path, NAMES) as output:
        assert not list(output.partial.iterdir())


def test_a_signal_waits_until_the_files_are_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "first")
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    # Whoever starts the tests in the background of a shell hands them an ignored SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    over = threading.Event()
    # One more thread, which could take the signal in place of the main one.
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "second")
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert [(tmp_path / name).read_text() for name in NAMES] == ["second"] * 2


def test_a_process_killed_on_the_way_leaves_no_files_of_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    calls = {"left": 0}
    for name in ("unlink", "replace"):
        real = getattr(Path, name)

        def step(self: Path, *args: object, real: object = real, **kw: object) -> object:
            calls["left"] -= 1
            if calls["left"] < 0:
                raise Killed
            return real(self, *args, **kw)  # type: ignore[operator]

        monkeypatch.setattr(Path, name, step)
    for steps in range(2 * len(NAMES)):
        write(tmp_path, "first")
        # Entering unlinks both names in `partial`.
        calls["left"] = len(NAMES) + steps
        with pytest.raises(Killed):
            run(tmp_path, "second")
        assert len({(tmp_path / n).read_text() for n in NAMES if (tmp_path / n).exists()}) <= 1


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with OutputFolder(tmp_path, NAMES) as output:
        write(output.partial, "first")
        with pytest.raises(InputError, match="in use by another run"):
            OutputFolder(tmp_path, NAMES).__enter__()
        assert len(list(output.partial.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="give another --out"):
        OutputFolder(tmp_path / "file", NAMES).__enter__()
