"""`PackedText`: text that is tokenized and packed when a run starts."""

import dataclasses
from dataclasses import dataclass

from elastix.data.documents import Documents, check_format, open_documents
from elastix.data.files import NO_IDENTITY
from elastix.data.filtering import Filtered, Keep
from elastix.data.packing import MOST_SEQ_LEN, Packed
from elastix.data.sources import Opened, build_stream, check_path, check_paths
from elastix.data.stream import DataError, Stream, check_prefetch, check_shuffle, whole
from elastix.data.tokenizers import load_tokenizer


@dataclass(frozen=True)
class PackedText:
    """Whole documents packed into sequences that do not see each other; columns as in `Packed`.

    `files` hold documents in a `format` that `elastix.data.open_documents` knows, with its `field`
    and `separator`; none means the source of Python's standard library. `tokenizer` is "bytes" or
    the path of a Hugging Face tokenizer.json. Documents of fewer than `min_tokens` tokens are left
    out, and those that one of `keep` does not keep. `shuffle` moves rows: anywhere (True), within
    windows of so many (a number), or not at all. The files are read once: tokens and plan are kept
    in `$XDG_CACHE_HOME/elastix/data`, memory-mapped, and two to four bytes a token. For more text
    than fits there, `elastix data pack` writes files for `PackedRecords`.

    Raises DataError, here or in the methods, for values and files that will not do.
    """

    files: tuple[str, ...] = dataclasses.field(default=(), metadata=NO_IDENTITY)
    format: str = "auto"
    field: str = "text"
    separator: str = ""
    tokenizer: str = dataclasses.field(default="bytes", metadata=NO_IDENTITY)
    seq_len: int = 128
    min_tokens: int = 1
    keep: tuple[Keep, ...] = ()
    shuffle: bool | int = True
    prefetch: int = dataclasses.field(default=2, metadata=NO_IDENTITY)

    def __post_init__(self):
        object.__setattr__(self, "files", check_paths(self.files))
        object.__setattr__(self, "tokenizer", check_path("tokenizer", self.tokenizer))
        check_format(self.format)
        for name in ("field", "separator"):
            if not isinstance(getattr(self, name), str):
                raise DataError(f"{name}={getattr(self, name)!r} must be a string")
        whole("seq_len", self.seq_len, 1, MOST_SEQ_LEN)
        whole("min_tokens", self.min_tokens, 1)
        check_prefetch(self.prefetch)
        check_shuffle(self.shuffle)
        if not isinstance(self.keep, tuple | list):
            raise DataError(f"keep={self.keep!r} must be a tuple, such as (MinLength(100),)")
        object.__setattr__(self, "keep", tuple(self.keep))

    @property
    def vocab_size(self) -> int:
        """The number of token ids: 257 for "bytes"; a model may pad it."""
        return load_tokenizer(self.tokenizer).vocab_size

    def build(self, global_batch: int, seed: int) -> Stream:
        """Reads, tokenizes and packs the files, or takes all that from the cache."""
        return build_stream(self, global_batch, seed)

    def open(self) -> Opened:
        """Reads, tokenizes and packs the files, and returns the rows."""
        tokenizer = load_tokenizer(self.tokenizer)
        documents: Documents = open_documents(self.files, self.format, self.field, self.separator)
        if self.keep:
            documents = Filtered(documents, self.keep)
        packed = Packed(documents, tokenizer, self.seq_len, self.min_tokens)
        return Opened(packed, {"kind": "packed text", **packed.fingerprint})
