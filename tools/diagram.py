"""Print the state diagram of the recovery machine, from the histories of small worlds.

Each edge was seen in an exhaustive search, so the picture cannot drift from the rules.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from elastix.machine import Policy
from tests.world_search import explore
from tests.world_values import FAULTS, Setting

SMALL = Policy(stable_probes=1, inflight=1)
KINDS = FAULTS - {"silent", "notice"}


def edges() -> set[tuple[str, str, str]]:
    """(state, event, next state) for each change of state in any history."""
    found = set()
    for min_slices in (1, 2):
        for every, num_steps, faults in ((1, 2, 2), (2, 3, 1)):
            policy = replace(
                SMALL, min_slices=min_slices, snapshot_every=every, checkpoint_every=every
            )
            found |= explore(Setting(policy, 2, num_steps, faults, KINDS)).edges
    return {edge for edge in found if edge[0] != edge[2]}


def mermaid() -> str:
    """The diagram in Mermaid's notation, one arrow for each pair of states."""
    events: dict[tuple[str, str], list[str]] = {}
    for before, event, after in sorted(edges()):
        events.setdefault((before, after), []).append(event)
    lines = ["stateDiagram-v2", "    [*] --> Starting"]
    lines += [f"    {a} --> {b}: {', '.join(es)}" for (a, b), es in events.items()]
    lines += ["    Done --> [*]", "    Failed --> [*]"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid())
