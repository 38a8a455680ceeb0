"""The counter of compilations."""

import jax

from dapo_jax.utils import compilations


def test_the_event_is_that_of_jax():
    """JAX does not promise its name: the listener would be silent where it changed."""
    counter = compilations.CompilationCounter()
    jax.jit(lambda x: x * 3 + 1).lower(1.0).compile()
    assert counter.count == 1
