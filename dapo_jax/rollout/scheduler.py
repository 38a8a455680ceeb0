"""Continuous batching: hands prompts to the engine, calls it, reads the tokens it sampled.

`GenerationLoop` is driven by its caller: each `Turn` reports the responses that ended during one
engine call. A caller that has enough stops asking. `generate` collects everything. Admission of
prompts is in `admission`.

Invariant: a response depends on the parameters, the key, its problem and its sample number, and on
nothing that happens here.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax.rollout.admission import (
    Admission,
    GenerationRequest,
    Request,
    Sample,
    Table,
)
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.jetstream import NOT_FINITE, OVER, VALID, DecodeOutput
from dapo_jax.rollout.partial_rollouts import Visit
from dapo_jax.rollout.slots import DecodeState
from dapo_jax.rollout.stop_strings import completed_at
from dapo_jax.types import Detokenize, Problem, Response
from dapo_jax.utils.telemetry import SILENT, Telemetry


class RolloutStats(NamedTuple):
    """Counts of one generation loop."""

    tokens: int = 0  # tokens of responses, without discarded ones
    busy_slots: int = 0  # sum over decode steps during which responses waited for a slot
    slots_offered: int = 0  # the same decode steps times the number of slots
    preempted: int = 0  # sequences that gave up their pages and were resumed later
    invalid: int = 0  # responses that ended because the logits were not finite
    idle_seconds: float = 0.0  # seconds without work, waiting for verdicts
    sampled: int = 0  # tokens sampled, discarded ones included
    could_sample: int = 0  # decode steps with any busy slot times the number of slots

    def __add__(self, other: tuple) -> "RolloutStats":
        return RolloutStats(*(a + b for a, b in zip(self, other)))


class Ended(NamedTuple):
    """A response that has ended."""

    prompt: int  # place of its problem in the order in which the loop took them
    sample: int
    response: Response


class NewTokens(NamedTuple):
    """Tokens of one response that the last engine call sampled."""

    prompt: int
    sample: int
    tokens: list[int]
    is_last: bool


class Turn(NamedTuple):
    """One iteration of the loop: at most one engine call made and one read."""

    ended: list[Ended]
    tokens: list[NewTokens]  # empty unless the request streams
    idle: bool  # nothing could be generated or read: more problems are to come later


def generate(
    engine: DecoderEngine,
    problems: Iterable[Problem],
    detokenize: Detokenize,
    key: jax.Array,
    request: GenerationRequest,
    telemetry: Telemetry = SILENT,
) -> tuple[list[list[Response]], RolloutStats]:
    """Returns the responses to every problem, in order, and the counts.

    Args:
        engine: within `engine.weights(params)`.
        key: of the rollout step.

    Raises:
        UserError: see `GenerationLoop`.
        StopRequested: a stop was requested; the responses so far are lost.
    """
    loop = GenerationLoop(engine, iter(problems), detokenize, key, request, telemetry)
    for _ in loop.turns():
        telemetry.check_stop()
    return loop.responses(), loop.stats


class _Call(NamedTuple):
    """A call of `generate`."""

    output: DecodeOutput
    had_work_R: np.ndarray  # bool: whether there was anything to do for the shard
    arrivals: int  # requests handed over before it


class GenerationLoop:
    """Generates `request.num_samples` responses to each problem.

    Args:
        engine: within `engine.weights(params)`.
        problems: taken one after another when there is room; None: no problem yet, ask again.
        key: of the rollout step.
        step: rollout step of the tokens sampled now; recorded where `begun` has older ones.
        begun: responses of earlier steps, by (problem id, epoch) and sample. Those that ended are
            reported as ended now. The others are resumed: their tokens stay, and new ones are
            sampled with this loop's parameters and key.

    Raises:
        UserError: a prompt is empty or longer than the engine takes, a limit is beyond what it
            generates, or a sampling parameter is outside its range.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        problems: Iterator[Problem | None],
        detokenize: Detokenize,
        key: jax.Array,
        request: GenerationRequest,
        telemetry: Telemetry = SILENT,
        *,
        step: int = 0,
        begun: Mapping[Visit, Mapping[int, Response]] | None = None,
    ):
        self.engine, self.params, self.detokenize = engine, engine.loaded, detokenize
        self.request, self.telemetry = request, telemetry
        sampling = engine.config.params if request.sampling is None else request.sampling
        self.mode = sampling.mode
        self.stats = RolloutStats()
        self.table = Table(engine.config, step)
        self.admission = Admission(engine, self.table, problems, key, request, begun or {})
        self.done = self.admission.done
        self.state: DecodeState = engine.init_decode_state()
        # Results are read one call late, so that the device never waits for the host.
        self.late: _Call | None = None
        self.calls_to_pass = 0  # calls made before a sample was cancelled
        # Tokens of cancelled samples in the in-flight call are discarded, even if their request
        # slot has been reused.
        self.cancelled = np.zeros_like(self.table.waiting)
        self._ended: list[Ended] = []
        self._tokens: list[NewTokens] = []

    def turns(self) -> Iterator[Turn]:
        """Generates until all responses have ended; yields after each engine call."""
        while self.has_work():
            moved = self.one_call()
            turn = Turn(self._ended, self._tokens, not moved)
            self._ended, self._tokens = [], []
            yield turn

    def has_work(self) -> bool:
        """Returns whether responses are still to come."""
        if self.late is not None or self.table.waiting.any() or self.admission.queue:
            return True
        if not self.admission.exhausted:
            self.admission.take(1)
        return bool(self.admission.queue) or not self.admission.exhausted

    def responses(self) -> list[list[Response]]:
        """Returns the responses to each problem taken; none where some have not ended."""
        num = self.request.num_samples
        return [[done[g] for g in range(num)] if len(done) == num else [] for done in self.done]

    def one_call(self) -> bool:
        """Admits prompts, calls `generate`, reads the previous call; returns whether any call was
        made or read."""
        unread = self.late is not None
        self.state = self.admission.admit(self.params, self.state, unread=unread)
        if self.admission.over:
            self._ended += [Ended(*ended) for ended in self.admission.over]
            self.admission.over = []
        now = None
        if self.table.waiting.any():
            self.state, now = self.engine.generate(self.params, self.state, self.mode)
            now.copy_to_host_async()
        late, self.late = self.late, None
        if now is not None:
            had_work_R = np.asarray(self.table.waiting.any(axis=(1, 2)))
            self.late = _Call(now, had_work_R, self.admission.arrivals)
        if late is not None:
            self._read(late)
        return late is not None or now is not None

    def unfinished(self) -> list[dict[int, Response]]:
        """Returns all tokens sampled for each problem taken, by sample, ended or not. The loop is
        over then."""
        late, self.late = self.late, None
        if late is not None:
            self._read(late)
        sampled = [dict(done) for done in self.done]
        for request in self.admission.queue:
            if request.begun is not None:
                sampled[request.number][request.first] = request.begun
        for work in np.argwhere(self.table.waiting & (self.table.count > 0)).tolist():
            number, sample = self.table.who(*work)
            sampled[number][sample] = self.table.sampled(*work)
        return sampled

    def _read(self, call: _Call) -> None:
        """Takes the tokens of a call, and ends responses."""
        config, waiting = self.engine.config, int(self.table.waiting.sum())
        at_work = min(waiting, config.slots)
        self.telemetry.waiting_for(
            f"the device: {at_work} slots at work, {waiting - at_work} responses waiting for one"
        )
        output = call.output.convert_to_numpy()
        self.admission.read(output.free_R)
        valid_RkB = output.flags_RkB & VALID > 0
        if valid_RkB.any():
            self.telemetry.moved()
        ours_RkB = valid_RkB & ~self._discarded(output)
        self.cancelled[:] = False
        before_REG = self.table.count.copy()
        ended: list[tuple[int, int, int, bool]] = []
        news: dict[Sample, list[int]] = {}
        for i in range(valid_RkB.shape[1]):
            if not valid_RkB[:, i].any():
                break
            shard, slot = np.nonzero(ours_RkB[:, i])
            at = shard, output.request_RkB[shard, i, slot], output.sample_index_RkB[shard, i, slot]
            place = self.table.count[at]
            self.table.tokens[(*at, place)] = output.token_RkB[shard, i, slot]
            self.table.log_probs[(*at, place)] = output.log_prob_RkB[shard, i, slot]
            self.table.model_log_probs[(*at, place)] = output.model_log_prob_RkB[shard, i, slot]
            self.table.count[at] += 1
            offered = output.waiting_Rk[:, i] > 0
            if self.admission.queue:
                offered[:] = True
            busy = valid_RkB[:, i].sum(axis=1)[offered].sum()
            self.stats += RolloutStats(
                len(shard),
                int(busy),
                int(offered.sum()) * (config.slots // config.shards),
                sampled=int(valid_RkB[:, i].sum()),
                could_sample=config.slots,
            )
            flags = output.flags_RkB[shard, i, slot]
            if self.request.stream:
                tokens = output.token_RkB[shard, i, slot].tolist()
                for r, e, c, token in zip(*(x.tolist() for x in at), tokens):
                    news.setdefault((r, e, c), []).append(token)
            is_last = flags & OVER > 0
            finite = flags & NOT_FINITE == 0
            ended += zip(*(x[is_last].tolist() for x in at), finite[is_last].tolist())
        cut: list[Sample] = []
        if self.request.stop_strings:
            cut = self._cut(before_REG, {work[:3] for work in ended if not work[3]}, news)
        over = {work[:3] for work in ended}
        gone = [work for work in cut if work not in over]  # the device still goes on with them
        ended = [work for work in ended if work[:3] not in cut] + [(*work, True) for work in cut]
        last = {work[:3] for work in ended}
        self._tokens += [
            NewTokens(*self.table.who(*work), tokens, work in last) for work, tokens in news.items()
        ]
        if ended:
            self._end(ended, cut)
        stuck_R = (
            call.had_work_R & ~valid_RkB.any(axis=(1, 2)) & self.table.waiting.any(axis=(1, 2))
        )
        if self.calls_to_pass:
            self.calls_to_pass -= 1
        elif stuck_R.any():
            gone += self._preempt(stuck_R, output.waiting_Rk[:, 0], call.arrivals)
        if gone:
            self._cancel(gone)

    def _discarded(self, output: DecodeOutput) -> np.ndarray:
        """bool [R, k, B]: tokens of samples that were cancelled after the call was made."""
        request_RkB = np.minimum(output.request_RkB, self.engine.config.requests - 1)
        return self.cancelled[
            np.arange(len(request_RkB))[:, None, None], request_RkB, output.sample_index_RkB
        ]

    def _cut(
        self, before_REG: np.ndarray, invalid: set[Sample], news: dict[Sample, list[int]]
    ) -> list[Sample]:
        """The samples whose text has come to hold a stop string, cut at the token that completes
        it: those drawn after it never were.

        Args:
            before_REG: tokens of each sample before the call.
            invalid: samples of whose last token nothing is known.
            news: what the call drew, as far as it was kept; cut too.
        """
        works: list[Sample] = [
            (r, e, c) for r, e, c in np.argwhere(self.table.count > before_REG).tolist()
        ]
        known = [
            self.table.tokens[work][: self.table.count[work] - (work in invalid)] for work in works
        ]
        first_new = [int(before_REG[work]) for work in works]
        places = completed_at(self.request.stop_strings, self.detokenize, known, first_new)
        cut = {work: place for work, place in zip(works, places) if place is not None}
        for work, place in cut.items():
            self.stats += RolloutStats(tokens=place - int(self.table.count[work]))
            self.table.count[work] = place
            if work in news:
                del news[work][place - int(before_REG[work]) :]
        return list(cut)

    def _end(self, ended: list[tuple[int, int, int, bool]], cut: list[Sample]) -> None:
        stops = set(self.engine.config.stop_tokens)
        sampled = [self.table.sampled(r, e, c) for r, e, c, _ in ended]
        tokens = [response.tokens for response in sampled]
        texts = self.detokenize(tokens)
        for (r, e, c, finite), response, text in zip(ended, sampled, texts):
            by_itself = int(response.tokens[-1]) in stops or (r, e, c) in cut
            reason = "stop" if by_itself else "length"
            if not finite:
                # Of what was drawn last nothing is known.
                assert response.model_log_probs is not None
                response.log_probs[-1] = response.model_log_probs[-1] = 0.0
                reason = "invalid"
                self.stats += RolloutStats(invalid=1)
            index, sample = self.table.who(r, e, c)
            response = response._replace(finish_reason=reason, text=text)
            self.done[index][sample] = response
            self._ended.append(Ended(index, sample, response))
            self.table.close(r, e, c)

    def _preempt(self, stuck_R: np.ndarray, waiting_R: np.ndarray, arrivals: int) -> list[Sample]:
        """Where nothing moves every sequence waits for a page. The youngest gives up its own, and
        is continued when there are pages again: its tokens are those it would have had anyway.

        Returns:
            those to be cancelled.
        """
        gone: list[Sample] = []
        for r in np.flatnonzero(stuck_R).tolist():
            in_order = sorted(
                (self.table.order[r, e], e)
                for e, request in enumerate(self.table.requests[r])
                if request is not None and self.table.order[r, e] < arrivals
            )
            works = [
                (e, int(c)) for _, e in in_order for c in np.flatnonzero(self.table.waiting[r, e])
            ]
            in_slots = works[: len(works) - int(waiting_R[r])]
            if len(in_slots) < 2:
                continue
            e, c = in_slots[-1]
            gone.append((r, e, c))
            request = self.table.requests[r][e]
            assert request is not None
            begun = self.table.sampled(r, e, c)
            self.admission.queue.appendleft(
                Request(request.number, request.problem, request.first + c, 1, begun)
            )
            self.table.close(r, e, c)
            self.stats += RolloutStats(preempted=1)
        return gone

    def _cancel(self, gone: list[Sample]) -> None:
        """Takes samples off the device; what the unread call draws of them is discarded."""
        config = self.engine.config
        self.calls_to_pass = 0 if self.late is None else 1
        request_RW = np.full((config.shards, config.shard_slots), -1, np.int32)
        sample_index_RW = np.full((config.shards, config.shard_slots), -1, np.int32)
        row = [0] * config.shards
        for r, e, c in gone:
            request_RW[r, row[r]], sample_index_RW[r, row[r]] = e, c
            row[r] += 1
            self.cancelled[r, e, c] = self.late is not None
        self.state = self.engine.cancel(self.state, request_RW, sample_index_RW)
