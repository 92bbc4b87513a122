"""A local Pathways: the JAX client, unmodified, talks to a proxy on this machine, with a process
for each slice that a test can kill, stop and give back.

    with LocalPathways(slices=3, devices_per_slice=2, heartbeat=0.5) as cluster:
        subprocess.run([sys.executable, "train.py"], env=os.environ | cluster.environment)

It needs `pip install 'elastix-jax[local-pathways]'`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastix.testing.local_pathways.launcher import LocalPathways
else:
    from elastix.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__, {"elastix.testing.local_pathways.launcher": ("LocalPathways",)}
    )

__all__ = ["LocalPathways"]
