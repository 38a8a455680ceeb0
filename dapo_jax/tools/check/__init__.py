"""Checks of this machine's accelerators, and of their speed: launch/check.py.

`runner` starts each of `parts` in a process of its own and keeps what they find in check.json.
"""
