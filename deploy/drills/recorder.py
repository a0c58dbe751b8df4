"""A plugin for drills alone: writes down what vLLM's own processes decide about each request.

Lines of JSON, one file a process; a line that was written outlives its process.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "VLLM_DRILL_RECORDS"
"""Names the folder of the records; without it nothing is recorded."""

ENTRY_POINTS = "[vllm.general_plugins]\nblasst_drill = blasst.deploy.drills.recorder:install\n"
REQUEST_ID = re.compile(r"drill-(\d+)")


@dataclass(frozen=True)
class Line:
    """role "front": stamped between began and ended, tokens = of the prompt. role "rank": a step
    of the prefill of so many tokens ran under this lambda; generation is 0."""

    role: str
    pid: int
    began: float
    ended: float
    request: int
    generation: int
    skip_lambda: float | None
    tokens: int


def environment(records: Path, site: Path) -> dict[str, str]:
    """What makes vLLM load this plugin: a distribution of its own in the folder `site`."""
    info = site / "blasst_drill-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: blasst-drill\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    records.mkdir(parents=True, exist_ok=True)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER: str(records), "PYTHONPATH": os.pathsep.join(paths)}


def read(records: Path) -> Iterator[Line]:
    """All lines of all processes; the last of a killed one may be cut off."""
    for path in sorted(records.glob("*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:
            yield Line(*json.loads(line))


def install() -> None:
    """vLLM calls it in every process."""
    folder = os.environ.get(FOLDER)
    if folder:
        _Recorder(Path(folder)).install()


class _Recorder:
    """Writes one file of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1
        self._pid = 0

    def install(self) -> None:
        from blasst.plugin import front_hooks
        from blasst.plugin.rank import Rank

        front_hooks._stamp = self._around_stamp(front_hooks._stamp)
        Rank.rows = self._around_rows(Rank.rows)  # type: ignore[method-assign]

    def _write(self, role: str, *values: object) -> None:
        pid = os.getpid()
        if pid != self._pid:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._fd, self._pid = os.open(self._folder / f"{pid}.jsonl", flags, 0o600), pid
        os.write(self._fd, json.dumps([role, pid, *values]).encode() + b"\n")

    def _around_stamp(self, stock: Callable[..., None]) -> Callable[..., None]:
        from blasst.plugin.stamp import read_stamp

        def stamp(front: Any, wish: Any, request: Any) -> None:
            began = time.monotonic()
            stock(front, wish, request)
            match = REQUEST_ID.search(request.request_id)
            made = read_stamp(request.sampling_params.extra_args)
            if match and made is not None:
                tokens = len(request.prompt_token_ids or ())
                times = began, time.monotonic()
                which = int(match[1])
                self._write("front", *times, which, made.generation, made.skip_lambda, tokens)

        return stamp

    def _around_rows(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def rows(rank: Any, req_ids: Any, lengths: Any, *rest: Any) -> Any:
            began = time.monotonic()
            votes = stock(rank, req_ids, lengths, *rest)
            voting = {} if votes is None else dict(zip(votes.rows, votes.lambdas, strict=True))
            for row, name in enumerate(req_ids):
                match, tokens = REQUEST_ID.search(name), int(lengths[row])
                if match and tokens > 1:
                    times = began, time.monotonic()
                    self._write("rank", *times, int(match[1]), 0, voting.get(row), tokens)
            return votes

        return rows
