"""A run planned before there is a machine: memory as compiled, times by arithmetic."""
