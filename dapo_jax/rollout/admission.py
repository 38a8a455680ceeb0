"""What is admitted: which prompts are handed to the engine, when, and to which of its shards.

What comes of them is read in `scheduler`; the two share the `Table`.
"""

import collections
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.partial_rollouts import Visit
from dapo_jax.rollout.programs import RolloutParams
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.slots import DecodeState, NewRequests
from dapo_jax.types import UNFINISHED, Problem, Response, UserError

Sample = tuple[int, int, int]  # shard, entry, column


class GenerationRequest(NamedTuple):
    """What to generate for each problem."""

    num_samples: int  # responses per problem
    sampling: SamplingParams | None = None  # None: the engine's own
    # A response ends with the token that completes one of these in its text, as with stop tokens.
    stop_strings: tuple[str, ...] = ()
    limits_QG: np.ndarray | None = None  # most tokens of each response; None: the engine's own
    stream: bool = False  # report tokens as they are sampled


class Request(NamedTuple):
    """Samples of one prompt that become an entry together."""

    number: int  # of the problem
    problem: Problem
    first: int  # number of the first sample
    samples: int
    # What there is of the one sample that goes on, after it was preempted or from an earlier step.
    begun: Response | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        begun = () if self.begun is None else tuple(self.begun.tokens.tolist())
        return self.problem.prompt_tokens + begun


def requests_of(
    number: int,
    problem: Problem,
    *,
    num_samples: int,
    most: int,
    begun: Mapping[int, Response],
) -> list[Request]:
    """Those of the samples of one prompt that have not ended: one for each that goes on, and one
    for up to `most` neighbours of which nothing is drawn.

    Args:
        begun: what there is, by sample.
    """
    requests, run = [], 0
    for sample in range(num_samples + 1):
        fresh = sample < num_samples and sample not in begun
        if run and (run == most or not fresh):
            requests.append(Request(number, problem, sample - run, run))
            run = 0
        run += fresh
        if sample in begun and begun[sample].finish_reason == UNFINISHED:
            requests.append(Request(number, problem, sample, 1, begun[sample]))
    return requests


class Table:
    """What the entries of the device hold, as far as the host has read: R shards of E entries of up
    to G samples, T tokens each at most."""

    def __init__(self, config: EngineConfig, step: int = 0):
        self.step = step  # rollout step of the tokens sampled now
        R, E, G, T = config.shards, config.requests, config.samples, config.max_response_tokens
        self.requests: list[list[Request | None]] = [[None] * E for _ in range(R)]
        self.order = np.zeros((R, E), np.int64)  # of arrival
        self.waiting = np.zeros((R, E, G), bool)  # responses that have not ended
        self.count = np.zeros((R, E, G), np.int32)  # tokens drawn
        self.tokens = np.zeros((R, E, G, T), np.int32)
        self.log_probs = np.zeros((R, E, G, T), np.float32)
        self.model_log_probs = np.zeros((R, E, G, T), np.float32)

    def who(self, r: int, e: int, column: int) -> tuple[int, int]:
        """(problem, sample)."""
        request = self.requests[r][e]
        assert request is not None
        return request.number, request.first + column

    def open(self, r: int, e: int, request: Request, order: int) -> None:
        """An entry for the request."""
        self.requests[r][e] = request
        self.order[r, e] = order
        self.waiting[r, e, : request.samples] = True
        self.count[r, e] = 0
        if request.begun is not None:
            self.count[r, e, 0] = n = len(request.begun.tokens)
            for name in ("tokens", "log_probs", "model_log_probs"):
                value = getattr(request.begun, name)
                getattr(self, name)[r, e, 0, :n] = np.nan if value is None else value

    def sampled(self, r: int, e: int, column: int) -> Response:
        """What there is of a sample, as a response that has not ended."""
        request, n = self.requests[r][e], self.count[r, e, column]
        assert request is not None
        versions = None
        # Of what this step alone has drawn its group knows the version.
        if request.begun is not None and request.begun.versions is not None:
            before = request.begun.versions
            versions = np.concatenate([before, np.full(n - len(before), self.step, np.int32)])
        at = r, e, column, slice(n)
        tokens, log_probs, model_log_probs = (
            x[at].copy() for x in (self.tokens, self.log_probs, self.model_log_probs)
        )
        return Response(tokens, log_probs, UNFINISHED, "", versions, model_log_probs)

    def close(self, r: int, e: int, column: int) -> None:
        """Without the sample; the entry is free when none is left."""
        self.waiting[r, e, column] = False
        if not self.waiting[r, e].any():
            self.requests[r][e] = None


class Admission:
    """Takes problems, and hands their prompts over.

    Args:
        problems: None: no problem yet, ask again.
        begun: see `scheduler.GenerationLoop`.

    Raises:
        UserError: `sampling` is outside its range; from `take` or `admit`, a prompt or a limit is.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        table: Table,
        problems: Iterator[Problem | None],
        key: jax.Array,
        request: GenerationRequest,
        begun: Mapping[Visit, Mapping[int, Response]],
    ):
        self.sampling = engine.config.params if request.sampling is None else request.sampling
        self.sampling.check()
        self.engine, self.table, self.problems, self.request = engine, table, problems, request
        self.key_data = np.asarray(jax.random.key_data(key))
        self.done: list[dict[int, Response]] = []  # of each problem taken, by sample
        self.exhausted = False  # no more problems will come
        self.begun = begun
        self.over: list[tuple[int, int, Response]] = []  # ended in earlier steps, to be reported
        self.queue: collections.deque[Request] = collections.deque()
        self.arrivals = 0
        config = engine.config
        self.free = np.full(
            config.shards, config.shard_pages - 1
        )  # pages, at least, at the next call
        # A call takes at most so many pages: each slot's own, and those of samples that come.
        steps = config.decode_steps
        per_slot = -(-steps // config.page_tokens) + 2
        self.pages_a_call = config.slots // config.shards * per_slot
        # Pages of prompts handed over since the call whose results are still to be read.
        self.since_late = np.zeros(config.shards, int)

    def read(self, free_R: np.ndarray) -> None:
        """Takes how many pages were free at the end of the call that was read last."""
        self.free = free_R - self.since_late
        self.since_late = np.zeros_like(self.since_late)

    def take(self, num: int) -> None:
        """Makes requests of up to so many problems, if they are to be had."""
        for _ in range(num):
            try:
                problem = next(self.problems)
            except StopIteration:
                self.exhausted = True
                return
            if problem is None:
                return
            self._check(problem)
            index = len(self.done)
            begun = self.begun.get((problem.id, problem.epoch), {})
            self.done.append({s: r for s, r in begun.items() if r.finish_reason != UNFINISHED})
            self.over += [(index, sample, r) for sample, r in self.done[index].items()]
            self.queue += requests_of(
                index,
                problem,
                num_samples=self.request.num_samples,
                most=self.engine.config.samples,
                begun=begun,
            )

    def _check(self, problem: Problem) -> None:
        most, tokens = self.engine.config.max_prompt_tokens, len(problem.prompt_tokens)
        if not 1 <= tokens <= most:
            raise UserError(
                f"problem {problem.id}: its prompt has {tokens} tokens; the engine takes 1 to "
                f"{most} (max_prompt_tokens). Leave it out, or make an engine for longer ones."
            )

    def _limit(self, problem: int, sample: int) -> int:
        most, limits_QG = self.engine.config.max_response_tokens, self.request.limits_QG
        limit = most if limits_QG is None else int(limits_QG[problem, sample])
        if not 1 <= limit <= most:
            raise UserError(
                f"limits_QG[{problem}, {sample}] is {limit} tokens; the engine generates 1 to "
                f"{most} (max_response_tokens). Ask for fewer, or make an engine for more."
            )
        return limit

    def admit(self, params: RolloutParams, state: DecodeState, *, unread: bool) -> DecodeState:
        """The state with prompts prefilled for the entries that are free, a batch at a time.

        Args:
            unread: whether a call's results are still to be read.
        """
        config = self.engine.config
        P = config.prefill_prompts // config.shards
        if not unread:
            # No call tells of pages that a cancellation has freed since the last one. A shard that
            # holds nothing has all of its pages.
            idle_R = ~self.table.waiting.any(axis=(1, 2))
            self.free = np.where(idle_R, config.shard_pages - 1, self.free)
        while True:
            free = [[e for e, r in enumerate(rs) if r is None] for rs in self.table.requests]
            beyond = config.max_in_flight - int(self.table.waiting.sum())
            room = min(sum(map(len, free)), max(0, -(-beyond // config.samples)))
            # Part of a batch only when there is no whole one to come, or the slots run dry.
            whole = min(config.prefill_prompts, config.shards * P)
            starving = self.table.waiting.sum() < config.slots
            if room < whole and not (starving or self.exhausted):
                return state  # and no prompt is claimed that another process could draw
            if len(self.queue) < min(room, config.prefill_prompts):
                self.take(min(room, config.prefill_prompts) - len(self.queue))
            if not self.queue or room == 0:
                return state
            if min(len(self.queue), room) < whole and not (starving or self.exhausted):
                return state
            batch = self._batch(free, P, unread)
            if not batch:
                return state
            state = self._hand_over(params, state, batch)

    def _padded_pages(self, request: Request) -> int:
        """To how many pages a prompt is padded: its own length decides, and no other's."""
        pages = -(-len(request.tokens) // self.engine.config.page_tokens)
        return next(n for n in self.engine.prompt_pages if n >= pages)

    def _batch(self, free: list[list[int]], P: int, unread: bool) -> list[tuple[int, int, Request]]:
        """(shard, entry, request) of the next prompts: to the shard that has least to do. All are
        padded to one length, that of the first; others wait, before those that come after them.

        A prompt that was padded as the longest beside it would be the same but for rounding, and
        what is drawn from it would depend on what it came with."""
        config = self.engine.config
        load = self.table.waiting.sum(axis=(1, 2))
        batch: list[tuple[int, int, Request]] = []
        taken = [0] * config.shards
        padded, others = self._padded_pages(self.queue[0]), collections.deque[Request]()
        while self.queue:
            if self._padded_pages(self.queue[0]) != padded:
                others.append(self.queue.popleft())
                continue
            shards = [r for r in range(config.shards) if free[r] and taken[r] < P]
            if not shards:
                break
            r = min(shards, key=lambda r: load[r])
            request = self.queue[0]
            alone = not unread and not any(r == other for other, *_ in batch)
            if not self._fits(r, request, alone=alone, unread=unread):
                break
            self.queue.popleft()
            batch.append((r, free[r].pop(0), request))
            taken[r] += 1
            load[r] += request.samples
            pages = -(-len(request.tokens) // config.page_tokens)
            self.free[r] -= pages
            self.since_late[r] += pages
        self.queue.extendleft(reversed(others))
        return batch

    def _fits(self, r: int, request: Request, *, alone: bool, unread: bool) -> bool:
        """Whether there are pages for the prompt, and for one sequence to go on to its end.

        Args:
            alone: whether no other is on its way to the shard.
        """
        config = self.engine.config
        if config.num_pages is None:
            return True
        need = -(-len(request.tokens) // config.page_tokens)
        alone = alone and not self.table.waiting[r].any()
        reserve = 0 if alone else config.table_pages + 2
        return self.free[r] - unread * self.pages_a_call >= need + reserve

    def _hand_over(
        self, params: RolloutParams, state: DecodeState, batch: list[tuple[int, int, Request]]
    ) -> DecodeState:
        config = self.engine.config
        R, P = config.shards, config.prefill_prompts // config.shards
        T = config.page_tokens * self._padded_pages(batch[0][2])
        tokens_RPT = np.zeros((R, P, T), np.int32)
        length_RP = np.ones((R, P), np.int32)
        ids_RP2 = np.zeros((R, P, 2), np.uint32)
        new = NewRequests.none(config, P, self.sampling)
        row = [0] * R
        for r, e, request in batch:
            p, row[r] = row[r], row[r] + 1
            tokens = request.tokens
            tokens_RPT[r, p, : len(tokens)], length_RP[r, p] = tokens, len(tokens)
            ids_RP2[r, p] = request.problem.id, request.problem.epoch
            new.request_P[r, p], new.num_samples_P[r, p] = e, request.samples
            new.first_sample_P[r, p] = request.first
            new.sampled_P[r, p] = len(tokens) - len(request.problem.prompt_tokens)
            numbers = range(request.first, request.first + request.samples)
            new.limit_PG[r, p, : request.samples] = [
                self._limit(request.number, s) for s in numbers
            ]
            self.table.open(r, e, request, self.arrivals)
            self.arrivals += 1
        # Not read here: on the device the keys wait behind the call of decode that is under way.
        keys_RP2 = _problem_keys(self.key_data, ids_RP2)
        prefix = self.engine.prefill(
            params=params, padded_tokens=tokens_RPT, true_length=length_RP, key_2=keys_RP2
        )
        return self.engine.insert(prefix, state, new)


@jax.jit
def _problem_keys(key_2: jax.Array, ids_RP2: jax.Array) -> jax.Array:
    """uint32 [R, P, 2]: the step's key folded with the id and the epoch of each problem."""

    def fold(id_2: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_2), id_2[0])
        return jax.random.key_data(jax.random.fold_in(key, id_2[1]))

    return jax.vmap(jax.vmap(fold))(ids_RP2)
