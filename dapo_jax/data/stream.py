"""The order of the training problems, a function of the seed alone, over several sources."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

import grain
import numpy as np

from dapo_jax.types import Problem, UserError


class ProblemStream:
    """An endless stream of problems. Every epoch of a source is a permutation of it, a function of
    the seed; sources take turns in the proportion of their weights.

    `Problem.epoch` gives the samples of two visits to a problem different random keys. Every
    process with the same problems and seed has the same order.

    Args:
        problems: at least one.
        seed: 0 or more.
        weights: of each `Problem.source`, above 0; None: the same for all.
    """

    _passed_over: Set[int] = frozenset()  # ids

    def __init__(
        self, problems: Sequence[Problem], seed: int, weights: Mapping[str, float] | None = None
    ):
        assert problems and seed >= 0, f"{len(problems)} problems, seed {seed}"
        by_source: dict[str, list[Problem]] = {}
        content = digest_of(problems)
        for problem in problems:
            by_source.setdefault(problem.source, []).append(problem)
        weights = dict.fromkeys(by_source, 1.0) if weights is None else weights
        shares = [weights[source] for source in by_source]
        content.update(json.dumps(shares).encode())
        self.num_problems = len(problems)
        self._sources = tuple(map(tuple, by_source.values()))
        self._identity: dict[str, Any] = {
            "seed": seed,
            "problems": len(problems),
            "sha256": content.hexdigest(),
        }
        datasets = [_endless(i, len(of_source), seed) for i, of_source in enumerate(self._sources)]
        # Without threads: there is nothing to wait for.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        mixed = grain.MapDataset.mix(datasets, weights=shares)
        self._places: grain.DatasetIterator = iter(mixed.to_iter_dataset(options))

    @property
    def digest(self) -> str:
        """SHA-256 of the problems and the weights of their sources."""
        return self._identity["sha256"]

    def take(self, n: int) -> list[Problem]:
        """Returns the next `n` problems, each with its source's epoch."""
        taken = []
        while len(taken) < n:
            source, visit, index = next(self._places)
            problems = self._sources[source]
            if problems[index].id not in self._passed_over:
                taken.append(problems[index]._replace(epoch=visit // len(problems)))
        return taken

    def without(self, ids: Set[int]) -> "ProblemStream":
        """Returns this stream passing over some problems, not all. The two share their position."""
        assert len(ids) < self.num_problems
        found = copy.copy(self)
        found._passed_over = ids
        return found

    def get_state(self) -> dict[str, Any]:
        """Returns the position and the identity of the problems, as JSON can hold them."""
        return {**self._identity, "grain": self._places.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a position, from which `take` continues exactly.

        Raises:
            UserError: the state belongs to other problems or another seed.
        """
        for name in self._identity:
            field = "config.seed" if name == "seed" else "config.data"
            if state[name] != self._identity[name]:
                raise UserError(
                    f"{field}: the checkpoint's position is in other training data: {name} was "
                    f"{state[name]}, and is {self._identity[name]} now. Restore {field} and its "
                    "files, or start a new run."
                )
        self._places.set_state(dict(state["grain"]))


def digest_of(problems: Sequence[Problem]) -> Any:
    """Returns the SHA-256 object of these problems."""
    content = hashlib.sha256()
    for problem in problems:
        content.update(json.dumps(problem).encode())
    return content


def _endless(source: int, num_problems: int, seed: int) -> grain.MapDataset:
    """Yields (source, visits to it before, index of a problem in it), without end."""
    if source:  # sources of the same length have different orders
        seed = int(np.random.SeedSequence([seed, source]).generate_state(1)[0])
    # Indices, because grain walks every token of an element to estimate its bytes. `.seed` hashes
    # the seed: `.shuffle(seed=s)` orders epoch e by s + e, as seed s + 1 does epoch e - 1.
    dataset = grain.MapDataset.source(range(num_problems)).seed(seed).shuffle().repeat()
    return dataset.map_with_index(lambda visit, index: (source, int(visit), index))
