"""Per-token metadata of packed samples: what masks read, beside position_ids and loss targets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from blasst.kernels.errors import InvalidInputError
from blasst.kernels.masks.mods import PADDING_DOCUMENT, TRUNK, Role

NO_TOKEN = -1


@dataclass(frozen=True)
class Segments:
    """int32 [batch, seqlen] each, on the CPU, made once per batch by the collator.

    document_ids: from 0 in each row, -1 = padding. segment_ids: 0 = seen by all segments of the
    document. turn_ids: from 0 in each document. role_ids: see Role. position_ids: for RoPE; they
    restart at the prefix's length for every suffix.
    """

    document_ids: torch.Tensor
    segment_ids: torch.Tensor
    turn_ids: torch.Tensor
    role_ids: torch.Tensor
    position_ids: torch.Tensor

    def __post_init__(self) -> None:
        reasons = []
        for name in FIELD_TENSORS.values():
            tensor = getattr(self, name)
            if not isinstance(tensor, torch.Tensor):
                reasons.append(f"{name} is {type(tensor).__name__}, it must be a tensor")
            elif tensor.dtype != torch.int32 or tensor.dim() != 2 or tensor.device.type != "cpu":
                reasons.append(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, it must be "
                    "int32 [batch, seqlen] on the CPU: the collator's thread builds it"
                )
            elif not tensor.numel():
                reasons.append(f"{name} has shape {list(tensor.shape)}, it must hold some token")
            elif tensor.shape != self.document_ids.shape:
                reasons.append(
                    f"{name} has shape {list(tensor.shape)}, document_ids "
                    f"{list(self.document_ids.shape)}; they must be equal"
                )
        if reasons:
            raise InvalidInputError(reasons)

    @property
    def batch(self) -> int:
        return self.document_ids.shape[0]

    @property
    def seqlen(self) -> int:
        return self.document_ids.shape[1]

    def field(self, name: str) -> torch.Tensor:
        """The tensor behind a field of a mask expression."""
        tensor: torch.Tensor = getattr(self, FIELD_TENSORS[name])
        return tensor

    def digest(self, names: Iterable[str]) -> tuple[object, ...]:
        """A key of the layout as far as these fields show it. Never kept: a collator may fill the
        same tensors again."""
        return (self.batch, self.seqlen, *((name, self._digest(name)) for name in names))

    def _digest(self, name: str) -> bytes:
        data = self.field(name).contiguous().numpy().data
        return hashlib.sha1(data, usedforsecurity=False).digest()

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> Segments:
        """Plain packed documents: a document starts wherever position_ids [batch, seqlen] is 0."""
        starts = position_ids == 0
        starts[:, :1] = True
        documents = starts.int().cumsum(1, dtype=torch.int32) - 1
        zeros = torch.zeros_like(documents)
        return cls(documents, zeros, zeros, zeros, position_ids.int())


FIELD_TENSORS = {
    "document": "document_ids",
    "segment": "segment_ids",
    "turn": "turn_ids",
    "role": "role_ids",
    "position": "position_ids",
}


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one sample. loss: whether they are predicted.

    after: the piece that comes before this one for the model (its last token predicts this one's
    first), as an index into the sample; None = the start. `position` is the first one's.
    """

    tokens: tuple[int, ...]
    segment: int = TRUNK
    turn: int = 0
    role: Role = Role.TEXT
    position: int = 0
    loss: bool = False
    after: int | None = None


@dataclass(frozen=True)
class Sample:
    """One document: pieces in packed order. align: every segment starts at a multiple of it."""

    pieces: tuple[Piece, ...]
    align: int = 1

    def __post_init__(self) -> None:
        if self.align < 1:
            raise InvalidInputError([f"align {self.align} must be at least 1 token"])

    @cached_property
    def columns(self) -> Columns:
        return _columns(self)

    def __len__(self) -> int:
        return len(self.columns.tokens)


@dataclass(frozen=True)
class Columns:
    """A sample token by token; source: the token whose logits predict this one, -1 = no loss."""

    tokens: list[int] = field(default_factory=list)
    padding: list[bool] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    role: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)


def _columns(sample: Sample) -> Columns:
    out = Columns()
    ends: list[int] = []
    segment: int | None = None
    for number, piece in enumerate(sample.pieces):
        if piece.after is not None and not 0 <= piece.after < number:
            raise InvalidInputError(
                [f"piece {number} comes after {piece.after}, it must be an earlier piece or None"]
            )
        if segment is not None and piece.segment != segment:
            _pad_columns(out, -len(out.tokens) % sample.align)
        segment = piece.segment
        first = len(out.tokens)
        before = NO_TOKEN if piece.after is None else ends[piece.after]
        count = len(piece.tokens)
        out.tokens.extend(piece.tokens)
        out.padding.extend([False] * count)
        out.segment.extend([piece.segment] * count)
        out.turn.extend([piece.turn] * count)
        out.role.extend([piece.role] * count)
        out.position.extend(range(piece.position, piece.position + count))
        sources = [before, *range(first, first + count - 1)] if piece.loss else [NO_TOKEN] * count
        out.source.extend(sources[:count])
        ends.append(first + count - 1 if count else before)
    return out


def _pad_columns(out: Columns, count: int) -> None:
    out.tokens.extend([0] * count)
    out.padding.extend([True] * count)
    out.segment.extend([TRUNK] * count)
    out.turn.extend([0] * count)
    out.role.extend([Role.PADDING] * count)
    out.position.extend([0] * count)
    out.source.extend([NO_TOKEN] * count)


@dataclass(frozen=True)
class PackedBatch:
    """What a packing collator hands to a model.

    input_ids: int64 [batch, seqlen]. loss_rows, loss_sources, loss_targets: int64 [n]; logits
    [row, source] predict the token `target`. One source may have many targets: the last token of a
    shared prefix predicts the first token of every suffix, so labels shifted by one cannot say it.
    """

    input_ids: torch.Tensor
    segments: Segments
    loss_rows: torch.Tensor
    loss_sources: torch.Tensor
    loss_targets: torch.Tensor


def pack(
    samples: Sequence[Sample],
    *,
    seqlen: int | None = None,
    pad_to_multiple_of: int = 1,
    pad_token: int = 0,
) -> PackedBatch:
    """Samples into rows, in order, first row that has room. Padding is its own document, -1.

    seqlen: tokens a row may hold, and every row's length; None = one row, as long as it must be,
    rounded up to pad_to_multiple_of (128 keeps every block whole). Samples start at multiples of
    their own `align`. Raises InvalidInputError when a sample is longer than seqlen.
    """
    if not samples:
        raise InvalidInputError(["no samples to pack; give at least one"])
    empty = [i for i, sample in enumerate(samples) if not len(sample)]
    if empty:
        raise InvalidInputError([f"sample {empty[0]} has no tokens; leave it out"])
    if pad_to_multiple_of < 1:
        raise InvalidInputError(
            [f"pad_to_multiple_of {pad_to_multiple_of} must be at least 1 token"]
        )
    if seqlen is not None and seqlen % pad_to_multiple_of:
        raise InvalidInputError(
            [f"seqlen {seqlen} is not a multiple of pad_to_multiple_of {pad_to_multiple_of}"]
        )
    rows: list[_Row] = []
    for sample in samples:
        _row_for(rows, sample, seqlen).append(sample)
    longest = max(len(row.documents) for row in rows)
    length = seqlen or -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    for row in rows:
        row.pad(length - len(row.documents))
    return _to_batch(rows, pad_token)


@dataclass
class _Row:
    """A row that fills up."""

    columns: Columns = field(default_factory=Columns)
    documents: list[int] = field(default_factory=list)
    count: int = 0

    def pad(self, missing: int) -> None:
        _pad_columns(self.columns, missing)
        self.documents.extend([PADDING_DOCUMENT] * missing)

    def append(self, sample: Sample) -> None:
        self.pad(-len(self.documents) % sample.align)
        start, new, columns = len(self.documents), sample.columns, self.columns
        self.documents.extend(PADDING_DOCUMENT if pad else self.count for pad in new.padding)
        self.count += 1
        columns.tokens.extend(new.tokens)
        columns.padding.extend(new.padding)
        columns.segment.extend(new.segment)
        columns.turn.extend(new.turn)
        columns.role.extend(new.role)
        columns.position.extend(new.position)
        columns.source.extend(s if s == NO_TOKEN else s + start for s in new.source)


def _row_for(rows: list[_Row], sample: Sample, seqlen: int | None) -> _Row:
    if seqlen is not None and len(sample) > seqlen:
        raise InvalidInputError(
            [f"a sample has {len(sample)} tokens, seqlen is {seqlen}; raise it or split the sample"]
        )
    for row in rows:
        start = len(row.documents) + -len(row.documents) % sample.align
        if seqlen is None or start + len(sample) <= seqlen:
            return row
    rows.append(_Row())
    return rows[-1]


def _to_batch(rows: list[_Row], pad_token: int) -> PackedBatch:
    def ids(values: Iterable[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([list(v) for v in values], dtype=torch.int32)

    columns = [row.columns for row in rows]
    segments = Segments(
        document_ids=ids(row.documents for row in rows),
        segment_ids=ids(c.segment for c in columns),
        turn_ids=ids(c.turn for c in columns),
        role_ids=ids(c.role for c in columns),
        position_ids=ids(c.position for c in columns),
    )
    tokens = torch.tensor([c.tokens for c in columns])
    tokens[segments.document_ids == PADDING_DOCUMENT] = pad_token
    source = torch.tensor([c.source for c in columns])
    at_row, at_token = (source != NO_TOKEN).nonzero(as_tuple=True)
    return PackedBatch(tokens, segments, at_row, source[at_row, at_token], tokens[at_row, at_token])
