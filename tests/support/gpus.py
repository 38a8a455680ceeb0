"""A GPU that is not there, for tests that lower programs for one."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def lowered_for_an_h100() -> Iterator[None]:
    """From jax 0.12 on Pallas has to know the kind of GPU that it lowers for."""
    if jax.__version_info__ < (0, 12):
        yield
        return
    sharding = jax.sharding
    device = sharding.AbstractDevice("NVIDIA H100", None, "gpu")  # pyright: ignore
    mesh = sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with sharding.use_abstract_mesh(mesh):
        yield
