"""Scorers, the pool of worker processes, asynchronous scoring."""
