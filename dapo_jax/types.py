"""The records that travel from prompt to gradient.

Records that JAX maps over are NamedTuples of arrays; records of the host are NamedTuples of plain
values and NumPy arrays.

The name of an array ends in its dimensions, a letter for each (`dapo_jax.rollout` lists those with
another meaning there):

    Q  questions (prompts)            B  packed rows
    G  responses of one question      T  positions in a row
    R  responses of a batch           V  vocabulary
    M  tokens of all R responses,     D  hidden size
       one response after the other   H  head size
    C  components of the reward       F  feed-forward size
    S  positions in the cache         L  layers
    N  query heads                    K  key-value heads
    A  micro-batches (gradient accumulation)
    X  tokens of any shape            P  columns of a part of the vocabulary
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any  # a jax.Array on the device, an np.ndarray on its way there
# Decodes many token sequences to text at once, special tokens left out.
Detokenize = Callable[[Sequence[np.ndarray]], list[str]]


UNFINISHED = "unfinished"  # a finish reason


class UserError(ValueError):
    """A mistake that the user can mend: names the field, what was received and the remedy.

    `launch/` prints its message without a traceback and exits with status 2.
    """


class RunError(RuntimeError):
    """The run cannot continue. The message says what is wrong, what is safe, and the remedy.

    Args:
        restart: whether the same command may succeed, as after an error of the storage.
    """

    def __init__(self, message: str, *, restart: bool = False):
        super().__init__(message)
        self.restart = restart


class StopRequested(Exception):
    """SIGTERM or Ctrl-C arrived: unwind to the loop, save the last completed step, and leave."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, then the error it was raised from or while handling, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def error_line(error: BaseException, number: int = 0) -> str:
    """Returns one line of an error's text, by default the first; of one without text, its type."""
    return (str(error).strip() or repr(error)).splitlines()[number][:300]


class Problem(NamedTuple):
    """One prompt with a checkable answer."""

    id: int  # position in the data set: names the problem in random keys, logs and checkpoints
    prompt: str
    prompt_tokens: tuple[int, ...]
    answer: str
    source: str  # its name in config.data, under which accuracy is reported
    epoch: int = 0  # passes over its source before this visit; part of the random key of a sample
    metadata: dict[str, Any] | None = None  # the other columns of its record, for scorers


class Response(NamedTuple):
    """One answer of the policy. A response that ended by itself holds its end-of-sequence token, or
    the token that completes a stop string. Some tokens may be given, not sampled: a forced end of
    thinking."""

    tokens: np.ndarray  # int32 [length]
    # float32 [length], under the distribution sampled from. NaN: the token is given. Sums that
    # forget `sampled` are not finite, and the update is skipped.
    log_probs: np.ndarray
    # "stop": sampled a stop token or completed a stop string; "length": cut at
    # max_response_tokens; "repetition": cut where it repeated itself, see `rollout.repetition`;
    # "invalid": its logits were not finite, never trained; "unfinished": sampling stopped before
    # its end, and it is in no group (`dapo_jax.rollout.carry`).
    finish_reason: str
    text: str  # decoded, special tokens left out; empty where unfinished
    # int32 [length], rollout step whose parameters sampled each token; None: that of its group
    versions: np.ndarray | None = None
    # float32 [length], under the untempered model with the whole vocabulary. None: unknown. NaN:
    # unknown for a token that an earlier version sampled, or the token is given.
    model_log_probs: np.ndarray | None = None

    @property
    def sampled(self) -> np.ndarray:
        """Returns whether the policy sampled each token, bool [length]; others are in no loss."""
        return ~np.isnan(self.log_probs)

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "repetition")

    @property
    def invalid(self) -> bool:
        return self.finish_reason == "invalid"


class Verdict(NamedTuple):
    """A scorer's verdict on one response. Correctness and reward are separate on purpose."""

    correct: bool
    reward: float
    extracted: str | None = None  # the answer that the scorer read
    note: str = ""  # empty, or why no verdict was reached: "timeout", "worker died", "error: ..."
    # Process supervision: (characters of the text up to the end of the step, its reward) of each.
    steps: tuple[tuple[int, float], ...] = ()
    extra: dict[str, Any] | None = None  # other values of the scorers, that JSON can hold
    rewards: tuple[float, ...] = ()  # weighted, of each scorer, where there are several

    @property
    def failed(self) -> bool:
        """Returns whether the scorer reached no verdict: the response may be right or wrong."""
        return bool(self.note)


def verdict_from_json(values: dict[str, Any]) -> Verdict:
    """Returns the verdict whose `_asdict()` went through JSON, which turns tuples into lists."""
    tuples = {"steps": tuple(map(tuple, values["steps"])), "rewards": tuple(values["rewards"])}
    return Verdict(**values | tuples)


# Arrays of a response.
_DTYPES = {
    "tokens": np.int32,
    "log_probs": np.float32,
    "versions": np.int32,
    "model_log_probs": np.float32,
}


def response_to_json(response: Response) -> dict[str, Any]:
    """Returns the response as JSON values. Arrays are base64 of their bytes: nothing is rounded."""

    def encode(array: np.ndarray | None) -> str | None:
        return None if array is None else base64.b64encode(array.tobytes()).decode()

    return response._asdict() | {name: encode(getattr(response, name)) for name in _DTYPES}


def response_from_json(values: dict[str, Any]) -> Response:
    """Returns the response of `response_to_json`."""

    def decode(text: str | None, dtype: type) -> np.ndarray | None:
        return None if text is None else np.frombuffer(base64.b64decode(text), dtype)

    arrays: dict[str, Any] = {
        name: decode(values.get(name), dtype) for name, dtype in _DTYPES.items()
    }
    return Response(**(values | arrays))


class Group(NamedTuple):
    """The G responses to one prompt, scored."""

    problem: Problem
    responses: tuple[Response, ...]
    verdicts: tuple[Verdict, ...]
    step: int  # rollout step that sampled the responses without versions

    @property
    def num_correct(self) -> int:
        return sum(verdict.correct for verdict in self.verdicts)

    def trained_correct(self, *, overlong_filter: bool) -> list[bool]:
        """Returns the correctness of each trained response. Invalid and unscored responses are not
        trained, nor truncated ones with overlong filtering."""
        return [
            verdict.correct
            for response, verdict in zip(self.responses, self.verdicts)
            if not (response.invalid or verdict.failed or (overlong_filter and response.truncated))
        ]

    def is_informative(self, *, overlong_filter: bool) -> bool:
        """Returns whether 0 < correct < G over the trained responses: DAPO eq. 11.

        A group with one right and one wrong response has a gradient.

        Args:
            overlong_filter: whether truncated responses are left out of the loss.
        """
        correct = self.trained_correct(overlong_filter=overlong_filter)
        return 0 < sum(correct) < len(correct)


class Attempt(NamedTuple):
    """One response to a problem of a benchmark, without its tokens."""

    text: str
    length: int  # in tokens, the end-of-sequence token included
    truncated: bool  # cut at max_response_tokens
    verdict: Verdict
    invalid: bool = False  # its logits were not finite

    @property
    def finish_reason(self) -> str:
        """The finish reason of its `Response`; evaluations never end a response for repetition."""
        return "invalid" if self.invalid else "length" if self.truncated else "stop"


class Attempts(NamedTuple):
    """The responses to one problem of a benchmark."""

    problem: Problem
    attempts: tuple[Attempt, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(attempt.verdict for attempt in self.attempts)


class Samples(NamedTuple):
    """A batch on the host: columns of R responses with M tokens in all.

    Columns of tokens hold one response after the other, split by `lengths_R`. A group's responses
    are neighbours.
    """

    prompts: tuple[tuple[int, ...], ...]  # R prompts in tokens
    tokens_M: np.ndarray  # int32
    log_prob_M: np.ndarray  # float32, under the distribution sampled from; NaN: given
    lengths_R: np.ndarray  # int, given tokens included
    groups_R: np.ndarray  # int, which prompt of the batch
    staleness_M: np.ndarray  # int, rollout steps since the token was sampled
    # bool, False where the loss leaves it out: invalid, not scored, overlong filtering
    trained_R: np.ndarray
    counted_R: np.ndarray  # bool, False where its group's baseline leaves it out too
    # float64, components of the reward: each scorer's, the overlong punishment
    rewards_RC: np.ndarray
    # Process supervision: (sampled tokens up to the end of the step, its reward), by response.
    steps: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def response_M(self) -> np.ndarray:
        """Index of the response of each token."""
        return np.repeat(np.arange(len(self.lengths_R)), self.lengths_R)

    @property
    def sampled_M(self) -> np.ndarray:
        """Returns whether the policy sampled each token, bool; the others were given."""
        return ~np.isnan(self.log_prob_M)

    @property
    def trained_M(self) -> np.ndarray:
        """Returns whether each token is in the loss, bool: sampled, and of a trained response."""
        return np.repeat(self.trained_R, self.lengths_R) & self.sampled_M


class Rows(NamedTuple):
    """Packed training rows: B rows of T tokens, with several prompts and responses in each.

    Every value at position t belongs to the token at position t: `log_prob_old_BT[b, t]` is the
    log-probability of `tokens_BT[b, t]` given the tokens of its segment before it.
    """

    tokens_BT: Array  # int32
    positions_BT: Array  # int32, in the sequence: 0 for the first token of its prompt
    segments_BT: Array  # int32, 0 is padding, segments count from 1 in each row
    # int32, a second segment that the token attends to: its prompt without the last token where
    # responses share prompts, else its own segment.
    prefixes_BT: Array
    staleness_BT: Array  # int32, rollout steps since the token was sampled
    mask_BT: Array  # bool, the token is a response token that is trained
    weight_BT: Array  # float32, numerator of its weight in the loss; 0 where mask_BT is False
    log_prob_old_BT: Array  # float32, under the policy that anchors the ratio
    log_prob_ref_BT: Array  # float32, under the reference of the KL term; else 0
    advantage_BT: Array  # float32
    # float32, weight of the policy term: the correction's, or 1; 0 below the top entropies
    correction_BT: Array
    selected_BT: Array  # bool, the tokens that Clip-Cov or KL-Cov acts on
    value_old_BT: Array  # float32, the critic's value before the update; 0 without a critic
    return_BT: Array  # float32, target of the critic; 0 without a critic
