"""Recipe: what a user composes, as one frozen tree of plain values."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from elastix.data import Stream
from elastix.machine import Policy
from elastix.mesh import MeshSpec
from elastix.plain_values import is_number, whole
from elastix.reduction import MOST_REPLICAS
from elastix.step import Loss, Reduction, Work

_MOST_SETS = 1000
"""Of slices, to compile for: each takes seconds, and space in the log."""


class ModelConfig(Protocol):
    """A frozen dataclass of plain values that builds an Equinox module.

    It may have `sharding_rules()`: (regex on the leaf's path, mesh axis of each dim) pairs; and
    `vocab_size`, the number of token ids that it knows: data that state more are refused.
    """

    def build(self, key: Any) -> Any: ...


class DataConfig(Protocol):
    """A frozen dataclass of plain values that builds a stream of global batches.

    It may have `vocab_size`: every token id in its batches is below it.
    """

    def build(self, global_batch: int, seed: int) -> Stream: ...


class OptimizerConfig(Protocol):
    """A frozen dataclass of plain values that builds an optax transformation.

    It may have `learning_rate(step)`, the rate of the update after `step` updates, to be logged.
    """

    def build(self) -> optax.GradientTransformation: ...


@dataclass(frozen=True)
class AdamW:
    """AdamW with linear warm-up, cosine decay and clipping by the global norm.

    Args:
        peak: the highest learning rate, reached after `warmup` updates.
        warmup: updates of linear warm-up.
        decay: updates from the start to the end of the cosine; after it the rate stays at
            `peak * floor`. None: the rate stays at the peak.
        floor: the last rate as a share of the peak.
        clip: largest global gradient norm; None: no clipping.
    """

    peak: float = 1e-3
    warmup: int = 0
    decay: int | None = None
    floor: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        self._require("peak", lambda x: x > 0, "a learning rate above 0, finite in float32")
        for name in ("b1", "b2"):
            self._require(name, lambda x: 0 <= x < 1, "0 to below 1")
        self._require("weight_decay", lambda x: x >= 0, "0 or more, finite in float32")
        self._require("floor", lambda x: 0 <= x <= 1, "a share from 0 to 1")
        if self.clip is not None:
            self._require("clip", lambda x: x > 0, "a norm above 0, finite in float32, or None")
        whole("optimizer.warmup", self.warmup, 0)
        if self.decay is not None:
            whole("optimizer.decay", self.decay, 1)
        if self.decay is not None and self.decay <= self.warmup:
            raise ValueError(
                f"optimizer.decay={self.decay}: use more updates than warmup={self.warmup}"
            )

    def _require(self, name: str, will_do: Callable[[float], bool], wanted: str) -> None:
        value = getattr(self, name)
        if not (is_number(value) and will_do(value)):
            raise ValueError(f"optimizer.{name}={value!r}: use {wanted}")

    def learning_rate(self, step: Any) -> Any:
        """The rate of the update that follows `step` updates."""
        if self.decay is None:
            warm = jnp.minimum(1.0, (step + 1) / max(1, self.warmup))
            return self.peak * warm
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.peak, self.warmup, self.decay, self.peak * self.floor
        )
        return schedule(step)

    def build(self) -> optax.GradientTransformation:
        clip = optax.clip_by_global_norm(self.clip) if self.clip else optax.identity()
        adamw = optax.adamw(
            self.learning_rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=_is_matrix
        )
        return optax.chain(clip, adamw)


def _is_matrix(params: Any) -> Any:
    """Weights decay; norms and biases, which have one dim, do not."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


Hook = Callable[[dict[str, Any]], None]
"""Called with each row of metrics, on the host, after the step committed. The run waits for it, and
for as long as it takes."""


@dataclass(frozen=True)
class Recipe:
    """A whole training run: what is learned, from what, how, and how it survives.

    Model, data, optimizer, loss, `global_batch`, `num_replicas`, `microbatches`, `seed` and
    `reduction` are the run's identity; the rest may change when it is resumed.

    Args:
        global_batch: examples in one step, whatever the number of slices.
        num_replicas: logical replicas the batch is split into; at least the number of slices.
        microbatches: parts of a replica computed one after another, their gradients added in
            order: more need less memory for activations.
        eval_data: what `policy.eval_every` evaluates on.
        eval_loss: its loss, if it is not the loss of training.
        eval_batches: global batches in an evaluation; None: all whole ones that the data has.

    Raises:
        ValueError: the batch cannot be split, or a number is out of range.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    loss: Loss
    num_steps: int
    global_batch: int
    num_replicas: int
    seed: int = 0
    reduction: Reduction = "ordered"
    microbatches: int = 1
    mesh: MeshSpec = MeshSpec()
    policy: Policy = Policy()
    eval_data: DataConfig | None = None
    eval_loss: Loss | None = None
    eval_batches: int | None = None
    hooks: tuple[Hook, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("num_steps", "global_batch", "num_replicas", "microbatches"):
            whole(name, getattr(self, name), 1)
        for name, kind in (("policy", Policy), ("mesh", MeshSpec), ("hooks", tuple)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r}: use a {kind.__name__}")
        self._refuse_other_kinds()
        if self.global_batch % self.num_replicas:
            raise ValueError(
                f"global_batch={self.global_batch} cannot be split into "
                f"num_replicas={self.num_replicas} equal replicas: use a multiple of "
                f"{self.num_replicas}"
            )
        examples = self.global_batch // self.num_replicas
        if examples % self.microbatches:
            raise ValueError(
                f"microbatches={self.microbatches} cannot split the {examples} examples of a "
                f"replica (global_batch / num_replicas) equally: use a divisor of {examples}"
            )
        if self.policy.eval_every and self.eval_data is None:
            raise ValueError(
                f"policy.eval_every={self.policy.eval_every} but eval_data=None: say what to "
                "evaluate on, or set eval_every=0"
            )
        if self.eval_batches is not None:
            whole("eval_batches", self.eval_batches, 1)
        if self.reduction not in ("ordered", "fast"):
            raise ValueError(f"reduction={self.reduction!r}: use 'ordered' or 'fast'")
        if self.reduction == "ordered" and self.num_replicas > MOST_REPLICAS:
            raise ValueError(
                f"num_replicas={self.num_replicas}: use at most {MOST_REPLICAS}, or "
                "reduction='fast'"
            )
        whole("seed", self.seed, 0, 2**32 - 1)

    def _refuse_other_kinds(self) -> None:
        """What holds code cannot be checked, but whether it is there can."""
        for name in ("model", "data", "optimizer", "eval_data"):
            value = getattr(self, name)
            if not callable(getattr(value, "build", None)) and (name, value) != ("eval_data", None):
                raise ValueError(f"{name}={value!r}: use a configuration, which has a build()")
        for name, value in (("loss", self.loss), ("eval_loss", self.eval_loss)):
            if not callable(value) and (name, value) != ("eval_loss", None):
                raise ValueError(f"{name}={value!r}: use a function")
        if not all(map(callable, self.hooks)):
            raise ValueError(f"hooks={self.hooks!r}: use functions")

    def identity(self) -> dict[str, Any]:
        """What makes this run another run if it changes, as JSON values."""
        return {
            "model": describe(self.model),
            "data": describe(self.data),
            "optimizer": describe(self.optimizer),
            "loss": describe(self.loss),
            "global_batch": self.global_batch,
            "num_replicas": self.num_replicas,
            "microbatches": self.microbatches,
            "seed": self.seed,
            "reduction": self.reduction,
        }

    def identity_sha256(self) -> str:
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def check_slices(self, num_slices: int) -> None:
        """Refuse a number of slices that the recipe cannot use.

        Raises:
            ValueError: fewer slices than the policy's least, more than logical replicas, or too
                many sets of them to compile for all.
        """
        most = min(num_slices, self.policy.max_slices or num_slices)
        if num_slices < self.policy.min_slices:
            raise ValueError(
                f"policy.min_slices={self.policy.min_slices} but there are {num_slices} slices: "
                "lower it or use more slices"
            )
        if self.num_replicas < most:
            raise ValueError(
                f"num_replicas={self.num_replicas} cannot keep {most} slices busy: use at least "
                f"{most}, or set policy.max_slices={self.num_replicas}"
            )
        sets = sum(math.comb(num_slices, n) for n in range(self.policy.min_slices, most + 1))
        if self.policy.warm == "all" and sets > _MOST_SETS:
            raise ValueError(
                f"policy.warm='all' would compile for {sets} sets of {num_slices} slices, and "
                f"{_MOST_SETS} are the most: use next, or raise policy.min_slices"
            )

    def check_vocabulary(self) -> None:
        """Refuse data with token ids that the model does not have: on a device, they would be read
        as others in silence. Data and models that state no `vocab_size` are not compared.

        Raises:
            ValueError: the data state more than the model; or they cannot be opened.
        """
        known = getattr(self.model, "vocab_size", None)
        if known is None:
            return
        evaluated = (("eval_data", self.eval_data),) if self.policy.eval_every else ()
        for name, data in (("data", self.data), *evaluated):
            ids = getattr(data, "vocab_size", None)
            if ids is not None and ids > known:
                raise ValueError(
                    f"model.vocab_size={known} is less than {name}.vocab_size={ids}, the token ids "
                    f"that there may be: use a model of {ids} or more, or data of fewer"
                )

    def build_eval_data(self) -> tuple[Stream, int]:
        """The evaluation data, and how many of its batches are evaluated.

        Raises:
            ValueError: it has fewer than that.
        """
        assert self.eval_data
        stream = self.eval_data.build(self.global_batch, self.seed)
        whole = stream.num_examples // self.global_batch
        if whole < (self.eval_batches or 1):
            raise ValueError(
                f"eval_batches={self.eval_batches or 1} of {self.global_batch} examples, but "
                f"eval_data has {stream.num_examples}: give more, or ask for fewer"
            )
        return stream, self.eval_batches or whole

    def useful_shares(self, num_slices: int) -> dict[int, float]:
        """For each permitted number of slices, the share of computed work that is not padding."""
        most = min(num_slices, self.policy.max_slices or num_slices)
        counts = range(self.policy.min_slices, most + 1)
        return {s: Work(self.global_batch, self.num_replicas, s).useful for s in counts}


def describe(value: Any) -> Any:
    """A configuration as JSON values: dataclasses by type and fields, but for those fields whose
    metadata say that they are no part of the identity: {"identity": False}.

    Raises:
        ValueError: a value is known by its place in memory alone.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        decisive = (f for f in dataclasses.fields(value) if f.metadata.get("identity", True))
        fields = {f.name: describe(getattr(value, f.name)) for f in decisive}
        return {"type": f"{type(value).__module__}.{type(value).__qualname__}", **fields}
    if isinstance(value, dict):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [describe(v) for v in value]
    if isinstance(value, set | frozenset):  # whose order another process has not
        return sorted((describe(v) for v in value), key=json.dumps)
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, functools.partial):
        given = {"args": describe(value.args), "keywords": describe(value.keywords)}
        return {"partial": describe(value.func), **given}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if re.search(r" at 0x[0-9a-fA-F]+", str(value)):
        raise ValueError(
            f"the recipe holds {value!r}, which no later run could tell from another: make "
            f"{type(value).__name__} a frozen dataclass of plain values"
        )
    return str(value)
