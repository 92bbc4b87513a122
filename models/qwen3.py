"""Qwen3, a family of decoder-only transformers: configs, Module, loss, sharding rules, HF names.

Written for one device and one sequence: `jax.vmap` makes a batch of it, and
`Qwen3Config.sharding_rules` lays it out over the inner mesh axes. The architecture is the dense
one of the Qwen3 report (arXiv:2505.09388).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Float32, Int, Key, PRNGKeyArray, Shaped

INIT_STD = 0.02
LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = 3.4e38

Stream = Float[Array, "seq hidden"]
Heads = Float[Array, "seq heads head_dim"]
Angles = Float32[Array, "seq half_head_dim"]
Mask = Bool[Array, "seq seq"]
Ids = Int[Array, " seq"]
Scalar = Float32[Array, ""]


@dataclass(frozen=True)
class Qwen3Config:
    """Plain values that define one model; `dataclasses.replace` makes variants of it.

    `head_dim` need not be hidden_size / num_heads. `dropout` is the rate on both residual branches.
    `remat` recomputes each layer in the backward pass (arXiv:1604.06174). Parameters are made in
    float32, `compute_dtype` ("float32" or "bfloat16") is that of the forward pass, and norms,
    softmax and logits are float32 in any case. Raises ValueError if no model has such values.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    dropout: float = 0.0
    remat: bool = False
    compute_dtype: str = "float32"

    def __post_init__(self):
        for field in fields(self):
            _check_kind(field.name, field.type, getattr(self, field.name))
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads}: give a divisor of num_heads={heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: give an even number, RoPE turns pairs")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: give a rate of at least 0 and below 1")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype={self.compute_dtype!r}: give 'float32' or 'bfloat16'")

    def build(self, key: PRNGKeyArray) -> "Qwen3":
        """Initialise a model; the same key gives the same weights."""
        return Qwen3(self, key=key)

    @property
    def num_params(self) -> int:
        """The exact number of parameters; a tied embedding counts once."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        projections = self.hidden_size * (attention + 3 * self.intermediate_size)
        norms = 2 * self.hidden_size + 2 * self.head_dim
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * (projections + norms) + embeddings + self.hidden_size

    def sharding_rules(self) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
        """Ordered (regex, mesh axis or None for each dim) pairs; no match means replicated.

        The first regex that `re.search` finds in `jax.tree_util.keystr(path)` holds, for the model
        and for all whose paths end like the model's: gradients, optimizer moments. "fsdp" divides
        hidden_size; "tensor" divides heads, intermediate and vocabulary (Megatron-LM,
        arXiv:1909.08053). The leading dim of a layer's leaf is what the scan walks along: no axis.
        """
        return (
            (r"\.embedding$", ("tensor", "fsdp")),
            (r"\.head\.weight$", ("fsdp", "tensor")),
            (r"\.layers\.(attention\.[qkv]|mlp\.gate|mlp\.up)\.weight$", (None, "fsdp", "tensor")),
            (r"\.layers\.(attention\.o|mlp\.down)\.weight$", (None, "tensor", "fsdp")),
            (r"\.layers\.\w+(\.[qk])?_norm\.weight$", (None, None)),
        )


def _check_kind(name: str, kind: object, value: object) -> None:
    """Raises ValueError unless `value` is of the kind of its field, and no size too large."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is int and not (whole and 0 < value <= LARGEST_SIZE):
        raise ValueError(f"{name}={value!r}: give a whole number from 1 to {LARGEST_SIZE}")
    if kind is float and not (whole or isinstance(value, float)):
        raise ValueError(f"{name}={value!r}: give a number")
    if kind is float and name != "dropout" and not 0 < value <= LARGEST_NUMBER:
        raise ValueError(f"{name}={value!r}: give a number above 0 that is finite in float32")
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False")


def residual_std(config: Qwen3Config) -> float:
    """Initial deviation of what writes to the residual stream: 0.02 / sqrt(2 * num_layers).

    With two such writes a layer, depth does not widen the stream (Megatron-LM, arXiv:1909.08053).
    """
    return INIT_STD / (2 * config.num_layers) ** 0.5


class Linear(eqx.Module):
    """A projection without bias, in the dtype of its input; normal with deviation `std` at first.

    The weight is [in, out]. Hugging Face keeps [out, in].
    """

    weight: Float[Array, "in out"]

    def __init__(self, in_dim: int, out_dim: int, key: PRNGKeyArray, std: float = INIT_STD):
        self.weight = std * jax.random.normal(key, (in_dim, out_dim), jnp.float32)

    def __call__(self, x: Float[Array, "*dims in"]) -> Float[Array, "*dims out"]:
        return x @ self.weight.astype(x.dtype)


class RMSNorm(eqx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 (arXiv:1910.07467).

    The result has the dtype of x.
    """

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, eps: float):
        self.weight = jnp.ones(dim, jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "*dims dim"]) -> Float[Array, "*dims dim"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight.astype(jnp.float32)).astype(x.dtype)


def rope_angles(positions: Ids, head_dim: int, theta: float) -> Angles:
    """Angles of RoPE in radians: position * theta^(-2i / head_dim) (arXiv:2104.09864)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return positions.astype(jnp.float32)[:, None] * frequencies


def rotate(x: Heads, angles: Angles) -> Heads:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle, in float32.

    A pair is half a head apart, as in Hugging Face's checkpoints, not neighbours as in the paper.
    """
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def dropout(x: Stream, rate: float, key: PRNGKeyArray | None) -> Stream:
    """Zero elements with probability `rate`, scale the rest by 1 / (1 - rate); no key, no-op."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0.0)


def attention_mask(tokens: Ids, segment_ids: Ids | None) -> Mask:
    """True where a query (row) may see a key (column): no later than itself, in its own segment.

    The order is that of the array, not of positions. All rows see themselves: no softmax is empty.
    """
    causal = jnp.tril(jnp.ones((tokens.size, tokens.size), bool))
    return causal if segment_ids is None else causal & (segment_ids[:, None] == segment_ids)


class Attention(eqx.Module):
    """Grouped-query attention (arXiv:2305.13245) with RMSNorm on q and k heads (arXiv:2302.05442).

    Query heads h * groups to (h + 1) * groups - 1 share key-value head h.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    num_kv_heads: int = eqx.field(static=True)

    def __init__(self, config: Qwen3Config, key: PRNGKeyArray):
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        q_dim, kv_dim = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q = Linear(config.hidden_size, q_dim, q_key)
        self.k = Linear(config.hidden_size, kv_dim, k_key)
        self.v = Linear(config.hidden_size, kv_dim, v_key)
        self.o = Linear(q_dim, config.hidden_size, o_key, residual_std(config))
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.num_kv_heads = config.num_kv_heads

    def __call__(self, x: Stream, angles: Angles, mask: Mask) -> Stream:
        head_dim = 2 * angles.shape[-1]
        q, k, v = (
            rearrange(project(x), "seq (heads head_dim) -> seq heads head_dim", head_dim=head_dim)
            for project in (self.q, self.k, self.v)
        )
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        q = rearrange(q, "q (kv groups) d -> q kv groups d", kv=self.num_kv_heads)
        scores = jnp.einsum("qhgd,khd->hgqk", q, k, preferred_element_type=jnp.float32)
        scores = jnp.where(mask, scores / head_dim**0.5, -jnp.inf)
        shares = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("hgqk,khd->qhgd", shares, v)
        return self.o(rearrange(mixed, "q kv groups d -> q (kv groups d)"))


class MLP(eqx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, config: Qwen3Config, key: PRNGKeyArray):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate = Linear(hidden, intermediate, gate_key)
        self.up = Linear(hidden, intermediate, up_key)
        self.down = Linear(intermediate, hidden, down_key, residual_std(config))

    def __call__(self, x: Stream) -> Stream:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(eqx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both branches."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP
    dropout: float = eqx.field(static=True)

    def __init__(self, config: Qwen3Config, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, attention_key)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, mlp_key)
        self.dropout = config.dropout

    def __call__(
        self, x: Stream, angles: Angles, mask: Mask, key: PRNGKeyArray | None = None
    ) -> Stream:
        keys = (None, None) if key is None else jax.random.split(key)
        branch = self.attention(self.attention_norm(x), angles, mask)
        x = x + dropout(branch, self.dropout, keys[0])
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[1])


class Qwen3(eqx.Module):
    """A decoder-only transformer for one sequence; every leaf is a float32 parameter.

    `layers` is one `Layer` whose leaves have a leading layer dim: the forward pass scans it, so the
    compiled program does not grow with depth. `head` is None when tied (arXiv:1608.05859). Weights
    start normal, with deviation 0.02 or `residual_std`.
    """

    embedding: Float[Array, "vocab hidden"]
    layers: Layer
    norm: RMSNorm
    head: Linear | None
    config: Qwen3Config = eqx.field(static=True)

    def __init__(self, config: Qwen3Config, key: PRNGKeyArray):
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embedding = INIT_STD * jax.random.normal(embedding_key, (vocab, hidden), jnp.float32)
        layer_keys = jax.random.split(layers_key, config.num_layers)
        self.layers = eqx.filter_vmap(lambda layer_key: Layer(config, layer_key))(layer_keys)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = None if config.tie_embeddings else Linear(hidden, vocab, head_key)
        self.config = config

    def __call__(
        self,
        tokens: Ids,
        *,
        key: PRNGKeyArray | None = None,
        segment_ids: Ids | None = None,
        positions: Ids | None = None,
    ) -> Float32[Array, "seq vocab"]:
        """The logits of the token after each position.

        Tokens must lie in [0, vocab_size), which JAX does not check. A token sees what is not later
        and has its segment id. `positions` (default 0, 1, ...) enter RoPE alone. There is dropout
        only when `key` is given.
        """
        config, mask = self.config, attention_mask(tokens, segment_ids)
        positions = jnp.arange(tokens.size) if positions is None else positions
        angles = rope_angles(positions, config.head_dim, config.rope_theta)

        def apply_layer(x, layer_and_key):
            layer, layer_key = layer_and_key
            return layer(x, angles, mask, layer_key), None

        if config.remat:  # inside a scan nothing can undo the remat, so it needs no guard
            apply_layer = jax.checkpoint(apply_layer, prevent_cse=False)
        layer_keys = None if key is None else jax.random.split(key, config.num_layers)
        x = self.embedding[tokens].astype(config.compute_dtype)
        x, _ = jax.lax.scan(apply_layer, x, (self.layers, layer_keys))
        weight = self.embedding.T if self.head is None else self.head.weight
        weight = weight.astype(x.dtype)
        return jnp.matmul(self.norm(x), weight, preferred_element_type=jnp.float32)


def next_token_loss(
    model: Callable[..., Array],
    batch: Mapping[str, Array],
    keys: Key[Array, " examples"] | None,
) -> tuple[Scalar, Scalar, dict[str, Scalar]]:
    """Sum of the cross-entropies in nats of one logical replica's next tokens, and their weight.

    `batch["tokens"]` is [examples, seq + 1]. Optional: `mask` [examples, seq], the weight of each
    target; `segment_ids` and `positions` [examples, seq + 1]. Other columns are ignored. A target
    in another segment than its input weighs nothing. `keys` holds one PRNG key an example, or is
    None for no dropout. Returns (sum, weight, metrics), float32 sums all of them, so that
    those of several replicas add up; "correct" is the weight of the targets predicted right.
    """
    tokens, segment_ids = batch["tokens"], batch.get("segment_ids")
    targets = tokens[:, 1:]
    weights = _target_weights(targets, segment_ids, batch.get("mask"))
    columns = (tokens, segment_ids, batch.get("positions"))
    inputs = jax.tree.map(lambda column: column[:, :-1], columns)  # an absent column stays None

    def predict(inputs, key):
        tokens, segment_ids, positions = inputs
        return model(tokens, key=key, segment_ids=segment_ids, positions=positions)

    logits = jax.vmap(predict)(inputs, keys)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    cross_entropies = jax.nn.logsumexp(logits, axis=-1) - target_logits
    correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    metrics = {"correct": jnp.sum(correct * weights)}
    return jnp.sum(cross_entropies * weights), jnp.sum(weights), metrics


def _target_weights(
    targets: Int[Array, "examples seq"],
    segment_ids: Int[Array, "examples seq+1"] | None,
    mask: Shaped[Array, "examples seq"] | None,
) -> Float32[Array, "examples seq"]:
    weights = jnp.ones(targets.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    if segment_ids is None:
        return weights
    return weights * (segment_ids[:, 1:] == segment_ids[:, :-1]).astype(jnp.float32)


class HFWeight(NamedTuple):
    """Our place for a Hugging Face tensor: leaf path, index in the layer dim, if transposed."""

    path: str
    layer: int | None
    transpose: bool


HF_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


def hf_weight_names(config: Qwen3Config) -> dict[str, HFWeight]:
    """The `HFWeight` of each tensor name of a Hugging Face Qwen3 checkpoint.

    `leaf[layer] = tensor.T if transpose else tensor`, where `path` is the leaf's
    `jax.tree_util.keystr`. A tied checkpoint may repeat its embedding as `lm_head.weight`, which is
    not in the map: ignore it.
    """
    names = {
        "model.embed_tokens.weight": HFWeight(".embedding", None, False),
        "model.norm.weight": HFWeight(".norm.weight", None, False),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = HFWeight(".head.weight", None, True)
    for layer in range(config.num_layers):
        for theirs, ours in HF_LAYER_NAMES.items():
            place = HFWeight(f".layers.{ours}.weight", layer, not theirs.endswith("norm"))
            names[f"model.layers.{layer}.{theirs}.weight"] = place
    return names


# vocab, hidden, layers, heads, kv heads, head dim, intermediate. A vocabulary of 320 is 256 bytes
# and special tokens, up to a multiple of 64 for a "tensor" axis to divide.
SIZES: dict[str, Qwen3Config] = {
    "tiny": Qwen3Config(320, 64, 3, 4, 2, 16, 192),
    "small": Qwen3Config(320, 128, 5, 4, 2, 32, 512),
    "medium": Qwen3Config(320, 256, 10, 8, 4, 64, 768),
    "0.6b": Qwen3Config(151936, 1024, 28, 16, 8, 128, 3072),
}


def qwen3(size: str) -> Qwen3Config:
    """The config of a named size in `SIZES` ("0.6b" is Qwen3-0.6B); ValueError for other names."""
    if size not in SIZES:
        raise ValueError(f"unknown Qwen3 size {size!r}: give one of {', '.join(SIZES)}")
    return SIZES[size]
