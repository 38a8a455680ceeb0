"""Draws responses: has prompts admitted, calls the engine, reads what it drew.

The interface to the rest is `generate`: prompts, parameters and a key in, responses with log-probs
out. Another engine can take its place. Which prompts go to the engine and when is decided in
`admission`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax.partial_rollouts import Partial
from dapo_jax.rollout.admission import Admission, Request, Sample, Table
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.programs import Loaded
from dapo_jax.rollout.sampling import Mode, SamplingParams
from dapo_jax.rollout.slots import DecodeState
from dapo_jax.rollout.spec import NOT_FINITE, OVER, VALID, Step
from dapo_jax.rollout.stop_strings import completed_at
from dapo_jax.types import Detokenize, Problem, Response
from dapo_jax.watchdog import UNWATCHED, Watchdog

IDLE_SECONDS = 0.002
# Takes (problem, sample, response) of responses that have ended.
Finished = Callable[[list[tuple[int, int, Response]]], None]
IGNORE: Finished = lambda _: None
# Takes (problem, sample, tokens just drawn, whether they are the last).
Drawn = Callable[[list[tuple[int, int, list[int], bool]]], None]


class RolloutStats(NamedTuple):
    """What a call of `generate` did."""

    tokens: int = 0  # of responses; those discarded are not among them
    busy_slots: int = 0  # sum over the decode steps taken while responses waited for a slot
    slots_offered: int = 0  # the same steps times the number of slots
    preempted: int = 0  # sequences that gave their pages up and were continued later
    invalid: int = 0  # responses that ended because the logits were not finite
    idle_seconds: float = 0.0  # with nothing to draw, while verdicts were awaited
    drawn: int = 0  # tokens, those discarded among them
    could_draw: int = 0  # the decode steps in which any slot drew times the number of slots

    def __add__(self, other: tuple) -> "RolloutStats":
        return RolloutStats(*(a + b for a, b in zip(self, other)))


def generate(
    engine: DecoderEngine,
    params: Loaded,
    problems: Iterable[Problem | None],
    detokenize: Detokenize,
    *,
    num_samples: int,
    key: jax.Array,
    sampling: SamplingParams | None = None,
    limits: Callable[[int, int], int] | None = None,
    stop_strings: Sequence[str] = (),
    finished: Finished = IGNORE,
    drawn: Drawn | None = None,
    enough: Callable[[], bool] = lambda: False,
    partial: Partial | None = None,
    watch: Watchdog = UNWATCHED,
    check_stop: Callable[[], None] = lambda: None,
    idle_seconds: float = IDLE_SECONDS,
) -> tuple[list[list[Response]], RolloutStats]:
    """`num_samples` responses to every problem, in order, and what it took.

    Args:
        params: in the engine's layout, see `DecoderEngine.load_params`.
        problems: taken one after another when there is room for them; None: not now, ask again.
        key: of the rollout step. A response depends on it, its problem's id and its sample number,
            and on nothing that happens here.
        sampling: temperature and what is left out; None: the engine's own.
        limits: most tokens of a response, by problem and sample; None: the engine's own.
        stop_strings: a response ends with the token that completes one of them in its text, as with
            the engine's stop tokens.
        finished: called between decode calls with (problem, sample, response) of the responses that
            have just ended, the problem as an index into `problems`.
        drawn: called between decode calls with what each of them drew.
        enough: asked between decode calls; True leaves the rest undrawn. Problems without all their
            responses have an empty list then.
        partial: what earlier steps drew of the responses. Those that have ended are told of as if
            they had just done so, the others go on: their tokens stay, and those that follow are
            drawn by this call's parameters and key.
        watch: is told what is waited for.
        check_stop: called between decode calls; raises to abandon the call.
        idle_seconds: until problems that are to come later are asked for again.

    Raises:
        UserError: a prompt is empty or longer than the engine takes, a limit is beyond what it
            draws, or a number of `sampling` is outside its range.
    """
    run = Run(engine, params, iter(problems), detokenize, num_samples, key, sampling, limits)
    run.finished, run.drawn, run.stop_strings = finished, drawn, tuple(stop_strings)
    run.watch = watch
    if partial is not None:
        run.table.step, run.admission.begun = partial.step, partial.begun
    for moved in run.turns(enough, check_stop):
        if not moved:
            time.sleep(idle_seconds)  # for problems that are to come later
            run.stats += RolloutStats(idle_seconds=idle_seconds)
    if partial is not None:
        partial.left(run.left())
    responses = [
        [done[sample] for sample in range(num_samples)] if len(done) == num_samples else []
        for done in run.done
    ]
    return responses, run.stats


class _Call(NamedTuple):
    """A call of `decode`."""

    step: Step
    had_work_R: np.ndarray  # bool: whether there was anything to do for the shard
    arrivals: int  # requests handed over before it


class Run:
    """One call of `generate`. Its arguments are explained there."""

    def __init__(
        self,
        engine: DecoderEngine,
        params: Loaded,
        problems: Iterator[Problem | None],
        detokenize: Detokenize,
        num_samples: int,
        key: jax.Array,
        sampling: SamplingParams | None,
        limits: Callable[[int, int], int] | None,
    ):
        spec = engine.spec
        self.engine, self.params, self.detokenize = engine, params, detokenize
        sampling = spec.params if sampling is None else sampling
        self.mode: Mode = sampling.mode
        self.finished: Finished = IGNORE
        self.drawn: Drawn | None = None
        self.stop_strings: tuple[str, ...] = ()
        self.watch = UNWATCHED
        self.stats = RolloutStats()
        self.table = Table(spec)
        self.admission = Admission(engine, self.table, problems, num_samples, key, sampling, limits)
        self.done = self.admission.done
        self.state: DecodeState = engine.init_decode_state()
        # Results are read one call late: the device never waits for the host. With them goes which
        # shards had work, and how many requests had arrived.
        self.late: _Call | None = None
        self.calls_to_pass = 0  # that were made before a sample was cancelled
        # What the unread call drew of samples cancelled since it was made is nobody's, also where
        # their entry is already another prompt's.
        self.cancelled = np.zeros_like(self.table.waiting)

    def turns(
        self, enough: Callable[[], bool], check_stop: Callable[[], None] = lambda: None
    ) -> Iterator[bool]:
        """Draws, and gives control back after each call: whether there was anything to do."""
        while self.has_work():
            check_stop()
            if enough():
                break
            yield self.one_call()

    def has_work(self) -> bool:
        """Whether responses are still to come."""
        if self.late is not None or self.table.waiting.any() or self.admission.queue:
            return True
        if not self.admission.exhausted:
            self.admission.take(1)
        return bool(self.admission.queue) or not self.admission.exhausted

    def one_call(self) -> bool:
        """Hands prompts over, calls `decode`, reads the results of the call before; whether there
        was one to make or to read."""
        unread = self.late is not None
        self.state = self.admission.admit(self.params, self.state, unread=unread)
        if self.admission.over:
            over, self.admission.over = self.admission.over, []
            self.finished(over)
        now = None
        if self.table.waiting.any():
            self.state, now = self.engine.decode(self.params, self.state, self.mode)
            jax.tree.map(lambda x: x.copy_to_host_async(), now)
        late, self.late = self.late, None
        if now is not None:
            had_work_R = np.asarray(self.table.waiting.any(axis=(1, 2)))
            self.late = _Call(now, had_work_R, self.admission.arrivals)
        if late is not None:
            self._read(late)
        return late is not None or now is not None

    def left(self) -> list[dict[int, Response]]:
        """What is drawn of each problem taken, by sample, whether it has ended or not."""
        late, self.late = self.late, None
        if late is not None:
            self._read(late)
        drawn = [dict(done) for done in self.done]
        for request in self.admission.queue:
            if request.begun is not None:
                drawn[request.number][request.first] = request.begun
        for work in np.argwhere(self.table.waiting & (self.table.count > 0)).tolist():
            number, sample = self.table.who(*work)
            drawn[number][sample] = self.table.drawn(*work)
        return drawn

    def _read(self, call: _Call) -> None:
        """Takes the tokens of a call, and ends responses."""
        spec, waiting = self.engine.spec, int(self.table.waiting.sum())
        at_work = min(waiting, spec.slots)
        self.watch.waiting_for(
            f"the device: {at_work} slots at work, {waiting - at_work} responses waiting for one"
        )
        step = Step(*map(np.asarray, call.step))
        self.admission.read(step.free_R)
        valid_RkB = step.flags_RkB & VALID > 0
        if valid_RkB.any():
            self.watch.moved()
        ours_RkB = valid_RkB & ~self._discarded(step)
        self.cancelled[:] = False
        before_REG = self.table.count.copy()
        ended: list[tuple[int, int, int, bool]] = []
        news: dict[Sample, list[int]] = {}
        for i in range(valid_RkB.shape[1]):
            if not valid_RkB[:, i].any():
                break
            shard, slot = np.nonzero(ours_RkB[:, i])
            at = shard, step.entry_RkB[shard, i, slot], step.column_RkB[shard, i, slot]
            place = self.table.count[at]
            self.table.tokens[(*at, place)] = step.token_RkB[shard, i, slot]
            self.table.log_probs[(*at, place)] = step.log_prob_RkB[shard, i, slot]
            self.table.model_log_probs[(*at, place)] = step.model_log_prob_RkB[shard, i, slot]
            self.table.count[at] += 1
            offered = step.waiting_Rk[:, i] > 0
            if self.admission.queue:
                offered[:] = True
            busy = valid_RkB[:, i].sum(axis=1)[offered].sum()
            self.stats += RolloutStats(
                len(shard),
                int(busy),
                int(offered.sum()) * (spec.slots // spec.shards),
                drawn=int(valid_RkB[:, i].sum()),
                could_draw=spec.slots,
            )
            flags = step.flags_RkB[shard, i, slot]
            if self.drawn is not None:
                tokens = step.token_RkB[shard, i, slot].tolist()
                for r, e, c, token in zip(*(x.tolist() for x in at), tokens):
                    news.setdefault((r, e, c), []).append(token)
            is_last = flags & OVER > 0
            finite = flags & NOT_FINITE == 0
            ended += zip(*(x[is_last].tolist() for x in at), finite[is_last].tolist())
        cut: list[Sample] = []
        if self.stop_strings:
            cut = self._cut(before_REG, {work[:3] for work in ended if not work[3]}, news)
        over = {work[:3] for work in ended}
        gone = [work for work in cut if work not in over]  # the device still goes on with them
        ended = [work for work in ended if work[:3] not in cut] + [(*work, True) for work in cut]
        if self.drawn is not None and news:
            last = {work[:3] for work in ended}
            self.drawn([(*self.table.who(*work), t, work in last) for work, t in news.items()])
        if ended:
            self._end(ended, cut)
        stuck_R = (
            call.had_work_R & ~valid_RkB.any(axis=(1, 2)) & self.table.waiting.any(axis=(1, 2))
        )
        if self.calls_to_pass:
            self.calls_to_pass -= 1
        elif stuck_R.any():
            gone += self._preempt(stuck_R, step.waiting_Rk[:, 0], call.arrivals)
        if gone:
            self._cancel(gone)

    def _discarded(self, step: Step) -> np.ndarray:
        """bool [R, k, B]: tokens of samples that were cancelled after the call was made."""
        entry_RkB = np.minimum(step.entry_RkB, self.engine.spec.entries - 1)
        return self.cancelled[np.arange(len(entry_RkB))[:, None, None], entry_RkB, step.column_RkB]

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
        places = completed_at(self.stop_strings, self.detokenize, known, first_new)
        cut = {work: place for work, place in zip(works, places) if place is not None}
        for work, place in cut.items():
            self.stats += RolloutStats(tokens=place - int(self.table.count[work]))
            self.table.count[work] = place
            if work in news:
                del news[work][place - int(before_REG[work]) :]
        return list(cut)

    def _end(self, ended: list[tuple[int, int, int, bool]], cut: list[Sample]) -> None:
        stops = set(self.engine.spec.stop_tokens)
        drawn = [self.table.drawn(r, e, c) for r, e, c, _ in ended]
        tokens = [response.tokens for response in drawn]
        texts = self.detokenize(tokens)
        told = []
        for (r, e, c, finite), response, text in zip(ended, drawn, texts):
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
            told.append((index, sample, response))
            self.table.close(r, e, c)
        self.finished(told)

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
            begun = self.table.drawn(r, e, c)
            self.admission.queue.appendleft(
                Request(request.number, request.problem, request.first + c, 1, begun)
            )
            self.table.close(r, e, c)
            self.stats += RolloutStats(preempted=1)
        return gone

    def _cancel(self, gone: list[Sample]) -> None:
        """Takes samples off the device; what the unread call draws of them is discarded."""
        spec = self.engine.spec
        self.calls_to_pass = 0 if self.late is None else 1
        entry_RW = np.full((spec.shards, spec.cancelled), -1, np.int32)
        column_RW = np.full((spec.shards, spec.cancelled), -1, np.int32)
        row = [0] * spec.shards
        for r, e, c in gone:
            entry_RW[r, row[r]], column_RW[r, row[r]] = e, c
            row[r] += 1
            self.cancelled[r, e, c] = self.late is not None
        self.state = self.engine.cancel(self.state, entry_RW, column_RW)
