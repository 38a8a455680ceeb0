"""Named random streams of the host.

NumPy pads the words of a seed with zeros: `default_rng([s, step])` is `default_rng([s, step, 0])`.
A name as the first word keeps the uses of a seed apart. Four older streams have no name, so that
published figures stay: generated problems (seed, side), text of the base model (seed, 1), order of
the problems (seed, source) and of the groups in an update (seed, step).
"""

import zlib

import numpy as np


def named_seed(name: str, *words: int) -> np.random.SeedSequence:
    """Returns the seed of one use of `words`, such as (config.seed, step)."""
    return np.random.SeedSequence([zlib.crc32(name.encode()), *words])


def named_generator(name: str, *words: int) -> np.random.Generator:
    """Returns a generator with that seed."""
    return np.random.default_rng(named_seed(name, *words))
