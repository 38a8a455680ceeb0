"""Continuous batching: keeps the engine's slots full until every response is drawn.

The interface to the rest is `generate`: prompts, parameters and a key in, responses with log-probs
out. Another engine can take its place.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dapo_jax import model
from dapo_jax.rollout.engine import INSERT_WIDTH, DecoderEngine, Prefix, Results
from dapo_jax.types import Problem, Response

# Decodes many token sequences to text at once, special tokens left out.
Detokenize = Callable[[Sequence[np.ndarray]], list[str]]
# Takes (problem, sample, response) of responses that have ended.
Finished = Callable[[list[tuple[int, int, Response]]], None]
# Takes (problem, sample, tokens just drawn, whether they are the last).
Drawn = Callable[[list[tuple[int, int, list[int], bool]]], None]


class RolloutStats(NamedTuple):
    """What a call of `generate` did."""

    tokens: int
    busy_slots: int  # sum over the calls made while responses waited for a slot
    slots_offered: int  # the same calls times the number of slots

    def __add__(self, other: tuple) -> "RolloutStats":
        return RolloutStats(*(a + b for a, b in zip(self, other)))


class _Work(NamedTuple):
    """A response waiting for a slot or in one."""

    problem: int  # index into the problems of the call
    sample: int


def generate(
    engine: DecoderEngine,
    params: model.Params,
    problems: Sequence[Problem],
    detokenize: Detokenize,
    *,
    num_samples: int,
    key: jax.Array,
    finished: Finished = lambda _: None,
    drawn: Drawn | None = None,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[list[list[Response]], RolloutStats]:
    """`num_samples` responses to every problem, in order, and what it took.

    Args:
        params: in the engine's layout.
        key: of the rollout step. A response depends on it, its problem's id and its sample number,
            and on nothing that happens here.
        finished: called between decode steps with (problem, sample, response) of the responses that
            have just ended, the problem as an index into `problems`.
        drawn: called between decode steps with what each of them drew.
        check_stop: called between decode steps; raises to abandon the call.
    """
    spec = engine.spec
    prompts = _Prompts(engine, params, problems, key)
    queue = [_Work(p, s) for p in range(len(problems)) for s in range(num_samples)]
    queue.reverse()  # taken from the end
    owners: list[_Work | None] = [None] * spec.slots
    tokens_BT = np.zeros((spec.slots, spec.max_response_tokens), np.int32)
    log_probs_BT = np.zeros((spec.slots, spec.max_response_tokens), np.float32)
    done: dict[_Work, Response] = {}
    stop_tokens = set(spec.stop_tokens)
    state = engine.init_decode_state()
    stats = RolloutStats(0, 0, 0)
    free = list(range(spec.slots))
    # Results are read one call late: the device never waits for the host. With them goes whether
    # responses were waiting for a slot.
    late: tuple[Results, bool] | None = None

    while queue or late is not None or len(free) < spec.slots:
        check_stop()
        while free and queue:
            prefix, prompts_W, works = prompts.next_inserts(queue, min(len(free), INSERT_WIDTH))
            slots = [free.pop() for _ in works]
            for slot, work in zip(slots, works):
                owners[slot] = work
            fill = INSERT_WIDTH - len(works)
            state = engine.insert_many(
                prefix,
                state,
                np.asarray(slots + [spec.slots] * fill, np.int32),
                np.asarray(prompts_W + [0] * fill, np.int32),
                np.asarray([work.sample for work in works] + [0] * fill, np.int32),
            )
        now = None
        if len(free) < spec.slots:
            state, results = engine.generate(params, state)
            results.copy_to_host_async()
            now = results, bool(queue)
        if late is not None:
            results, waiting = late[0].convert_to_numpy(), late[1]
            token_B, valid_B, length_B = np.asarray(results.data).T
            slots = np.flatnonzero(valid_B)
            tokens_BT[slots, length_B[slots] - 1] = token_B[slots]
            log_probs_BT[slots, length_B[slots] - 1] = results.log_prob[slots]
            stats += RolloutStats(len(slots), len(slots) * waiting, spec.slots * waiting)
            ended: list[tuple[_Work, np.ndarray, np.ndarray]] = []
            over_B = (length_B == spec.max_response_tokens) | np.isin(token_B, spec.stop_tokens)
            if drawn is not None:
                news = ((owners[s], [int(token_B[s])], bool(over_B[s])) for s in slots)
                drawn([(w.problem, w.sample, tokens, over) for w, tokens, over in news if w])
            for slot in slots:
                n = length_B[slot]
                if over_B[slot]:
                    work = owners[slot]
                    assert work is not None
                    ended.append((work, tokens_BT[slot, :n].copy(), log_probs_BT[slot, :n].copy()))
                    owners[slot] = None
                    free.append(int(slot))
            if ended:
                texts = detokenize([tokens for _, tokens, _ in ended])
                new = {
                    work: Response(
                        tokens,
                        log_probs,
                        "stop" if int(tokens[-1]) in stop_tokens else "length",
                        text,
                    )
                    for (work, tokens, log_probs), text in zip(ended, texts)
                }
                done |= new
                finished([(work.problem, work.sample, response) for work, response in new.items()])
        late = now

    responses = [
        [done[_Work(problem, sample)] for sample in range(num_samples)]
        for problem in range(len(problems))
    ]
    return responses, stats


class _Prompts:
    """Prefills prompts a batch at a time, when the first of them is wanted."""

    def __init__(
        self,
        engine: DecoderEngine,
        params: model.Params,
        problems: Sequence[Problem],
        key: jax.Array,
    ):
        self.engine, self.params, self.problems = engine, params, problems
        self.key_data = np.asarray(jax.random.key_data(key))
        self.first = -1
        self.prefix: Prefix | None = None

    def next_inserts(self, queue: list[_Work], most: int) -> tuple[Prefix, list[int], list[_Work]]:
        """(prefix, rows in it, work) of up to `most` of the next responses, all of one prefix."""
        P = self.engine.spec.prefill_prompts
        first = queue[-1].problem // P * P
        if first != self.first:
            self.first, self.prefix = first, self._prefill(first)
        assert self.prefix is not None
        works: list[_Work] = []
        while queue and len(works) < most and queue[-1].problem < first + P:
            works.append(queue.pop())
        return self.prefix, [work.problem - first for work in works], works

    def _prefill(self, first: int) -> Prefix:
        spec = self.engine.spec
        tokens_PT = np.zeros((spec.prefill_prompts, spec.max_prompt_tokens), np.int32)
        lengths_P = np.ones(spec.prefill_prompts, np.int32)
        ids_P2 = np.zeros((spec.prefill_prompts, 2), np.uint32)
        for row, problem in enumerate(self.problems[first : first + spec.prefill_prompts]):
            tokens_PT[row, : len(problem.prompt_tokens)] = problem.prompt_tokens
            lengths_P[row] = len(problem.prompt_tokens)
            ids_P2[row] = problem.id, problem.epoch
        keys_P2 = _problem_keys(self.key_data, ids_P2)
        return self.engine.prefill_many(self.params, tokens_PT, lengths_P, keys_P2)


@jax.jit
def _problem_keys(key_2: jax.Array, ids_P2: jax.Array) -> jax.Array:
    """uint32 [P, 2]: the step's key folded with the id and the epoch of each problem."""

    def fold(id_2: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_2), id_2[0])
        return jax.random.key_data(jax.random.fold_in(key, id_2[1]))

    return jax.vmap(fold)(ids_P2)
