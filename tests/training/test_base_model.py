"""A base model that was made before is taken where nothing that it depends on differs."""

import pytest

from dapo_jax.training.base_model import fingerprint
from tests.support.helpers import tiny_config


@pytest.mark.parametrize(
    "change, same",
    [
        ({"train__num_steps": 9}, True),
        ({"seed": 1}, False),
        ({"train__row_tokens": 96}, True),
        ({"rollout__max_response_tokens": 200, "train__row_tokens": 256}, False),
        ({"data__train__sums__levels": (3,)}, False),
        ({"pretrain__num_steps": 99}, False),
    ],
)
def test_what_a_base_model_depends_on(change, same):
    assert (fingerprint(tiny_config(**change)) == fingerprint(tiny_config())) == same
