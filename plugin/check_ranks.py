"""What must hold when `vllm serve` runs on several GPUs: lambdas, counters, answers.

python -P -m blasst.plugin.check_ranks serve MODEL --tp 2 --out two.json
python -P -m blasst.plugin.check_ranks serve MODEL --out one.json
python -P -m blasst.plugin.check_ranks compare one.json two.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from blasst.kernels.exchange.desired import DesiredState, write_desired
from blasst.kernels.exchange.layout import RANK
from blasst.kernels.exchange.stats import iter_stats
from blasst.kernels.threshold import SkipThreshold
from blasst.plugin.bench_engines import no_model_reason
from blasst.plugin.bench_server import Server, ServerError, served

CLIENTS = 8
CHANGE_S = 20.0
"""How long a change waits for a request that was admitted under it."""
KEEP_EVERY = 10
"""Changes between two writings of the result: someone else's limit may end this at any moment."""
SKIPS_APART = 0.01
"""Ranks add up in another order than one GPU, so that scores near lambda may fall elsewhere."""


@dataclass
class Found:
    """What one server showed. answers: token ids by request; tiles: [visited, skipped] of each kv
    head of the model in the first part; lambdas: by rank, of each request every lambda it used."""

    tp: int
    dp: int
    nodes: int = 1
    start_s: float = 0.0
    prompt_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)
    tiles: list[list[int]] = field(default_factory=list)
    vote_tokens: dict[str, int] = field(default_factory=dict)
    lambdas: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    stamped: dict[str, list[float]] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 everything held, 1 something did not, 2 bad usage, 3 the server failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    serve = verbs.add_parser(
        "serve",
        help="start a server and write what was seen of it: 100 requests with a threshold each, "
        "then 100 changes of the deployment's while requests come",
    )
    add = serve.add_argument
    add("model", help="a Hugging Face folder with its tokenizer")
    add("--tp", type=int, default=1, help="tensor-parallel ranks (default: 1)")
    add("--dp", type=int, default=1, help="data-parallel engines (default: 1)")
    add(
        "--nodes",
        type=int,
        default=1,
        help="of vLLM, all on this host, which then may share its GPUs (default: 1)",
    )
    add("--requests", type=int, default=100, help="of each part (default: 100)")
    add("--answer-tokens", type=int, default=8, help="of each request of its own (default: 8)")
    add("--live-tokens", type=int, help="first tokens of prompts while changes are made")
    add("--budget-s", type=float, default=1e9, help="make no further change after these seconds")
    add("--tokens", type=int, default=3000, help="of the longest prompt (default: 3000)")
    add("--prompts", type=Path, help="JSONL of `blasst ruler generate`, instead of random ids")
    add("--dtype", default="bfloat16")
    add("--chunk", type=int, default=1024, help="most tokens of a step (default: 1024)")
    add("--graphs", choices=("eager", "decode"), default="decode", help="what is captured")
    add("--ready-s", type=float, default=240, help="for the start (default: 240)")
    add("--log", type=Path, help="of the server (default: beside --out)")
    add("--out", type=Path, required=True)
    compare = verbs.add_parser("compare", help="the first file is of one rank, the others of more")
    compare.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.verb == "compare":
        return _compare([json.loads(f.read_text()) for f in args.files])
    reason = no_model_reason(args.model)
    if reason is None and args.prompts is not None and not args.prompts.is_file():
        reason = f"{args.prompts} does not exist"
    if reason is None and (args.nodes < 1 or args.tp * args.dp % args.nodes):
        reason = f"{args.tp * args.dp} ranks cannot be spread evenly over --nodes {args.nodes}"
    if reason is None and not args.out.absolute().parent.is_dir():
        reason = f"the folder of {args.out} does not exist"
    if reason is not None:
        parser.error(reason)
    found = Found(args.tp, args.dp, args.nodes)
    try:
        _serve(args, found)
    except ServerError as e:
        print(f"blasst: error: {e}", file=sys.stderr)
        return 3
    wrong = reasons(asdict(found))
    print("\n".join([summary(asdict(found)), *(f"WRONG {w}" for w in wrong)]), flush=True)
    return 1 if wrong else 0


def _serve(args: argparse.Namespace, found: Found) -> None:
    prompts = _prompts(args)
    found.prompt_tokens = sum(map(len, prompts))
    with tempfile.TemporaryDirectory(prefix="blasst-ranks-", ignore_cleanup_errors=True) as name:
        state, seen = Path(name) / "state", Path(name) / "seen"
        state.mkdir()
        seen.mkdir()
        log = args.log or args.out.with_suffix(".log")
        started = time.monotonic()
        with served(args, state, log) as server:
            found.start_s = time.monotonic() - started
            try:
                server.call("/collective_rpc", {"method": "blasst_record", "args": [str(seen)]})
                _each_its_own(server, state, prompts, found, args.answer_tokens)
                _keep(args.out, seen, found)
                live = [p[: args.live_tokens] for p in prompts]
                keep = partial(_keep, args.out, seen, found)
                _live_changes(server, state, live, found, started + args.budget_s, keep)
                found.metrics = _metrics(server.text("/metrics"))
            finally:  # before the server's end, which someone else's limit may not wait for
                _keep(args.out, seen, found)


def _keep(out: Path, seen: Path, found: Found) -> None:
    """What is known by now, once there is an answer."""
    _read_records(seen, found)
    if found.answers:
        new = out.with_suffix(".new")
        new.write_text(json.dumps(asdict(found)))
        new.replace(out)  # whoever collects what is there never finds half of it


def _each_its_own(
    server: Server, state: Path, prompts: list[list[int]], found: Found, tokens: int
) -> None:
    """One request after the other: batches are the same whatever the number of ranks."""
    for i, prompt in enumerate(prompts):
        answer = server.complete(prompt, f"own-{i}", tokens, blasst_mag=1000 + 37 * i)
        found.answers.append(answer)
    time.sleep(0.6)
    heads = json.loads((server.model / "config.json").read_text())["num_key_value_heads"]
    found.tiles = [[0, 0] for _ in range(heads)]
    for page in iter_stats(state / "stats", RANK):
        found.vote_tokens[page.name] = int(page.scalar("prefill_tokens_vote"))
        _, per_rank, _ = page.shape("tiles")
        first = int(page.labels["first_kv_head"])
        for at, count in enumerate(page.arrays["tiles"]):
            head, what = first + at // 2 % per_rank, at % 2
            found.tiles[head][what] += int(count)


def _live_changes(
    server: Server,
    state: Path,
    prompts: list[list[int]],
    found: Found,
    end: float,
    keep: Callable[[], None],
) -> None:
    """Clients send without a pause; each change waits for a request that began and ended in it.
    keep: called now and then, to write down what is known."""
    done = threading.Event()
    began: list[int] = [0]  # the generation each client's last finished request began in
    lock = threading.Lock()
    generation = 0

    def client(number: int) -> None:
        rng = random.Random(number)
        sent = 0
        while not done.is_set():
            begin = generation
            server.complete(rng.choice(prompts), f"live-{number}-{sent}", max_tokens=2)
            sent += 1
            with lock:
                began[0] = max(began[0], begin)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, i) for i in range(CLIENTS)]
        try:
            for number in range(1, len(prompts) + 1):
                if time.monotonic() > end:
                    break
                threshold = SkipThreshold("mag", 1000 + 61 * number)
                found.written[str(number)] = threshold.skip_lambda()
                write_desired(state, DesiredState(number, threshold))
                generation = number
                _wait_for(lambda number=number: began[0] >= number, clients)
                if number % KEEP_EVERY == 0:
                    keep()
        finally:
            done.set()
        for c in clients:
            c.result()


def _wait_for(condition: Any, clients: Sequence[Any]) -> None:
    end = time.monotonic() + CHANGE_S
    while not condition():
        for c in clients:
            if c.done():
                c.result()
        if time.monotonic() > end:
            raise ServerError(f"no request was answered in {CHANGE_S:.0f} s after a change")
        time.sleep(0.002)


def _read_records(folder: Path, found: Found) -> None:
    for path in sorted(folder.iterdir()):
        used = found.lambdas.setdefault(path.stem, {})
        whole, _, _ = path.read_text().rpartition("\n")  # a rank may be writing
        for line in map(json.loads, whole.splitlines()):
            if "stamped" in line:
                found.stamped[line["id"]] = line["stamped"]
            else:
                known = used.setdefault(line["id"], [])
                if line["lambda"] not in known:
                    known.append(line["lambda"])


def reasons(found: Mapping[str, Any]) -> list[str]:
    """What does not hold of one server's numbers; empty: everything does."""
    wrong = []
    ranks, stamped = found["lambdas"], found["stamped"]
    if len(ranks) != found["tp"] * found["dp"]:
        wrong.append(f"{len(ranks)} ranks were recorded, not {found['tp'] * found['dp']}")
    by_engine: dict[str, list[dict[str, list[float]]]] = {}
    for name, used in ranks.items():
        by_engine.setdefault(name.split("-")[0], []).append(used)
    for engine, members in by_engine.items():
        if any(m != members[0] for m in members):
            wrong.append(f"the ranks of engine {engine} used different lambdas")
    for used in (members[0] for members in by_engine.values()):
        for request, lambdas in used.items():
            if lambdas != [stamped[request][0]]:
                wrong.append(f"{request} was stamped {stamped[request]} and ran with {lambdas}")
    for request, (skip_lambda, generation) in stamped.items():
        live = "live-" in request
        if live and generation and skip_lambda != found["written"][str(generation)]:
            wrong.append(f"{request} got {skip_lambda} under generation {generation}")
    missed = set(found["written"]) - {str(g) for _, g in stamped.values()}
    if missed:
        wrong.append(f"no request was admitted under the changes {sorted(missed, key=int)[:5]}")
    votes = sorted(found["vote_tokens"].values())
    total = found["prompt_tokens"]
    if sum(votes) != total * found["tp"] or (found["dp"] == 1 and len(set(votes)) != 1):
        wrong.append(f"ranks count {votes} voting tokens of {total}")
    if not sum(skipped for _, skipped in found["tiles"]):
        wrong.append("nothing was skipped")
    return wrong


def summary(found: Mapping[str, Any]) -> str:
    """Two lines of text."""
    visited, skipped = (sum(column) for column in zip(*found["tiles"], strict=True))
    live = {r for r in found["stamped"] if "live-" in r}
    return (
        f"tp {found['tp']}, dp {found['dp']}, nodes {found['nodes']}: "
        f"ready after {found['start_s']:.0f} s; "
        f"{len(found['answers'])} requests of {found['prompt_tokens']} tokens, "
        f"{skipped} of {visited} tiles skipped ({skipped / max(visited, 1):.2%})\n"
        f"{len(found['written'])} changes met by {len(live)} requests under "
        f"{len({found['stamped'][r][1] for r in live})} generations; requests by rank: "
        f"{ {name: len(used) for name, used in found['lambdas'].items()} }"
    )


def _compare(files: Sequence[Mapping[str, Any]]) -> int:
    one, held = files[0], True
    for other in files[1:]:
        pairs = list(zip(one["answers"], other["answers"], strict=True))
        size = min(len(answer) for pair in pairs for answer in pair)
        differ = sum(a[:size] != b[:size] for a, b in pairs)
        same_visits = [t[0] for t in one["tiles"]] == [t[0] for t in other["tiles"]]
        apart = max(
            abs(a[1] - b[1]) / max(a[1], 1)
            for a, b in zip(one["tiles"], other["tiles"], strict=True)
        )
        held &= same_visits and apart <= SKIPS_APART
        print(
            f"tp {other['tp']}, dp {other['dp']} against tp {one['tp']}, dp {one['dp']}: "
            f"{differ} of {len(pairs)} answers of {size} tokens differ; visited tiles of each "
            f"kv head {'equal' if same_visits else 'DIFFER'}; "
            f"skipped tiles at most {apart:.3%} apart"
        )
    return 0 if held else 1


def _metrics(page: str) -> dict[str, float]:
    """Sums of blasst_* samples on vLLM's own page."""
    sums: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("blasst_") and "_bucket" not in line:
            name = line.split("{")[0].split(" ")[0]
            sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return sums


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    if args.prompts is not None:
        texts = args.prompts.read_text().splitlines()
        lines: list[list[int]] = [json.loads(x)["prompt"] for x in texts]
        return (lines * int(args.requests))[: int(args.requests)]
    vocabulary = int(json.loads((Path(args.model) / "config.json").read_text())["vocab_size"])
    rng = random.Random(0)
    sizes = [rng.randint(args.tokens // 8, args.tokens) for _ in range(args.requests)]
    return [[rng.randrange(3, min(vocabulary, 4000)) for _ in range(n)] for n in sizes]


if __name__ == "__main__":
    sys.exit(main())
