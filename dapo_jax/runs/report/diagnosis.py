"""Faults of a run that its metrics show, in words; docs/diagnose.md has the rules and examples.

Each check compares the means of a metric over the first and the last fifth of the rollout steps,
at most ten of them each. Only metrics are read: a check whose metrics are missing finds nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dapo_jax.config import objective_checks
from dapo_jax.runs import run_directory
from dapo_jax.runs.report.data import Run, field_at, responses_sampled
from dapo_jax.runs.report.paper_curves import Curve

MIN_STEPS = 5  # a shorter run is not judged
WINDOW_SHARE, WINDOW_MAX = 0.2, 10  # of the rollout steps; rollout steps

ENTROPY_FALL = 0.2  # last over first
ENTROPY_RISE = 2.0  # last over first
ERROR_LEFT = 0.5  # last over first share of wrong responses
ACCURACY_RISE = 0.1  # what counts as progress of accuracy/sampled
ACCURACY_STILL = 0.02  # a smaller change of it is none
HELDOUT_SHARE = 0.25  # of that progress, which held-out accuracy should show
TRUNCATED = 0.1  # share of responses
TRUNCATED_LEFT = 0.5  # last over first share
NO_SIGNAL = 0.8  # share of sampled prompts
WORSE = 0.2  # a rise of the share that is all wrong
CLIPPED = 0.3  # share of trained tokens
LOG_PROB_MISMATCH = 0.05  # nats per token
SCORER_FAULTS = 0.01  # share of sampled responses
FLAT = 0.1  # a relative change below it is none


class Finding(NamedTuple):
    """A fault of a run."""

    name: str  # a heading of docs/diagnose.md
    seen: str  # the metrics that show it, with their values
    remedy: str


class Change(NamedTuple):
    """Means of a metric over the first and over the last steps."""

    first: float
    last: float

    @property
    def difference(self) -> float:
        return self.last - self.first

    @property
    def trend(self) -> str:
        """Returns "rises", "falls" or "stays"."""
        if abs(self.difference) <= FLAT * max(map(abs, self)):
            return "stays"
        return "rises" if self.difference > 0 else "falls"


def diagnose(run: Run) -> list[Finding]:
    """Returns the faults that a run's metrics show, in the order of CHECKS."""
    if len(trained_steps(run)) < MIN_STEPS:
        return []
    return [finding for check in CHECKS if (finding := check(run)) is not None]


def in_words(run: Run, curves: Sequence[Curve] = ()) -> list[str]:
    """Returns the findings of `diagnose` as sentences, then the run's trends against the paper's.

    Args:
        curves: of the paper; none: no comparison with it.
    """
    steps = len(trained_steps(run))
    if steps < MIN_STEPS:
        return [f"{run.name}: {steps} rollout steps are too few to judge; {MIN_STEPS} are needed."]
    lines = [
        f"{run.name}: {found.name.upper()}. {found.seen} Try: {found.remedy}"
        for found in diagnose(run)
    ]
    lines = lines or [f"{run.name}: none of the {len(CHECKS)} faults of docs/diagnose.md found."]
    return lines + [f"{run.name}: {line}" for line in against_paper(run, curves)]


def against_paper(run: Run, curves: Sequence[Curve]) -> list[str]:
    """Returns sentences that compare the run's trends with the paper's, one for each metric that
    both have."""
    lines = []
    for curve in curves:
        of_run, of_paper = change(run, curve.metric), _change([v for _, v in curve.points])
        if of_run is None or "DAPO" not in curve.label:
            continue
        like = "like" if of_run.trend == of_paper.trend else "unlike"
        lines.append(
            f"{like} the paper, {curve.metric} {of_run.trend}, {_from_to(of_run)} "
            f"({curve.label}: {of_paper.trend}, {_from_to(of_paper)})."
        )
    return lines


def trained_steps(run: Run) -> list[dict[str, float]]:
    """Returns the metrics of the rollout steps, without those of the base model."""
    return [numbers for numbers in run.steps if numbers["step"] > 0]


def change(run: Run, metric: str) -> Change | None:
    """Returns the change of a metric over a run; None where fewer than two steps have it. Held-out
    metrics are compared at the first and the last evaluation, the base model's included."""
    if metric.startswith("eval/"):
        values = [numbers[metric] for numbers in run.steps if metric in numbers]
        return Change(values[0], values[-1]) if len(values) > 1 else None
    values = [numbers[metric] for numbers in trained_steps(run) if metric in numbers]
    return _change(values) if len(values) > 1 else None


def _change(values: Sequence[float]) -> Change:
    window = max(1, min(WINDOW_MAX, int(WINDOW_SHARE * len(values))))
    return Change(sum(values[:window]) / window, sum(values[-window:]) / window)


def _entropy_collapsed(run: Run) -> Finding | None:
    entropy, accuracy = change(run, "policy/entropy"), change(run, "accuracy/sampled")
    if entropy is None or accuracy is None or entropy.last >= ENTROPY_FALL * entropy.first:
        return None
    if 1 - accuracy.last <= ERROR_LEFT * (1 - accuracy.first):
        return None  # a policy that is right may be sure of it
    return Finding(
        "entropy collapsed",
        f"Entropy fell {_from_to(entropy)} nats per token, while {1 - accuracy.last:.0%} of the "
        f"sampled responses are wrong ({1 - accuracy.first:.0%} at the start): the policy is sure "
        "of what is wrong, and samples of one prompt are alike.",
        "a lower optimizer.learning_rate, a higher objective.clip_high.",
    )


def _entropy_exploded(run: Run) -> Finding | None:
    entropy, accuracy = change(run, "policy/entropy"), change(run, "accuracy/sampled")
    if entropy is None or accuracy is None or entropy.last <= ENTROPY_RISE * entropy.first:
        return None
    if accuracy.difference >= ACCURACY_RISE:
        return None
    return Finding(
        "entropy exploded",
        f"Entropy rose {_from_to(entropy)} nats per token, and accuracy went "
        f"{_percent(accuracy)}: responses become noise.",
        "a lower optimizer.learning_rate or objective.clip_high, no entropy bonus; see whether "
        "rollout/log_prob_mismatch_mean is small.",
    )


def _responses_cut(run: Run) -> Finding | None:
    cut = change(run, "length/truncated_share")
    if cut is None or cut.last < max(TRUNCATED, TRUNCATED_LEFT * cut.first):
        return None
    return Finding(
        "responses run into the limit",
        f"The share of responses cut at rollout.max_response_tokens went {_percent(cut)}.",
        "soft overlong punishment (reward.overlong_buffer_tokens, reward.overlong_penalty), or a "
        "higher rollout.max_response_tokens.",
    )


def _reward_apart(run: Run) -> Finding | None:
    training, heldout = change(run, "accuracy/sampled"), change(run, "eval/avg@k")
    if training is None or heldout is None or training.difference < ACCURACY_RISE:
        return None
    if heldout.difference >= HELDOUT_SHARE * training.difference:
        return None
    return Finding(
        "training reward apart from held-out accuracy",
        f"Accuracy while sampling went {_percent(training)}, held-out accuracy "
        f"{_percent(heldout)}.",
        "read the last file in rollouts/: the scorer may reward something else than a right "
        "answer. If the responses are right, training problems are memorised or unlike those "
        "held out.",
    )


def _heldout_fell(run: Run) -> Finding | None:
    points = [n for n in run.steps if "eval/interval_low" in n]
    if len(points) < 2:
        return None
    best, last = max(points, key=lambda n: n["eval/avg@k"]), points[-1]
    if last["eval/interval_high"] >= best["eval/interval_low"]:
        return None
    saved = run_directory.saved_steps(run.directory, run.frozen["config"])
    return Finding(
        "held-out accuracy fell",
        f"It was {best['eval/avg@k']:.1%} after step {best['step']} and is "
        f"{last['eval/avg@k']:.1%} after step {last['step']}; their 95 % intervals are apart.",
        (f"the checkpoint of step {best['step']}; " if best["step"] in saved else "")
        + "a lower optimizer.learning_rate.",
    )


def _nothing_learned(run: Run) -> Finding | None:
    accuracy = change(run, "accuracy/sampled")
    points = [n for n in run.steps if "eval/interval_low" in n]
    if accuracy is None or abs(accuracy.difference) >= ACCURACY_STILL:
        return None
    if len(points) < 2 or points[-1]["eval/interval_low"] > points[0]["eval/interval_high"]:
        return None
    return Finding(
        "nothing is learned",
        f"Accuracy while sampling went {_percent(accuracy)}, held-out accuracy "
        f"{points[0]['eval/avg@k']:.1%} to {points[-1]['eval/avg@k']:.1%}.",
        f"a higher optimizer.learning_rate, {'easier' if accuracy.last < 0.5 else 'harder'} "
        "problems, more rollout steps.",
    )


def _few_informative(run: Run) -> Finding | None:
    right, wrong = change(run, "share/all_right"), change(run, "share/all_wrong")
    if right is None or wrong is None or right.last + wrong.last < NO_SIGNAL:
        return None
    at_the_end = lambda name: field_at(run.frozen["config"], name, run.steps[-1]["step"])
    is_filtered = at_the_end("dynamic_sampling.enabled")
    if not is_filtered and at_the_end("objective.advantage") in objective_checks.WITHOUT_GROUPS:
        return None  # such a prompt is trained on, with a gradient
    remedy = f"{'harder' if right.last > wrong.last else 'easier'} problems, or a larger "
    remedy += "rollout.group_size."
    if wrong.difference > WORSE:
        remedy = "a lower optimizer.learning_rate: the policy has become worse."
    return Finding(
        "few prompts are informative",
        f"At the end {right.last:.0%} of the sampled prompts are all right and {wrong.last:.0%} "
        f"all wrong ({right.first:.0%} and {wrong.first:.0%} at the start).",
        remedy,
    )


def _clipped_often(run: Run) -> Finding | None:
    high, low = change(run, "policy/clip_high_share"), change(run, "policy/clip_low_share")
    if high is None or low is None or high.last + low.last < CLIPPED:
        return None
    return Finding(
        "many tokens are clipped",
        f"The bounds clip {high.last:.1%} of the tokens above and {low.last:.1%} below.",
        "a lower optimizer.learning_rate, or fewer updates per rollout step.",
    )


def _policies_apart(run: Run) -> Finding | None:
    mismatch = change(run, "rollout/log_prob_mismatch_mean")
    if mismatch is None or mismatch.last < LOG_PROB_MISMATCH:
        return None
    return Finding(
        "rollout and trainer disagree",
        "Log-probs of the same tokens under the same parameters differ by "
        f"{mismatch.last:.3f} nats on average.",
        'rollout.log_prob_source="recompute", correction.importance=("token", None, 2.0); float32.',
    )


def _updates_skipped(run: Run) -> Finding | None:
    skipped = sum(n.get("optimizer/skipped_updates", 0) for n in run.steps)
    if not skipped:
        return None
    return Finding(
        "updates were skipped",
        f"Loss or gradient of {skipped:.0f} updates was not finite.",
        "look at optimizer/grad_norm and rollout/invalid in the steps before the first of them.",
    )


def _scorer_failed(run: Run) -> Finding | None:
    steps = trained_steps(run)
    responses = sum(responses_sampled(numbers, run.frozen["config"]) for numbers in steps)
    faults = sum(n.get("sampling/scorer_faults", 0) for n in steps)
    if faults <= SCORER_FAULTS * responses:
        return None
    return Finding(
        "the scorer fails",
        f"It raised, died or ran out of time on {faults:.0f} of {responses} responses.",
        "try it with launch/score.py; reward.timeout_seconds.",
    )


CHECKS: tuple[Callable[[Run], Finding | None], ...] = (
    _entropy_collapsed,
    _entropy_exploded,
    _responses_cut,
    _reward_apart,
    _heldout_fell,
    _nothing_learned,
    _few_informative,
    _clipped_often,
    _policies_apart,
    _updates_skipped,
    _scorer_failed,
)


def _from_to(change: Change) -> str:
    first, last = (f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}" for x in change[:2])
    return f"from {first} to {last}"


def _percent(change: Change) -> str:
    return f"from {change.first:.1%} to {change.last:.1%}"
