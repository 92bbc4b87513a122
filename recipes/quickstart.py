"""A byte model of Python's own standard library: about a minute on two CPU cores."""

from dataclasses import replace

from elastix import AdamW, Policy, Recipe
from elastix.data import Text
from models.qwen3 import SIZES, next_token_loss


def recipe() -> Recipe:
    data = Text(seq_len=64)
    model = replace(SIZES["tiny"], vocab_size=260)
    return Recipe(
        model=model,
        data=data,
        optimizer=AdamW(peak=3e-3, warmup=10, decay=120),
        loss=next_token_loss,
        num_steps=120,
        global_batch=24,
        num_replicas=12,
        policy=Policy(snapshot_every=10, checkpoint_every=20, probe_every=0.2),
    )
