"""JAX's interpreter of TPU kernels, with what JAX's own kernel for ragged pages needs besides.

It runs a kernel's copies and semaphores too, on this machine. In jax 0.10.2 and 0.12.0 it reads no
reference that is reshaped or seen as another dtype, which that kernel does: here it does.
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
    """Pallas kernels for TPUs are interpreted within."""
    plain = interpret_pallas_call.get

    def get(
        token: Any, device: Any, core: Any, space: Any, buffer: Any, transforms: Any, *more: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        views = [i for i, transform in enumerate(transforms) if not hasattr(transform, "indices")]
        first = views[0] if views else len(transforms)
        token, x = plain(token, device, core, space, buffer, transforms[:first], *more, **named)
        for transform in transforms[first:]:
            x = seen(np.asarray(x), transform)
        return token, x

    get.__wrapped__ = plain.__wrapped__  # what copies call
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(interpret_pallas_call, "get", get)
        yield


def seen(x: np.ndarray, transform: Any) -> np.ndarray:
    """What a reference to x shows through a transform of it."""
    if hasattr(transform, "indices"):
        return x[utils.to_range((transform,))]
    if hasattr(transform, "shape"):
        return x.reshape(transform.shape)
    # Rows of narrower numbers lie packed on a TPU: as many of a column are one wider number.
    wider = np.dtype(transform.dtype)
    packed = wider.itemsize // x.itemsize
    rows = x.reshape(*x.shape[:-2], -1, packed, x.shape[-1])
    return np.ascontiguousarray(np.moveaxis(rows, -2, -1)).view(wider)[..., 0]
