"""Losses, advantages, aggregation, KL and corrections: pure functions of arrays."""
