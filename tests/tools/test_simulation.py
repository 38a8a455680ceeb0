"""launch/plan.py --simulate_hosts: what is drawn, how long it takes, and what is refused."""

import json
import re

import numpy as np
import pytest

from dapo_jax.rollout.dynamic_sampling import SamplingState, next_rate
from dapo_jax.tools.plan import chips, estimate, many_hosts, simulation, workload
from dapo_jax.tools.plan.many_hosts import Asked
from dapo_jax.tools.plan.simulation import Setting
from dapo_jax.tools.plan.virtual import Costs
from tests.support.helpers import tiny_config
from tests.support.runs import load_launcher

main = load_launcher("plan")
G = 4
CONFIG = tiny_config(
    rollout__group_size=G,
    rollout__max_response_tokens=32,
    rollout__decode_steps=4,
    train__prompts_per_step=6,
    train__prompts_per_update=2,
    dynamic_sampling__max_prompts=80,
)
SECOND = Costs(lambda live, cached: 1.0, prefill=0.0)  # a token a second


def setting(*, costs=SECOND, slots=4, prefill_prompts=1, config=CONFIG, unit=1):
    return Setting(config, slots, prefill_prompts, unit, 1, costs)


def play(group, *, hosts=1, policy="ours", share=0.5, **settings):
    """One rollout of prompts that a function of their number makes: (lengths, informative)."""

    def work(step, number):
        tokens, informative = group(number)
        return workload.Group(np.broadcast_to(tokens, G), np.arange(G) < informative)

    return simulation.rollout(
        setting(**settings), work, hosts=hosts, policy=policy, step=0, share=share
    )


def test_one_host_by_hand():
    """Four slots, four samples of ten tokens: one prompt after another, ten seconds each."""
    found = play(lambda _: (10, True), share=1.0)
    assert found.seconds == pytest.approx(60)
    assert found.begun == found.tried == 6 and found.batch == list(range(6))
    assert found.tokens == 6 * G * 10 and found.tokens_lost == 0
    assert found.idle_H == pytest.approx([0]) and found.slots_busy == pytest.approx(1)
    # Of each sequence a page of 32 tokens that is not full; and the prompts that are on the device.
    assert found.tokens_cached == 4 * 10 + 4 * 32 + 3 * 1


def test_prefill_host_and_rewards_add_up():
    """Prefill goes through the same device; the host works while the device does; the reward of
    the last response comes on top."""
    costs = Costs(lambda live, cached: 1.0, prefill=2.0, host=0.5, reward=0.25)
    found = play(lambda _: (10, True), share=1.0, costs=costs)
    # One worker for the four responses that end last. The first call waits for the host.
    assert found.seconds == pytest.approx(60 + 6 * 2 + 4 * 0.25, abs=2)
    assert found.seconds >= 60 + 6 * 2 + 4 * 0.25


def test_a_host_without_work_waits():
    """Two prompts and two hosts: one prompt takes 5 s, the other 20."""
    config = tiny_config(
        rollout__group_size=G, rollout__max_response_tokens=32, rollout__decode_steps=1,
        train__prompts_per_step=2, train__prompts_per_update=2,
    )  # fmt: skip

    def found(policy):
        prompts = lambda number: (5 if number == 0 else 20, True)
        return play(prompts, hosts=2, policy=policy, share=1.0, config=config)

    one = found("dealt")
    assert one.seconds == pytest.approx(20) and one.begun == 2
    assert one.idle_H == pytest.approx([0.75, 0]) and one.wait_H == pytest.approx([15, 0])
    assert one.slots_busy == pytest.approx(25 / 40)
    # A host has room for prompts that wait for its slots: who comes first claims both.
    ours = found("ours")
    assert ours.seconds == pytest.approx(25) and ours.idle_H == pytest.approx([0, 1])


def test_slots_that_are_kept_full_draw_the_same_batch():
    """The policy `eager`: more is begun, and no prompt of the batch is another."""
    rng = np.random.default_rng(5)
    lengths, informative = rng.integers(1, 33, (80, G)), rng.random(80) < 0.4
    drawn = lambda **changes: play(lambda i: (lengths[i], informative[i]), hosts=2, **changes)
    ours, eager = drawn(), drawn(policy="eager")
    assert eager.begun > ours.begun and eager.batch == ours.batch


@pytest.mark.parametrize("policy", simulation.POLICIES)
def test_the_batch_does_not_depend_on_hosts(policy):
    """The first informative prompts in their order, each drawn once, whoever draws them."""
    rng = np.random.default_rng(3)
    lengths, informative = rng.integers(1, 33, (80, G)), rng.random(80) < 0.4
    right = np.flatnonzero(informative)
    costs = Costs(lambda live, cached: 1.0 + 0.1 * live, 0.5, host=0.1, reward=0.2)
    for hosts in (1, 2, 5, 12):
        found = play(
            lambda i: (lengths[i], informative[i]), hosts=hosts, policy=policy, costs=costs
        )
        assert found.batch == right[:6].tolist() and found.tried == right[5] + 1
        assert found.begun >= found.tried
        needed = lengths[: found.tried].sum()
        # What is drawn of a prompt is drawn once: beyond those there is part of those given back.
        assert 0 <= found.tokens - needed == found.tokens_lost
        assert (0 <= found.idle_H).all() and (found.idle_H <= 1).all()
        assert found.seconds >= lengths[: found.tried].max()


def test_without_a_distribution_lengths_are_such_as_the_config_allows(capsys):
    """72 tokens at most: a mean of a quarter of that, where the 32B's is 5,120."""
    command = ["--config=configs/tiny_dapo.py", "--simulate_hosts=1", "--compare_hosts=1"]
    assert main(["program", *command, "--simulate_steps=1"]) == 0
    assert "lengths lognormal:18:1, each for itself" in capsys.readouterr().out


def test_a_batch_that_cannot_be_filled_ends():
    for hosts in (1, 3):
        for policy in simulation.POLICIES:
            found = play(lambda i: (i % 7 + 1, i % 40 == 0), hosts=hosts, policy=policy)
            assert found.batch == [0, 40] and found.tried == found.begun == 80


def test_units_of_tokens_change_little():
    long = tiny_config(
        rollout__group_size=G, rollout__max_response_tokens=512, rollout__decode_steps=4,
        train__row_tokens=536,
        train__prompts_per_step=6, train__prompts_per_update=2,
    )  # fmt: skip
    lengths = np.random.default_rng(0).integers(100, 512, (400, G))

    def seconds(unit):
        costs = Costs(lambda live, cached: float(unit), 0.0)
        return play(
            lambda i: (lengths[i], i % 2), hosts=3, config=long, costs=costs, unit=unit
        ).seconds

    assert simulation.unit_tokens(long) == 4 and simulation.unit_tokens(CONFIG) == 1
    assert seconds(4) == pytest.approx(seconds(1), rel=0.02)


def test_arithmetic_of_a_decode_step():
    chip = chips.CHIPS["TPU v5"]._replace(flops=1e6, memory_rate=1e3)
    c = CONFIG.model
    cost = lambda **live: estimate.at_best(estimate.decode_token(CONFIG, 2, slots=8, **live), chip)
    none = cost(live=0, cached_tokens=0)
    assert none.memory == estimate.weight_bytes(CONFIG.model) / 2e3
    assert none.compute == pytest.approx(8 * estimate.model_flops(CONFIG, 0) / 3 / 2e6)
    some = cost(live=4, cached_tokens=100)
    token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
    assert some.memory - none.memory == pytest.approx(100 * token / 2e3)
    attention = 4 * c.num_layers * c.num_heads * c.head_dim * 100  # scores and values
    assert some.compute - none.compute == pytest.approx(attention / 2e6)


def test_lengths(tmp_path):
    rng = np.random.default_rng(0)
    draw = lambda text, most: workload.lengths_of(text, most)(rng, 50_000)
    assert set(draw("uniform:7", 10)) == {7}
    found = draw("lognormal:100:0.5", 10_000)
    assert found.mean() == pytest.approx(100, rel=0.02)
    assert np.log(found).std() == pytest.approx(0.5, rel=0.02)
    assert draw("lognormal:40:2", 50).max() == 50
    file = tmp_path / "some.jsonl"
    file.write_text('{"length": 3}\n5\n')
    assert set(draw(str(file), 4)) == {3, 4}


def saved_run(place, records, tried=2, step=1, seconds=8.0):
    """With one step more."""
    (place / "rollouts").mkdir(parents=True, exist_ok=True)
    (place / "rollouts" / f"step_{step:06}.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    line = {"step": step, "sampling/prompts_tried": tried, "time/rollout": seconds}
    with (place / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line) + "\n")
    return place


def test_lengths_and_verdicts_of_a_run(tmp_path, capsys):
    records = [
        {"step": 1, "length": 4 + i % 8, "correct": i in (0, 5)} for i in range(2 * 8)
    ]  # two groups of the tiny config
    place = saved_run(tmp_path, records)
    arguments = [
        "--config=configs/tiny_dapo.py", "--simulate_hosts=1", f"--lengths_from={place}",
        "--decode_seconds=0.8", "--prefill_seconds=0", "--config.train.prompts_per_step=1",
        "--config.train.prompts_per_update=1", "--json",
    ]  # fmt: skip
    assert main(["program", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    # A new run claims both prompts, side by side. The first group suffices: 11 tokens of a tenth of
    # a second each, in two calls of eight.
    assert found["seconds"] == [8.0] and found["predicted_seconds"][0] == pytest.approx(
        1.1, abs=0.01
    )
    (tmp_path / "other").mkdir()
    other = saved_run(tmp_path / "other", records[:-1])
    assert main(["program", *arguments[:2], f"--lengths_from={other}"]) == 2
    assert "--config.log.rollouts_per_step=1000000" in capsys.readouterr().err


def test_calls_take_as_long_as_in_another_run(tmp_path, capsys):
    """By the median of its steps, two of which took twice what is given and one was disturbed."""

    def records(step, lengths):
        return [{"step": step, "length": n, "correct": i in (0, 5)} for i, n in enumerate(lengths)]

    for step, seconds in enumerate((2.2, 2.2, 30.0), 1):
        saved_run(
            tmp_path / "known", records(step, [*range(4, 12)] * 2), step=step, seconds=seconds
        )
    saved_run(tmp_path / "asked", records(1, [3] * 16))
    arguments = [
        "--config=configs/tiny_dapo.py", "--simulate_hosts=1", f"--lengths_from={tmp_path}/asked",
        "--decode_seconds=0.8", "--prefill_seconds=0", "--config.train.prompts_per_step=1",
        "--config.train.prompts_per_update=1", "--reward_seconds=0", "--json",
    ]  # fmt: skip
    predicted = []
    for more in ([], [f"--calibrate_from={tmp_path}/known"]):
        assert main(["program", *arguments, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        predicted += found["measured"]["predicted_seconds"]
    # 3 tokens of a tenth of a second each; of the other run 11, see above.
    assert predicted[0] == pytest.approx(0.3, abs=0.01)
    assert predicted[1] == pytest.approx(2 * predicted[0], rel=0.01)
    assert "all calls take 2.0" in found["assumptions"][-2]
    again = f"--calibrate_from={tmp_path}/known/../asked"
    assert main(["program", *arguments, again]) == 2
    assert "nothing would be predicted" in capsys.readouterr().err


def test_a_simulation_begins_as_a_run_begins():
    """With the prior of a new run, not with the share that its prompts turn out to have; then with
    the estimate that a run would have."""
    rng = np.random.default_rng(4)
    lengths, informative = rng.integers(1, 33, (3, 80, G)), rng.random((3, 80)) < 0.3
    work = lambda step, number: workload.Group(
        lengths[step, number], np.arange(G) < informative[step, number]
    )
    found = simulation.rollouts(setting(), work, hosts=2, policy="ours", steps=3)
    share = SamplingState().informative_rate
    for one in found:
        assert one.share == share
        share = next_rate(share, len(one.batch), one.tried)
    assert found[2].share != found[1].share != found[0].share


def test_the_price_of_a_run(capsys):
    """Rollout and evaluation as simulated, the rest by arithmetic; where so many hosts are the
    config's mesh."""
    arguments = [
        "--config=configs/tiny_dapo.py", "--simulate_hosts=4", "--compare_hosts=4",
        "--simulate_steps=2", "--config.mesh.data=4", "--length_distribution=uniform:20",
        "--config.rollout.log_prob_source=recompute", "--config.train.num_steps=90", "--json",
    ]  # fmt: skip
    assert main(["program", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    cost, steps = found["price"], found["steps"]
    assert len(steps) == 2 and steps[0]["share"] == SamplingState().informative_rate
    assert {"rollout", "old_logprobs", "train", "evaluation"} <= set(cost["parts"])
    assert cost["parts"]["rollout"] == steps[1]["seconds"], "the first begins with a prior"
    assert all(seconds > 0 for name, seconds in cost["parts"].items() if name != "weights")
    assert cost["step_seconds"] == pytest.approx(sum(cost["parts"].values()))
    assert cost["chip_hours"] == pytest.approx(4 * 90 * cost["step_seconds"] / 3600)
    text = many_hosts.describe(found)
    assert "The first steps of a run on 4 hosts" in text and "chip-hours" in text
    assert main(["program", *arguments, "--simulate_hosts=2", "--compare_hosts=2"]) == 0
    assert json.loads(capsys.readouterr().out)["price"] is None, "the mesh is of four"


def test_the_table(capsys):
    arguments = ["--config=configs/tiny_dapo.py", "--simulate_hosts=2", "--compare_hosts=1"]
    arguments += ["--length_distribution=lognormal:20:1", "--accept=0.5", "--simulate_steps=2"]
    assert main(["program", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["hosts"], row["policy"]): row for row in found["rows"]}
    every = {(hosts, policy) for hosts in (1, 2) for policy in simulation.POLICIES}
    assert set(rows) == every - {(1, "dealt")}
    assert rows[2, "ours"]["steps"] == 2 and rows[1, "ours"]["steps"] == 1
    assert rows[1, "eager"]["begun"] > rows[1, "ours"]["begun"] >= 32
    text = many_hosts.describe(found)
    assert "A simulation, not a measurement" in text and "v5p at 47% of the rate" in text
    assert "would wait for pages" not in text
    assert main(["program", *arguments, "--config.rollout.cache_gib=0.002"]) == 0
    assert "cache_gib is 0.002, and a device would have some" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--simulate_hosts=0"], "--simulate_hosts must be above 0; got 0"),
        (["--compare_hosts=1,no"], "--compare_hosts must be such as 1,16,64,256; got '1,no'"),
        (["--accept=0"], "--accept must be above 0 and at most 1; got 0"),
        (["--accept=1.5"], "--accept must be above 0 and at most 1; got 1.5"),
        (["--length_distribution=lognormal:1e9:1"], r"MEAN and .* from 1 to .*'lognormal:1e9:1'"),
        (["--length_distribution=normal:3"], "must be lognormal:MEAN:SIGMA, .*'normal:3'"),
        (["--length_distribution=uniform:99999"], "from 1 to 72; got 'uniform:99999'"),
        (["--length_distribution=none.jsonl"], "none.jsonl: no such file"),
        (["--lengths_from=nowhere"], "nowhere is not the directory of a run"),
        (["--lengths_from=x", "--accept=0.5"], "leave --accept and"),
        (["--calibrate_from=nowhere"], "--calibrate_from=nowhere is not the directory of a run"),
        (["--calibrate_from=x", "--config.mesh.data=2"], "one shard: config.mesh has 2"),
        (["--chip=v9"], "--chip must be one of v4, v5p"),
        (["--decode_seconds=1"], "go together"),
        (["--unit_tokens=3"], "--unit_tokens must divide config.rollout.decode_steps .8."),
        (["--config.dynamic_sampling.enabled=False"], "needs config.dynamic_sampling.enabled"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_told(capsys, arguments, message):
    first = [] if arguments[0].startswith("--simulate_hosts") else ["--simulate_hosts=2"]
    assert main(["program", "--config=configs/tiny_dapo.py", *first, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and re.search(message, err), err


def test_asked_is_what_the_program_takes():
    config = tiny_config()
    assert many_hosts.check(config, Asked(simulate_hosts=3)) == [1, 3, 16, 64, 256]
