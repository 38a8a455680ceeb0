"""Virtual engine and reward workers: they take time on a virtual clock and compute nothing.

The simulator gives them to the run's own `RolloutCollector`. `VirtualEngine` fills slots as
`rollout.slots` does: before every token, free slots go to waiting samples in the order in which
prompts arrived. A device works on its calls one after another. The host continues at once and waits
where it reads a result, as with JAX.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapo_jax.rewards.pool import Scored
from dapo_jax.rewards.types import Score, Task
from dapo_jax.rollout.programs import Loaded
from dapo_jax.rollout.slots import Arrivals
from dapo_jax.rollout.spec import OVER, VALID, EngineSpec, Step

CORRECT, INCORRECT = 2, 3  # tokens; a response repeats one of them


class Clock:
    """The time of one host, in seconds since the rollout began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device = 0.0  # time at which the device finishes its last call
        self.busy = 0.0  # seconds of all calls

    def enqueue(self, seconds: float) -> float:
        """Gives the device a call; returns the time at which the call finishes."""
        self.device = max(self.device, self.now) + seconds
        self.busy += seconds
        return self.device

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


class Costs(NamedTuple):
    """Seconds of each kind of work."""

    # One unit of tokens in all slots, by the number of busy slots and the units they have cached.
    decode: Callable[[int, float], float]
    prefill: float  # one call
    host: float = 0.0  # the host, for each call of decode
    reward: float = 0.0  # a worker, for each response


class Group(NamedTuple):
    """The responses to one prompt."""

    lengths_G: np.ndarray  # int
    correct_G: np.ndarray  # bool


class Late:
    """A result of the device. Reading it waits until it is ready."""

    def __init__(self, clock: Clock, ready: float, values: np.ndarray):
        self.clock, self.ready, self.values = clock, ready, values

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.clock.wait(self.ready)
        return self.values


class Slots:
    """The decode slots, and the samples that wait for one."""

    def __init__(self, num: int):
        # By slot: units still to come (0: the slot is free), units sampled, and the sample's entry,
        # column and token.
        self.left_B, self.sampled_B, self.entry_B, self.column_B, self.token_B = np.zeros(
            (5, num), np.int32
        )
        # (entry, column, units, token) of each waiting sample
        self.waiting: collections.deque[tuple[int, int, int, int]] = collections.deque()

    def refill(self) -> None:
        """Gives free slots to waiting samples."""
        for slot in np.flatnonzero(self.left_B == 0)[: len(self.waiting)].tolist():
            self.entry_B[slot], self.column_B[slot], self.left_B[slot], self.token_B[slot] = (
                self.waiting.popleft()
            )
            self.sampled_B[slot] = 0


class VirtualEngine:
    """An engine of one shard that samples units of tokens. A prompt's first token is its number.

    Args:
        group: the responses to the prompt of a number, with lengths in units.
        prompt_units: mean length of a prompt.
        page_units: units of a cache page; each sequence may have one that is not full.
    """

    def __init__(
        self,
        spec: EngineSpec,
        clock: Clock,
        costs: Costs,
        group: Callable[[int], Group],
        prompt_units: float,
        page_units: float,
    ):
        assert spec.shards == 1 and spec.num_pages is None
        self.spec, self.clock, self.costs, self.group = spec, clock, costs, group
        self.prompt_units, self.page_units = prompt_units, page_units
        self.prompt_pages = (spec.table_pages,)
        self.loaded = Loaded({}, {})
        self.slot_seconds = 0.0  # sum over slots of the seconds in which they held a sequence
        self.units = 0  # units sampled
        self.cached_units = 0.0  # largest number in the cache; a prompt counts once for its samples

    def init_decode_state(self) -> Slots:
        return Slots(self.spec.slots)

    def prefill_many(
        self, params: Any, tokens_RPT: np.ndarray, length_RP: np.ndarray, key_RP2: Any
    ) -> np.ndarray:
        """Returns the numbers of the prompts."""
        self.clock.enqueue(self.costs.prefill)
        return tokens_RPT[0, :, 0]

    def enqueue(self, state: Slots, prefix: np.ndarray, arrivals: Arrivals) -> Slots:
        """Adds the samples of prefilled prompts to those that wait."""
        arrived = (prefix, arrivals.entry_P[0], arrivals.samples_P[0], arrivals.first_P[0])
        for number, entry, samples, first in zip(*(x.tolist() for x in arrived)):
            if entry >= self.spec.entries:
                continue
            group = self.group(number)
            for column in range(samples):
                token = CORRECT if group.correct_G[first + column] else INCORRECT
                units = int(group.lengths_G[first + column])
                state.waiting.append((entry, column, units, token))
        return state

    def decode(self, params: Any, state: Slots, mode: Any) -> tuple[Slots, Step]:
        """Samples up to `decode_steps` units in every slot; fewer where nothing is left."""
        k, B = self.spec.decode_steps, self.spec.slots
        flags_kB, token_kB, entry_kB, column_kB = np.zeros((4, k, B), np.int32)
        waiting_k = np.zeros(k, np.int32)
        call = 0.0
        waiting_entries = {entry for entry, *_ in state.waiting}
        for i in range(k):
            state.refill()
            busy_B = state.left_B > 0
            busy = int(busy_B.sum())
            if busy == 0:
                break
            sampled = float(state.sampled_B[busy_B].sum())
            prompts = len(waiting_entries.union(state.entry_B[busy_B].tolist()))
            cached = sampled + busy * (1 + self.page_units) + prompts * self.prompt_units
            self.cached_units = max(self.cached_units, cached)
            seconds = self.costs.decode(busy, sampled + busy * self.prompt_units)
            call += seconds
            self.slot_seconds += busy * seconds
            self.units += busy
            state.left_B[busy_B] -= 1
            state.sampled_B[busy_B] += 1
            flags_kB[i] = busy_B * VALID + (busy_B & (state.left_B == 0)) * OVER
            token_kB[i], entry_kB[i], column_kB[i] = state.token_B, state.entry_B, state.column_B
            waiting_k[i] = len(state.waiting)
        self.clock.now += self.costs.host
        ready = self.clock.enqueue(call)
        zeros_kB, free = np.zeros((k, B), np.float32), np.zeros((), int)
        results = (token_kB, zeros_kB, zeros_kB, flags_kB, entry_kB, column_kB, waiting_k, free)
        return state, Step(*(Late(self.clock, ready, x[None]) for x in results))


class Scores(NamedTuple):
    """Responses being scored, and the time at which they are."""

    tasks: Sequence[Task]
    ready: float


class VirtualPool:
    """Reward workers with the interface of `RewardPool`; each response takes one `seconds`."""

    def __init__(self, clock: Clock, workers: int, seconds: float):
        self.clock, self.workers, self.seconds = clock, workers, seconds
        self.free = 0.0  # time at which the workers have finished everything
        self.pending: list[float] = []  # times at which submitted scores are ready

    def submit(self, tasks: Sequence[Task]) -> Scores:
        self.free = max(self.free, self.clock.now) + len(tasks) * self.seconds / self.workers
        scores = Scores(tasks, max(self.free, self.clock.now + self.seconds))
        self.pending.append(scores.ready)
        return scores

    def ready(self, scores: Scores) -> bool:
        return scores.ready <= self.clock.now

    def collect(self, scores: Scores) -> list[Scored]:
        self.clock.wait(scores.ready)
        self.pending.remove(scores.ready)
        return [Scored((Score(task.text == "correct"),), self.seconds) for task in scores.tasks]


def detokenize(sequences: Sequence[np.ndarray]) -> list[str]:
    """Returns the texts that `VirtualPool` scores."""
    return ["correct" if tokens[-1] == CORRECT else "incorrect" for tokens in sequences]
