"""avg@k, cons@k, pass@k during a run, and benchmarks of a model by itself."""
