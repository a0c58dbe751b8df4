"""Judges a drill: each answer, each change, each counter and each recovery."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blasst.deploy.drills.control import Watchers, lambda_of, plain_lambda
from blasst.deploy.drills.history import Lambda, Seen, Write, faults
from blasst.deploy.drills.load import Answer, Fingerprint, distance
from blasst.deploy.drills.processes import Outage
from blasst.deploy.drills.recorder import Line
from blasst.kernels.exchange.desired import FILE_NAME, read_desired
from blasst.kernels.threshold import lambda_to_mag

References = Mapping[Lambda, Mapping[int, Fingerprint]]
"""Lambda of a class -> number of a prompt -> what the answer to it looks like."""

_CLASS_WIDTH_MAG = 1.0
_GRACE_S = 0.5
"""A request may be cut a moment after the process that it needed was seen to be ready."""


@dataclass
class Result:
    """What happened. faults: broken promises, none in a good run."""

    faults: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """All that a drill collected. answers: in no order but that the last was sent last, alone."""

    state: Path
    writes: Sequence[Write]
    watchers: Watchers
    answers: Sequence[Answer]
    references: References
    engine: Sequence[Outage]
    sidecar: Sequence[Outage]
    lines: Sequence[Line]


def judge(evidence: Evidence, result: Result) -> None:
    """Add to the result's faults and numbers."""
    fronts: dict[int, list[Line]] = defaultdict(list)
    ranks: dict[int, list[Line]] = defaultdict(list)
    for line in evidence.lines:
        (fronts if line.role == "front" else ranks)[line.request].append(line)
    own = {a.ask.number for a in evidence.answers if a.ask.wish is not None}
    stamps = [
        Seen(f"front {x.pid}", x.began, x.ended, x.generation, x.skip_lambda)
        for number, lines in fronts.items()
        if number not in own
        for x in lines
    ]
    seen = [*evidence.watchers.seen, *stamps]
    result.faults += faults(evidence.writes, seen)
    result.numbers |= {"stamps": len(stamps), "looks": len(evidence.watchers.seen)}
    result.numbers["generations_seen"] = len({s.generation for s in seen})
    _answers(evidence, fronts, ranks, result)
    _end(evidence, result)
    _audit(evidence, result)
    _recoveries(evidence, result)


def _answers(
    evidence: Evidence,
    fronts: Mapping[int, Sequence[Line]],
    ranks: Mapping[int, Sequence[Line]],
    result: Result,
) -> None:
    good = [a for a in evidence.answers if a.status == 200]
    bad = [a for a in evidence.answers if a.status != 200]
    result.faults += [f"{a} failed while all ran" for a in bad if not _excused(a, evidence.engine)]
    by_content, farthest = 0, 0.0
    for answer in good:
        stamps, steps = fronts.get(answer.ask.number, ()), ranks.get(answer.ask.number, ())
        if len(stamps) != 1:
            result.faults.append(f"{answer.ask} was stamped {len(stamps)} times")
            continue
        (stamp,) = stamps
        result.faults += _wrong_record(answer, stamp, steps)
        if not answer.ask.salt:
            continue
        by_content += 1
        here = _class(stamp.skip_lambda, evidence.references)
        distances = {
            mag: distance(known[answer.ask.prompt], answer.fingerprint)
            for mag, known in evidence.references.items()
        }
        farthest = max(farthest, distances[here])
        nearest = min(distances, key=distances.__getitem__)
        if nearest != here:
            result.faults.append(f"{answer} looks like lambda {nearest}, and {stamp} says {here}")
    if not by_content:
        result.faults.append(
            "no answer was compared with its threshold's: give more --changes or a longer --pause"
        )
    result.numbers |= {
        "requests": len(evidence.answers),
        "answered": len(good),
        "failed_in_outages": len(bad),
        "own_threshold": sum(a.ask.wish is not None for a in good),
        "checked_by_content": by_content,
        "farthest_from_its_class_nats": farthest,
    }


def _wrong_record(answer: Answer, stamp: Line, steps: Sequence[Line]) -> list[str]:
    found = []
    wish = answer.ask.wish
    if wish is not None:
        wanted = None if isinstance(wish, str) else lambda_of(wish)
        if stamp.skip_lambda != wanted:
            found.append(f"{answer.ask} wanted {wanted} and got {stamp}")
    if any(step.skip_lambda != stamp.skip_lambda for step in steps):
        found.append(f"{stamp} was computed as {sorted({str(s.skip_lambda) for s in steps})}")
    if answer.ask.salt and sum(step.tokens for step in steps) < stamp.tokens:
        found.append(f"of {stamp} only {sum(s.tokens for s in steps)} tokens were computed")
    return found


def _excused(answer: Answer, outages: Sequence[Outage]) -> bool:
    """Whether the engine was killed or starting at some moment of it; a refusal never is."""
    return answer.status not in range(400, 500) and any(
        answer.ended >= o.killed_at and answer.began <= (o.ready_at or 1e18) + _GRACE_S
        for o in outages
    )


def _class(skip_lambda: Lambda, references: References) -> Lambda:
    if skip_lambda is None:
        return None
    mag = lambda_to_mag(skip_lambda)
    for known in references:
        if known is not None and abs(lambda_to_mag(known) - mag) <= _CLASS_WIDTH_MAG:
            return known
    raise RuntimeError(f"lambda {skip_lambda} is of no class that was learned")


def _end(evidence: Evidence, result: Result) -> None:
    """The last state is the last change that was acknowledged, or a later one."""
    state = read_desired(evidence.state / FILE_NAME)
    value = plain_lambda(state)
    last = max(i for i, w in enumerate(evidence.writes) if w.generation is not None)
    newest = evidence.writes[last]
    later = {w.skip_lambda for w in evidence.writes[last + 1 :]}
    if (state.generation, value) != (newest.generation, newest.skip_lambda) and value not in later:
        result.faults.append(f"{newest} was lost: the file holds {state}")
    answer = evidence.answers[-1]
    (stamp,) = [x for x in evidence.lines if x.role == "front" and x.request == answer.ask.number]
    if (stamp.generation, stamp.skip_lambda) != (state.generation, value):
        result.faults.append(f"the last request got {stamp}, not {state}")
    if evidence.watchers.file_errors:
        result.faults.append(f"the file could not be read {evidence.watchers.file_errors} times")
    result.faults += evidence.watchers.shrunk
    visited, skipped = evidence.watchers.tiles
    result.numbers |= {"tiles_visited": visited, "tiles_skipped": skipped}


def _audit(evidence: Evidence, result: Result) -> None:
    """Each acknowledged change is a record, with the value that was asked for."""
    applied: dict[int, Lambda] = {}
    for line in (evidence.state / "audit.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["result"] == "applied":
            threshold = record["new"]["threshold"]
            value = None if threshold is None else lambda_of(threshold["value"])
            applied[record["generation"]] = value
        else:
            applied.pop(record["generation"], None)  # announced, and then a crash came before it
    acknowledged = [w for w in evidence.writes if w.generation is not None]
    for write in acknowledged:
        if write.generation not in applied:
            result.faults.append(f"{write} is not in the audit log")
        elif applied[write.generation] != write.skip_lambda:
            result.faults.append(f"{write}: audit log has {applied[write.generation]}")
    unknown = len(evidence.writes) - len(acknowledged)
    result.numbers |= {
        "changes": len(evidence.writes),
        "acknowledged": len(acknowledged),
        "cut_off": unknown,
        "cut_off_and_done": len(applied.keys() - {w.generation for w in acknowledged}),
    }


def _recoveries(evidence: Evidence, result: Result) -> None:
    times: dict[str, list[Outage]] = defaultdict(list)
    for outage in (*evidence.engine, *evidence.sidecar):
        times[outage.role].append(outage)
        if not outage.ready_at:
            result.faults.append(f"{outage} never ended")
    result.numbers["kills"] = {
        role: {
            "times": len(outages),
            "noticed_s": _spread([o.ended_at - o.killed_at for o in outages]),
            "recovered_s": _spread([o.recovery_s for o in outages]),
            "left_over": sum(o.left_over for o in outages),
        }
        for role, outages in sorted(times.items())
    }


def _spread(seconds: Sequence[float]) -> list[float]:
    """[median, slowest]"""
    return [round(statistics.median(seconds), 2), round(max(seconds), 2)]
