"""The type checker that conftest.py puts around the functions of the algorithm modules."""

from beartype import BeartypeConf, beartype

# An int is accepted where a float is annotated, as PEP 484 says.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
