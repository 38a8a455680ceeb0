"""Parameters and problems of the rollout tests."""

import pytest

from tests.support.engines import CONFIG, make_problems
from tests.support.helpers import make_params


@pytest.fixture(scope="session")
def params():
    return make_params(CONFIG)


@pytest.fixture(scope="session")
def problems():
    return make_problems(20)
