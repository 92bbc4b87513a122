"""The loop that somebody would write by hand around a compiled step."""

from collections import deque
from time import perf_counter

import jax


def hand_written(step, state, batches, put, inflight, read_at):
    """Train on `batches`, and note when the results of each step were read."""
    flying: deque = deque()
    for batch in batches:
        state, results = step(state, put(batch))
        flying.append(results)
        if len(flying) == inflight:
            jax.device_get(flying.popleft())
            read_at.append(perf_counter())
    while flying:
        jax.device_get(flying.popleft())
        read_at.append(perf_counter())
    return state
