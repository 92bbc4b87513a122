"""Packing: whole documents side by side in sequences of one length, none of which sees another.

Best-fit decreasing: the longest piece first, each into the row that it leaves least room in (Ding
et al., Fewer Truncations Improve Language Modeling, arXiv:2404.10830). A document is only split
where it is longer than a row.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np

from elastix.data.cache import ArrayWriter, cached_arrays
from elastix.data.documents import Documents
from elastix.data.stream import DataError, whole
from elastix.data.tokenizers import Tokenizer, check_ids

PADDING = 0
"""The token and the segment id of what is left of a row."""

MOST_SEQ_LEN = 2**24
"""Targets in a packed row."""

_PLAN_VERSION = 1


class Packed:
    """Documents, tokenized and packed: a `Source` of rows that hold seq_len + 1 tokens.

    A row has `tokens`, `segment_ids` and `positions`, int32 [seq_len + 1], and `mask`, float32
    [seq_len]. Segments are numbered 1, 2, ... in their row, and 0 is padding; positions restart at
    0 in each; the mask weighs a target 1 if it is in the segment of its input, else 0.

    Every document is followed by the tokenizer's end. One that does not fit into a row is split
    into pieces that overlap by one token, each a segment: so every token but the first of a
    document is a target exactly once. Documents of fewer than `min_tokens` tokens, their end not
    counted, are left out. Tokens and plan lie in the cache, memory-mapped. `fingerprint` holds JSON
    values. Raises DataError for bad values, and if nothing is left to be packed.
    """

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, seq_len: int, min_tokens: int = 1
    ):
        self.seq_len = whole("seq_len", seq_len, 1, MOST_SEQ_LEN)
        min_tokens = whole("min_tokens", min_tokens, 1)
        made_from = {"documents": documents.fingerprint, "tokenizer": tokenizer.fingerprint}
        tokenized = cached_arrays(
            {"kind": "tokens", **made_from}, partial(_write_tokens, documents, tokenizer)
        )
        # As plain arrays, which are the same pages: slices of a memmap take five times as long.
        self._tokens, ends = (np.asarray(tokenized.arrays[name]) for name in ("tokens", "ends"))
        options = {"seq_len": self.seq_len, "min_tokens": min_tokens}
        plan = cached_arrays(
            # By the hash of the tokens: another release of a tokenizer may make others.
            {"kind": f"plan {_PLAN_VERSION}", **made_from, **tokenized.sha256, **options},
            lambda writer: _write_plan(writer, ends, self.seq_len, min_tokens),
        )
        self._pieces, self._ends = (np.asarray(plan.arrays[name]) for name in ("pieces", "ends"))
        if not len(self):
            raise DataError(
                f"min_tokens={min_tokens} leaves none of {len(documents)} documents to be packed; "
                "give longer ones, or lower it"
            )
        self.fingerprint: dict[str, object] = {
            **made_from,
            **options,
            "tokens": len(self._tokens),
            "tokens_sha256": tokenized.sha256["tokens"],
            "plan_sha256": plan.sha256["pieces"],
        }

    def __len__(self) -> int:
        return len(self._ends)

    def segments(self, index: int) -> list[np.ndarray]:
        """Returns the ids of each segment of a row, without its padding."""
        begin = self._ends[index - 1] if index else 0
        pieces = self._pieces[begin : self._ends[index]].tolist()
        return [self._tokens[start:stop] for start, stop in pieces]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return packed_row(self.segments(index), self.seq_len)


def packed_row(segments: Sequence[np.ndarray], seq_len: int) -> dict[str, np.ndarray]:
    """Returns the columns of one row, as `Packed` has them, from the ids of its segments."""
    tokens, segment_ids, positions = np.zeros((3, seq_len + 1), np.int32)
    start = 0
    for number, segment in enumerate(segments, 1):
        stop = start + len(segment)
        tokens[start:stop], segment_ids[start:stop] = segment, number
        positions[start:stop] = np.arange(len(segment))
        start = stop
    same = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[1:] != PADDING)
    mask = same.astype(np.float32)
    return {"tokens": tokens, "segment_ids": segment_ids, "positions": positions, "mask": mask}


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype, little-endian, that tokens are stored in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def encode(documents: Documents, index: int, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids [n] of a document and its end; none of one that has no tokens."""
    ids = check_ids(tokenizer.encode(documents[index]), tokenizer.vocab_size, f"document {index}")
    ends = [tokenizer.end_id] if len(ids) else []
    return np.concatenate([ids, ends]).astype(token_dtype(tokenizer.vocab_size))


def pieces_of(lengths: np.ndarray, seq_len: int, min_tokens: int) -> np.ndarray:
    """Returns where the pieces of documents [n] begin and end among all tokens: int64 [m, 2].

    `lengths` count the documents' ends; a document of length n has ceil((n - 1) / seq_len) pieces.
    """
    lengths = lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    kept = lengths > min_tokens
    starts, lengths = starts[kept], lengths[kept]
    counts = -(-(lengths - 1) // seq_len)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(starts, counts) + (np.arange(len(first)) - first) * seq_len
    ends = np.minimum(begins + seq_len + 1, np.repeat(starts + lengths, counts))
    return np.stack([begins, ends], axis=1)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each piece, int64 [n]: rows hold `capacity` tokens, pieces at most that.

    Takes about a microsecond a piece, whatever the capacity, for those that models have.
    """
    rows = np.empty(len(lengths), np.int64)
    having: dict[int, list[int]] = defaultdict(list)  # rows, by how much is free in them
    frees, count = 0, 0  # bit f of `frees` is set where a row has f tokens free
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = frees >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = having[free].pop()
            if not having[free]:
                frees ^= 1 << free
        else:
            row, free, count = count, capacity, count + 1
        rows[piece] = row
        if left := free - length:
            having[left].append(row)
            frees |= 1 << left
    return rows


def plan(lengths: np.ndarray, seq_len: int, min_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pieces in the order of their rows, and where each row ends among them.

    Rows, and pieces in a row, are in the order of their first document.
    """
    pieces = pieces_of(lengths, seq_len, min_tokens)
    rows = best_fit(pieces[:, 1] - pieces[:, 0], seq_len + 1)
    order = np.argsort(rows, kind="stable")  # within a row, by document
    ends = np.cumsum(np.bincount(rows)) if len(rows) else np.zeros(0, np.int64)
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64) if len(rows) else ends
    by_first = np.argsort(order[begins], kind="stable")
    place = np.empty(len(ends), np.int64)
    place[by_first] = np.arange(len(ends))
    order = np.lexsort((np.arange(len(rows)), place[rows]))
    return pieces[order], np.cumsum((ends - begins)[by_first]).astype(np.int64)


def _write_tokens(documents: Documents, tokenizer: Tokenizer, writer: ArrayWriter) -> None:
    dtype, end = token_dtype(tokenizer.vocab_size), 0
    writer.append("tokens", np.zeros(0, dtype))
    for index in range(len(documents)):
        ids = encode(documents, index, tokenizer)
        end += len(ids)
        writer.append("tokens", ids)
        writer.append("ends", np.array([end], np.int64))


def _write_plan(writer: ArrayWriter, ends: np.ndarray, seq_len: int, min_tokens: int) -> None:
    pieces, rows = plan(np.diff(ends, prepend=0), seq_len, min_tokens)
    writer.append("pieces", pieces)
    writer.append("ends", rows)
