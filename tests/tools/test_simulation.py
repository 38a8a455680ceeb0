"""launch/plan.py --simulate_hosts: what is generated, how long it takes, and what is refused."""

import dataclasses
import json
import re

import numpy as np
import pytest

from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState, next_rate
from dapo_jax.tools.plan import (
    chips,
    many_hosts,
    simulation,
    virtual,
    whole_steps,
    workload,
)
from dapo_jax.tools.plan.simulation import Setting
from dapo_jax.tools.plan.virtual import Costs, Group
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
TINY = "--config=configs/tiny_dapo.py"


def setting(*, costs=SECOND, config=CONFIG, unit=1):
    return Setting(config, 4, 1, unit, 1, costs)  # four slots, one prompt a prefill


def play(group, *, hosts=1, rate=0.5, **settings):
    """One rollout of prompts that a function of their number makes: (lengths, informative)."""

    def work(step, number):
        tokens, informative = group(number)
        return Group(np.broadcast_to(tokens, G), np.arange(G) < informative)

    state = DynamicSamplingState(rate)
    return simulation.rollout(setting(**settings), work, hosts=hosts, step=0, state=state)[0]


def simulated(capsys, *arguments):
    """What the command prints as JSON."""
    assert main(["program", TINY, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_without_dynamic_sampling_every_group_is_kept(max_staleness):
    """Also groups without a signal; a synchronous step begins no prompt beyond its batch."""
    sampling = dataclasses.replace(CONFIG.dynamic_sampling, enabled=False)
    config = dataclasses.replace(carrying(max_staleness), dynamic_sampling=sampling)
    found = play(lambda number: (10, number % 2), config=config)
    assert found.batch == list(range(6)) == list(range(found.tried)) and found.tokens_lost == 0
    assert max_staleness or found.claimed == 6


def test_one_host_by_hand():
    """Four slots, four samples of ten tokens: one prompt after another, ten seconds each."""
    found = play(lambda _: (10, True), rate=1.0)
    assert found.seconds == pytest.approx(60)
    assert found.claimed == found.tried == 6 and found.batch == list(range(6))
    assert found.tokens == 6 * G * 10 and found.tokens_lost == 0
    assert found.idle_H == pytest.approx([0]) and found.slots_busy == pytest.approx(1)
    # Each sequence has a page of 32 tokens that is not full; three prompts are on the device.
    assert found.tokens_cached == 4 * 10 + 4 * 32 + 3 * 1


def test_prefill_host_and_rewards_add_up():
    """Prefill goes through the same device; the host works while the device does; the reward of
    the last response comes on top."""
    costs = Costs(lambda live, cached: 1.0, prefill=2.0, host=0.5, reward=0.25)
    found = play(lambda _: (10, True), rate=1.0, costs=costs)
    # One worker for the four responses that end last. The first call waits for the host.
    assert found.seconds == pytest.approx(60 + 6 * 2 + 4 * 0.25, abs=2)
    assert found.seconds >= 60 + 6 * 2 + 4 * 0.25


def test_a_host_without_work_waits():
    """A host has room for prompts that wait for its slots: the first claims both of two prompts."""
    config = tiny_config(
        rollout__group_size=G,
        rollout__max_response_tokens=32,
        rollout__decode_steps=1,
        train__prompts_per_step=2,
        train__prompts_per_update=2,
    )
    found = play(lambda number: (5 if number == 0 else 20, True), hosts=2, rate=1.0, config=config)
    assert found.seconds == pytest.approx(25) and found.claimed == 2
    assert found.idle_H == pytest.approx([0, 1]) and found.wait_H == pytest.approx([0, 25])
    assert found.slots_busy == pytest.approx(1 / 2)


def test_the_batch_does_not_depend_on_hosts():
    """The first informative prompts in their order, each sampled once, on whatever host."""
    rng = np.random.default_rng(3)
    lengths, informative = rng.integers(1, 33, (80, G)), rng.random(80) < 0.4
    right = np.flatnonzero(informative)
    costs = Costs(lambda live, cached: 1.0 + 0.1 * live, 0.5, host=0.1, reward=0.2)
    for hosts in (1, 2, 5, 12):
        found = play(lambda i: (lengths[i], informative[i]), hosts=hosts, costs=costs)
        assert found.batch == right[:6].tolist() and found.tried == right[5] + 1
        assert found.claimed >= found.tried
        needed = lengths[: found.tried].sum()
        assert 0 <= found.tokens - needed == found.tokens_lost
        assert (0 <= found.idle_H).all() and (found.idle_H <= 1).all()
        assert found.seconds >= lengths[: found.tried].max()


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_batch_that_cannot_be_filled_ends(hosts):
    found = play(lambda i: (i % 7 + 1, i % 40 == 0), hosts=hosts)
    assert found.batch == [0, 40] and found.tried == found.claimed == 80


def test_units_of_tokens_change_little():
    long = tiny_config(
        rollout__group_size=G,
        rollout__max_response_tokens=512,
        rollout__decode_steps=4,
        train__row_tokens=536,
        train__prompts_per_step=3,
        train__prompts_per_update=1,
    )
    lengths = np.random.default_rng(0).integers(100, 512, (400, G))

    def seconds(unit):
        costs = Costs(lambda live, cached: float(unit), 0.0)
        group = lambda i: (lengths[i], i % 2)
        return play(group, hosts=3, config=long, costs=costs, unit=unit).seconds

    assert simulation.unit_tokens(long) == 4 and simulation.unit_tokens(CONFIG) == 1
    assert seconds(4) == pytest.approx(seconds(1), rel=0.02)


def test_lengths(tmp_path):
    rng = np.random.default_rng(0)
    sample = lambda text, most: workload.lengths_of(text, most)(rng, 50_000)
    assert set(sample("uniform:7", 10)) == {7}
    found = sample("lognormal:100:0.5", 10_000)
    assert found.mean() == pytest.approx(100, rel=0.02)
    assert np.log(found).std() == pytest.approx(0.5, rel=0.02)
    assert sample("lognormal:40:2", 50).max() == 50
    file = tmp_path / "some.jsonl"
    file.write_text('{"length": 3}\n5\n')
    assert set(sample(str(file), 4)) == {3, 4}


def test_lengths_and_verdicts_of_a_run(tmp_path, capsys):
    records = [{"step": 1, "length": 4 + i % 8, "correct": i in (0, 5)} for i in range(2 * 8)]
    (tmp_path / "rollouts").mkdir()
    save = lambda records: (tmp_path / "rollouts" / "step_000001.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    save(records)  # two groups of the tiny config
    metrics = {"step": 1, "sampling/prompts_tried": 2, "time/rollout": 8.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    arguments = [
        "--simulate_hosts=1",
        f"--lengths_from={tmp_path}",
        "--decode_seconds=0.8",
        "--prefill_seconds=0",
        "--config.train.prompts_per_step=1",
        "--config.train.prompts_per_update=1",
    ]
    with open(tmp_path / "metrics.jsonl", "a") as lines:
        lines.write('{"step": 2, "time/ro')  # the run still writes
    found = simulated(capsys, *arguments)["measured"]
    # A new run claims both prompts together. The first group suffices: 11 tokens of a tenth of a
    # second each, in two calls of eight.
    assert found["seconds"] == [8.0]
    assert found["predicted_seconds"][0] == pytest.approx(1.1, abs=0.01)
    save(records[:-1])
    assert main(["program", TINY, *arguments]) == 2
    assert "--config.log.rollouts_per_step=1000000" in capsys.readouterr().err
    save([])
    assert main(["program", TINY, *arguments]) == 2
    assert "--config.log.rollouts_per_step=1000000" in capsys.readouterr().err


def test_a_simulation_begins_as_a_run_begins():
    """With the prior of a new run, and then with the estimate that a run would have."""
    rng = np.random.default_rng(4)
    lengths, informative = rng.integers(1, 33, (3, 80, G)), rng.random((3, 80)) < 0.3
    work = lambda step, number: Group(
        lengths[step, number], np.arange(G) < informative[step, number]
    )
    found = simulation.rollouts(setting(), work, hosts=2, steps=3)
    rate = DynamicSamplingState().informative_rate
    for one in found:
        assert one.rate == rate
        rate = next_rate(rate, len(one.batch), one.tried)
    assert found[2].rate != found[1].rate != found[0].rate


def test_the_price_of_a_run(capsys):
    """Rollout and evaluation as simulated, the rest by arithmetic; where so many hosts are the
    config's mesh."""
    arguments = [
        "--simulate_steps=2",
        "--config.mesh.data=4",
        "--length_distribution=uniform:20",
        "--config.rollout.log_prob_source=recompute",
        "--config.train.num_steps=90",
        "--config.train.prompts_per_step=8",
        "--config.train.prompts_per_update=8",
    ]
    found = simulated(
        capsys, *arguments, "--simulate_hosts=4", "--compare_hosts=2", "--heldout_prompts=4"
    )
    cost, rows = found["price"], {(row["hosts"], row["step"]): row for row in found["rows"]}
    assert rows.keys() == {(2, 1), (4, 1), (4, 2)}
    assert rows[4, 1]["rate"] == rows[2, 1]["rate"] == DynamicSamplingState().informative_rate
    assert {"rollout", "old_logprobs", "train", "evaluation"} <= set(cost["parts"])
    assert cost["parts"]["rollout"] == rows[4, 2]["seconds"], "the first begins with a prior"
    assert all(seconds > 0 for name, seconds in cost["parts"].items() if name != "weights")
    assert cost["step_seconds"] == pytest.approx(sum(cost["parts"].values()))
    assert cost["chip_hours"] == pytest.approx(4 * 90 * cost["step_seconds"] / 3600)
    text = many_hosts.describe(found)
    assert f"{cost['chip_hours']:.3g} chip-hours" in text
    assert "step takes 0 s" not in text and " 0 hours" not in text, "of a tiny model too"
    found = simulated(capsys, *arguments, "--simulate_hosts=2", "--compare_hosts=2")
    assert found["price"] is None, "the mesh is of four"


def test_an_evaluation_may_have_more_prompts_than_a_step_tries(capsys):
    flags = ["--simulate_hosts=1", "--compare_hosts=1", "--simulate_steps=1"]
    flags += ["--length_distribution=uniform:20", "--config.dynamic_sampling.max_prompts=32"]
    seconds = [
        simulated(capsys, *flags, f"--heldout_prompts={n}")["price"]["evaluation_seconds"]
        for n in (32, 64)
    ]
    assert seconds[1] > 1.5 * seconds[0]


def test_a_short_batch_has_a_shorter_update(capsys):
    """Without refill a quarter of the prompts is left; the update of all is as that of a batch that
    a refill has filled."""
    flags = ["--simulate_hosts=1", "--compare_hosts=1", "--simulate_steps=4", "--accept=0.25"]
    flags += ["--length_distribution=uniform:20", "--config.train.prompts_per_step=64"]
    flags += ["--config.train.prompts_per_update=64", "--config.train.rows_per_micro_batch=1"]

    def update(*more):
        found = simulated(capsys, *flags, *more)
        parts = found["price"]["parts"]
        return parts.get("train", 0.0), found["whole_steps"]["steps"][-1][2]

    full = update("--config.dynamic_sampling.max_prompts=1000")
    short = update("--config.dynamic_sampling.max_prompts=64")
    assert all(0.1 < s / f < 0.5 for s, f in zip(short, full)), (short, full)
    skipped = "--config.dynamic_sampling.exhausted=skip"
    assert update("--config.dynamic_sampling.max_prompts=64", skipped) == (0.0, 0.0)


@pytest.mark.parametrize("step, num", [(1, 40), (40, 40), (41, 30), (71, 20), (90, 20)])
def test_the_price_is_that_of_the_steps_of_a_stage(capsys, step, num):
    stages = "((41, {'rollout.temperature': 0.9}), (71, {'rollout.temperature': 1.0}), (99, {}))"
    flags = ["--simulate_hosts=1", "--compare_hosts=1", "--simulate_steps=1"]
    flags += ["--config.train.num_steps=90", f"--config.stages={stages}"]
    cost = simulated(capsys, *flags, f"--step={step}")["price"]
    assert cost["num_steps"] == num
    assert cost["hours"] == pytest.approx(num * cost["step_seconds"] / 3600)


def test_the_table(capsys):
    """Without a distribution the mean length is a quarter of the longest, 72 tokens."""
    arguments = ["--simulate_hosts=1", "--compare_hosts=1", "--simulate_steps=1"]
    bounded = "--config.rollout.cache_gib=0.002"
    assert main(["program", TINY, *arguments, "--decode_seconds=1", "--prefill_seconds=0"]) == 0
    text = capsys.readouterr().out
    assert "A simulation, not a measurement" in text and "lengths lognormal:18:1" in text
    assert "| 1 | 1 | 50.0% |" in text and "would wait for pages" not in text
    assert main(["program", TINY, *arguments, bounded]) == 0
    text = capsys.readouterr().out
    assert "v5p at 47% of the rate" in text and "cache_gib is 0.002, and a device" in text


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--simulate_hosts=0", "--simulate_hosts must be above 0; got 0"),
        ("--compare_hosts=1,no", "--compare_hosts must be .*; got '1,no'"),
        ("--accept=0", "--accept must be above 0 and at most 1; got 0"),
        ("--accept=1.5", "--accept must be above 0 and at most 1; got 1.5"),
        ("--length_distribution=lognormal:1e9:1", r"from 1 to .*'lognormal:1e9:1'"),
        ("--length_distribution=lognormal:4-1e9:1", r"LAST and LENGTH from 1 to .*'lognormal:4-1e"),
        ("--length_distribution=normal:3", "must be lognormal:MEAN:SIGMA.*'normal:3'"),
        ("--length_distribution=uniform:99999", "from 1 to 72; got 'uniform:99999'"),
        ("--length_distribution=none.jsonl", "none.jsonl: no such file"),
        ("--lengths_from=nowhere", "--lengths_from=nowhere is not the directory of a run"),
        ("--lengths_from=x --accept=0.5", "leave --accept and"),
        ("--chip=v9", "--chip must be one of v4, v5p"),
        ("--chip=v9 --decode_seconds=1 --prefill_seconds=1", "--chip is not read where"),
        ("--prompt_tokens=33", r"--prompt_tokens must be at most .*\(24\); got 33"),
        ("--lengths_from=x --config.rollout.max_staleness=1", "--lengths_from needs .*; got 1"),
        ("--config.mesh.data=2 --config.rollout.slots=33", r"slots \(33\) must be a multiple"),
        ("--step=0", r"--step must be from 1 to .*; got 0"),
        ("--decode_seconds=1", "--decode_seconds and --prefill_seconds"),
        ("--config.dynamic_sampling.enabled=False --accept=0.5", "--accept is not read where"),
        ("--split=0", "--split must be 'best' or how many of the hosts sample, less than .*=2; go"),
        ("--split=2", "got '2'"),
        ("--split=some", "got 'some'"),
        ("--split=best --simulate_hosts=1", "simulate_hosts must be 2 or more .*--split; got 1"),
        ("--split=1", "max_staleness 1 or more.*; got 0"),
        ("--split=1 --config.rollout.max_staleness=1 --compare_hosts=4", "leave --compare_hosts"),
    ],
)
def test_a_wrong_command_is_refused(capsys, argument, message):
    assert main(["program", TINY, "--simulate_hosts=2", *argument.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and re.search(message, err), err


def test_an_axis_that_takes_the_rest_is_as_large_as_the_hosts(capsys):
    """As in a run: the slots of the config are shared."""
    flags = ["--simulate_hosts=4", "--compare_hosts=4", "--simulate_steps=1", "--json"]
    each = []
    for mesh in ([], ["--config.mesh.data=4"]):
        assert main(["program", TINY, *flags, *mesh]) == 0
        each.append(json.loads(capsys.readouterr().out))
    assert each[0] == each[1] and "fits" not in each[0]
    assert "one of 4 shards of the rollout" in each[0]["assumptions"][0]
    assert each[0]["price"] is not None


def test_a_replica_has_the_devices_that_a_run_would_give_it(capsys, monkeypatch):
    """By the memory of the chip, unless calls were measured. One device holds 9.8 MiB, two hold 9.0
    each, and a run takes nine tenths of the memory."""
    small = chips.CHIPS["TPU v5 lite"]._replace(gib=9.5 / 0.9 / 1024)
    monkeypatch.setitem(chips.CHIPS, "TPU v5 lite", small)
    flags = ["--simulate_hosts=2", "--compare_hosts=2", "--simulate_steps=1", "--json"]
    flags += ["--config.mesh.data=1", "--config.mesh.fsdp=4"]
    for more, devices in (
        (["--chip=v5e"], 2),
        (["--chip=v5p"], 1),
        (["--decode_seconds=1", "--prefill_seconds=0"], 1),
    ):
        assert main(["program", TINY, *flags, *more]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        text = f"one of {4 // devices} shards of the rollout: {devices} devices"
        assert text in found["assumptions"][0]
        assert (found["price"] is not None) == (devices == 2) == ("form an inference" in err)


def test_slots_are_busy_up_to_the_end_of_the_rollout():
    """Calls that the devices still work on after it do not count."""
    clock = virtual.Clock()
    engine = virtual.VirtualEngine(
        setting().engine_config,
        clock,
        Costs(lambda live, cached: 1.0, 0.0),
        lambda i: Group(np.full(G, 8), np.arange(G) < 1),
        1.0,
        1.0,
    )
    engine.calls = [(10.0, 10.0, 30.0), (20.0, 10.0, 40.0)]
    assert engine.slot_seconds(20.0) == 70 and engine.slot_seconds(15.0) == 50
    assert engine.slot_seconds(5.0) == 15


def carrying(max_staleness=2, **changes):
    rollout = dataclasses.replace(CONFIG.rollout, max_staleness=max_staleness, **changes)
    return dataclasses.replace(CONFIG, rollout=rollout)


def test_carried_prompts_keep_the_slots_full():
    """Lengths 10, but one response of each sixth prompt is 32 long: a synchronous step ends with
    the slots of the others empty. Carried, all tokens are sampled once, in full slots."""

    def work(_, number):
        lengths = np.full(G, 10)
        lengths[0] += 22 * (number % 6 == 5)
        return Group(lengths, np.arange(G) < 1)

    run = lambda config: simulation.rollouts(setting(config=config), work, hosts=1, steps=6)
    sync, carried = run(CONFIG), run(carrying())
    assert all(one.batch == list(range(6)) == list(range(one.tried)) for one in (*sync, *carried))
    assert [one.seconds for one in sync] == pytest.approx([82] * 6)
    tokens = 6 * G * 10 + 22
    assert all(one.slots_busy > 0.9 for one in carried[1:])
    needed = 6 * tokens + carried[-1].tokens_carried + sum(one.tokens_lost for one in carried)
    assert sum(one.tokens for one in carried) == needed
    assert sum(one.seconds for one in carried) <= 0.9 * sum(one.seconds for one in sync)


def test_the_lengths_of_carried_prompts_are_those_of_synchronous_ones():
    """No bias: the prompts of the first steps are the same, in the same order, with the same
    lengths, in whatever order they end; more hosts change nothing."""
    lengths = workload.lengths_of("lognormal:8:1:0.5", 32)
    work = workload.sampled(lengths, 0.5, G, seed=3)
    found = [
        simulation.rollouts(setting(config=carrying()), work, hosts=hosts, steps=8)
        for hosts in (1, 3)
    ]
    order, position = [], 0
    for one in found[0]:
        order += [position + i for i in one.batch]
        position += one.tried
    informative = [i for i in range(position) if 0 < work(0, i).correct_G.sum() < G]
    assert order == informative, "every informative prompt, in the order of the data"
    batches = [[(one.tried, one.batch) for one in of_hosts] for of_hosts in found]
    assert batches[0] == batches[1]


def test_prompts_beyond_the_first_window_begin_at_once():
    """Every eighth prompt is informative: 48 fill the batch, and 18 may begin at first. Verdicts
    take no time: the last of a window comes while its host still reads calls."""
    for hosts in (1, 2, 5):
        found = play(lambda i: (10, i % 8 == 7), hosts=hosts, config=carrying(), rate=1.0)
        assert found.batch == list(range(7, 48, 8)) and found.tried == 48


def test_the_prompts_that_carry_begins_are_counted():
    """Each of four hosts begins every fourth prompt of the window, which has (1 + 2) x 6."""
    found = play(lambda _: (10, True), hosts=4, config=carrying(), rate=1.0)
    assert found.claimed == 18 and found.tried == 6


@pytest.mark.parametrize("reward", [0, 0.001])
def test_a_batch_of_carried_groups_alone_samples_nothing(capsys, reward):
    """The window of the first step ends at once. Without rewards the second step takes no time."""
    flags = ["--simulate_hosts=1", "--compare_hosts=1", "--simulate_steps=2", "--accept=1"]
    flags += [f"--reward_seconds={reward}", "--config.rollout.max_staleness=2"]
    flags += ["--config.rollout.slots=1024", "--length_distribution=uniform:20"]
    first, second = simulated(capsys, *flags)["rows"]
    assert first["seconds"] > second["seconds"] >= 0 == second["slots_busy"]
    assert second["idle_mean"] == 1 and second["tokens_lost_share"] == 0


def test_correlated_lengths_of_a_group():
    lengths = workload.lengths_of("lognormal:100:1:0.75", 10**9)
    rng = np.random.default_rng(0)
    logs = np.log([lengths(rng, 2) for _ in range(4000)])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.75, abs=0.03)
    assert logs.std() == pytest.approx(1, abs=0.03)


def test_a_growing_mean():
    """From MEAN to LAST over the steps, by the place in the data, carried or not."""
    lengths = workload.lengths_of("lognormal:10-30:0", 100)
    assert [int(lengths(np.random.default_rng(0), 1, at)[0]) for at in (0, 0.5, 1)] == [10, 20, 30]
    steps, prompts = 4, 8
    progress = lambda step, number: min(1.0, (step + number / prompts) / steps)
    work = workload.sampled(lengths, 1.0, G, 0, progress=progress)
    of = lambda step, number: work(step, number).lengths_G.tolist()
    assert of(0, 0) == [10] * G and of(3, 4) == of(0, 28) == [28] * G and of(0, 99) == [30] * G


def test_the_mean_of_correlated_lengths(capsys):
    """Of many groups: one group's lengths would have the mean of that group."""
    arguments = ["--simulate_hosts=1", "--compare_hosts=1", "--simulate_steps=1"]
    found = simulated(capsys, *arguments, "--length_distribution=lognormal:9:0.5:0.9")
    (text,) = [text for text in found["assumptions"] if text.startswith("lengths lognormal")]
    assert ": 9 tokens on average" in text
    found = simulated(capsys, *arguments, "--length_distribution=lognormal:4-8:0.5:0.9")
    assert ": 6 tokens on average" in "".join(found["assumptions"])


@pytest.mark.parametrize("rollout, update, transfer", [(10, 4, 1), (4, 10, 1), (10, 10, 2)])
def test_split_meshes_by_hand(rollout, update, transfer):
    """The slower side sets the pace. Where both take as long, parameters that are on their way
    delay each second rollout, since the next needs those of the update before the last."""
    steps = whole_steps.at_once([rollout] * 6, [update] * 6, transfer)
    assert steps[0] == (rollout + update, rollout, update, 0, rollout), "from a cold start"
    seconds = [step.seconds for step in steps[1:]]
    if rollout != update:
        assert seconds == [max(rollout, update)] * 5
    else:
        # Rollouts end at 10, 20, 32, 42, 54, 64: the third waits until 20 + 2, the fifth until 44.
        assert seconds == [10, 12, 10, 12, 10]
    waits = sum(step.sampler_waits for step in steps[1:]), sum(s.trainer_waits for s in steps[1:])
    expected = {10: {4: (0, 5 * 6), 10: (2 * 2, 2 * 2)}, 4: {10: (7 + 6 + 6 + 6, 0)}}
    assert waits == expected[rollout][update]


def test_the_best_split():
    """Twelve hosts; rollouts take 60 s and updates 20 s on one host each: 9 sample."""
    of = lambda k: whole_steps.at_once([60 / k] * 4, [20 / (12 - k)] * 4, 0.0)
    found = whole_steps.best_split(of, 12)
    assert found == 9 == min(range(1, 12), key=lambda k: whole_steps.mean_seconds(of(k)))
    assert whole_steps.best_split(of, 2) == 1
    one = lambda k: whole_steps.at_once([100 / k], [100 / (8 - k)], 0.0)
    assert whole_steps.best_split(one, 8) == 4, "a simulation of one step"


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_age_of_simulated_tokens(max_staleness):
    """Every token counts once, for a batch, for the next step or as lost; none is too old. The
    informative rate rises, so that fewer prompts begin: the groups of others age out."""
    lengths = workload.lengths_of("lognormal:8:1:0.5", 32)
    work = workload.sampled(lengths, 1.0, G, seed=1)
    config = carrying(max_staleness)
    found = simulation.rollouts(setting(config=config), work, hosts=2, steps=8)
    used, position = 0, 0
    for step, one in enumerate(found):
        of_batch = [
            work(*((0, position + i) if max_staleness else (step, i))).lengths_G.mean()
            for i in range(one.tried)
        ]
        assert one.response_tokens == pytest.approx(np.mean(of_batch))
        used += sum(of_batch) * G
        position += one.tried
        assert 0 <= one.staleness <= min(step, max_staleness)
    assert max(one.staleness for one in found) == max_staleness
    lost = sum(one.tokens_lost for one in found)
    assert sum(one.tokens for one in found) == used + found[-1].tokens_carried + lost


def test_whole_steps(capsys):
    """In turn and at once: the rollout is that of the hosts that sample, with a staleness of one
    less; the update takes as much longer as fewer hosts train."""
    arguments = ["--simulate_steps=3", "--config.mesh.data=4", "--simulate_hosts=4"]
    turn = simulated(capsys, *arguments, "--compare_hosts=3", "--config.rollout.max_staleness=1")
    first, *_ = (whole_steps.Step(*values) for values in turn["whole_steps"]["steps"])
    assert first.rollout == turn["rows"][1]["seconds"]
    assert first.seconds == pytest.approx(first.rollout + first.update)
    parts = turn["price"]["parts"]
    assert first.update == pytest.approx(parts["train"], rel=0.3), "the lengths are of the batch"
    split = simulated(capsys, *arguments, "--split=3", "--config.rollout.max_staleness=2")
    rows, found = split["rows"], split["whole_steps"]
    assert [row["hosts"] for row in rows] == [3] * 3 and split["price"] is None
    steps = [whole_steps.Step(*values) for values in found["steps"]]
    assert (found["sampling"], found["training"]) == (3, 1) and found["staleness"] <= 2
    assert [step.rollout for step in steps] == [row["seconds"] for row in rows]
    assert rows[0]["seconds"] == turn["rows"][0]["seconds"], "a new run's prompts, on three hosts"
    assert found["transfer_seconds"] > 0
    text = many_hosts.describe(split)
    assert "3 hosts sampling and 1 training" in text and "2 rollout steps old" in text
    best = simulated(capsys, *arguments, "--split=best", "--config.rollout.max_staleness=2")
    assert best["whole_steps"]["sampling"] in (1, 2, 3)


def test_updates_take_longer_on_fewer_hosts():
    sizes = {"data": 1, "fsdp": 16, "context": 1, "tensor": 4}
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, row_tokens=2**20))
    seconds = lambda share: whole_steps.update_seconds(
        config, sizes, chips.named("v5p"), share=share, response_tokens=20, prompt_tokens=8
    )
    assert seconds(0.25) == pytest.approx(2 * seconds(0.5), rel=0.05)
    assert seconds(0.25) == pytest.approx(4 * seconds(1.0), rel=0.05)


@pytest.mark.parametrize(
    "sizes, share, same",
    [((8, 2, 1), 1 / 16, (1, 1, 1)), ((8, 2, 4), 1 / 8, (1, 2, 4)), ((4, 4, 1), 3 / 4, (3, 4, 1))],
)
def test_a_part_of_a_mesh_has_no_part_of_a_device(sizes, share, same):
    """Copies of the parameters go first; no device has more than all of them."""
    seconds = lambda sizes, share: whole_steps.update_seconds(
        CONFIG,
        dict(zip(("data", "fsdp", "tensor"), sizes), context=1),
        chips.named("v5p"),
        share=share,
        response_tokens=20,
        prompt_tokens=8,
    )
    assert seconds(sizes, share) == pytest.approx(seconds(same, 1.0))
