"""A GPU that is not there, for tests that lower programs for one."""

from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lowered_for_an_h100() -> Any:
    """Context in which Pallas lowers for this GPU. From jax 0.12 on it has to know the kind."""
    device = AbstractDevice("NVIDIA H100", None, "gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))
