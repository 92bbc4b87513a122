"""Tokenizers: bytes, which need nothing, and any Hugging Face `tokenizer.json`."""

from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np

from elastix.data.files import file_identity, file_problem
from elastix.data.stream import DataError

# What published tokenizers call the token between two documents, most usual first.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """Text to token ids and back: every id is in [0, vocab_size), documents end in `end_id`."""

    vocab_size: int
    end_id: int
    fingerprint: str

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids of one document, int32 [n], without its end; bytes must be UTF-8."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids [n]; document ends vanish, ids outside raise DataError."""


def load_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer named "bytes", or the one in the `tokenizer.json` at path `name`.

    Raises DataError if the file is missing or is no tokenizer, or `tokenizers` is not installed.
    """
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def check_ids(ids: np.ndarray, vocab_size: int, where: str = "tokens") -> np.ndarray:
    """Returns `ids` unchanged; DataError, which begins with `where`, unless all are in range.

    On a device an id outside the embedding would read another row in silence.
    """
    low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise DataError(f"{where}: id {bad} is outside the vocabulary of {vocab_size}")
    return ids


@final
class ByteTokenizer:
    """One token for each byte, and 256 for the end of a document."""

    end_id = 256
    vocab_size = 257
    fingerprint = "bytes-257"

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the bytes (UTF-8 of a str) as int32 [n]; any bytes will do."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids [n]; what is not UTF-8 becomes U+FFFD."""
        ids = check_ids(np.asarray(ids, np.int64), self.vocab_size)
        return ids[ids != self.end_id].astype(np.uint8).tobytes().decode(errors="replace")


@final
class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the package `tokenizers` (pip install 'elastix-jax[text]').

    The end of a document is the file's own (`<|endoftext|>`, `</s>`, ...), or one more id after
    its last if it has none. Truncation and padding set in the file are switched off.
    """

    def __init__(self, path: str):
        self._tokenizer = _load_hugging_face(path)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # Not the number of entries: the ids of a published vocabulary may have holes.
        size = max(vocab.values(), default=-1) + 1
        self.end_id = next((vocab[name] for name in _END_NAMES if name in vocab), size)
        self.vocab_size = max(size, self.end_id + 1)
        self.fingerprint = f"huggingface-sha256:{file_identity(path)['sha256']}"

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids, int32 [n], with no special tokens added; DataError if not UTF-8."""
        try:
            text = text.decode() if isinstance(text, bytes) else text
        except UnicodeDecodeError as error:
            raise DataError(f'not UTF-8 text: {error}; use the tokenizer "bytes"') from None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of ids [n]."""
        ids = check_ids(np.asarray(ids, np.int64), self.vocab_size)
        return self._tokenizer.decode(ids[ids != self.end_id].tolist(), skip_special_tokens=False)


def _load_hugging_face(path: str) -> Any:
    if problem := file_problem(path):
        raise DataError(f'tokenizer {path!r} {problem}; give "bytes" or a tokenizer.json')
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            f"tokenizer {path!r} needs the package tokenizers: pip install 'elastix-jax[text]'"
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises bare Exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"tokenizer {path!r} is not a valid tokenizer.json ({reason}); save it again"
        ) from None
    tokenizer.no_truncation()  # a file may carry the 512 tokens of the model it was made for
    tokenizer.no_padding()
    return tokenizer
