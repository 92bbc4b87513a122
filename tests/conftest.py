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
