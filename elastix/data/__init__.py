"""Data: random access sources, read as one stream whose whole state is one integer.

`Text` and `TokenRecords` are the configurations that a recipe holds; `stream` makes the same
`Stream` of any other source. Nothing here touches a JAX device.
"""

from elastix.data.sources import Text, TokenRecords, unigram_entropy
from elastix.data.stream import DataError, Source, Stream, stream
from elastix.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "Source",
    "Stream",
    "Text",
    "TokenRecords",
    "Tokenizer",
    "load_tokenizer",
    "stream",
    "unigram_entropy",
]
