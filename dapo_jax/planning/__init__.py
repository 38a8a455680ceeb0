"""A run planned before there is anything to run it on: what launch/plan.py does."""
