"""Prepared problems are cached in a directory of the test's own."""

import pytest


@pytest.fixture(autouse=True)
def own_cache(cache_home):
    """Nothing is read from the user's cache."""
