"""A worker extension for checks: writes down which lambda each rank used for each request.

vllm serve ... --worker-extension-cls blasst.plugin.rank_recorder.RankRecorder, and then the remote
call blasst_record(FOLDER) to all workers. One JSONL file a rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from blasst.plugin.stamp import read_stamp


class RankRecorder:
    """Becomes a base of vLLM's worker class, so its only name is one that vLLM does not have."""

    def blasst_record(self, folder: str) -> None:
        """From now on every voting row of this worker appends a line: id, lambda, tokens; and every
        new request one: id, lambda and generation of its stamp. Raises OSError."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        rank = runner._blasst_rank
        shape = rank.shape
        path = Path(folder) / f"{shape.engine}-{shape.rank}-{os.getpid()}.jsonl"
        note, rows = rank.note, rank.rows

        def write(**line: Any) -> None:
            with open(path, "a") as out:
                out.write(json.dumps(line) + "\n")

        def recorded_note(new: Sequence[Any], finished: Collection[str]) -> None:
            for request in new:
                stamp = read_stamp(getattr(request.sampling_params, "extra_args", None))
                if stamp is not None:
                    write(id=request.req_id, stamped=stamp.encode())
            note(new, finished)

        def recorded_rows(
            req_ids: Sequence[str], tokens: Mapping[str, int], drafts: Collection[str]
        ) -> list[float | None] | None:
            found: list[float | None] | None = rows(req_ids, tokens, drafts)
            for req_id, used in zip(req_ids, found or (), strict=False):
                if used is not None:
                    write(**{"id": req_id, "lambda": used, "tokens": tokens[req_id]})
            return found

        rank.note, rank.rows = recorded_note, recorded_rows
