"""JAX is set up here, before a test uses it: eight CPU devices and a cache of compiled programs."""

import os
from pathlib import Path

import hypothesis
import jax
import jaxtyping

# The cache only saves time: a program read from it gives the bits of one compiled anew. It is set
# for this process, not for its children: a child that is killed would leave half an entry behind.
cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
jax.config.update("jax_compilation_cache_dir", str(cache / "elastix-tests" / jax.__version__))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_num_cpu_devices", 8)

# How long one example takes says nothing about the code on a shared machine. The same examples are
# drawn in every run, so that a change fails for what it changed; the soak tests draw others.
hypothesis.settings.register_profile("elastix", deadline=None, derandomize=True)
hypothesis.settings.load_profile("elastix")

# The step and its sums run type-checked: shapes in annotations are asserted.
jaxtyping.install_import_hook(
    ["elastix.step", "elastix.reduction", "elastix.progress", "elastix.program"],
    "beartype.beartype",
)

# What takes longest comes first (`make test` keeps this order), or the last of it would run alone
# on one worker. Neighbours of these differ in what they do, so that two workers seldom compile the
# same program at the same time.
LONGEST_FIRST = (
    *("test_lessons_on_arrays", "test_histories", "test_step", "test_on_pathways", "test_cli"),
    *("test_simulation", "test_verify", "test_qwen3", "test_runs", "test_packed_run"),
    *("test_local_pathways", "test_on_arrays", "test_readme", "test_corrupt", "test_mutants"),
    *("test_crash_points", "test_in_a_bucket", "test_replay", "test_assert_recovers"),
    *("test_checkpoints", "test_split_runs", "test_plugin", "test_corruption", "test_data"),
)


def pytest_collection_modifyitems(items):
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))
