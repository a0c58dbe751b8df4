"""Layouts: what packing, prefixes and conversations turn into, and what equals what."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks.bound import bind
from blasst.kernels.masks.chat import Tags, Template, conversation, passes, shared_prefix_sample
from blasst.kernels.masks.mods import (
    Role,
    causal,
    document,
    padding,
    shared_prefix,
    strip_history_thinking,
)
from blasst.kernels.masks.segments import PackedBatch, Piece, Sample, Segments, pack


def characters(text: str) -> list[int]:
    return [ord(c) for c in text]


def text(batch: PackedBatch, row: int, places: torch.Tensor) -> str:
    return "".join(chr(t) for t in batch.input_ids[row, places].tolist())


def test_prefix_and_suffixes() -> None:
    sample = shared_prefix_sample([1, 2, 3], [[4, 5], [6]])
    batch = pack([sample], pad_to_multiple_of=4)
    s = batch.segments
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert s.segment_ids.tolist() == [[0, 0, 0, 1, 1, 2, 0, 0]]
    assert s.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 0]]
    assert s.document_ids.tolist() == [[0] * 6 + [-1, -1]]
    # The last token of the prefix predicts the first one of both suffixes.
    pairs = list(zip(batch.loss_sources.tolist(), batch.loss_targets.tolist(), strict=True))
    assert pairs == [(2, 4), (3, 5), (2, 6)]


def test_aligned_segments_start_at_block_borders() -> None:
    batch = pack([shared_prefix_sample([1] * 5, [[2] * 3, [3] * 9], align=8)])
    segments = batch.segments
    starts = [int((segments.segment_ids[0] == i).nonzero()[0]) for i in (1, 2)]
    assert starts == [8, 16]
    assert segments.document_ids[0, 5:8].tolist() == [-1] * 3
    assert segments.role_ids[0, 5:8].tolist() == [Role.PADDING] * 3
    seen = bind(shared_prefix() & document() & padding(), segments).dense()[0]
    assert not seen[:, 5:8].any()
    assert not seen[5:8].any()
    assert segments.position_ids[0, 8] == segments.position_ids[0, 16] == 5


def test_rows_fill_in_order_and_samples_keep_to_themselves() -> None:
    samples = [Sample((Piece(tuple([i + 1] * n), loss=True),)) for i, n in enumerate((6, 5, 2, 4))]
    batch = pack(samples, seqlen=8, pad_to_multiple_of=4, pad_token=99)
    assert batch.input_ids.tolist() == [
        [1] * 6 + [3] * 2,
        [2] * 5 + [99] * 3,
        [4] * 4 + [99] * 4,
    ]
    assert batch.segments.document_ids.tolist() == [
        [0] * 6 + [1] * 2,
        [0] * 5 + [-1] * 3,
        [0] * 4 + [-1] * 4,
    ]
    seen = bind(causal() & document() & padding(), batch.segments).dense()
    assert not seen[0, 6:, :6].any()
    assert not seen[1, 5:].any()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: pack([]), "at least one"),
        (lambda: pack([shared_prefix_sample([1] * 9, [[2]])], seqlen=8), "10 tokens, seqlen is 8"),
        (lambda: pack([shared_prefix_sample([1], [[2]])], seqlen=9, pad_to_multiple_of=4), "9"),
        (lambda: shared_prefix_sample([], [[1]]), "at least one token"),
        (lambda: shared_prefix_sample([1], [[]]), "at least one token"),
        (lambda: shared_prefix_sample([1], []), r"1 tokens of prefix and suffixes of \[\]"),
        (lambda: conversation([], characters), "no tokens"),
        (lambda: conversation([{"role": "user"}], characters), "message 1 needs text as content"),
        (lambda: conversation([], characters, strip="both"), '"mask" or "exact"'),  # type: ignore[arg-type]
        (lambda: list(Tags().split("a <think> b")), "no partner"),
        (lambda: list(Tags().split("a </think> b")), "no partner"),
        (lambda: Segments(*[torch.zeros(2, 3)] * 5), "int32"),
        (
            lambda: Segments(torch.zeros(1, 2).int(), *[torch.zeros(1, 3).int()] * 4),
            "must be equal",
        ),
        (lambda: shared_prefix_sample([1], [[2]], align=0), "align 0 must be"),
        (lambda: pack([shared_prefix_sample([1], [[2]])], pad_to_multiple_of=0), "of 0 must be"),
        (lambda: bind(causal(), None), "segments is NoneType"),  # type: ignore[arg-type]
        (lambda: bind(None, None), "mask is NoneType"),  # type: ignore[arg-type]
    ],
)
def test_refusals(call: object, reason: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidInputError, match=reason):
        call()


def test_documents_from_position_ids() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 0, 1, 2, 3]])
    segments = Segments.from_position_ids(positions)
    assert segments.document_ids.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]


def test_tags_are_configurable() -> None:
    parts = list(Tags("[", "]", trailing=" ").split("a[b]  c[d]"))
    assert parts == [
        (Role.ANSWER, "a"),
        (Role.THINK, "[b]  "),
        (Role.ANSWER, "c"),
        (Role.THINK, "[d]"),
    ]
    assert list(Tags().split("<think>x</think>\n\ny")) == [
        (Role.THINK, "<think>x</think>\n\n"),
        (Role.ANSWER, "y"),
    ]
    assert list(Tags().split("")) == []


CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "<think>t1</think>a1"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "content": "<think>t2</think>a2"},
    {"role": "tool", "content": "r2"},
    {"role": "assistant", "content": "<think>t3</think>a3"},
    {"role": "user", "content": "u4"},
    {"role": "assistant", "content": "<think>t4</think>a4"},
]
SHORT = Template(header="{role[0]}:", footer=".")


def context_of(batch: PackedBatch, seen: torch.Tensor, word: str) -> str:
    """What the last token of a word sees; of several copies, the one that thinks."""
    whole = "".join(chr(t) for t in batch.input_ids[0].tolist())
    at = whole.index(word) + len(word) - 1
    return text(batch, 0, seen[at].nonzero()[:, 0])


def test_history_thinking_is_hidden_and_own_thinking_is_not() -> None:
    batch = pack([conversation(CHAT, characters, template=SHORT)])
    seen = bind(strip_history_thinking() & document(), batch.segments).dense()[0]
    assert context_of(batch, seen, "a1") == "s:S.u:u1.a:<think>t1</think>a1"
    assert context_of(batch, seen, "a3") == (
        "s:S.u:u1.a:a1.u:u2.a:<think>t2</think>a2.t:r2.a:<think>t3</think>a3"
    )
    assert context_of(batch, seen, "a4") == (
        "s:S.u:u1.a:a1.u:u2.a:a2.t:r2.a:a3.u:u4.a:<think>t4</think>a4"
    )
    assert batch.segments.turn_ids[0, [0, -1]].tolist() == [0, 3]


def test_exact_copies_answers_into_a_clean_history() -> None:
    batch = pack([conversation(CHAT, characters, strip="exact", template=SHORT)])
    whole = "".join(chr(t) for t in batch.input_ids[0].tolist())
    assert whole == (
        "s:S.u:u1.a:<think>t1</think>a1.a1.u:u2.a:<think>t2</think>a2.t:r2.a:<think>t3</think>a3."
        "a2.t:r2.a:a3.u:u4.a:<think>t4</think>a4."
    )
    seen = bind(shared_prefix() & document(), batch.segments).dense()[0]
    # The copy in the history has never seen a thought; the first one has seen its own.
    copy = whole.rindex("a1") + 1
    assert text(batch, 0, seen[copy].nonzero()[:, 0]) == "s:S.u:u1.a:a1"
    assert context_of(batch, seen, "t4") == "s:S.u:u1.a:a1.u:u2.a:a2.t:r2.a:a3.u:u4.a:<think>t4"
    assert batch.segments.position_ids[0, copy] == len("s:S.u:u1.a:a1") - 1


def test_no_thinking_no_copy() -> None:
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    one, exact = (conversation(chat, characters, strip=s) for s in ("mask", "exact"))
    assert one.columns == exact.columns


chats = st.lists(
    st.tuples(
        st.sampled_from(["user", "assistant", "assistant", "tool"]),
        st.text("pq", min_size=1, max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


def messages(drawn: Sequence[tuple[str, str, bool]]) -> list[dict[str, str]]:
    return [
        {
            "role": role,
            "content": f"<think>{body}</think>{body}" if role == "assistant" and think else body,
        }
        for role, body, think in drawn
    ]


@settings(deadline=None, max_examples=60)
@given(chats)
def test_exact_is_one_pass_per_turn(drawn: list[tuple[str, str, bool]]) -> None:
    """Each predicted token has the same tokens at the same positions before it, and none besides,
    as in the separate pass of its turn: any causal model then gives the same loss and gradient."""
    chat = messages(drawn)
    exact = pack([conversation(chat, characters, strip="exact")])
    separate = passes(chat, characters)
    assert sorted(contexts(exact, shared=True)) == sorted(
        context for sample in separate for context in contexts(pack([sample]), shared=False)
    )


def contexts(batch: PackedBatch, *, shared: bool) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """(target, what its source sees as (position, token)) of every predicted token; the contexts
    of what is seen are equal in turn, because the sources among them are compared too."""
    mask = shared_prefix() if shared else causal()
    seen = bind(mask & document() & padding(), batch.segments).dense()[0]
    found = []
    for source, target in zip(
        batch.loss_sources.tolist(), batch.loss_targets.tolist(), strict=True
    ):
        places = seen[source].nonzero()[:, 0].tolist() if source >= 0 else []
        context = tuple(
            (int(batch.segments.position_ids[0, p]), int(batch.input_ids[0, p])) for p in places
        )
        found.append((target, context))
    return found
