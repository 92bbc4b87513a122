"""Three sizes of one byte model, for `elastix bench`: 0.2, 1.3 and 10 million parameters.

The text is Python's own standard library. Sequences are short, so that a step is short on a few
CPU cores: what is measured is what a step costs around the arithmetic, and what a loss costs.
"""

from dataclasses import replace

from elastix import AdamW, Recipe
from elastix.data import Text
from models.qwen3 import SIZES, Qwen3Config, next_token_loss

VOCABULARY = 260
"""The bytes and what marks the end of a document, to a multiple of four."""


def small() -> Recipe:
    """0.2 million parameters, 24 sequences of 32 bytes."""
    return _recipe(replace(SIZES["tiny"], num_layers=4), 24, 32)


def medium() -> Recipe:
    """1.3 million parameters, 12 sequences of 32 bytes."""
    return _recipe(SIZES["small"], 12, 32)


def large() -> Recipe:
    """10 million parameters, 12 sequences of 16 bytes."""
    return _recipe(SIZES["medium"], 12, 16)


def _recipe(model: Qwen3Config, global_batch: int, seq_len: int) -> Recipe:
    return Recipe(
        model=replace(model, vocab_size=VOCABULARY),
        data=Text(seq_len=seq_len),
        optimizer=AdamW(peak=1e-3, warmup=10),
        loss=next_token_loss,
        num_steps=200,
        global_batch=global_batch,
        num_replicas=12,
    )
