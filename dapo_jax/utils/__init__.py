"""Small helpers that know nothing of reinforcement learning."""
