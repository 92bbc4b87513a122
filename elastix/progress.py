"""Which examples a run has consumed, in order, as a count and a chained hash."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True)
class Progress:
    """`sha256` is chained: h_n = sha256(h_{n-1} + the ids of step n as int64 little-endian)."""

    examples: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    def consume(self, ids: Int64[np.ndarray, " examples"]) -> Progress:
        """The progress after one more step, whose example ids are `ids`, in order."""
        chained = bytes.fromhex(self.sha256) + np.asarray(ids, "<i8").tobytes()
        return Progress(self.examples + len(ids), hashlib.sha256(chained).hexdigest())

    def to_json(self) -> dict[str, Any]:
        return {"examples": self.examples, "sha256": self.sha256}

    @staticmethod
    def from_json(value: Any) -> Progress:
        return Progress(int(value["examples"]), str(value["sha256"]))
