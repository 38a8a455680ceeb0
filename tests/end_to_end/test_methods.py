"""Each way of training runs end to end, reports itself, and resumes bit for bit."""

import shutil

import jax
import numpy as np
import pytest

from dapo_jax.config import Config
from dapo_jax.training import packing
from dapo_jax.training.batch import make_samples
from dapo_jax.training.learner import Learner
from dapo_jax.training.schedule import Schedule
from dapo_jax.types import Group, Problem, Response, UserError, Verdict
from tests.algorithms.test_policy_losses import configured
from tests.end_to_end.test_runs import RUN, assert_documented
from tests.support.helpers import make_mesh, make_params, tiny_config, tiny_dict
from tests.support.runs import metrics_of, run_here

SHORT = RUN | {
    "dynamic_sampling__enabled": False,
    "evaluation__top_p": 1.0,
    "train__num_steps": 2,
    "pretrain__num_steps": 20,
    "evaluation__every_steps": 10,
}
NO_OVERLONG = {"reward__overlong_buffer_tokens": 0, "reward__overlong_penalty": 0.0}
PPO = {
    "objective__advantage": "gae",
    "objective__advantage_args": {"gae_lambda": 0.95},
    "objective__reward_kl_coefficient": 0.01,
    "objective__kl_estimator": "k1",
    "objective__reward_kl_adaptation": (0.1, 100),
    "critic": dict(learning_rate=1e-3, value_clip=0.5, head_start_steps=1),
    "rollout__group_size": 1,
    "train__prompts_per_step": 8,
    "train__prompts_per_update": 4,
}


def correction(policy="current", **fields):
    return {"correction": {"policy": policy} | fields}


def advantage(name, **arguments):
    return {"objective__advantage": name, "objective__advantage_args": arguments}


CAPPED = {"importance": ("token", None, 2.0)}
WAYS = {
    "process": NO_OVERLONG
    | {
        "objective__advantage": "grpo-process",
        "reward__scorer": "dapo_jax.data.arithmetic:score_steps",
    },
    "clip-cov": configured("clip-cov"),
    "kl-cov": configured("kl-cov"),
    "energy": {"objective__advantage": "optimal-token-baseline"},
    "top-entropy": {"objective__top_entropy_share": 0.2},
    "adaptive-entropy": {"objective__entropy_adaptation": (3.4, 0.01)},
    "kl": {
        "objective__kl_coefficient": 0.1,
        "objective__kl_estimator": "k3+",
        "objective__entropy_coefficient": 0.01,
    },
    "truncated-importance": correction("old", importance=("normalised-token", None, 2.0))
    | {"rollout__log_prob_source": "recompute"},
    "rejection": configured("policy-gradient")
    | correction(
        importance=("sequence", 0.999, 1.001),
        reject=(("seq-mean-k1", 0.999, 1.001), ("sequence-mask", None, 0.001)),
    )
    | {"optimizer__learning_rate": 1e-3},
}


def make_learner(config):
    return Learner(config, make_mesh(config, 1), lambda sequences: [""] * len(sequences), print)


def on_policy_groups(learner, params, rng, step):
    """Groups of random responses with their true log-probs, half of them right."""
    config = learner.config
    G, groups = config.rollout.group_size, []
    for i in range(config.train.prompts_per_step):
        problem = Problem(i, "", tuple(rng.integers(3, 20, 14).tolist()), "", "sums")
        lengths = rng.integers(2, 30, G)
        tokens = [rng.integers(3, config.model.vocab_size, n).astype(np.int32) for n in lengths]
        packed = packing.pack(
            [problem.prompt_tokens] * G, np.concatenate(tokens), lengths, config.train.row_tokens
        )
        rows, n = learner._micro_batches(packed.rows)
        log_probs = packing.take_columns(packed, learner.log_probs(params, rows, n))
        responses = tuple(
            Response(t, logp, "stop", "")
            for t, logp in zip(tokens, np.split(log_probs, np.cumsum(lengths)[:-1]))
        )
        verdicts = tuple(Verdict(i % 2 == 0, 1.0 - 2.0 * (i % 2)) for i in range(G))
        groups.append(Group(problem, responses, verdicts, step))
    return groups


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_step_that_shares_prompts_learns_the_same():
    """With all that is read off packed rows: recomputed log-probs, reference and critic."""
    ways = PPO | {
        "rollout__log_prob_source": "recompute",
        "rollout__group_size": 4,
        "correction": {"policy": "old"} | CAPPED,
        "objective__kl_coefficient": 0.1,
        "objective__kl_estimator": "k3",
    }
    found = []
    for share in (False, True):
        config = tiny_config(**SHORT | ways, train__share_prompts=share)
        params, learner = make_params(config), make_learner(config)
        learner.reference = params
        groups = on_policy_groups(learner, params, np.random.default_rng(0), 2)
        schedule = Schedule(1, 0.01, 0.0)
        state, _, numbers = learner.train_on(learner.init_state(params), schedule, groups, 2)
        mini_batches = learner._cut(make_samples(config, groups, 2, learner.detokenize))
        tokens = sum((batch.packed.rows.segments_BT > 0).sum() for batch in mini_batches)
        found.append((tokens, jax.device_get((state.policy.params, state.critic.params)), numbers))
    (tokens, *alone), (fewer_tokens, *shared) = found
    assert fewer_tokens < 0.9 * tokens
    del alone[1]["batch/padding_share"], shared[1]["batch/padding_share"]
    for a, b in zip(jax.tree.leaves(alone[0]), jax.tree.leaves(shared[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert alone[1].keys() == shared[1].keys()
    for name, value in alone[1].items():
        np.testing.assert_allclose(value, shared[1][name], rtol=2e-4, atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("way", WAYS)
def test_two_steps_of_updates(way):
    config = tiny_config(**SHORT | WAYS[way])
    params, learner = make_params(config), make_learner(config)
    learner.reference = params if learner.needs_reference else None
    state, rng, steps = learner.init_state(params), np.random.default_rng(0), []
    before = jax.device_get(state.policy.params)
    for step in (1, 2):
        groups = on_policy_groups(learner, state.policy.params, rng, step)
        if way == "process":
            steps_of = lambda v: v._replace(steps=((1, 1.0), (2, -1.0)))
            groups = [g._replace(verdicts=tuple(map(steps_of, g.verdicts))) for g in groups]
        schedule = Schedule(step - 1, 0.0, 0.0)
        state, _, numbers = learner.train_on(state, schedule, groups, step)
        steps.append(numbers)
    for numbers in steps:  # a mini-batch whose tokens are all rejected makes no update
        empty = numbers["optimizer/empty_updates"]
        assert numbers["optimizer/updates"] == 2 - empty and empty <= (way == "rejection")
    assert_documented(steps)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, state.policy.params)
    assert max(jax.tree.leaves(moved)) > 0
    first, last = steps
    if way == "kl":
        assert 0 <= first["policy/kl_ref"] < last["policy/kl_ref"]
    if way == "truncated-importance":
        # The same program on the same parameters: nothing to correct.
        assert first["correction/rejected_share"] == 0
        assert abs(first["mismatch/kl"]) < 1e-5 and first["mismatch/prob_gap_max"] < 1e-5
    if way == "rejection":
        # The second mini-batch meets parameters that have moved.
        assert 0 < first["correction/rejected_share"] < 1


@pytest.mark.slow
def test_remax_runs_with_its_greedy_baselines(tmp_path, home):
    changes = {"objective__advantage": "remax"}
    run_here(tmp_path / "run", home, **SHORT | changes | {"train__num_steps": 1})
    (numbers,) = metrics_of(tmp_path / "run")[1:]
    assert numbers["optimizer/updates"] == 2


PPO_RUN = SHORT | PPO | {"train__num_steps": 3, "checkpoint__every_steps": 1}


@pytest.fixture(scope="module")
def ppo(tmp_path_factory, home):
    workdir = tmp_path_factory.mktemp("runs") / "ppo"
    run_here(workdir, home, **PPO_RUN)
    return workdir


@pytest.mark.slow
def test_ppo_trains_the_critic_first_and_adapts_its_kl(ppo):
    steps = metrics_of(ppo)[1:]
    assert_documented(steps)
    assert "optimizer/grad_norm" not in steps[0] and steps[0]["critic/grad_norm"] > 0
    assert steps[0]["critic/value_mean"] == 0  # the head starts at 0
    assert all(numbers["optimizer/updates"] == 2 for numbers in steps[1:])
    assert steps[-1]["critic/value_mean"] != 0
    coefficients = [numbers["reward/kl_coefficient"] for numbers in steps]
    kls = [numbers["reward/kl"] for numbers in steps]
    assert coefficients[1] == coefficients[0], "in the head start the policy stands still"
    for before, kl, after in zip(coefficients[1:], kls[1:], coefficients[2:]):
        error = np.clip(kl / 0.1 - 1, -0.2, 0.2)
        assert after == pytest.approx(before * (1 + error * 8 / 100), rel=1e-9)


@pytest.mark.slow
def test_ppo_resumes_bit_for_bit(ppo, home, tmp_path):
    """From what a kill leaves before the second checkpoint is whole."""
    workdir = tmp_path / "run"
    shutil.copytree(ppo, workdir)
    (workdir / "summary.json").unlink()
    for step in (2, 3):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert "resuming after step 1 of 3" in run_here(workdir, home, **PPO_RUN)[1]
    assert metrics_of(workdir) == metrics_of(ppo)


@pytest.mark.slow
def test_the_entropy_coefficient_adapts_and_resumes_bit_for_bit(tmp_path, home):
    """Where it resumes the coefficient is neither that of the config nor one step from it."""
    changes = SHORT | {
        "objective__entropy_coefficient": 0.02,
        "objective__entropy_adaptation": (3.0, 0.015),
        "train__num_steps": 4,
        "checkpoint__every_steps": 2,
    }
    run_here(tmp_path / "whole", home, **changes)
    steps = metrics_of(tmp_path / "whole")[1:]
    assert_documented(steps)
    assert all(numbers["policy/entropy_old"] < 3.0 for numbers in steps)
    coefficients = [numbers["policy/entropy_coefficient"] for numbers in steps]
    assert coefficients == pytest.approx([0.02, 0.035, 0.05, 0.065], rel=1e-12)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    assert "resuming after step 2 of 4" in run_here(tmp_path / "run", home, **changes)[1]
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


ALL_KEPT = {"dynamic_sampling__enabled": False}
BINARY = NO_OVERLONG | {"reward__incorrect": 0.0}
REWARD_KL = advantage("grpo-process") | {
    "objective__reward_kl_coefficient": 0.1,
    "objective__kl_estimator": "k1",
}


@pytest.mark.parametrize(
    "changes, message",
    [
        (advantage("rloo", std_ddof=1), r"std_ddof is not a field of the advantage 'rloo'.* none"),
        (advantage("grpo", gamma=0.9), r"gamma is not a field.* has: normalise_"),
        (advantage("grpo", std_ddof=2), r"std_ddof must be one of 0, 1; got 2"),
        (advantage("nosuch"), r"objective\.advantage must be one of grpo, rloo"),
        (advantage("maxrl") | {"reward__incorrect": 0.0}, "overlong_penalty must be 0"),
        (BINARY | REWARD_KL | advantage("maxrl"), "reward_kl_coefficient must be 0 for .*'maxrl'"),
        (advantage("gpg") | {"reward__incorrect": 0.0}, "overlong_penalty must be 0 for .*'gpg'"),
        (BINARY | REWARD_KL | advantage("gpg"), "reward_kl_coefficient must be 0 for .*'gpg'"),
        (
            REWARD_KL | advantage("gdpo", component_weights=(1.0, 1.0)),
            "reward_kl_coefficient must be 0 for .*'gdpo'",
        ),
        (
            ALL_KEPT | {"rollout__group_size": 1},
            "'grpo' compares the responses of a group: .*group_size must be at least 2; got 1",
        ),
        (
            ALL_KEPT | PPO | {"train__num_steps": 1},
            r"head_start_steps must be below .*num_steps \(1\); got 1",
        ),
        (PPO | {"model__lora_rank": 2}, "critic: with .*lora_rank 2 only adapters of the policy"),
        (
            ALL_KEPT | PPO | {"optimizer__warmup_steps": 2, "optimizer__final_rate_share": 0.1},
            "warmup_steps must be below 2, the policy's steps",
        ),
        (advantage("gdpo"), r"component_weights is missing and has no default"),
        (advantage("gdpo", component_weights=(1.0,)), "2 numbers"),
        (advantage("grpo-process"), "overlong_penalty must be 0 for .*outcome_as_step to True"),
        (NO_OVERLONG | REWARD_KL, "reward_kl_coefficient must be 0 for .*outcome_as_step to True"),
        (correction("old", reject=(("sequence-mask", None, 0.1),)), "'recompute', or policy"),
        (correction(reject=(("seq-k9", None, 1.0),)), r"reject\[0\]\[0\] must be .*got 'seq-k9'"),
        (correction(reject=(("seq-sum-k1", None, 2.0),)), "bounds of a ratio"),
        (correction(reject=(("seq-sum-k1", 3.0, 2.0),)), "bounds of a ratio"),
        (correction(reject=(("seq-sum-k2", 0.5, 2.0),)), "None, cap.* cap above 0, in nats"),
        (correction(reject=(("sequence-mask", None, 0.0),)), "None, cap.* cap above 0, in nats"),
        (configured("gspo-token") | {"model__compute_dtype": "bfloat16"}, "bounds of .*gspo-token"),
    ],
)
def test_contradictions_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        Config.from_dict(tiny_dict(**changes))
