"""One threshold at a time: set it, prove that it is in force, measure samples, prove it again."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from blasst.evals import fanout
from blasst.evals.client import Completions, Generation, ServedModel
from blasst.evals.errors import InputError, ServerError
from blasst.evals.identity import details_of, identity
from blasst.evals.metrics import match
from blasst.evals.samples import Sample
from blasst.evals.sidecar import Counters, Setting, Sidecar
from blasst.evals.store import Record, Store
from blasst.evals.tasks import task_named
from blasst.evals.thresholds import Point, key_of, lambda_at, mag_at, name_of, point_of

_REASON = "RULER sweep, "
"""Begins the reason of a threshold that a sweep sets; of what was there before it does not."""
_OVER = "RULER sweep over"
Pass = Literal["both", "accuracy", "ttft"]
"""accuracy: answers and gold NLL, many requests at once. ttft: the first token, one at a time.
both: one at a time, time and answer of the same request."""
DEFAULT_MIN_CONTEXT = 8192
"""The engine's own setting (prompt tokens), where neither the state nor a front end names one."""
_PROBE_MIN = 256


@dataclass(frozen=True)
class RunOptions:
    """max_tokens: at most this many answer tokens (None: the task's own). settle_s: how long the
    counters may lag behind a request. min_context: None keeps what the deployment has.
    concurrency: requests at once in the accuracy pass. nll: samples of each task and length whose
    gold NLL is measured, which costs a server far more than an answer (None: all)."""

    max_tokens: int | None = None
    nll: int | None = None
    settle_s: float = 20.0
    min_context: int | None = None
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"--max-tokens {self.max_tokens}: give at least 1")
        if self.nll is not None and self.nll < 0:
            raise InputError(f"--nll {self.nll}: give at least 0")
        if self.concurrency < 1:
            raise InputError(f"--concurrency {self.concurrency}: give at least 1")
        if self.min_context is not None and self.min_context < 0:
            raise InputError(f"--min-context {self.min_context}: give at least 0")
        if not 0 < self.settle_s < float("inf"):
            raise InputError(f"--settle {self.settle_s:g}: give seconds above 0")


@dataclass(frozen=True)
class Expected:
    """Prompt tokens that must appear on each path, by so many requests.

    A prompt's last chunk of one token counts as a decode: a request may show one token less.
    """

    vote: int
    dense: int
    requests: int

    @property
    def least(self) -> int:
        return self.vote + self.dense - self.requests


class Runner:
    """Measures on one server and appends to one store. details: what the server says; identity: of
    the results. Raises InputError when those in the store are of another server."""

    def __init__(
        self,
        client: Completions,
        sidecar: Sidecar,
        store: Store,
        options: RunOptions,
        served_name: str | None = None,
    ) -> None:
        self.client, self.sidecar, self.store, self.options = client, sidecar, store, options
        self.model: ServedModel = client.model(served_name)
        self.initial: Setting = sidecar.get()
        self._set: int | None = None  # the generation that is ours; None while a PUT is on its way
        self._warm: set[tuple[int, bool]] = set()
        self.waited_s = 0.0  # for thresholds and counters, not for answers
        wanted = options.min_context
        self.min_context = wanted if wanted is not None else self.initial.min_context
        engine = sidecar.engine()
        self.kernels = engine.kernels
        self.details = details_of(self.model, engine, sidecar.version(), self.floor)
        self.identity = identity(self.details, store.records, client.url)
        self.fingerprint = self.identity.fingerprint

    @property
    def floor(self) -> int:
        """Prompt tokens below which a request runs dense."""
        own = self.initial.own_min_context
        usual = DEFAULT_MIN_CONTEXT if own is None else own
        return usual if self.min_context is None else self.min_context

    def check_length(self, length: int) -> None:
        """Raises InputError when the server cannot take `length` tokens of prompt and answer."""
        limit = self.model.max_model_len
        if limit is not None and length > limit:
            raise InputError(
                f"length {length} is beyond the server's max_model_len {limit}; give shorter "
                f"lengths or serve with --max-model-len {length}"
            )

    def check_in_force(self, points: Sequence[Point], longest: int) -> None:
        """Raises InputError when no prompt of at most `longest` tokens runs under a threshold."""
        if longest < self.floor and any(point is not None for point in points):
            raise InputError(
                f"prompts of at most {longest} tokens are below min_context {self.floor} and run "
                "dense under every threshold: nothing would be compared; give --min-context N "
                "below them, or longer --lengths"
            )

    def check_tokenizer(self, sample: Sample) -> None:
        """Raises InputError when the server reads these ids as another text: another tokenizer."""
        text = self.client.detokenize(self.model.name, sample.prompt)
        missing = [a for a in sample.answers if text is not None and a not in text]
        if missing:
            raise InputError(
                f"sample {sample.id} hides {missing[0]}, but the text that {self.model.name} reads "
                "does not hold it: the samples are of another tokenizer; give --model the folder "
                "of the served model"
            )

    def key(self, sample: Sample, point: Point, which: Pass = "both") -> str:
        """One measurement: prompt and gold ids, server, threshold, answer budget, pass."""
        parts = [sample.prompt_sha256, self.fingerprint, key_of(point), str(self.budget(sample))]
        parts.append(which if which == "ttft" or self.wants_nll(sample) else f"{which} without nll")
        return _sha("|".join(parts))

    def wants_nll(self, sample: Sample) -> bool:
        return self.options.nll is None or sample.index < self.options.nll

    def pending(
        self, samples: Sequence[Sample], point: Point, which: Pass = "both"
    ) -> list[Sample]:
        return [s for s in samples if self.key(s, point, which) not in self.store]

    def warm_up(self, point: Point, sample: Sample) -> None:
        """Once for each length, dense and with a threshold, under the one in force: a prefill that
        is not measured, so that neither has to pay for allocations and caches of the first one."""
        if self.is_warm(point, sample):
            return
        before = self.sidecar.counters()
        self.client.generate(self.model.name, sample.prompt, 2)
        self.sidecar.settled(before, len(sample.prompt) - 1, self.options.settle_s)
        self._warm.add((sample.length, point is None))

    def is_warm(self, point: Point, sample: Sample) -> bool:
        return (sample.length, point is None) in self._warm

    def run_cell(
        self,
        point: Point,
        samples: Sequence[Sample],
        go_on: Callable[[Sample, bool], bool],
        keep: Callable[[Record], None],
        which: Pass = "both",
    ) -> bool:
        """Measure each sample under `point` and `keep` its record, as long as `go_on` (of the
        sample, and whether it is the last of those that were sent together) says so;
        False when it did not before the last sample was done. The accuracy pass sends them all.

        Raises ServerError when the threshold is not in force, changes on the way, or a counter
        does not move as this threshold must move it.
        """
        with self._waiting():
            setting = self.activate(point, samples[0])
        if which != "accuracy":
            self.warm_up(point, samples[0])
        before = self.sidecar.counters()
        done = 0
        together = which == "accuracy"
        for group in [samples] if together else [[sample] for sample in samples]:
            records, before = self._measure(group, point, setting, before, which)
            for record in records:
                keep(record)
            done += len(group)
            if not all([go_on(sample, sample is group[-1]) for sample in group]):
                break
        return done == len(samples)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.waited_s += time.monotonic() - start

    def activate(self, point: Point, sample: Sample) -> Setting:
        """Set the threshold, send one short probe, and check generation and counters."""
        # A sidecar keeps the reason of a threshold that is set once more, as by restore().
        own = self.before()
        as_before = own == {
            "threshold": key_of(point),
            "min_context": self.min_context,
            "schedule": [],
        }
        reason = _OVER if as_before else _REASON + name_of(point)
        self._set = None
        setting = self.sidecar.put(point, min_context=self.min_context, reason=reason)
        self._set = setting.generation
        before = self.sidecar.counters()
        probe = sample.prompt[: max(self.floor, _PROBE_MIN)]
        self.client.generate(self.model.name, probe, 1)
        setting = self.sidecar.wait_converged(setting.generation, self.options.settle_s)
        expected = self._expected(point, [len(probe)])
        after = self.sidecar.settled(before, expected.least, self.options.settle_s)
        check_counters(after.since(before), expected, point, "the probe request")
        return setting

    def restore(self) -> None:
        """The threshold that the deployment had before, unless somebody has set another since."""
        if self._set is not None and self.sidecar.get().generation != self._set:
            return
        self.sidecar.put(
            self.initial.threshold,
            min_context=self.initial.min_context,
            reason=_OVER,
            schedule=self.initial.schedule,
        )

    def before(self) -> dict[str, Any]:
        """What restore() puts back, for the plan."""
        key = key_of(self.initial.threshold)
        schedule = [dict(step) for step in self.initial.schedule]
        return {"threshold": key, "min_context": self.initial.min_context, "schedule": schedule}

    def recover(self) -> str:
        """After a sweep that was killed: restore() puts back what that one found, not what it left.
        A line that says so; empty where there was none."""
        if not self.initial.reason.startswith(_REASON):
            return ""
        left = (
            f"a sweep that was killed left {name_of(self.initial.threshold)} at {self.sidecar.url}"
        )
        for plan in reversed(self.store.records):
            if (found := plan.get("before", {}).get(self.sidecar.url)) is not None:
                self.initial = replace(
                    self.initial,
                    threshold=point_of(found["threshold"]),
                    min_context=found["min_context"],
                    schedule=tuple(found["schedule"]),
                )
                return f"{left}; what was there before it is put back at the end"
        return f"{left}, and these results do not say what was before: see `blasst threshold`"

    def budget(self, sample: Sample) -> int:
        """Answer tokens at most."""
        limit = self.options.max_tokens
        return sample.max_tokens if limit is None else min(limit, sample.max_tokens)

    def _expected(self, point: Point, lengths: Sequence[int]) -> Expected:
        vote = sum(n for n in lengths if point is not None and n >= self.floor)
        return Expected(vote, sum(lengths) - vote, len(lengths))

    def _measure(
        self,
        samples: Sequence[Sample],
        point: Point,
        setting: Setting,
        before: Counters,
        which: Pass,
    ) -> tuple[list[Record], Counters]:
        """One sample, or several at once whose counters only their sum is known of."""
        answers = self._answers(samples, which)
        if (now := self.sidecar.get()).generation != setting.generation:
            raise ServerError(
                f"the threshold changed during the cell {name_of(point)}: generation "
                f"{now.generation} instead of {setting.generation}; its last answers are not kept, "
                "run one sweep at a time against a server"
            )
        sent = [len(s.prompt) for s in samples]
        if which != "ttft":
            sent += [len(s.prompt) + len(s.gold) for s in samples if self.wants_nll(s)]
        expected = self._expected(point, sent)
        with self._waiting():
            after = self.sidecar.settled(before, expected.least, self.options.settle_s)
        moved = after.since(before)
        check_counters(moved, expected, point, samples[0].id)
        records = [
            self._record(sample, point, which, answer, nll)
            | {"generation": setting.generation, **_counted(moved if i == 0 else None)}
            for i, (sample, (answer, nll)) in enumerate(zip(samples, answers, strict=True))
        ]
        return records, after

    def _answers(
        self, samples: Sequence[Sample], which: Pass
    ) -> list[tuple[Generation, float | None]]:
        name = self.model.name
        if which == "accuracy":
            jobs = [
                fanout.Job(s.prompt, s.gold if self.wants_nll(s) else None, self.budget(s))
                for s in samples
            ]
            return [*fanout.measure(self.client, name, jobs, self.options.concurrency)]
        (sample,) = samples
        budget = 1 if which == "ttft" else self.budget(sample)
        answer = self.client.generate(name, sample.prompt, budget)
        if which == "ttft" or not self.wants_nll(sample):
            return [(answer, None)]
        return [(answer, self.client.gold_nll(name, sample.prompt, sample.gold))]

    def _record(
        self, sample: Sample, point: Point, which: Pass, answer: Generation, nll: float | None
    ) -> Record:
        record: Record = {
            "kind": "sample",
            "pass": which,
            "key": self.key(sample, point, which),
            "fingerprint": self.fingerprint,
            "threshold": key_of(point),
            "lambda": lambda_at(point, len(sample.prompt)),
            "mag": mag_at(point, len(sample.prompt)),
            "sample": sample.id,
            "task": sample.task,
            "length": sample.length,
            "index": sample.index,
            "seed": sample.seed,
            "prompt_sha256": sample.prompt_sha256,
            "prompt_tokens": len(sample.prompt),
            "gold_tokens": len(sample.gold),
            "depths": [round(depth, 4) for depth in sample.depths],
            "completion_tokens": answer.completion_tokens,
            "finish_reason": answer.finish_reason,
            "at": time.time(),
        }
        if which != "accuracy":
            record |= {"ttft_s": answer.ttft_s, "total_s": answer.total_s}
        if which != "ttft":
            metric = task_named(sample.task).metric
            record |= {
                "prediction": answer.text,
                "tokens": list(answer.tokens),
                "budget": self.budget(sample),
                "answers": list(sample.answers),
                "match": match(metric, answer.text, sample.answers),
                "gold_nll": nll,
            }
        return record


def _counted(moved: Counters | None) -> Record:
    """None: the first record of the cell holds the counters of all."""
    if moved is None:
        return {"visited": 0, "skipped": 0, "layers": []}
    layers = [[layer, *pair] for layer, pair in moved.layers.items()]
    return {"visited": moved.visited, "skipped": moved.skipped, "layers": layers}


def check_counters(moved: Counters, expected: Expected, point: Point, what: str) -> None:
    """Raises ServerError unless exactly these tokens took these paths, and tiles moved too."""
    name = name_of(point)
    vote, dense = moved.vote_tokens, moved.dense_tokens
    total = expected.vote + expected.dense
    if min(vote, dense) < 0:
        raise ServerError(f"{what}: the counters went back: the server was started again meanwhile")
    if vote + dense < expected.least:
        raise ServerError(
            f"{what}: the counters show {vote + dense} of {total} prefilled tokens; is the sidecar "
            "that of this server, and does the server run the blasst backend?"
        )
    if vote + dense > total:
        raise ServerError(
            f"{what}: {vote + dense} tokens were prefilled, {total} of them ours; the server has "
            "other traffic, measure on an idle one; or it computed preempted requests again, lower "
            "--concurrency"
        )
    if vote > expected.vote or dense > expected.dense:
        raise ServerError(
            f"{what} at {name}: {vote} tokens ran under a threshold and {dense} dense, expected "
            f"{expected.vote} and {expected.dense}; the server ignores the threshold or has "
            "another min_context (give --min-context N as it was started with)"
        )
    if (moved.visited > 0) != (expected.vote > 0):
        raise ServerError(
            f"{what} at {name}: {moved.visited} tiles were counted as visited for {expected.vote} "
            "tokens under a threshold; the skip counters of this server are wrong"
        )
    skips_nothing = point is not None and point.value == 0 and moved.skipped > 0
    if not 0 <= moved.skipped <= moved.visited or skips_nothing:
        raise ServerError(
            f"{what} at {name}: {moved.skipped} of {moved.visited} tiles counted as skipped; the "
            "skip counters of this server are wrong"
        )


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
