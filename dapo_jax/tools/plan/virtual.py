"""What a simulated host has instead of devices and reward workers: things that take time and
compute nothing.

`VirtualEngine` has the interface that `rollout.scheduler` calls, and fills slots as `rollout.slots`
does: free slots are given to samples that wait, in the order in which prompts came, before every
token. Calls are handed to a device that works on one after another; the host goes on at once, and
waits where it reads a result, as with JAX.
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

RIGHT, WRONG = 2, 3  # tokens; a response is made of one of them


class Clock:
    """The time of one host, in seconds since the rollout began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.device = 0.0  # when the device is done with all that it was given
        self.busy = 0.0  # seconds of that

    def hand_over(self, seconds: float) -> float:
        """When the device will be done with work that it is given now."""
        self.device = max(self.device, self.now) + seconds
        self.busy += seconds
        return self.device

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


class Costs(NamedTuple):
    """Seconds."""

    # Of one unit of tokens in the slots, by how many hold a sequence and the tokens in the cache.
    decode: Callable[[int, float], float]
    prefill: float  # of a call
    host: float = 0.0  # of the host, for each call of decode
    reward: float = 0.0  # of a worker, for each response


class Work(NamedTuple):
    """What the responses to one prompt will be."""

    units_G: np.ndarray  # int, lengths
    right_G: np.ndarray  # bool


class Late:
    """An array that the device will have computed at a certain time. Who reads it waits."""

    def __init__(self, clock: Clock, ready: float, values: np.ndarray):
        self.clock, self.ready, self.values = clock, ready, values

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.clock.wait(self.ready)
        return self.values


class Slots:
    """B slots, and who waits for one."""

    def __init__(self, num: int):
        self.left_B = np.zeros(num, int)  # units that are still to come; 0: the slot is free
        self.sampled_B = np.zeros(num, int)
        self.request_B, self.sample_index_B, self.token_B = (
            np.zeros(num, np.int32) for _ in range(3)
        )
        # (entry, column, units, token) of samples
        self.waiting: collections.deque[tuple[int, int, int, int]] = collections.deque()

    def refill(self) -> None:
        """Free slots given to samples that wait."""
        for slot in np.flatnonzero(self.left_B == 0)[: len(self.waiting)].tolist():
            entry, column, units, token = self.waiting.popleft()
            self.request_B[slot], self.sample_index_B[slot], self.token_B[slot] = (
                entry,
                column,
                token,
            )
            self.left_B[slot], self.sampled_B[slot] = units, 0


class VirtualEngine:
    """An engine of one shard, whose tokens are units of `unit_tokens` tokens each. The first token
    of a prompt is its number.

    Args:
        work: of a prompt, by its number.
        prompt_units: mean length of a prompt, for the cache that is read.
        page_units: of a page, of which each sequence may have one that is not full.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        costs: Costs,
        work: Callable[[int], Work],
        prompt_units: float,
        page_units: float,
    ):
        assert config.shards == 1 and config.num_pages is None
        self.config, self.clock, self.costs, self.work = config, clock, costs, work
        self.prompt_units, self.page_units = prompt_units, page_units
        self.prompt_pages = (config.table_pages,)
        self.loaded = RolloutParams({}, {})
        self.slot_seconds = 0.0  # that slots held a sequence
        self.units = 0  # drawn
        self.cached_units = 0.0  # in the cache at once, at most; prompts once for all samples

    def init_decode_state(self) -> Slots:
        """All slots empty."""
        return Slots(self.config.slots)

    def prefill(
        self, *, params: Any, padded_tokens: np.ndarray, true_length: np.ndarray, key_2: Any
    ) -> np.ndarray:
        """The numbers of the prompts."""
        self.clock.hand_over(self.costs.prefill)
        return padded_tokens[0, :, 0]

    def insert(self, prefix: np.ndarray, state: Slots, new: NewRequests) -> Slots:
        """The state with prompts whose samples wait for slots."""
        arrays = prefix, new.request_P[0], new.num_samples_P[0], new.first_sample_P[0]
        for number, request, samples, first in zip(*(x.tolist() for x in arrays)):
            if request < self.config.requests:
                work = self.work(number)
                for index in range(samples):
                    units, right = work.units_G[first + index], work.right_G[first + index]
                    token = RIGHT if right else WRONG
                    state.waiting.append((request, index, int(units), token))
        return state

    def generate(self, params: Any, state: Slots, mode: Any) -> tuple[Slots, DecodeOutput]:
        """Up to `decode_steps` units in every slot; fewer where nothing is left to generate."""
        k, B = self.config.decode_steps, self.config.slots
        data_kB3 = np.zeros((k, B, 3), np.int32)
        request_kB, sample_index_kB = np.zeros((2, k, B), np.int32)
        waiting_k = np.zeros(k, np.int32)
        call = 0.0
        of_waiting = {entry for entry, *_ in state.waiting}
        for i in range(k):
            state.refill()
            goes_B = state.left_B > 0
            live = int(goes_B.sum())
            if live == 0:
                break
            prompts = len(of_waiting.union(state.request_B[goes_B].tolist()))
            cached = float(state.sampled_B[goes_B].sum()) + live * (1 + self.page_units)
            self.cached_units = max(self.cached_units, cached + prompts * self.prompt_units)
            seconds = self.costs.decode(
                live, float(state.sampled_B[goes_B].sum()) + live * self.prompt_units
            )
            call += seconds
            self.slot_seconds += live * seconds
            self.units += live
            state.left_B[goes_B] -= 1
            state.sampled_B[goes_B] += 1
            flags_B = goes_B * VALID + (goes_B & (state.left_B == 0)) * OVER
            data_kB3[i] = np.stack([state.token_B, flags_B, state.sampled_B], axis=-1)
            request_kB[i], sample_index_kB[i] = state.request_B, state.sample_index_B
            waiting_k[i] = len(state.waiting)
        self.clock.now += self.costs.host
        ready = self.clock.hand_over(call)
        log_prob_kB = np.zeros((k, B), np.float32)
        arrays = data_kB3, log_prob_kB, log_prob_kB, request_kB, sample_index_kB, waiting_k
        late = (Late(self.clock, ready, x[None]) for x in (*arrays, np.zeros((), int)))
        return state, DecodeOutput.of(*late)


class Scores(NamedTuple):
    """Of responses that are being scored."""

    tasks: Sequence[Task]
    ready: float


class VirtualPool:
    """Reward workers with the interface of `reward_pool.RewardPool`. Each response takes a worker
    `seconds`; those whose text is "right" are."""

    def __init__(self, clock: Clock, workers: int, seconds: float):
        self.clock, self.workers, self.seconds = clock, workers, seconds
        self.free = 0.0  # when the workers are done with what they were given
        self.pending: list[float] = []  # when what is not collected yet is ready

    def submit(self, tasks: Sequence[Task]) -> Scores:
        """Hands responses to the workers."""
        self.free = max(self.free, self.clock.now) + len(tasks) * self.seconds / self.workers
        scores = Scores(tasks, max(self.free, self.clock.now + self.seconds))
        self.pending.append(scores.ready)
        return scores

    def ready(self, scores: Scores) -> bool:
        """Whether all of them are scored."""
        return scores.ready <= self.clock.now

    def collect(self, scores: Scores) -> list[Scored]:
        """What the scorer says of each response."""
        self.clock.wait(scores.ready)
        self.pending.remove(scores.ready)
        return [Scored((Score(task.text == "right"),), self.seconds) for task in scores.tasks]


def detokenize(sequences: Sequence[np.ndarray]) -> list[str]:
    """What the scorer reads of responses of a virtual engine."""
    return ["right" if tokens[-1] == RIGHT else "wrong" for tokens in sequences]
