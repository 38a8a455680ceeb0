"""Every advantage against a loop written from its paper, and what must hold for all of them."""

import inspect
import math

import numpy as np
import pytest

from dapo_jax.algorithms import advantages as advantage
from dapo_jax.algorithms.advantages import ADVANTAGES, Outcomes, estimate
from dapo_jax.types import RunError

STD = [dict(normalise_std=True, std_ddof=d) for d in (0, 1)] + [
    dict(normalise_std=False, std_ddof=1)
]
SETTINGS = {
    "grpo": STD,
    "grpo-process": [s | {"outcome_as_step": x} for s in STD for x in (False, True)],
    "pass-at-k": STD,
    "gdpo": [{"component_weights": (1.0, 0.3)} | s for s in STD],
    "lite-ppo": [
        {"std_ddof": ddof, "std_of": of} for ddof in (0, 1) for of in ("rewards", "advantages")
    ],
    "rloo": [{}],
    "opo": [{}],
    "remax": [{}],
    "maxrl": [{}],
    "gpg": [{"gpg_norm": 1.0}, {"gpg_norm": 0.7}],
    "reinforce++": [{"gamma": 1.0}, {"gamma": 0.9}],
    "reinforce++-baseline": [{}],
    "optimal-token-baseline": [{"zero_tail": True}, {"zero_tail": False}],
    "gae": [dict(gamma=g, gae_lambda=x) for g, x in ((1, 1), (1, 0.95), (0.9, 0.8), (0.7, 0))],
}
CASES = [(name, settings) for name, all_of_one in SETTINGS.items() for settings in all_of_one]
# What the function of each outcome advantage reads.
READS = {
    "grpo": ("rewards_R", "groups_R"),
    "rloo": ("rewards_R", "groups_R"),
    "opo": ("rewards_R", "groups_R", "total_lengths_R"),
    "remax": ("rewards_R", "baselines_R"),
    "pass-at-k": ("rewards_R", "groups_R"),
    "gpg": ("rewards_R", "groups_R"),
    "lite-ppo": ("rewards_R", "groups_R"),
    "maxrl": ("rewards_R", "groups_R"),
    "gdpo": ("components_RC", "groups_R", "lengths_R"),
    "reinforce++-baseline": ("rewards_R", "groups_R", "lengths_R"),
}
# Equal rewards in a group do not make these zero: their baseline is not of the group alone.
OTHER_BASELINES = "remax", "reinforce++", "gae", "optimal-token-baseline"
each_case = pytest.mark.parametrize("name, settings", CASES)


def make_outcomes(seed=0, sizes=(5, 2, 1, 3, 4)):
    """Groups of unequal size, interleaved: one of a lone response, one of equal rewards. A few
    responses without a trained token, a few rewards of 0, steps in no order and past the end."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([7, 2, 9, 4, 5], sizes))
    R = len(groups)
    rewards = np.abs(rng.standard_normal(R)) * (rng.random(R) < 0.7)
    components = np.stack([rewards, rng.integers(-2, 1, R) / 2], axis=1)
    rewards[groups == 4], components[groups == 4] = 0.1, (0.1, -0.7)
    lengths = rng.integers(1, 8, R)
    total_lengths = lengths.copy()
    lengths[[0, 3, 4, R - 1]] = 0
    N = lengths.sum()
    return Outcomes(
        rewards_R=rewards,
        components_RC=components,
        groups_R=groups,
        lengths_R=lengths,
        total_lengths_R=total_lengths,
        token_rewards_M=rng.standard_normal(N),
        steps=tuple(
            tuple((int(rng.integers(1, n + 3)), float(rng.standard_normal())) for _ in range(k))
            for n, k in zip(lengths, rng.integers(0, 4, R))
        ),
        baselines_R=rng.standard_normal(R),
        values_M=rng.standard_normal(N),
        energy_M=2 * rng.random(N),
    )


def mean(xs):
    return sum(xs) / len(xs)


def deviation(xs, ddof):
    """Standard deviation; 0 where it is not defined."""
    if len(xs) <= ddof:
        return 0.0
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - ddof))


def standardised(xs, settings):
    scale = deviation(xs, settings["std_ddof"]) + 1e-6 if settings["normalise_std"] else 1.0
    return [(x - mean(xs)) / scale for x in xs]


def whitened(xs, tokens):
    """xs by the mean and deviation of the tokens."""
    scale = math.sqrt(deviation(tokens, 1) ** 2 + 1e-8)
    return [(x - mean(tokens)) / scale for x in xs]


def outcome_by_hand(name, o, p):
    """The advantage of every response, from the papers' formulas."""
    R, r, n = len(o.rewards_R), o.rewards_R.tolist(), o.lengths_R.tolist()
    peers = [[j for j in range(R) if o.groups_R[j] == o.groups_R[i]] for i in range(R)]
    over_tokens = lambda xs: whitened(xs, [xs[i] for i in range(R) for _ in range(n[i])])
    out = []
    for i in range(R):
        group = [r[j] for j in peers[i]]
        others = [r[j] for j in peers[i] if j != i]
        if name == "grpo":
            A = standardised(group, p)[peers[i].index(i)]
        elif name == "rloo":
            A = r[i] - mean(others) if others else 0.0
        elif name == "opo":
            m = o.total_lengths_R
            weight = sum(m[j] for j in peers[i])
            A = r[i] - sum(m[j] * r[j] for j in peers[i]) / weight if weight and others else 0.0
        elif name == "remax":
            A = r[i] - o.baselines_R[i]
        elif name == "pass-at-k":  # what the best of the group would lose without this response
            A = max(group) - max(others) if others else 0.0
            A /= deviation(group, p["std_ddof"]) + 1e-6 if p["normalise_std"] else 1.0
        elif name == "gpg":
            A = R / sum(x != 0 for x in r) * (r[i] - mean(group)) / p["gpg_norm"]
        elif name == "lite-ppo":
            centred = [r[j] - mean([r[k] for k in peers[j]]) for j in range(len(r))]
            spread = {"rewards": r, "advantages": centred}[p["std_of"]]
            A = centred[i] / (deviation(spread, p["std_ddof"]) + 1e-6)
        elif name == "maxrl":
            A = (r[i] - mean(group)) / mean(group) if any(group) else 0.0
        elif name == "reinforce++-baseline":
            A = r[i] - mean(group)
        else:
            A = 0.0
            for k, weight in enumerate(p["component_weights"]):
                column = [o.components_RC[j, k] for j in peers[i]]
                A += weight * standardised(column, p)[peers[i].index(i)]
        out.append(A)
    return over_tokens(out) if name in ("gdpo", "reinforce++-baseline") else out


def gae_by_hand(o, p):
    """A_t = sum_l (gamma lambda)^l delta_{t+l} by two loops, and A + V."""
    advantages, returns, start = [], [], 0
    for n in o.lengths_R:
        r, V = o.token_rewards_M[start : start + n], [*o.values_M[start : start + n], 0.0]
        for t in range(n):
            A = 0.0
            for s in range(t, n):
                delta = r[s] + p["gamma"] * V[s + 1] - V[s]
                A += (p["gamma"] * p["gae_lambda"]) ** (s - t) * delta
            advantages.append(A)
            returns.append(A + V[t])
        start += n
    return advantages, returns


def optimal_by_hand(o, p):
    """G_t - E[G_t W_t] / E[W_t] over the responses of a group that have a token t (section 3 of the
    paper). A response that alone has one keeps G_t, or is its own baseline."""
    starts = np.cumsum([0, *o.lengths_R])
    out = []
    for i, n in enumerate(o.lengths_R):
        peers = [j for j in range(len(o.lengths_R)) if o.groups_R[j] == o.groups_R[i]]
        peers = [j for j in peers if o.lengths_R[j]]
        for t in range(n):
            alive = [j for j in peers if o.lengths_R[j] > t]
            to_go = {j: sum(o.token_rewards_M[starts[j] + t : starts[j + 1]]) for j in alive}
            weight = {j: sum(o.energy_M[starts[j] : starts[j] + t + 1]) for j in alive}
            if len(peers) == 1:
                out.append(0.0)
            elif alive == [i] and p["zero_tail"]:
                out.append(to_go[i])
            else:
                expected = sum(to_go[j] * weight[j] for j in alive)
                out.append(to_go[i] - expected / (sum(weight.values()) + 1e-8))
    return out


def token_by_hand(name, o, p):
    """The advantage of every token, from the papers' formulas."""
    if name == "gae":
        advantages, _ = gae_by_hand(o, p)
        return whitened(advantages, advantages)
    if name == "optimal-token-baseline":
        return optimal_by_hand(o, p)
    out, start = [], 0
    for i, n in enumerate(o.lengths_R):
        if name == "reinforce++":
            r = o.token_rewards_M[start : start + n]
            out += [sum(p["gamma"] ** (s - t) * r[s] for s in range(t, n)) for t in range(n)]
        else:
            of = [list(s) for s in o.steps]
            if p["outcome_as_step"]:  # not the paper's
                of = [[*s, (m, r)] for s, m, r in zip(of, o.lengths_R, o.rewards_R)]
            group = [x for j, s in enumerate(of) if o.groups_R[j] == o.groups_R[i] for _, x in s]
            scale = deviation(group, p["std_ddof"]) + 1e-6 if p["normalise_std"] else 1.0
            for t in range(1, n + 1):
                out.append(sum((x - mean(group)) / scale for end, x in of[i] if end >= t))
        start += n
    return whitened(out, out) if name == "reinforce++" else out


def by_hand(name, o, p):
    """The advantage of every token: an outcome's is the same for all tokens of its response."""
    if ADVANTAGES[name].per_token:
        return token_by_hand(name, o, p)
    return [A for A, n in zip(outcome_by_hand(name, o, p), o.lengths_R) for _ in range(n)]


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def outcome(name, o, settings):
    return ADVANTAGES[name].function(*(getattr(o, field) for field in READS[name]), **settings)


@pytest.mark.parametrize("seed", range(3))
@each_case
def test_advantage_is_the_papers(name, settings, seed):
    o = make_outcomes(seed)
    got = estimate(name, o, settings)
    assert got.advantage_M.dtype == np.float64 and got.advantage_M.shape == o.values_M.shape
    assert_close(got.advantage_M, by_hand(name, o, settings))
    if not ADVANTAGES[name].per_token:  # also of responses that have no token to carry it
        assert_close(outcome(name, o, settings), outcome_by_hand(name, o, settings))
    if name == "gae":  # returns keep the reward's unit: they are not whitened
        assert_close(got.return_M, gae_by_hand(o, settings)[1])
    else:
        assert got.return_M is None


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("rewards", [[1, -1, -1, 1], [1, -1.5, -2, 0.25, 1], [3.0, 1.0], [0, 2e-6]])
def test_one_group_is_equation_9(rewards, ddof):
    got = advantage.group_advantages(np.array(rewards), normalise_std=True, std_ddof=ddof)
    assert_close(got, [(r - mean(rewards)) / (deviation(rewards, ddof) + 1e-6) for r in rewards])


@pytest.mark.parametrize("settings", STD)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [-1.0], [2.0]])
def test_equal_rewards_and_lone_responses_teach_nothing(rewards, settings):
    got = advantage.group_advantages(np.array(rewards), **settings)
    assert got.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    "name, settings", [case for case in CASES if case[0] not in OTHER_BASELINES]
)
def test_equal_rewards_in_every_group_teach_nothing(name, settings):
    """Groups differ from each other; no rounding is divided by a standard deviation of nothing."""
    o = make_outcomes()
    r = o.groups_R / 40  # three times 0.1 has another mean than 0.1
    o = o._replace(rewards_R=r, components_RC=np.stack([r, -r / 3], axis=1))
    o = o._replace(steps=tuple(tuple((end, x) for end, _ in s) for s, x in zip(o.steps, r)))
    got = estimate(name, o, settings).advantage_M
    np.testing.assert_allclose(got, 0.0, atol=0 if name not in ("rloo", "opo") else 1e-15)


def test_process_supervision_is_that_of_the_paper():
    """arXiv:2402.03300, section 4.1.3, by hand: two responses of four tokens, two steps each, which
    end at tokens 2 and 4. R = {{1, 1}, {1, -1}} has mean 1/2 and, with ddof 1, standard deviation
    1: r~ = (1/2, 1/2) and (1/2, -3/2). A token gets the sum of r~ of the steps from its own on."""
    o = make_outcomes()._replace(
        rewards_R=np.array([1.0, -1.0]),
        groups_R=np.array([0, 0]),
        lengths_R=np.array([4, 4]),
        steps=(((2, 1.0), (4, 1.0)), ((2, 1.0), (4, -1.0))),
    )
    settings = dict(normalise_std=True, std_ddof=1, outcome_as_step=False)
    paper = [1.0, 1.0, 0.5, 0.5, -1.0, -1.0, -1.5, -1.5]
    got = estimate("grpo-process", o, settings).advantage_M
    np.testing.assert_allclose(got, paper, rtol=2e-6)  # the 1e-6 added to the deviation
    # The outcome is not read: R holds the rewards of steps alone.
    other = o._replace(rewards_R=np.array([-7.0, 3.0]))
    np.testing.assert_array_equal(estimate("grpo-process", other, settings).advantage_M, got)
    # As a step it is in R = {{1, 1, 1}, {1, -1, -1}}, of mean 1/3 and variance 16/15.
    by_hand = np.array([2.0, 2.0, 4 / 3, 4 / 3, -2.0, -2.0, -8 / 3, -8 / 3]) / (16 / 15) ** 0.5
    got = estimate("grpo-process", o, settings | {"outcome_as_step": True}).advantage_M
    np.testing.assert_allclose(got, by_hand, rtol=2e-6)


def test_tokens_after_the_last_step_and_responses_without_steps_are_not_moved():
    """R = {{3, 1}, {}} has mean 2 and is not divided here: r~ = (1, -1)."""
    o = make_outcomes()._replace(
        rewards_R=np.array([1.0, -1.0]),
        groups_R=np.array([0, 0]),
        lengths_R=np.array([5, 3]),
        steps=(((1, 3.0), (3, 1.0)), ()),
    )
    settings = dict(normalise_std=False, std_ddof=1, outcome_as_step=False)
    got = estimate("grpo-process", o, settings).advantage_M
    assert_close(got, [0.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("settings", STD)
def test_an_outcome_that_is_the_only_step_is_grpo(settings):
    o = make_outcomes()._replace(steps=((),) * 15)
    got = estimate("grpo-process", o, settings | {"outcome_as_step": True}).advantage_M
    np.testing.assert_array_equal(got, estimate("grpo", o, settings).advantage_M)


def test_a_step_counts_up_to_its_last_token():
    """Rewards of one group, 4 2 -2 and -4, have mean 0 and are not divided here."""
    o = make_outcomes()._replace(
        rewards_R=np.array([-2.0, -4.0]),
        groups_R=np.array([0, 0]),
        lengths_R=np.array([4, 0]),
        steps=(((3, 2.0), (1, 4.0)), ()),
    )
    settings = dict(normalise_std=False, std_ddof=1, outcome_as_step=True)
    got = estimate("grpo-process", o, settings).advantage_M
    assert_close(got, [4.0, 0.0, 0.0, -2.0])


def reordered(o, order):
    """The same responses in another order, each with its tokens."""
    tokens = np.split(np.arange(o.lengths_R.sum()), np.cumsum(o.lengths_R)[:-1])
    order_M = np.concatenate([tokens[i] for i in order])
    moved = {f: getattr(o, f)[order] for f in Outcomes._fields if f.endswith(("_R", "_RC"))}
    of_tokens = ("token_rewards_M", "values_M", "energy_M")
    moved |= {f: getattr(o, f)[order_M] for f in of_tokens}
    return o._replace(**moved, steps=tuple(o.steps[i] for i in order)), order_M


@each_case
def test_order_of_responses_and_names_of_groups_do_not_matter(name, settings):
    o = make_outcomes()
    order = np.random.default_rng(1).permutation(len(o.rewards_R))
    moved, order_M = reordered(o, order)
    moved = moved._replace(groups_R=100 - 3 * moved.groups_R)
    a, b = estimate(name, o, settings), estimate(name, moved, settings)
    assert_close(b.advantage_M, a.advantage_M[order_M])
    if name == "gae":
        assert_close(b.return_M, a.return_M[order_M])
    if not ADVANTAGES[name].per_token:
        assert_close(outcome(name, moved, settings), outcome(name, o, settings)[order])


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e12])
@pytest.mark.parametrize(
    "sizes, longest",
    [
        ((5, 2, 1, 3, 4), 0),  # no trained token
        ((1, 1, 1, 1, 1), 7),  # nothing but lone responses
        ((3, 0, 0, 0, 0), 1),  # two of them have no token: one trained token in all
        ((1, 0, 0, 0, 0), 7),  # one response
        ((0, 0, 0, 0, 0), 7),  # none
        ((5, 2, 1, 3, 4), 7),
    ],
)
@each_case
def test_edges_stay_finite(name, settings, sizes, longest, scale):
    R = sum(sizes)
    o = make_outcomes()
    lengths = np.minimum(o.lengths_R[:R], longest) if longest != 1 else np.array([0, 1, 0])
    N = lengths.sum()
    o = Outcomes(
        rewards_R=scale * o.rewards_R[:R],
        components_RC=scale * o.components_RC[:R],
        groups_R=np.repeat(np.arange(5), sizes),
        lengths_R=lengths,
        total_lengths_R=lengths,
        token_rewards_M=scale * o.token_rewards_M[:N],
        steps=tuple(tuple((e, scale * x) for e, x in s) for s in o.steps[:R]),
        baselines_R=scale * o.baselines_R[:R],
        values_M=scale * o.values_M[:N],
        energy_M=o.energy_M[:N],
    )
    got = estimate(name, o, settings)
    assert got.advantage_M.shape == (N,) and np.isfinite(got.advantage_M).all()
    if name == "gae":
        assert got.return_M.shape == (N,) and np.isfinite(got.return_M).all()
    if not ADVANTAGES[name].per_token:
        direct = outcome(name, o, settings)
        assert direct.shape == (R,) and np.isfinite(direct).all()


def test_the_baseline_of_sure_tokens_is_between_the_rewards():
    """Their energy is 1e-8; rounding in float32 put the two on either side of 0."""
    collision = np.float32(0.99988997)
    energy_M = advantage.token_energy(
        np.full(2, -5.5029002e-05, np.float32),
        np.array([collision, np.nextafter(collision, np.float32(0))]),
    )
    ones, group = np.ones(2, int), np.zeros(2, int)
    for rewards in ([1.0, 0.0], [0.0, 1.0]):
        of_tokens = np.array(rewards), group, ones, energy_M
        advantage_M = advantage.optimal_token_baseline(*of_tokens, zero_tail=True)
        assert (np.abs(advantage_M) <= 1).all()


@each_case
def test_what_is_given_is_not_written_to(name, settings):
    o = make_outcomes()
    for x in o:
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    estimate(name, o, settings)


@pytest.mark.parametrize("seed", range(3))
def test_whitening_counts_an_entry_as_often_as_it_is_there(seed):
    rng = np.random.default_rng(seed)
    x, counts = rng.standard_normal(9), rng.integers(0, 5, 9)
    assert_close(advantage.whiten(x, counts), whitened(x, np.repeat(x, counts).tolist()))
    assert_close(advantage.whiten(x), whitened(x, x.tolist()))
    for few in (x[:2], 1e-5 * x):  # where the 1e-8 under the root can be seen
        assert_close(advantage.whiten(few), whitened(few, few.tolist()))


@pytest.mark.parametrize("x, counts", [([], None), ([3.0], None), ([3.0, 4], [1, 0]), ([3.0], [0])])
def test_fewer_than_two_are_whitened_to_zero(x, counts):
    counts = None if counts is None else np.array(counts)
    assert advantage.whiten(np.array(x), counts).tolist() == [0.0] * len(x)


def test_maxrl_refuses_rewards_below_zero():
    o = make_outcomes()
    o.rewards_R[3] = -1e-9
    with pytest.raises(RunError, match="is 'maxrl', and a reward is -1e-09"):
        estimate("maxrl", o, {})


@pytest.mark.parametrize("weights", [(), (1.0,), (1.0, 1.0, 1.0)])
def test_gdpo_wants_one_weight_per_component(weights):
    settings = {"component_weights": weights, "normalise_std": True, "std_ddof": 1}
    with pytest.raises(ValueError, match=f"{len(weights)} weights for 2 reward components"):
        estimate("gdpo", make_outcomes(), settings)


def test_the_table_says_what_each_advantage_reads():
    assert ADVANTAGES.keys() == SETTINGS.keys()
    assert READS.keys() == {name for name, entry in ADVANTAGES.items() if not entry.per_token}
    for name, (function, reads, arguments, _) in ADVANTAGES.items():
        signature = inspect.signature(function).parameters
        named = [p for p, v in signature.items() if v.kind is v.KEYWORD_ONLY]
        assert set(arguments) == set(named) == set(SETTINGS[name][0])
        assert list(reads) == [p for p in signature if p not in named]
        assert set(reads) <= set(Outcomes._fields)
