"""Data: random access sources, read as one stream whose whole state is one integer.

`Text`, `PackedText`, `TokenRecords`, `PackedRecords` and `Mixture` are the configurations that a
recipe holds; `stream` makes the same `Stream` of any other source. Nothing here touches a JAX
device.
"""

from elastix.data.documents import Documents, open_documents
from elastix.data.filtering import Filtered, MaxLength, MinLength
from elastix.data.mixture import Mixed, Mixture
from elastix.data.packed_records import PackedRecords
from elastix.data.packed_text import PackedText
from elastix.data.packing import Packed
from elastix.data.sources import Text, TokenRecords, unigram_entropy
from elastix.data.stream import DataError, Source, Stream, stream
from elastix.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "Documents",
    "Filtered",
    "MaxLength",
    "MinLength",
    "Mixed",
    "Mixture",
    "Packed",
    "PackedRecords",
    "PackedText",
    "Source",
    "Stream",
    "Text",
    "TokenRecords",
    "Tokenizer",
    "load_tokenizer",
    "open_documents",
    "stream",
    "unigram_entropy",
]
