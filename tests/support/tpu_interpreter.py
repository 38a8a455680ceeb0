"""JAX's interpreter of TPU kernels, extended for JAX's own kernel for ragged pages.

It runs a kernel's copies and semaphores too, on this machine. In jax 0.10.2 and 0.12.0 it reads no
reference that is reshaped or viewed as another dtype, as that kernel does; here it does.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, utils  # no public names
from jax.experimental.pallas import tpu as pltpu


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Interprets Pallas kernels for TPUs within the block."""
    plain = interpret_pallas_call.get

    def get(*arguments: Any, **named: Any) -> Any:
        *before, transforms = arguments[:6]
        views = [i for i, transform in enumerate(transforms) if not hasattr(transform, "indices")]
        first = views[0] if views else len(transforms)
        token, x = plain(*before, transforms[:first], *arguments[6:], **named)
        for transform in transforms[first:]:
            x = viewed(np.asarray(x), transform)
        return token, x

    get.__wrapped__ = plain.__wrapped__  # what copies call
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(interpret_pallas_call, "get", get)
        yield


def viewed(x: np.ndarray, transform: Any) -> np.ndarray:
    """Returns what a reference to x shows through a transform."""
    if hasattr(transform, "indices"):
        return x[utils.to_range((transform,))]
    if hasattr(transform, "shape"):
        return x.reshape(transform.shape)
    # A TPU packs rows of narrower numbers: several of a column are one wider number.
    wider = np.dtype(transform.dtype)
    packed = wider.itemsize // x.itemsize
    rows = x.reshape(*x.shape[:-2], -1, packed, x.shape[-1])
    return np.ascontiguousarray(np.moveaxis(rows, -2, -1)).view(wider)[..., 0]
