"""Rollouts: a JetStream engine around the decoder, and the scheduler that keeps it busy."""
