"""Tests of models/qwen3.py, under jaxtyping + beartype and strict dtype promotion."""

import dataclasses
import functools
import importlib
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

from elastix.data.packing import packed_row


def import_typechecked(name):
    """Import a module with its annotations checked, even where other tests imported it without."""
    unchecked = sys.modules.pop(name, None)
    try:
        with jaxtyping.install_import_hook(name, "beartype.beartype"):
            return importlib.import_module(name)
    finally:
        if unchecked is not None:
            sys.modules[name] = unchecked


qwen3 = import_typechecked("models.qwen3")
next_token_loss, SIZES = qwen3.next_token_loss, qwen3.SIZES

NANO = qwen3.Qwen3Config(
    vocab_size=32,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    rope_theta=100.0,  # so low that twelve positions turn every pair
)
# On the host: a test of a lost slice overwrites what lies on its devices.
TOKENS = np.random.default_rng(0).integers(0, 32, 12, dtype=np.int32)

# Nearly all the time of these tests is XLA's, and most of that is optimising what runs once.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
forward = jit(lambda model, tokens, **options: model(tokens, **options))
loss_of = jit(next_token_loss)
loss_and_grad = jit(jax.value_and_grad(lambda *args: next_token_loss(*args)[0]))
BATCH = {"tokens": np.arange(32, dtype=np.int32)[None], "mask": np.ones((1, 31), np.float32)}


@pytest.fixture
def one_key():
    return jax.random.split(jax.random.key(1), 1)


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def variant(**changes):
    return dataclasses.replace(NANO, **changes)


def paths_and_leaves(tree):
    return [(jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree)]


def shape_of(config):
    return jax.eval_shape(config.build, jax.random.key(0))


def build(config):
    """A model with random leaves: at their initial ones, norms could stand in for each other."""
    rng = np.random.default_rng(1)

    def leaf(path, like):
        mean = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(rng.normal(mean, 0.2, like.shape), like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shape_of(config))


@pytest.fixture(scope="module")
def model():
    return build(NANO)


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def far(a, b, least=1e-2):
    assert np.abs(np.asarray(a) - np.asarray(b)).max() > least


# The architecture


def test_the_typechecker_is_on(model):
    with pytest.raises(jaxtyping.TypeCheckError):
        model(jnp.zeros(3, jnp.float32))
    with pytest.raises(jaxtyping.TypeCheckError):
        model(TOKENS, segment_ids=TOKENS[1:])


def hugging_face_forward(tensors, config, tokens):
    """Qwen3 as Hugging Face's modeling_qwen3.py computes it, in float64, from its own names."""

    def norm(x, name):
        scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps)
        return scaled * tensors[name + ".weight"]

    def linear(x, name):
        return x @ tensors[name + ".weight"].T

    def rope(x):
        half = config.head_dim // 2
        angles = np.arange(len(x))[:, None] / config.rope_theta ** (np.arange(half) / half)
        cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    def attention(x, name):
        q, k, v = (
            linear(x, f"{name}.{p}_proj").reshape(len(x), -1, config.head_dim) for p in "qkv"
        )
        q, k = rope(norm(q, name + ".q_norm")), rope(norm(k, name + ".k_norm"))
        k, v = (np.repeat(t, config.num_heads // config.num_kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        shares = np.exp(scores) * np.tri(len(x))
        shares /= shares.sum(-1, keepdims=True)
        return linear(np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1), name + ".o_proj")

    def mlp(x, name):
        gate = linear(x, name + ".gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(x, name + ".up_proj")
        return linear(gated, name + ".down_proj")

    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        x = x + attention(norm(x, name + ".input_layernorm"), name + ".self_attn")
        x = x + mlp(norm(x, name + ".post_attention_layernorm"), name + ".mlp")
    head = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    return linear(norm(x, "model.norm"), head)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_hugging_face(tied):
    config = variant(tie_embeddings=tied)
    model = build(config)
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in paths_and_leaves(model)}
    tensors = {}
    for name, (path, layer, transpose) in qwen3.hf_weight_names(config).items():
        leaf = leaves[path] if layer is None else leaves[path][layer]
        tensors[name] = leaf.T if transpose else leaf
    close(forward(model, TOKENS), hugging_face_forward(tensors, config, TOKENS), 1e-4)


def test_a_later_token_changes_no_earlier_logit(model):
    before, after = forward(model, TOKENS), forward(model, jnp.asarray(TOKENS).at[7].add(1))
    np.testing.assert_array_equal(before[:7], after[:7])
    far(before[7], after[7])
    far(before[8:], after[8:])


@pytest.mark.parametrize("positions", [None, [*range(5), *range(7)]])
def test_packed_segments_equal_the_documents_alone(model, positions):
    segment_ids = jnp.asarray([1] * 5 + [2] * 7)
    options = {} if positions is None else {"positions": jnp.asarray(positions)}
    packed = forward(model, TOKENS, segment_ids=segment_ids, **options)
    close(packed[:5], forward(model, TOKENS[:5]))
    close(packed[5:], forward(model, TOKENS[5:]))
    far(forward(model, TOKENS)[5:], packed[5:])


def test_grouped_query_attention_is_full_attention_with_repeated_heads(model):
    def repeat(path, leaf):
        if not re.search(r"\.[kv]\.weight$", jax.tree_util.keystr(path)):
            return leaf
        heads = leaf.reshape(NANO.num_layers, NANO.hidden_size, NANO.num_kv_heads, NANO.head_dim)
        return heads.repeat(2, axis=2).reshape(NANO.num_layers, NANO.hidden_size, -1)

    config = variant(num_kv_heads=NANO.num_heads)
    leaves = jax.tree.leaves(jax.tree_util.tree_map_with_path(repeat, model))
    full = jax.tree.unflatten(jax.tree.structure(shape_of(config)), leaves)
    assert full.layers.attention.num_kv_heads == 4
    close(forward(model, TOKENS), forward(full, TOKENS))


def test_rope_products_depend_on_the_distance_alone():
    rng = np.random.default_rng(3)
    q, k = jnp.asarray(rng.normal(size=(2, 1, 1, 8)), jnp.float32)

    def product(q_position, k_position):
        turned = [
            qwen3.rotate(x, qwen3.rope_angles(jnp.asarray([at]), 8, 1e3))
            for x, at in ((q, q_position), (k, k_position))
        ]
        return jnp.sum(turned[0] * turned[1])

    close(product(9, 4), product(105, 100), 1e-4)
    close(product(6, 6), jnp.sum(q * k))
    far(product(9, 4), product(9, 5))


def test_shifted_positions_change_nothing_and_stretched_ones_do(model):
    positions = jnp.arange(12)
    close(forward(model, TOKENS), forward(model, TOKENS, positions=positions + 50), 1e-4)
    far(forward(model, TOKENS), forward(model, TOKENS, positions=3 * positions))


@pytest.mark.parametrize("name, invariant", [("q", True), ("k", True), ("v", False)])
def test_qk_norm_takes_the_scale_out_of_queries_and_keys(model, name, invariant):
    weight = getattr(model.layers.attention, name).weight
    scaled = eqx.tree_at(lambda m: getattr(m.layers.attention, name).weight, model, 7 * weight)
    compare = close if invariant else far
    compare(forward(model, TOKENS), forward(scaled, TOKENS))


def test_rms_norm_is_float32_inside_and_keeps_the_dtype():
    norm = qwen3.RMSNorm(4, 0.0)
    x = jnp.asarray([1e30, 2e30, -2e30, 4e30], jnp.bfloat16) / 1e15
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    close(out.astype(jnp.float32), np.asarray([0.4, 0.8, -0.8, 1.6]), 1e-2)


def test_the_scan_equals_a_loop_over_layers(model):
    @jit
    def unrolled(model):
        x = model.embedding[TOKENS]
        angles = qwen3.rope_angles(jnp.arange(12), NANO.head_dim, NANO.rope_theta)
        mask = qwen3.attention_mask(jnp.asarray(TOKENS), None)
        for i in range(NANO.num_layers):
            x = jax.tree.map(lambda leaf, i=i: leaf[i], model.layers)(x, angles, mask)
        return model.norm(x) @ model.embedding.T

    close(unrolled(model), forward(model, TOKENS))


def test_remat_recomputes_and_changes_nothing(model, one_key):
    remat = build(variant(remat=True))
    assert "prevent_cse" not in str(loss_and_grad.trace(model, BATCH, one_key).jaxpr)
    assert "prevent_cse" in str(loss_and_grad.trace(remat, BATCH, one_key).jaxpr)
    results = [jax.tree.leaves(loss_and_grad(m, BATCH, one_key)) for m in (model, remat)]
    for kept, recomputed in zip(*results, strict=True):
        close(kept, recomputed)


def test_bfloat16_computes_from_float32_masters(one_key):
    half = build(variant(tie_embeddings=False, compute_dtype="bfloat16"))
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("float32")}
    logits, exact = forward(half, TOKENS), forward(build(variant(tie_embeddings=False)), TOKENS)
    assert logits.dtype == jnp.float32
    assert 1e-4 < jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact) < 5e-2
    results = loss_and_grad(half, BATCH, one_key)
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype("float32")}


def test_dropout_depends_on_its_key_and_is_off_without_one(model):
    dropping = build(variant(dropout=0.5))
    one, two = jax.random.split(jax.random.key(2))
    np.testing.assert_array_equal(forward(dropping, TOKENS), forward(model, TOKENS))
    np.testing.assert_array_equal(forward(model, TOKENS, key=one), forward(model, TOKENS))
    same = forward(dropping, TOKENS, key=one)
    np.testing.assert_array_equal(same, forward(dropping, TOKENS, key=one))
    far(same, forward(dropping, TOKENS, key=two))
    far(same, forward(dropping, TOKENS))


def test_dropout_keeps_the_mean():
    dropped = qwen3.dropout(jnp.ones((100, 100), jnp.float32), 0.25, jax.random.key(0))
    values, counts = np.unique(dropped, return_counts=True)
    close(values, np.asarray([0, 4 / 3]))
    assert abs(counts[0] / 10_000 - 0.25) < 0.02


# Configs, counts, initial weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_num_params_is_exact(size, tied):
    config = dataclasses.replace(qwen3.qwen3(size), tie_embeddings=tied)
    assert config.num_params == sum(x.size for x in jax.tree.leaves(shape_of(config)))


def test_sizes():
    assert list(SIZES) == ["tiny", "small", "medium", "0.6b"]
    assert SIZES["0.6b"] == qwen3.Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
    )
    assert SIZES["0.6b"].num_params == 596_049_920
    untied = dataclasses.replace(SIZES["0.6b"], tie_embeddings=False)
    assert untied.num_params - SIZES["0.6b"].num_params == 151_936 * 1024
    with pytest.raises(ValueError, match=r"'7b': give one of tiny, small, medium, 0\.6b$"):
        qwen3.qwen3("7b")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 0},
        {"vocab_size": -1},
        {"rope_theta": float("nan")},
        {"num_kv_heads": 3},
        {"head_dim": 7},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"compute_dtype": "float16"},
    ],
)
def test_an_impossible_config_is_refused_in_one_line(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))}: give [^\n]*$"):
        variant(**changes)


def test_initial_weights():
    config = SIZES["tiny"]
    build = jit(config.build)
    model = build(jax.random.key(0))
    for path, leaf in paths_and_leaves(model):
        if "norm" in path:
            assert (leaf == 1).all()
            continue
        residual = re.search(r"\.(o|down)\.weight$", path)
        expected = 0.02 / np.sqrt(2 * 3) if residual else 0.02
        assert abs(leaf.std() / expected - 1) < 0.05, path
        assert abs(leaf.mean()) < 1e-3
        far(leaf[0], leaf[1])  # no two layers alike
    assert eqx.tree_equal(model, build(jax.random.key(0)))
    assert not eqx.tree_equal(model, build(jax.random.key(1)))


# The loss. It knows no transformer, so most of its tests take a bigram table for a model.

TABLE = np.random.default_rng(4).normal(size=(32, 32)).astype(np.float32)


@jax.tree_util.Partial  # a pytree without leaves, as jit wants of a model
def bigrams(tokens, **_):
    return jnp.asarray(TABLE)[tokens]


def reference_loss(logits, targets, weights):
    logits, targets = np.asarray(logits, np.float64), np.asarray(targets)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    losses = -np.log(np.take_along_axis(chances, targets[..., None], -1)[..., 0])
    return (
        (losses * weights).sum(),
        weights.sum(),
        ((chances.argmax(-1) == targets) * weights).sum(),
    )


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_loss_is_the_weighted_sum(mask):
    rng = np.random.default_rng(4)
    tokens = jnp.asarray(rng.integers(0, 32, (3, 9)))
    for i in range(5):  # so that some targets are predicted right
        tokens = tokens.at[:, i + 1].set(jnp.argmax(bigrams(tokens[:, i]), -1))
    weights = {
        None: np.ones((3, 8)),
        "bool": np.arange(8) < np.asarray([[8], [3], [0]]),
        "float": rng.uniform(size=(3, 8)).astype(np.float32),
    }[mask]
    masked = {} if mask is None else {"mask": jnp.asarray(weights)}
    got = loss_of(bigrams, {"tokens": tokens, "ids": jnp.arange(3), **masked}, None)
    total, weight, correct = reference_loss(bigrams(tokens[:, :-1]), tokens[:, 1:], weights)
    close(got[0], total, 1e-5)
    close(got[1], weight, 1e-6)
    close(got[2]["correct"], correct, 1e-6)
    assert 0 < correct < weight and got[2].keys() == {"correct"}


def test_losses_of_replicas_add_up():
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 32, (3, 9)))
    mask = jnp.ones((3, 8), jnp.float32).at[2].set(0.0).at[0, 4:].set(0.0)
    whole = loss_of(bigrams, {"tokens": tokens, "mask": mask}, None)
    replicas = [
        loss_of(bigrams, {"tokens": tokens[i : i + 1], "mask": mask[i : i + 1]}, None)
        for i in range(3)
    ]
    for total, *parts in zip(*map(jax.tree.leaves, [whole, *replicas]), strict=True):
        assert total.shape == () and total.dtype == jnp.float32
        close(total, sum(parts), 1e-5)
    assert all(x == 0 for x in jax.tree.leaves(replicas[2]))


def test_a_replica_of_weight_zero_has_no_loss_and_no_gradient(model, one_key):
    padding = {"tokens": jnp.zeros((1, 32), jnp.int32), "mask": jnp.zeros((1, 31), jnp.float32)}
    assert all((x == 0).all() for x in jax.tree.leaves(loss_and_grad(model, padding, one_key)))


def test_loss_of_packed_documents_is_that_of_the_documents(model):
    packed = {
        "tokens": TOKENS[None],
        "segment_ids": jnp.asarray([[1] * 5 + [2] * 7]),
        "positions": jnp.asarray([[*range(5), *range(20, 27)]]),
    }
    total, weight, _ = loss_of(model, packed, None)
    documents = TOKENS[:5], TOKENS[5:]
    alone = [reference_loss(forward(model, d)[:-1], d[1:], np.ones(len(d) - 1)) for d in documents]
    close(total, alone[0][0] + alone[1][0], 1e-4)
    assert weight == 4 + 6


def test_packed_rows_have_the_loss_and_the_gradient_of_their_documents(model):
    documents = [TOKENS[:4], TOKENS[4:7], TOKENS[8:]]  # two are as long, and compile once
    rows = [packed_row(documents[:2], 11), packed_row(documents[2:], 11)]  # both with padding
    packed = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
    whole = loss_and_grad(model, packed, None)
    parts = [loss_and_grad(model, {"tokens": d[None]}, None) for d in documents]
    for total, *alone in zip(*map(jax.tree.leaves, [whole, *parts]), strict=True):
        close(total, sum(alone), 1e-4)
    assert loss_of(model, packed, None)[1] == sum(len(d) - 1 for d in documents)
    # Without what the packing says of segments it is something else.
    bare = {name: packed[name] for name in ("tokens", "mask")}
    far(loss_and_grad(model, bare, None)[0], whole[0])


def test_loss_hands_each_example_its_own_row_of_every_column():
    @jax.tree_util.Partial
    def model(tokens, *, key, segment_ids, positions):
        assert tokens.shape == segment_ids.shape == positions.shape == (2,)
        noise = jax.random.uniform(key, (2, 32), jnp.float32)
        return (
            noise
            + jnp.asarray(TABLE)[tokens]
            + jnp.asarray(TABLE)[positions] * segment_ids[:, None].astype(jnp.float32)
        )

    columns = {
        name: jnp.asarray(rows)
        for name, rows in zip(
            ("tokens", "segment_ids", "positions"),
            ([[1, 2, 3], [4, 5, 6]], [[7, 7, 7], [8, 8, 8]], [[0, 1, 2], [9, 10, 11]]),
            strict=True,
        )
    }
    keys = jax.random.split(jax.random.key(0), 2)
    expected = 0.0
    for i in range(2):
        row = {name: column[i] for name, column in columns.items()}
        inputs = {name: column[:-1] for name, column in row.items()}
        expected += reference_loss(model(key=keys[i], **inputs), row["tokens"][1:], np.ones(2))[0]
    close(loss_of(model, columns, keys)[0], expected, 1e-5)


def test_loss_is_stable_for_huge_logits():
    logits = 1e6 * jax.nn.one_hot(jnp.arange(1, 4), 8, dtype=jnp.float32)
    batch = {"tokens": jnp.asarray([[0, 1, 2, 7]])}
    total, weight, metrics = next_token_loss(lambda tokens, **_: logits, batch, None)
    assert (total, weight, metrics["correct"]) == (1e6, 3, 2)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "compute_dtype": "bfloat16"}])
def test_each_layer_of_each_leaf_has_a_gradient(changes, one_key):
    _, grads = loss_and_grad(build(variant(**changes)), BATCH, one_key)
    for path, grad in paths_and_leaves(grads):
        layers = np.asarray(grad if path.startswith(".layers") else grad[None])
        sizes = np.abs(layers).reshape(len(layers), -1).max(axis=1)
        assert np.isfinite(layers).all() and (sizes > 1e-4).all(), path


def test_it_learns():
    tokens = jnp.asarray(np.random.default_rng(6).integers(0, 32, (4, 17)))
    keys = jax.random.split(jax.random.key(0), 4)
    optimizer = optax.adam(1e-2)

    @jit
    def step(model, state):
        def mean_loss(model):
            total, weight, _ = next_token_loss(model, {"tokens": tokens}, keys)
            return total / weight

        loss, grads = jax.value_and_grad(mean_loss)(model)
        with jax.numpy_dtype_promotion("standard"):  # Optax raises a float to an integer power
            updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    model = jit(NANO.build)(jax.random.key(0))
    state, losses = optimizer.init(model), []
    for _ in range(30):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert abs(losses[0] - np.log(32)) < 0.1
    assert losses[-1] < 0.5 * losses[0]


# Sharding rules and Hugging Face names


def match(rules, path):
    found = [axes for regex, axes in rules if re.search(regex, path)]
    assert len(found) <= 1, f"{path} matches several rules"
    return found[0] if found else None


AXIS_SIZES = {
    "tiny": [(2, 1), (2, 2), (4, 1)],
    "small": [(2, 1), (2, 2), (4, 1)],
    "medium": [(2, 1), (2, 4), (8, 1)],
    "0.6b": [(16, 1), (4, 4), (1, 8)],
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_sharding_rules_fit_every_leaf(size, tied):
    config = dataclasses.replace(SIZES[size], tie_embeddings=tied)
    rules, used = config.sharding_rules(), set()
    for path, leaf in paths_and_leaves(shape_of(config)):
        axes = match(rules, path)
        used.add(axes)
        if leaf.ndim == 1:
            assert axes is None, path
            continue
        assert len(axes) == leaf.ndim, path
        named = [axis for axis in axes if axis]
        assert sorted(named) == ([] if "norm" in path else ["fsdp", "tensor"]), path
        for fsdp, tensor in AXIS_SIZES[size]:
            parts = {"fsdp": fsdp, "tensor": tensor, None: 1}
            assert all(n % parts[axis] == 0 for n, axis in zip(leaf.shape, axes, strict=True)), path
    assert used >= {axes for regex, axes in rules if "head" not in regex or not tied}


def test_sharding_rules_follow_the_parameters_into_the_optimizer_state():
    config = variant(tie_embeddings=False)
    model = shape_of(config)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    train_state = {"model": model, "opt_state": jax.eval_shape(optimizer.init, model)}
    parameters = {p: match(config.sharding_rules(), p) for p, _ in paths_and_leaves(model)}
    seen = []
    for path, leaf in paths_and_leaves(train_state):
        axes = match(config.sharding_rules(), path)
        owners = [p for p in parameters if path.endswith(p) and leaf.ndim]
        if not owners:
            assert leaf.ndim == 0 and axes is None
            continue
        owner = max(owners, key=len)
        assert axes == parameters[owner], path
        seen.append(owner)
    assert sorted(seen) == sorted(3 * list(parameters))


@pytest.mark.parametrize("tied", [True, False])
def test_hugging_face_names_cover_every_leaf_once(tied):
    config = dataclasses.replace(SIZES["tiny"], tie_embeddings=tied)
    places = [(path, layer) for path, layer, _ in qwen3.hf_weight_names(config).values()]
    wanted = []
    for path, leaf in paths_and_leaves(shape_of(config)):
        layers = range(len(leaf)) if path.startswith(".layers") else [None]
        wanted += [(path, layer) for layer in layers]
    assert sorted(places, key=str) == sorted(wanted, key=str)


def test_hugging_face_shapes_of_0_6b():
    config = dataclasses.replace(SIZES["0.6b"], tie_embeddings=False)
    leaves = dict(paths_and_leaves(shape_of(config)))
    shapes = {}
    for name, (path, layer, transpose) in qwen3.hf_weight_names(config).items():
        shape = leaves[path].shape if layer is None else leaves[path].shape[1:]
        shapes[name] = shape[::-1] if transpose else shape
    assert len(shapes) == 28 * 11 + 3
    last = {n.removeprefix("model.layers.27."): s for n, s in shapes.items() if ".0." not in n}
    expected = {
        "model.embed_tokens.weight": (151_936, 1024),
        "lm_head.weight": (151_936, 1024),
        "model.norm.weight": (1024,),
        "input_layernorm.weight": (1024,),
        "post_attention_layernorm.weight": (1024,),
        "self_attn.q_proj.weight": (2048, 1024),
        "self_attn.k_proj.weight": (1024, 1024),
        "self_attn.v_proj.weight": (1024, 1024),
        "self_attn.o_proj.weight": (1024, 2048),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (3072, 1024),
        "mlp.up_proj.weight": (3072, 1024),
        "mlp.down_proj.weight": (1024, 3072),
    }
    assert {n: last[n] for n in expected} == expected
