"""Does the server read a prompt as it was sent? Each way in which harnesses have failed, checked.

What the server read comes from its own `prompt_logprobs`: one entry a token, named by its id.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blasst.evals.client import Completions, ServedModel, request_body, scored
from blasst.evals.errors import ServerError
from blasst.evals.prompts import PromptEncoder

Grade = Literal["ok", "fault", "note"]
_HITS = re.compile(r"^vllm:prefix_cache_hits_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)
_FASTER = 0.5
"""A repeated prompt in less than this share of its first time was not computed again."""


@dataclass(frozen=True)
class Finding:
    """note: true of a way in that blasst does not use, but another harness may."""

    check: str
    grade: Grade
    words: str


@dataclass(frozen=True)
class Probe:
    """A RULER sample as text and as ids; the prefix is the end of the prompt. need: tokens of
    context that the longest samples take."""

    user: str
    prefix: str
    ids: tuple[int, ...]
    need: int


def probe_of(encoder: PromptEncoder, user: str, prefix: str, need: int) -> Probe:
    return Probe(user, prefix, encoder.encode(user, prefix).ids, need)


def examine(
    client: Completions, model: ServedModel, encoder: PromptEncoder, probe: Probe
) -> list[Finding]:
    """Every check, in order. Raises ServerError when the server cannot be asked at all."""
    findings = [_context(model, probe)]
    seen = _seen(client, "/v1/completions", scored(request_body(model.name, probe.ids, 1)))
    if seen is None:
        raise ServerError(f"{client.url} returns no prompt_logprobs; vLLM does")
    findings += compare(seen, probe, encoder)
    findings.append(_cache(client, model, probe))
    text = encoder.decode(probe.ids)
    body = {**scored(request_body(model.name, (), 1)), "prompt": text}
    findings.append(_other_way(client, "/v1/completions", body, probe, encoder, "text prompts"))
    chat = {k: v for k, v in body.items() if k != "prompt"}
    chat |= {
        "messages": [
            {"role": "user", "content": probe.user},
            {"role": "assistant", "content": probe.prefix},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    findings.append(
        _other_way(client, "/v1/chat/completions", chat, probe, encoder, "chat messages")
    )
    return findings


def compare(seen: Sequence[int | None], probe: Probe, encoder: PromptEncoder) -> list[Finding]:
    """What was read against what was sent; None in `seen` is a token that the server does not
    name (vLLM never names the first)."""
    read = _named(seen, probe.ids)
    sent = list(probe.ids)
    prefix = sent[len(sent) - _prefix_tokens(probe, encoder) :]
    findings = [
        _finding(
            "answer prefix",
            read[-len(prefix) :] == prefix,
            "ends the prompt as sent",
            "the prompt does not end with the answer prefix: base models collapse without it",
        ),
        _starts(read, sent, encoder),
    ]
    front, back = _common(read, sent), _common(read[::-1], sent[::-1])
    lost, gained = _between(sent, read, front, back), _between(read, sent, front, back)
    if len(read) < len(sent) and not gained:
        words = f"{len(lost)} of {len(sent)} tokens are missing, from token {front} on"
        findings.append(Finding("truncation", "fault", words))
    else:
        findings.append(Finding("truncation", "ok", f"all {len(sent)} tokens are read"))
    if gained and [t for t in gained if t != encoder.start_id]:
        words = f"the server put in {encoder.decode(tuple(gained))[:120]!r}"
        findings.append(Finding("template extras", "fault", words))
    else:
        findings.append(Finding("template extras", "ok", "nothing is put in"))
    return findings


def _context(model: ServedModel, probe: Probe) -> Finding:
    limit = model.max_model_len
    if limit is None:
        return Finding("max_model_len", "note", "the server does not say it")
    return _finding(
        "max_model_len",
        limit >= probe.need,
        f"{limit} tokens, {probe.need} are needed",
        f"{limit} tokens, but {probe.need} are needed: serve with --max-model-len {probe.need}",
    )


def _starts(read: list[int], sent: list[int], encoder: PromptEncoder) -> Finding:
    if encoder.start_id is None:
        return Finding("start token", "note", "the format has none")
    found, wanted = read.count(encoder.start_id), sent.count(encoder.start_id)
    return _finding(
        "start token",
        found == wanted,
        f"as often as sent ({wanted})",
        f"{found} start tokens instead of {wanted}: send token ids, or add_special_tokens=false",
    )


def _cache(client: Completions, model: ServedModel, probe: Probe) -> Finding:
    """Twice the same prompt, each with a salt of its own: the second must be computed again."""
    before = _cache_hits(client)
    times = []
    for _ in range(3):
        times.append(client.generate(model.name, probe.ids, 1).ttft_s)
    after = _cache_hits(client)
    name = "prefix cache"
    if before is not None and after is not None:
        return _finding(
            name,
            after == before,
            "salted prompts are never taken from it",
            f"{after - before:.0f} tokens came from the cache although every request had a salt of "
            "its own: TTFT and skip rates are worthless; serve with --no-enable-prefix-caching",
        )
    ratio = statistics.median(times[1:]) / times[0]
    return _finding(
        name,
        ratio >= _FASTER,
        "a repeated prompt takes as long as before (no cache metrics to read)",
        f"a repeated prompt takes {ratio:.0%} of its first time: it comes from a cache",
    )


def _other_way(
    client: Completions,
    path: str,
    body: Mapping[str, Any],
    probe: Probe,
    encoder: PromptEncoder,
    name: str,
) -> Finding:
    """The same sample in a way that other harnesses use."""
    try:
        seen = _seen(client, path, body)
    except ServerError as e:
        return Finding(name, "note", f"not comparable: {e}")
    if seen is None:
        return Finding(name, "note", "not comparable: the server does not say what it read")
    wrong = [f.words for f in compare(seen, probe, encoder) if f.grade == "fault"]
    if wrong:
        return Finding(name, "note", "would be another prompt: " + "; ".join(wrong))
    return Finding(name, "ok", "would be the same prompt")


def _seen(client: Completions, path: str, body: Mapping[str, Any]) -> list[int | None] | None:
    """Token ids that the server read; None where it has no prompt_logprobs."""
    answer = client.post(path, body)
    entries = answer.get("prompt_logprobs") or answer["choices"][0].get("prompt_logprobs")
    if not entries:
        return None
    return [int(next(iter(entry))) if entry else None for entry in entries]


def _cache_hits(client: Completions) -> float | None:
    text = client.metrics()
    found = [float(value) for value in _HITS.findall(text)]
    return sum(found) if found else None


def _named(seen: Sequence[int | None], sent: Sequence[int]) -> list[int]:
    """A first token without a name is the one that was sent before what follows it."""
    rest = [sent[0] if token is None else token for token in seen[1:]]
    cut = len(sent) - len(seen)
    before = sent[cut] if cut > 0 and rest == list(sent[cut + 1 :]) else sent[0]
    return [before if seen[0] is None else seen[0], *rest]


def _prefix_tokens(probe: Probe, encoder: PromptEncoder) -> int:
    return max(1, min(encoder.count(probe.prefix), len(probe.ids) - 1))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _between(a: list[int], b: list[int], front: int, back: int) -> list[int]:
    """What `a` has between the common front and the common back with `b`."""
    return a[front : max(front, len(a) - min(back, len(b) - front, len(a) - front))]


def _finding(check: str, good: bool, fine: str, fault: str) -> Finding:
    return Finding(check, "ok" if good else "fault", fine if good else fault)
