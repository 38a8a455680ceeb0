"""What this machine's accelerators do, and at what cost: launch/check.py.

`runner` starts each of `parts` in a process of its own and keeps what they find in check.json.
"""
