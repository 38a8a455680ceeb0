"""DAPO in JAX: reinforcement learning of language models on problems with checkable answers."""

__version__ = "0.1.0"
