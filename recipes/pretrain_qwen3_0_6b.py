"""Qwen3-0.6B from nothing, on three slices of 16 TPU v5e chips: 393 thousand tokens a step.

`data/` holds text that was tokenized before, with the vocabulary of Qwen3 (elastix.data explains
the files); `--data.files` names others.
"""

from dataclasses import replace

from elastix import AdamW, MeshSpec, Policy, Recipe
from elastix.data import TokenRecords
from models.qwen3 import SIZES, next_token_loss

SEQ_LEN = 2048
NUM_STEPS = 20_000
SHARDS = 8


def recipe() -> Recipe:
    model = replace(SIZES["0.6b"], compute_dtype="bfloat16", remat=True)
    data = TokenRecords(
        files=tuple(f"data/qwen3-{n:05}-of-{SHARDS:05}.arrayrecord" for n in range(SHARDS)),
        dtype="uint32",
        seq_len=SEQ_LEN,
        vocab_size=model.vocab_size,
    )
    return Recipe(
        model=model,
        data=data,
        optimizer=AdamW(peak=6e-4, warmup=500, decay=NUM_STEPS),
        loss=next_token_loss,
        num_steps=NUM_STEPS,
        # 12 replicas are 4 on each of three slices, 6 on each of two. A replica is 16 examples,
        # one for each chip of a slice.
        global_batch=192,
        num_replicas=12,
        mesh=MeshSpec(fsdp=16),
        policy=Policy(snapshot_every=25, checkpoint_every=250, deadline=3600.0),
    )
