"""A worker extension for checks: writes down which lambda each rank used for each request.

vllm serve ... --worker-extension-cls blasst.plugin.rank_recorder.RankRecorder, and then the remote
call blasst_record(FOLDER) to all workers. One JSONL file a rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from blasst.plugin.metadata import Votes
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

        def recorded_rows(req_ids: Sequence[str], lengths: Any, *others: Any) -> Votes | None:
            found: Votes | None = rows(req_ids, lengths, *others)
            if found is not None:
                for row, used in zip(found.rows, found.lambdas, strict=True):
                    write(**{"id": req_ids[row], "lambda": used, "tokens": int(lengths[row])})
            return found

        rank.note, rank.rows = recorded_note, recorded_rows
