"""Small helpers that know nothing of reinforcement learning.

Modules that load a heavy library are imported by their names: `precision`, `compilations` and
`profiling` (jax), `hf_hub` (huggingface_hub).
"""

from dapo_jax.utils.bootstrap import bootstrap_interval
from dapo_jax.utils.progress import Progress, duration
from dapo_jax.utils.random_streams import named_generator, named_seed
from dapo_jax.utils.telemetry import SILENT, Telemetry
from dapo_jax.utils.watchdog import UNWATCHED, Watchdog

__all__ = [
    "SILENT",
    "UNWATCHED",
    "Progress",
    "Telemetry",
    "Watchdog",
    "bootstrap_interval",
    "duration",
    "named_generator",
    "named_seed",
]
