"""Measurements: what launch/bench.py runs."""
