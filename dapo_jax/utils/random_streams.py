"""Random streams of the host that have names.

NumPy pads the words of a seed with zeros: `default_rng([s, step])` is `default_rng([s, step, 0])`.
A name as the first word keeps one use of the seed from the numbers of another. Four streams have
no name, so that the published figures of the tiny runs stay theirs: generated problems (seed,
side), text of the base model (seed, 1), order of the problems (seed, source) and order of the
groups in an update (seed, step). These still share the numbers of (seed, 1).
"""

import zlib

import numpy as np


def named_seed(name: str, *words: int) -> np.random.SeedSequence:
    """The seed of one use of `words`, such as (config.seed, step)."""
    return np.random.SeedSequence([zlib.crc32(name.encode()), *words])


def named_generator(name: str, *words: int) -> np.random.Generator:
    """A generator of `named_seed`."""
    return np.random.default_rng(named_seed(name, *words))
