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
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.jetstream import OVER, VALID, DecodeOutput
from dapo_jax.rollout.programs import RolloutParams
from dapo_jax.rollout.slots import NewRequests

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
        self.left_B, self.sampled_B = np.zeros((2, num), np.int32)  # units to come, units sampled
        self.request_B, self.sample_index_B, self.token_B = np.zeros((3, num), np.int32)
        # (request, sample index, units to come, units sampled, token) of each waiting sample
        self.waiting: collections.deque[tuple[int, int, int, int, int]] = collections.deque()

    def refill(self) -> None:
        """Gives free slots to waiting samples."""
        for slot in np.flatnonzero(self.left_B == 0)[: len(self.waiting)].tolist():
            request, index, units, sampled, token = self.waiting.popleft()
            self.request_B[slot], self.sample_index_B[slot] = request, index
            self.left_B[slot], self.token_B[slot] = units, token
            self.sampled_B[slot] = sampled


class VirtualEngine:
    """An engine of one shard that samples units of tokens. A prompt's first token is its number.

    Args:
        group: the responses to the prompt of a number, with lengths in units.
        prompt_units: mean length of a prompt.
        page_units: units of a cache page; each sequence may have one that is not full.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        costs: Costs,
        group: Callable[[int], Group],
        prompt_units: float,
        page_units: float,
    ):
        assert config.shards == 1 and config.num_pages is None
        self.config, self.clock, self.costs, self.group = config, clock, costs, group
        self.prompt_units, self.page_units = prompt_units, page_units
        self.prompt_pages = (config.table_pages,)
        self.loaded = RolloutParams({}, {})
        # (end, seconds, sum over slots of the seconds in which they held a sequence) of each call
        self.calls: list[tuple[float, float, float]] = []
        self.units = 0  # units sampled
        self.cached_units = 0.0  # largest number in the cache; a prompt counts once for its samples

    def slot_seconds(self, until: float) -> float:
        """Returns the sum over slots of the seconds in which they held a sequence, up to a time."""
        return sum(
            held * min(1.0, max(0.0, 1 - (end - until) / seconds))
            for end, seconds, held in self.calls
            if seconds > 0
        )

    def init_decode_state(self) -> Slots:
        return Slots(self.config.slots)

    def prefill(
        self, *, params: Any, padded_tokens: np.ndarray, true_length: np.ndarray, key_2: Any
    ) -> np.ndarray:
        """Returns the numbers of the prompts. Prompts with the tokens of carried responses take as
        much longer as the longest of them is."""
        sampled = int(true_length.max()) - 1
        self.clock.enqueue(self.costs.prefill * (1 + sampled / self.prompt_units))
        return padded_tokens[0, :, 0]

    def insert(self, prefix: np.ndarray, state: Slots, new: NewRequests) -> Slots:
        """Adds the samples of prefilled prompts to the waiting samples."""
        fields = new.request_P, new.num_samples_P, new.first_sample_P, new.sampled_P
        arrays = prefix, *(x[0] for x in fields)
        for number, request, samples, first, sampled in zip(*(x.tolist() for x in arrays)):
            if request >= self.config.requests:
                continue
            group = self.group(number)
            for index in range(samples):
                token = CORRECT if group.correct_G[first + index] else INCORRECT
                units = int(group.lengths_G[first + index]) - sampled
                state.waiting.append((request, index, units, sampled, token))
        return state

    def generate(self, params: Any, state: Slots, mode: Any) -> tuple[Slots, DecodeOutput]:
        """Samples up to `decode_steps` units in every slot; fewer where nothing is left."""
        k, B = self.config.decode_steps, self.config.slots
        data_kB3 = np.zeros((k, B, 3), np.int32)
        request_kB, sample_index_kB = np.zeros((2, k, B), np.int32)
        waiting_k = np.zeros(k, np.int32)
        call = slot_seconds = 0.0
        waiting_requests = {request for request, *_ in state.waiting}
        for i in range(k):
            state.refill()
            busy_B = state.left_B > 0
            busy = int(busy_B.sum())
            if busy == 0:
                break
            sampled = float(state.sampled_B[busy_B].sum())
            prompts = len(waiting_requests.union(state.request_B[busy_B].tolist()))
            cached = sampled + busy * (1 + self.page_units) + prompts * self.prompt_units
            self.cached_units = max(self.cached_units, cached)
            seconds = self.costs.decode(busy, sampled + busy * self.prompt_units)
            call += seconds
            slot_seconds += busy * seconds
            self.units += busy
            state.left_B[busy_B] -= 1
            state.sampled_B[busy_B] += 1
            flags_B = busy_B * VALID + (busy_B & (state.left_B == 0)) * OVER
            data_kB3[i] = np.stack([state.token_B, flags_B, state.sampled_B], axis=-1)
            request_kB[i], sample_index_kB[i] = state.request_B, state.sample_index_B
            waiting_k[i] = len(state.waiting)
        self.clock.now += self.costs.host
        ready = self.clock.enqueue(call)
        self.calls.append((ready, call, slot_seconds))
        zeros_kB, free = np.zeros((k, B), np.float32), np.zeros((), int)
        results = (data_kB3, zeros_kB, zeros_kB, request_kB, sample_index_kB, waiting_k, free)
        return state, DecodeOutput.of(*(Late(self.clock, ready, x[None]) for x in results))


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

    def give_up(self) -> None:
        self.free = min(self.free, self.clock.now)
        self.pending = []

    def ready(self, scores: Scores) -> bool:
        return scores.ready <= self.clock.now

    def collect(self, scores: Scores) -> list[Scored]:
        self.clock.wait(scores.ready)
        self.pending.remove(scores.ready)
        return [Scored((Score(task.text == "correct"),), self.seconds) for task in scores.tasks]


def detokenize(sequences: Sequence[np.ndarray]) -> list[str]:
    """Returns the texts that `VirtualPool` scores."""
    return ["correct" if tokens[-1] == CORRECT else "incorrect" for tokens in sequences]
