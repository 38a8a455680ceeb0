"""Continuous batching: hands prompts to the engine, calls it, reads the tokens it sampled.

The caller drives `GenerationLoop`: each `SchedulerOutput` reports the responses that finished
during one engine call. A caller that has enough stops asking. `admission` admits the prompts.

Invariant: a response depends on the parameters, the key, its problem and its sample number, and on
nothing that happens here.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax.rollout import carry
from dapo_jax.rollout.admission import Admission, GenerationSettings, RequestTable, SamplePlace
from dapo_jax.rollout.carry import CarriedResponses
from dapo_jax.rollout.end_of_thinking import EndOfThinking
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.jetstream import NOT_FINITE, OVER, VALID, DecodeOutput
from dapo_jax.rollout.slots import DecodeState
from dapo_jax.rollout.stop_strings import first_completions
from dapo_jax.types import Detokenize, Problem, Response
from dapo_jax.utils.telemetry import SILENT, Telemetry

TokensOfCall = dict[SamplePlace, list[int]]  # new tokens of each sample, where they are streamed


class RolloutStats(NamedTuple):
    """Counts of one generation loop."""

    tokens: int = 0  # tokens of responses, without discarded ones
    busy_slots: int = 0  # sum over decode steps during which responses waited for a slot
    slots_offered: int = 0  # the same decode steps times the number of slots
    preempted: int = 0  # sequences that gave up their pages and were resumed later
    idle_seconds: float = 0.0  # seconds without work, waiting for verdicts
    sampled: int = 0  # tokens sampled, discarded ones included
    could_sample: int = 0  # decode steps with any busy slot times the number of slots
    discarded: int = 0  # tokens sampled after the cut of a carried rollout

    def __add__(self, other: tuple) -> "RolloutStats":
        return RolloutStats(*(a + b for a, b in zip(self, other)))


class Finished(NamedTuple):
    """A response that has finished."""

    prompt: int  # number of its problem, in the order in which the loop took them
    sample: int
    response: Response
    call: int = 0  # number of the decode call of its last token; 0: it ended in an earlier step


class NewTokens(NamedTuple):
    """Tokens of one response that the last engine call sampled."""

    prompt: int
    sample: int
    tokens: list[int]
    is_last: bool


class SchedulerOutput(NamedTuple):
    """One iteration of the loop: at most one engine call made and one read."""

    finished: list[Finished]
    tokens: list[NewTokens]  # empty unless `settings.stream`
    idle: bool  # nothing could be generated or read: more problems are to come later


def generate(
    engine: DecoderEngine,
    problems: Iterable[Problem],
    detokenize: Detokenize,
    key: jax.Array,
    settings: GenerationSettings,
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
    loop = GenerationLoop(engine, iter(problems), detokenize, key, settings, telemetry)
    for _ in loop.run():
        telemetry.check_stop()
    return loop.responses(), loop.stats


class _Call(NamedTuple):
    """A call of `generate` whose results are still to be read."""

    output: DecodeOutput
    number: int  # from 1
    arrivals: int  # requests handed over before the call


class GenerationLoop:
    """Generates `settings.num_samples` responses to each problem.

    Args:
        engine: within `engine.weights(params)`.
        problems: taken one after another when there is room; None: no problem yet, ask again.
        key: of the rollout step.
        step: rollout step of the tokens sampled now; recorded where `carried` has older ones.
        carried: responses of earlier steps. Finished ones are reported as finished now. The others
            are resumed: their tokens stay, and new ones are sampled with this loop's parameters and
            key. None: there are none, and `unfinished` cannot leave out the last calls.

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
        settings: GenerationSettings,
        telemetry: Telemetry = SILENT,
        *,
        step: int = 0,
        carried: CarriedResponses | None = None,
    ):
        self.engine, self.params, self.detokenize = engine, engine.loaded, detokenize
        self.settings, self.telemetry = settings, telemetry
        self.stats = RolloutStats()
        self.mode = (settings.sampling or engine.config.params).mode
        self.table = RequestTable(
            engine.config,
            step,
            keep_calls=carried is not None,
            end_repetition=settings.end_repetition,
            excludes_tokens=self.mode.excludes_tokens,
        )
        self.admission = Admission(engine, self.table, problems, key, settings, carried or {})
        self.done = self.admission.done
        self.state: DecodeState = engine.init_decode_state()
        # Results are read one call late, so that the device never waits for the host.
        self.unread: _Call | None = None
        self.num_calls = self.num_read = 0  # decode calls made, and read
        self.done_calls: dict[tuple[int, int], np.ndarray | None] = {}  # by problem and sample
        # Tokens of cancelled samples in the in-flight call are discarded, even if their request
        # slot has been reused.
        self.cancelled = np.zeros_like(self.table.unfinished)
        self._finished: list[Finished] = []
        self._tokens: list[NewTokens] = []

    def run(self) -> Iterator[SchedulerOutput]:
        """Generates until all responses have finished; yields after each engine call."""
        while self.has_work():
            moved = self.step()
            output = SchedulerOutput(self._finished, self._tokens, not moved)
            self._finished, self._tokens = [], []
            yield output

    def has_work(self) -> bool:
        """Returns whether responses are still to come."""
        on_device = self.unread is not None or bool(self.table.unfinished.any())
        return on_device or self.admission.has_work()

    def responses(self) -> list[list[Response]]:
        """Returns the responses to each problem taken; none where some have not finished."""
        num = self.settings.num_samples
        return [[done[g] for g in range(num)] if len(done) == num else [] for done in self.done]

    def unfinished(self, last_call: int | None = None) -> list[dict[int, Response]]:
        """Ends the loop early; returns all responses so far to each problem taken, by sample,
        finished or not.

        Args:
            last_call: number of the last decode call whose tokens count; None: all do.
        """
        last, self.unread = self.unread, None
        if last is not None and (last_call is None or last.number <= last_call):
            self._read(last)
        found = [dict(done) for done in self.done]
        calls = self.done_calls
        for request in self.admission.queue:
            if request.partial is not None:
                found[request.number][request.first] = request.partial
                calls[request.number, request.first] = request.calls
        for r, e, g in np.argwhere(self.table.unfinished & (self.table.count > 0)).tolist():
            number, sample = self.table.problem_and_sample(r, e, g)
            found[number][sample] = self.table.response(r, e, g)
            calls[number, sample] = self.table.calls_of(r, e, g)
        if last_call is None:
            return found
        for number, responses in enumerate(found):
            for sample, response in responses.items():
                of_tokens = calls.get((number, sample))
                if of_tokens is not None:  # else all of earlier steps
                    responses[sample] = carry.cut(response, of_tokens, last_call)
                    discarded = int(response.sampled.sum() - responses[sample].sampled.sum())
                    self.stats += RolloutStats(tokens=-discarded, discarded=discarded)
        return found

    def skip_to(self, call: int) -> None:
        """Numbers the next decode call after `call`, at least."""
        self.num_calls = max(self.num_calls, call)

    def step(self) -> bool:
        """Admits prompts, calls `generate`, reads the previous call. Returns whether it made or
        read a call, or found responses that had finished in earlier steps."""
        last, self.unread = self.unread, None
        self.state = self.admission.admit(self.params, self.state, unread=last is not None)
        before = self.admission.take_finished()
        self._finished += [Finished(*found) for found in before]
        if self.table.unfinished.any():
            self.state, output = self.engine.generate(self.params, self.state, self.mode)
            output.copy_to_host_async()
            self.num_calls += 1
            self.unread = _Call(output, self.num_calls, self.admission.arrivals)
        if last is not None:
            self._read(last)
        return bool(before) or last is not None or self.unread is not None

    def _read(self, call: _Call) -> None:
        """Takes the tokens of a call; ends, preempts and cancels responses."""
        table, unfinished = self.table, int(self.table.unfinished.sum())
        busy = min(unfinished, self.engine.config.slots)
        self.telemetry.waiting_for(
            f"the device: {busy} slots at work, {unfinished - busy} responses waiting for one"
        )
        output = call.output.convert_to_numpy()
        self.num_read = call.number
        self.admission.read(output.free_R)
        valid_RkB = output.flags_RkB & VALID > 0
        if valid_RkB.any():
            self.telemetry.moved()
        before_REG = table.count.copy()
        ours_RkB = valid_RkB & ~self._is_cancelled(output)
        # Which sequences are in slots is not known where samples were cancelled after the call.
        is_stuck_R = ~(valid_RkB.any(axis=(1, 2)) | self.cancelled.any(axis=(1, 2)))
        self.cancelled[:] = False
        finished, new_tokens = self._take_tokens(output, valid_RkB, ours_RkB)
        over = set(finished)  # on the device
        ended, thinking = self._apply_rules(before_REG, finished, new_tokens)
        to_cancel = [sample for sample in (*ended, *thinking) if sample not in over]
        finished |= dict.fromkeys(ended, True)
        self._tokens += [
            NewTokens(*table.problem_and_sample(*sample), tokens, sample in finished)
            for sample, tokens in new_tokens.items()
        ]
        if finished:
            self._finish(finished, ended)
        for sample in reversed(thinking):
            self._resume_first(*sample)
        for r in np.flatnonzero(is_stuck_R).tolist():
            to_cancel += self._preempt(r, int(output.waiting_Rk[r, 0]), call.arrivals)
        if to_cancel:
            self._cancel(to_cancel)

    def _apply_rules(
        self,
        before_REG: np.ndarray,
        finished: dict[SamplePlace, bool],
        new_tokens: TokensOfCall,
    ) -> tuple[dict[SamplePlace, str], list[SamplePlace]]:
        """Cuts responses where a rule of the settings ends them.

        Args:
            before_REG: tokens of each response before the call.

        Returns:
            The samples that end, with the finish reason; those whose thinking ends, which have the
            phrase now and continue.
        """
        table, thinking = self.table, []
        if (end := self.settings.end_of_thinking) is not None:
            # First, so that no rule sees what is discarded.
            thinking = self._cut_thinking(end, before_REG, finished, new_tokens)
        invalid = {sample for sample, is_finite in finished.items() if not is_finite}
        ended: dict[SamplePlace, str] = {}
        if table.repetition is not None:
            repeats = self._cut_at_repetition(before_REG, invalid, new_tokens)
            ended |= dict.fromkeys(repeats, "repetition")
            invalid -= set(repeats)  # the token without a meaning came later
        if self.settings.stop_strings:
            completed = self._cut_at_stop_strings(before_REG, invalid, new_tokens)
            ended |= dict.fromkeys(completed, "stop")
        thinking = [sample for sample in thinking if sample not in ended]
        for sample in thinking:
            assert end is not None
            table.append_given(*sample, end.phrase)
            if sample in new_tokens:
                new_tokens[sample] += end.phrase
        return ended, thinking

    def _take_tokens(
        self, output: DecodeOutput, valid_RkB: np.ndarray, ours_RkB: np.ndarray
    ) -> tuple[dict[SamplePlace, bool], TokensOfCall]:
        """Records the tokens of a call; returns the samples that ended, each with whether its last
        logits were finite, and the tokens of each sample where they are streamed."""
        table, slots = self.table, self.engine.config.slots
        finished: dict[SamplePlace, bool] = {}
        new_tokens: TokensOfCall = {}
        for i in range(valid_RkB.shape[1]):
            if not valid_RkB[:, i].any():
                break
            shard, slot = np.nonzero(ours_RkB[:, i])
            at = shard, output.request_RkB[shard, i, slot], output.sample_index_RkB[shard, i, slot]
            place = (*at, table.count[at])
            table.tokens[place] = output.token_RkB[shard, i, slot]
            table.log_probs[place] = output.log_prob_RkB[shard, i, slot]
            table.model_log_probs[place] = output.model_log_prob_RkB[shard, i, slot]
            if table.calls is not None:
                table.calls[place] = self.num_read
            table.count[at] += 1
            offered_R = (output.waiting_Rk[:, i] > 0) | bool(self.admission.queue)
            self.stats += RolloutStats(
                tokens=len(shard),
                busy_slots=int(valid_RkB[:, i].sum(axis=1)[offered_R].sum()),
                slots_offered=int(offered_R.sum()) * (slots // self.engine.config.shards),
                sampled=int(valid_RkB[:, i].sum()),
                could_sample=slots,
            )
            if self.settings.stream:
                tokens = output.token_RkB[shard, i, slot].tolist()
                for sample, token in zip(zip(*(x.tolist() for x in at)), tokens):
                    new_tokens.setdefault(sample, []).append(token)
            flags = output.flags_RkB[shard, i, slot]
            last, finite = flags & OVER > 0, flags & NOT_FINITE == 0
            finished |= zip(zip(*(x[last].tolist() for x in at)), finite[last].tolist())
        return finished, new_tokens

    def _is_cancelled(self, output: DecodeOutput) -> np.ndarray:
        """Returns which tokens are of samples cancelled after the call was made, bool [R, k, B]."""
        request_RkB = np.minimum(output.request_RkB, self.engine.config.requests - 1)
        return self.cancelled[
            np.arange(len(request_RkB))[:, None, None], request_RkB, output.sample_index_RkB
        ]

    def _cut_thinking(
        self,
        end: EndOfThinking,
        before_REG: np.ndarray,
        finished: dict[SamplePlace, bool],
        new_tokens: TokensOfCall,
    ) -> list[SamplePlace]:
        """Cuts each sample whose thinking is to be ended, after its `after_tokens` tokens; returns
        the cut samples, which are in `finished` no longer."""
        table, n, cut = self.table, end.after_tokens, dict[SamplePlace, int]()
        for r, e, g in np.argwhere((before_REG < n) & (table.count >= n)).tolist():
            has_ended = (r, e, g) in finished and table.count[r, e, g] == n
            has_room = n + len(end.phrase) < self.admission.limit(
                *table.problem_and_sample(r, e, g)
            )
            if has_room and not has_ended:
                cut[r, e, g] = n
        texts = self.detokenize([table.tokens[sample][:n] for sample in cut]) if cut else []
        cut = {sample: n for sample, text in zip(cut, texts) if end.closing not in text}
        self._cut(cut, before_REG, new_tokens)
        for sample in cut:
            finished.pop(sample, None)
        return list(cut)

    def _answer_start(self, sample: SamplePlace) -> int:
        """Returns the number of tokens up to the end of the given phrase; 0 without one."""
        end, log_probs = self.settings.end_of_thinking, self.table.log_probs[sample]
        if end is None or self.table.count[sample] <= end.after_tokens:
            return 0
        is_forced = np.isnan(log_probs[end.after_tokens])
        return end.after_tokens + len(end.phrase) if is_forced else 0

    def _cut_at_repetition(
        self,
        before_REG: np.ndarray,
        invalid: set[SamplePlace],
        new_tokens: TokensOfCall,
    ) -> list[SamplePlace]:
        """Cuts each sample that repeats itself, after the token at which the rule holds first, and
        returns the cut samples. The last token of `invalid` samples has no meaning."""
        assert self.table.repetition is not None
        after_REG = self.table.count.copy()
        for sample in invalid:
            after_REG[sample] -= 1
        found = self.table.repetition.advance(before_REG, after_REG)
        cut = {(r, e, g): length for (r, e, g), length in found.items()}
        self._cut(cut, before_REG, new_tokens)
        return list(cut)

    def _cut_at_stop_strings(
        self,
        before_REG: np.ndarray,
        invalid: set[SamplePlace],
        new_tokens: TokensOfCall,
    ) -> list[SamplePlace]:
        """Cuts each sample whose text holds a stop string, after the token that completes it, and
        returns the cut samples. The last token of `invalid` samples has no meaning. A string that
        reaches into a given phrase does not count."""
        table = self.table
        samples: list[SamplePlace] = [
            (r, e, g) for r, e, g in np.argwhere(table.count > before_REG).tolist()
        ]
        starts = [self._answer_start(sample) for sample in samples]
        ends = [int(table.count[sample]) - (sample in invalid) for sample in samples]
        completions = first_completions(
            self.settings.stop_strings,
            self.detokenize,
            [table.tokens[sample][i:j] for sample, i, j in zip(samples, starts, ends)],
            [int(before_REG[sample]) - i for sample, i in zip(samples, starts)],
        )
        cut = {s: i + n for s, i, n in zip(samples, starts, completions) if n is not None}
        self._cut(cut, before_REG, new_tokens)
        return list(cut)

    def _cut(
        self,
        cut: dict[SamplePlace, int],
        before_REG: np.ndarray,
        new_tokens: TokensOfCall,
    ) -> None:
        """Cuts samples to these lengths."""
        for sample, length in cut.items():
            self.stats += RolloutStats(tokens=length - int(self.table.count[sample]))
            self.table.count[sample] = length
            if sample in new_tokens:
                del new_tokens[sample][length - int(before_REG[sample]) :]

    def _finish(self, finished: dict[SamplePlace, bool], ended: dict[SamplePlace, str]) -> None:
        """Reports samples as finished; those in `ended` for this reason, unless with a stop
        token."""
        stops = set(self.engine.config.stop_tokens)
        responses = [self.table.response(*sample) for sample in finished]
        texts = self.detokenize([response.tokens for response in responses])
        for (place, is_finite), response, text in zip(finished.items(), responses, texts):
            is_stopped = int(response.tokens[-1]) in stops
            reason = "stop" if is_stopped else ended.get(place, "length")
            if not is_finite:  # the last token has no meaning
                assert response.model_log_probs is not None
                response.log_probs[-1] = response.model_log_probs[-1] = 0.0
                reason = "invalid"
            number, sample = self.table.problem_and_sample(*place)
            response = response._replace(finish_reason=reason, text=text)
            self.done[number][sample] = response
            self.done_calls[number, sample] = self.table.calls_of(*place)
            self._finished.append(Finished(number, sample, response, self.num_read))
            self.table.end(*place)

    def _preempt(self, r: int, num_waiting: int, arrivals: int) -> list[SamplePlace]:
        """Takes the pages of the youngest sequence of a shard in which none got its next page, and
        returns it to be cancelled; nothing where fewer than two are in slots. It is resumed later,
        with the tokens it would have had."""
        table = self.table
        in_order = sorted(
            (table.order[r, e], e)
            for e, request in enumerate(table.requests[r])
            if request is not None and table.order[r, e] < arrivals
        )
        samples = [(e, int(g)) for _, e in in_order for g in np.flatnonzero(table.unfinished[r, e])]
        in_slots = samples[: len(samples) - num_waiting]
        if len(in_slots) < 2:
            return []
        e, g = in_slots[-1]
        self._resume_first(r, e, g)
        self.stats += RolloutStats(preempted=1)
        return [(r, e, g)]

    def _resume_first(self, r: int, e: int, g: int) -> None:
        """Frees the place of a sample, which is prefilled with the tokens it has when there is room
        again."""
        table = self.table
        request, response = table.request(r, e), table.response(r, e, g)
        calls = table.calls_of(r, e, g)
        resumed = request._replace(
            first=request.first + g, samples=1, partial=response, calls=calls
        )
        self.admission.resume_first(resumed)
        table.end(r, e, g)

    def _cancel(self, samples: list[SamplePlace]) -> None:
        """Takes samples off the device; their tokens in the unread call are discarded."""
        config = self.engine.config
        request_RW = np.full((config.shards, config.shard_slots), -1, np.int32)
        sample_index_RW = np.full((config.shards, config.shard_slots), -1, np.int32)
        num_R = [0] * config.shards
        for r, e, g in samples:
            request_RW[r, num_R[r]], sample_index_RW[r, num_R[r]] = e, g
            num_R[r] += 1
            self.cancelled[r, e, g] = True
        self.state = self.engine.cancel(self.state, request_RW, sample_index_RW)
