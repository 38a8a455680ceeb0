"""Programs besides training, run by `launch/` and `dapo_jax.api`; no other package imports them."""
