"""The reference's own numbers: see tests/conformance."""

import re

import jax

from tests.conformance.__main__ import main


def test_every_compared_case_agrees(capsys):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert main() == 0, capsys.readouterr().out
    found = re.search(r"conformance: (\d+) compared", capsys.readouterr().out)
    assert found and int(found[1]) >= 743
