"""Admission: which prompts are handed to the engine, when, and to which of its shards.

`scheduler` reads the results; the two share the `RequestTable`.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax.rollout.carry import CarriedResponses
from dapo_jax.rollout.end_of_thinking import EndOfThinking
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.programs import RolloutParams
from dapo_jax.rollout.repetition import RepetitionDetector
from dapo_jax.rollout.sampling import SamplingParams, problem_keys
from dapo_jax.rollout.slots import DecodeState, NewRequests
from dapo_jax.types import UNFINISHED, Problem, Response, UserError

SamplePlace = tuple[int, int, int]  # shard r, request slot e, number g among its samples


class GenerationSettings(NamedTuple):
    """Settings of generation, the same for every problem."""

    num_samples: int  # responses per problem
    sampling: SamplingParams | None = None  # None: the engine's own
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one
    # A response ends once it has this many confident tokens in a row, see `repetition`.
    end_repetition: int | None = None
    limits_QG: np.ndarray | None = None  # most tokens of each response; None: the engine's own
    stream: bool = False  # report tokens as they are sampled
    # Thinking that has not ended by itself is ended; the engine's `num_pages` must not be None.
    end_of_thinking: EndOfThinking | None = None


class Request(NamedTuple):
    """Samples of one prompt that take one request slot of the engine."""

    number: int  # of the problem
    problem: Problem
    first: int  # number of the first sample
    samples: int
    partial: Response | None = None  # of the only sample: a response to resume
    calls: np.ndarray | None = None  # int32 [length], decode call of its tokens; None: of no call

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens to prefill."""
        resumed = () if self.partial is None else tuple(self.partial.tokens.tolist())
        return self.problem.prompt_tokens + resumed

    @property
    def num_tokens(self) -> int:
        """The length of `tokens`, which takes long to put together."""
        resumed = 0 if self.partial is None else len(self.partial.tokens)
        return len(self.problem.prompt_tokens) + resumed


def requests_of(
    number: int,
    problem: Problem,
    *,
    num_samples: int,
    max_samples: int,
    carried: Mapping[int, Response],
) -> list[Request]:
    """Returns the requests for a problem's samples: one for each unfinished response in `carried`,
    one for up to `max_samples` neighbours without a token, none for finished responses."""
    requests, fresh = [], 0
    for sample in range(num_samples + 1):
        is_fresh = sample < num_samples and sample not in carried
        if fresh and (fresh == max_samples or not is_fresh):
            requests.append(Request(number, problem, sample - fresh, fresh))
            fresh = 0
        fresh += is_fresh
        if sample in carried and carried[sample].finish_reason == UNFINISHED:
            requests.append(Request(number, problem, sample, 1, carried[sample]))
    return requests


class RequestTable:
    """The engine's request slots as the host knows them, one call late: E on each of R shards, each
    with up to G samples of at most T tokens. A place (r, e, g) is sample g of request slot e on
    shard r.

    Args:
        step: rollout step of the tokens sampled now.
        keep_calls: whether the decode call of every token is kept.
        end_repetition: see `GenerationSettings`.
        excludes_tokens: see `sampling.Mode`.
    """

    def __init__(
        self,
        config: EngineConfig,
        step: int = 0,
        *,
        keep_calls: bool = False,
        end_repetition: int | None = None,
        excludes_tokens: bool = False,
    ):
        self.step = step
        R, E, G, T = config.shards, config.requests, config.samples, config.max_response_tokens
        self.requests: list[list[Request | None]] = [[None] * E for _ in range(R)]
        self.order = np.zeros((R, E), np.int64)  # of arrival
        self.unfinished = np.zeros((R, E, G), bool)  # responses that have not ended
        self.count = np.zeros((R, E, G), np.int32)  # tokens
        # In memory the first samples of all requests come first, and so on: memory of samples that
        # requests of one sample do not have is never touched. NumPy asks for pages of 2 MiB.
        of_tokens = lambda dtype: np.zeros((R, G, E, T), dtype).swapaxes(1, 2)
        self.tokens = of_tokens(np.int32)
        self.log_probs = of_tokens(np.float32)
        self.model_log_probs = of_tokens(np.float32)
        self.calls = of_tokens(np.int32) if keep_calls else None
        self.repetition = None
        if end_repetition is not None:
            # The log-probs are of the remaining tokens alone where the sampler leaves some out: all
            # is certain where one remains.
            policy = self.model_log_probs if excludes_tokens else self.log_probs
            self.repetition = RepetitionDetector(end_repetition, policy)

    def request(self, r: int, e: int) -> Request:
        """Returns the request in a request slot that is taken."""
        request = self.requests[r][e]
        assert request is not None
        return request

    def problem_and_sample(self, r: int, e: int, g: int) -> tuple[int, int]:
        """Returns (number of the problem, number of the sample)."""
        request = self.request(r, e)
        return request.number, request.first + g

    def open(self, r: int, e: int, request: Request, order: int) -> None:
        """Gives a request slot to a request."""
        self.requests[r][e] = request
        self.order[r, e] = order
        self.unfinished[r, e, : request.samples] = True
        self.count[r, e] = 0
        if request.partial is not None:
            self.count[r, e, 0] = n = len(request.partial.tokens)
            for name in ("tokens", "log_probs", "model_log_probs"):
                getattr(self, name)[r, e, 0, :n] = getattr(request.partial, name)
            if self.calls is not None:
                self.calls[r, e, 0, :n] = 0 if request.calls is None else request.calls
        if self.repetition is not None:
            for g in range(request.samples):
                self.repetition.begin((r, e, g), int(self.count[r, e, g]))

    def response(self, r: int, e: int, g: int) -> Response:
        """Returns the tokens of a sample so far, as an unfinished response."""
        partial, n = self.request(r, e).partial, self.count[r, e, g]
        versions = None  # all tokens are of this step
        if partial is not None and partial.versions is not None:
            new = np.full(n - len(partial.versions), self.step, np.int32)
            versions = np.concatenate([partial.versions, new])
        arrays = self.tokens, self.log_probs, self.model_log_probs
        tokens, log_probs, model_log_probs = (x[r, e, g, :n].copy() for x in arrays)
        return Response(tokens, log_probs, UNFINISHED, "", versions, model_log_probs)

    def calls_of(self, r: int, e: int, g: int) -> np.ndarray | None:
        """Returns the decode call of each token of a sample, where they are kept."""
        if self.calls is None:
            return None
        return self.calls[r, e, g, : self.count[r, e, g]].copy()

    def append_given(self, r: int, e: int, g: int, tokens: Sequence[int]) -> None:
        """Appends tokens that are not sampled to a sample. They count as tokens of the call that
        sampled the last one."""
        n = self.count[r, e, g]
        at = r, e, g, slice(n, n + len(tokens))
        self.tokens[at] = tokens
        self.log_probs[at] = self.model_log_probs[at] = np.nan
        if self.calls is not None:
            self.calls[at] = self.calls[r, e, g, n - 1]
        self.count[r, e, g] = n + len(tokens)

    def end(self, r: int, e: int, g: int) -> None:
        """Ends a sample; its request slot is free after the last one."""
        self.unfinished[r, e, g] = False
        if not self.unfinished[r, e].any():
            self.requests[r][e] = None


class Admission:
    """Takes problems, and hands their prompts to the engine.

    Args:
        problems: None: no problem yet, ask again.
        carried: see `scheduler.GenerationLoop`.

    Raises:
        UserError: `sampling` is outside its range; from `take` or `admit`, a prompt or a limit is.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        table: RequestTable,
        problems: Iterator[Problem | None],
        key: jax.Array,
        settings: GenerationSettings,
        carried: CarriedResponses,
    ):
        self.sampling = engine.config.params if settings.sampling is None else settings.sampling
        self.sampling.check()
        resumes = engine.config.num_pages is not None
        assert resumes or settings.end_of_thinking is None, "no programs for longer prompts"
        self.engine, self.table, self.problems, self.settings = engine, table, problems, settings
        self.key_data = np.asarray(jax.random.key_data(key))
        self.carried = carried
        self.done: list[dict[int, Response]] = []  # finished, by problem taken and sample
        # Responses that finished in an earlier step and are to be reported: (problem, sample, it).
        self._finished_before: list[tuple[int, int, Response]] = []
        self.queue: collections.deque[Request] = collections.deque()
        self.exhausted = False  # no more problems will come
        self.arrivals = 0  # requests handed over
        config = engine.config
        # Pages that are free at the next call, at least.
        self.free_R = np.full(config.shards, config.shard_pages - 1)
        # Most pages that a call takes: each slot's own, and those of samples that get the slot.
        per_slot = -(-config.decode_steps // config.page_tokens) + 2
        self.call_pages = config.slots // config.shards * per_slot
        # Pages of the prompts handed over since the call to be read next.
        self.unread_pages_R = np.zeros(config.shards, int)

    def has_work(self) -> bool:
        """Returns whether requests wait, or problems may still come."""
        if not self.queue and not self.exhausted:
            self.take(1)
        return bool(self.queue) or not self.exhausted

    def take_finished(self) -> list[tuple[int, int, Response]]:
        """Returns (problem, sample, response) of responses that had finished in earlier steps, of
        the problems taken since the last call."""
        found, self._finished_before = self._finished_before, []
        return found

    def resume_first(self, request: Request) -> None:
        """Lets a request with a partial response begin before all others."""
        self.queue.appendleft(request)

    def read(self, free_R: np.ndarray) -> None:
        """Takes the numbers of pages that were free at the end of the call that was read last."""
        self.free_R = free_R - self.unread_pages_R
        self.unread_pages_R = np.zeros_like(self.unread_pages_R)

    def take(self, num: int) -> None:
        """Makes requests of up to `num` problems, if there are so many."""
        for _ in range(num):
            try:
                problem = next(self.problems)
            except StopIteration:
                self.exhausted = True
                return
            if problem is None:
                return
            longest, tokens = self.engine.config.max_prompt_tokens, len(problem.prompt_tokens)
            if not 1 <= tokens <= longest:
                raise UserError(
                    f"problem {problem.id}: its prompt has {tokens} tokens; the engine takes 1 to "
                    f"{longest} (max_prompt_tokens). Leave it out, or make an engine for longer "
                    "ones."
                )
            number = len(self.done)
            carried = self.carried.get((problem.id, problem.epoch), {})
            self.done.append({s: r for s, r in carried.items() if r.finish_reason != UNFINISHED})
            self._finished_before += [(number, sample, r) for sample, r in self.done[-1].items()]
            self.queue += requests_of(
                number,
                problem,
                num_samples=self.settings.num_samples,
                max_samples=self.engine.config.samples,
                carried=carried,
            )

    def admit(self, params: RolloutParams, state: DecodeState, *, unread: bool) -> DecodeState:
        """Returns the state with prompts prefilled for free slots, a batch at a time; `unread`
        says whether a call's results are still to be read."""
        config, table = self.engine.config, self.table
        # A shard without samples has all of its pages, also those freed by a cancellation that no
        # result knows of yet, and takes none in the call that is to be read.
        idle_R = ~table.unfinished.any(axis=(1, 2))
        self.free_R = np.where(idle_R, config.shard_pages - 1, self.free_R)
        unread_R = np.asarray(unread & ~idle_R)
        while True:
            free = [[e for e, r in enumerate(rs) if r is None] for rs in table.requests]
            unfinished = int(table.unfinished.sum())
            ahead = max(0, -(-(config.max_in_flight - unfinished) // config.samples))
            room = min(sum(map(len, free)), ahead)
            # A part of a batch only where the slots run dry or no more prompts come. Prompts that
            # are not needed yet are not claimed: another process may have room for them.
            partly = unfinished < config.slots or self.exhausted
            if room < config.prefill_prompts and not partly:
                return state
            self.take(min(room, config.prefill_prompts) - len(self.queue))
            ready = min(len(self.queue), room)
            is_part = ready < config.prefill_prompts
            if ready == 0 or (is_part and not (partly or self.exhausted)):
                return state
            batch = self._next_batch(free, unread_R)
            if not batch:
                return state
            state = self._hand_over(params, state, batch)

    def _pages(self, request: Request) -> int:
        return -(-request.num_tokens // self.engine.config.page_tokens)

    def _padded_pages(self, request: Request) -> int:
        return next(n for n in self.engine.prompt_pages if n >= self._pages(request))

    def _next_batch(
        self, free: list[list[int]], unread_R: np.ndarray
    ) -> list[tuple[int, int, Request]]:
        """Returns (shard, slot, request) of the next prompts, each for the shard with least to do.

        All are padded to the length of the first, by its own length alone: padding changes rounding
        and must not depend on the other prompts. Prompts of other lengths keep their place.
        """
        config = self.engine.config
        load_R = self.table.unfinished.sum(axis=(1, 2))
        batch: list[tuple[int, int, Request]] = []
        num_R = [0] * config.shards
        padded, others = self._padded_pages(self.queue[0]), collections.deque[Request]()
        while self.queue:
            request = self.queue[0]
            if self._padded_pages(request) != padded:
                others.append(self.queue.popleft())
                continue
            most = config.prefill_prompts // config.shards
            shards = [r for r in range(config.shards) if free[r] and num_R[r] < most]
            if not shards:
                break
            r = min(shards, key=lambda r: load_R[r])
            alone = not num_R[r] and not self.table.unfinished[r].any()
            if not self._fits(r, request, alone=alone, unread=unread_R[r]):
                break
            self.queue.popleft()
            batch.append((r, free[r].pop(0), request))
            num_R[r] += 1
            load_R[r] += request.samples
            self.free_R[r] -= self._pages(request)
            self.unread_pages_R[r] += self._pages(request)
        self.queue.extendleft(reversed(others))
        return batch

    def _fits(self, r: int, request: Request, *, alone: bool, unread: bool) -> bool:
        """Returns whether there are pages for the prompt, and for one sequence up to its end unless
        the request has the shard to itself."""
        config = self.engine.config
        if config.num_pages is None:
            return True
        reserve = 0 if alone else config.table_pages + 2
        return self.free_R[r] - unread * self.call_pages >= self._pages(request) + reserve

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
        num_R = [0] * R
        for r, e, request in batch:
            p, num_R[r] = num_R[r], num_R[r] + 1
            tokens = request.tokens
            tokens_RPT[r, p, : len(tokens)], length_RP[r, p] = tokens, len(tokens)
            ids_RP2[r, p] = request.problem.id, request.problem.epoch
            new.request_P[r, p], new.num_samples_P[r, p] = e, request.samples
            new.first_sample_P[r, p] = request.first
            new.sampled_P[r, p] = len(tokens) - len(request.problem.prompt_tokens)
            numbers = range(request.first, request.first + request.samples)
            limits = [self.limit(request.number, sample) for sample in numbers]
            new.limit_PG[r, p, : request.samples] = limits
            self.table.open(r, e, request, self.arrivals)
            self.arrivals += 1
        # The keys stay on the device, where they wait behind the decode call under way.
        keys_RP2 = problem_keys(self.key_data, ids_RP2)
        prefix = self.engine.prefill(
            params=params, padded_tokens=tokens_RPT, true_length=length_RP, key_2=keys_RP2
        )
        return self.engine.insert(prefix, state, new)

    def limit(self, problem: int, sample: int) -> int:
        """Returns the most tokens of a sample; raises UserError where it is out of range."""
        most, limits_QG = self.engine.config.max_response_tokens, self.settings.limits_QG
        limit = most if limits_QG is None else int(limits_QG[problem, sample])
        if not 1 <= limit <= most:
            raise UserError(
                f"limits_QG[{problem}, {sample}] is {limit} tokens; the engine generates 1 to "
                f"{most} (max_response_tokens). Ask for fewer, or make an engine for more."
            )
        return limit
