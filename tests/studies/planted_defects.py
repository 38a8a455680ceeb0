"""Tests of the tests: plants known defects one by one in a copy and demands that a test fails.

Command: python tests/studies/planted_defects.py

Other trainers shipped each of these defects. Its tests must pass on the copy without it and fail on
the copy with it.
"""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Defect(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    tests: str


DEFECTS = (
    Defect(
        "ReMax: the greedy baseline of another prompt is subtracted",
        "dapo_jax/training/learner.py",
        "np.float64)[order][samples.groups_R]",
        "np.float64)[samples.groups_R]",
        "tests/training/test_learner.py -k greedy_baseline",
    ),
    Defect(
        "the loss of an update is divided by rejected tokens too",
        "dapo_jax/training/learner.py",
        "kept_lengths(mine.mask_M, lengths_R)",
        "kept_lengths(columns.mask_M[batch.tokens], lengths_R)",
        "tests/training/test_learner.py -k denominator",
    ),
    Defect(
        "the base model is fitted on held-out problems",
        "dapo_jax/training/pretrain.py",
        "if arithmetic.is_heldout(prompt_text):",
        "if not prompt_text:",
        "tests/training/test_base_model.py -k held_out",
    ),
    Defect(
        "mask off by one: the last prompt token is trained",
        "dapo_jax/training/packing.py",
        "row * row_tokens + start - n + np.arange(n)\n",
        "row * row_tokens + start - n + np.arange(n)\n"
        "            rows.mask_BT[row, start - n - 1] = True\n",
        "tests/training/test_packing.py",
    ),
    Defect(
        "the phrase that ends thinking is trained",
        "dapo_jax/types.py",
        "np.repeat(self.trained_R, self.lengths_R) & self.sampled_M",
        "np.repeat(self.trained_R, self.lengths_R)",
        "tests/training/test_given_tokens.py -k gradient",
    ),
    Defect(
        "thinking is ended after a whole call: a run depends on the tokens in a call",
        "dapo_jax/rollout/scheduler.py",
        "cut = {sample: n for sample, text in zip(cut, texts)",
        "cut = {s: int(table.count[s]) for s, text in zip(cut, texts)",
        "tests/rollout/test_end_of_thinking.py -k exactly",
    ),
    Defect(
        "tokens sampled while verdicts were awaited are kept: a run depends on time",
        "dapo_jax/rollout/collector.py",
        "loop.unfinished(prompts.cut)",
        "loop.unfinished()",
        "tests/rollout/test_carry_repeats.py -k verdicts_take",
    ),
    Defect(
        "old responses age out one by one, and leave their groups the short ones",
        "dapo_jax/rollout/carry.py",
        "    kept = tuple(group for group in groups if is_fresh(group))\n",
        "    one = lambda v, r: CarriedGroup(v, (r,))\n"
        "    kept = tuple(one(v, r) for v, rs in groups for r in rs if is_fresh(one(v, r)))\n",
        "tests/rollout/test_carry.py",
    ),
    Defect(
        "adapters are trained and do not reach the rollouts",
        "dapo_jax/rollout/programs.py",
        "params = lora.join(trained, frozen)\n",
        "params = lora.join(lora.switched_off(trained), frozen)\n",
        "tests/end_to_end/test_lora.py -m slow",
    ),
    Defect(
        "the scale of adapters forgets their rank",
        "dapo_jax/models/decoder.py",
        "(c.lora_alpha / c.lora_rank)",
        "c.lora_alpha",
        "tests/models/test_lora.py",
    ),
    Defect(
        "old log-probs of carried tokens are recomputed",
        "dapo_jax/training/learner.py",
        "samples.staleness_M == 0, recomputed_M, samples.log_prob_M",
        "samples.staleness_M >= 0, recomputed_M, samples.log_prob_M",
        "tests/training/test_learner.py",
    ),
    Defect(
        "responses that share their prompt begin at position 0",
        "dapo_jax/training/packing.py",
        "np.arange(first, end)",
        "np.arange(end - first)",
        "tests/training/test_step.py",
    ),
    Defect(
        "log-probs off by one: those of the next token",
        "dapo_jax/models/log_probs.py",
        "return jnp.roll(x_BT, 1, axis=1).at[:, 0].set(0.0)",
        "return x_BT",
        "tests/training/test_step.py::test_row_log_probs_speak_of_their_own_token",
    ),
    Defect(
        "end of sequence left out of the response",
        "dapo_jax/rollout/scheduler.py",
        "        texts = self.detokenize([response.tokens for response in responses])\n",
        "        n = [len(r.tokens) - (r.tokens[-1] in stops) for r in responses]\n"
        "        responses = [r._replace(tokens=r.tokens[:i]) for r, i in zip(responses, n)]\n"
        "        texts = self.detokenize([response.tokens for response in responses])\n",
        "tests/rollout/test_engine.py::test_finish_reasons",
    ),
    Defect(
        "mean per micro-batch",
        "dapo_jax/training/step.py",
        "loss = jnp.sum(rows.weight_BT * loss_BT)",
        "loss = jnp.sum(rows.weight_BT * loss_BT) / jnp.maximum(jnp.sum(mask_BT), 1)",
        "tests/training/test_exact_gradient.py -k alone",
    ),
    Defect(
        "one clip bound for both sides",
        "dapo_jax/algorithms/surrogate.py",
        "clipped_BT = clamp(ratio_BT, 1 - clip_low, 1 + clip_high)",
        "clipped_BT = clamp(ratio_BT, 1 - clip_low, 1 + clip_low)",
        "tests/algorithms/test_surrogate.py",
    ),
    Defect(
        "filter on the shaped reward",
        "dapo_jax/types.py",
        "return 0 < sum(correct) < len(correct)",
        "return len({(v.reward, r.truncated) for v, r in zip(self.verdicts, self.responses)}) > 1",
        "tests/rollout/test_dynamic_sampling.py",
    ),
    Defect(
        "length in characters",
        "dapo_jax/training/batch.py",
        "np.array([len(response.tokens) for response in group.responses])",
        "np.array([len(response.text) for response in group.responses])",
        "tests/training/test_batch.py",
    ),
    Defect(
        "one random key for all samples of a prompt",
        "dapo_jax/rollout/slots.py",
        "jax.random.fold_in(jax.random.wrap_key_data(key_2), sample)",
        "jax.random.fold_in(jax.random.wrap_key_data(key_2), 0 * sample)",
        "tests/rollout/test_engine.py::test_samples_problems_epochs_and_steps_differ",
    ),
    Defect(
        "samples of a prompt write into one page",
        "dapo_jax/rollout/slots.py",
        "table_BJ = jnp.where(own_BJ, page_B[:, None], table_BJ)",
        "table_BJ = jnp.where(own_BJ, table_BJ, table_BJ)",
        "tests/rollout/test_engine.py -k log_probs_are_the_trainers",
    ),
    Defect(
        "log-probs of the untempered distribution",
        "dapo_jax/models/chunked_softmax.py",
        "return logits_XV / temperature",
        "return logits_XV",
        "tests/training/test_step.py::test_row_log_probs_speak_of_their_own_token",
    ),
    Defect(
        "untempered log-probs stored by the rollout",
        "dapo_jax/rollout/programs.py",
        "                sampled.log_prob_B,\n                sampled.model_log_prob_B,",
        "                sampled.model_log_prob_B,\n                sampled.model_log_prob_B,",
        "tests/rollout/test_engine.py -k log_probs_are_the_trainers",
    ),
    Defect(
        "rejected tokens stay in the denominator",
        "dapo_jax/training/batch.py",
        "kept_M[mask_M] = correction.kept_M",
        "correction_M[mask_M] *= correction.kept_M",
        "tests/training/test_batch.py",
    ),
    Defect(
        "whitening over a mini-batch instead of the batch",
        "dapo_jax/algorithms/advantages.py",
        "return Advantages(whiten(advantage_M), return_M)",
        "half = len(advantage_M) // 2\n"
        "        halves = [whiten(advantage_M[:half]), whiten(advantage_M[half:])]\n"
        "        return Advantages(np.concatenate(halves), return_M)",
        "tests/algorithms/test_advantages.py",
    ),
    Defect(
        "the value of the next response bootstraps the last token",
        "dapo_jax/algorithms/advantages.py",
        "next_M[np.cumsum(lengths_R) - 1] = 0.0",
        "next_M[-1] = 0.0",
        "tests/algorithms/test_advantages.py",
    ),
    Defect(
        "values off by one: those after the token",
        "dapo_jax/training/critic.py",
        "return log_probs.to_own_token(value_BT)",
        "return value_BT",
        "tests/training/test_critic.py",
    ),
    Defect(
        "values of a row that lies over devices stay in zig-zag order",
        "dapo_jax/training/critic.py",
        "value_BT = zigzag.to_rows(value_BT, 1 if layout is None else layout.context)",
        "value_BT = zigzag.to_rows(value_BT, 1)",
        "tests/training/test_critic.py -k eight_devices",
    ),
    Defect(
        "the KL in the reward is charged the coefficient of the first step",
        "dapo_jax/training/learner.py",
        "schedule.reward_kl_coefficient * kl_M",
        "config.objective.reward_kl_coefficient * kl_M",
        "tests/training/test_learner.py -k has_adapted",
    ),
    Defect(
        "the loss forgets the correction",
        "dapo_jax/training/step.py",
        "loss_BT = -rows.correction_BT * terms.objective_BT",
        "loss_BT = -terms.objective_BT",
        "tests/training/test_step.py",
    ),
    Defect(
        "the supervised loss is a mean of each micro-batch",
        "dapo_jax/training/supervised.py",
        "return total / denominator",
        "return total / jnp.maximum(jnp.sum(rows.mask_BT, dtype=jnp.float32), 1)",
        "tests/training/test_supervised.py -k cut",
    ),
    Defect(
        "the turns of the user are trained",
        "dapo_jax/data/examples.py",
        "own = ends[-1] if is_assistant else 0",
        "own = ends[-1] if ends else 0",
        "tests/data/test_examples.py",
    ),
    Defect(
        "the end of a turn is not trained",
        "dapo_jax/data/examples.py",
        "own = ends[-1] if is_assistant else 0",
        "own = ends[-1] - 1 if is_assistant else 0",
        "tests/training/test_supervised.py -k labels",
    ),
    Defect(
        "every epoch of supervised examples has one order",
        "dapo_jax/tools/sft.py",
        'named_generator("sft-order", self.seed, epoch)',
        'named_generator("sft-order", self.seed)',
        "tests/tools/test_sft.py -k epoch",
    ),
)


def run(copy: Path, tests: str) -> int:
    """pytest's exit status: 0 all passed, 1 some failed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", *tests.split(" ", 2)]
    # The libraries' byte code of the whole suite, see conftest.py, instead of one for each copy.
    kept = {"PYTHONPYCACHEPREFIX": str(ROOT / ".pytest_cache" / "d" / "bytecode")}
    # Programs that a defect leaves as they are compile once for all copies.
    kept |= {"JAX_COMPILATION_CACHE_DIR": str(copy.parent / "programs")}
    kept |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    env = os.environ | kept | {"PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest could not run {tests}:\n{done.stdout}{done.stderr}")
    return done.returncode


def plant(copy: Path, defect: Defect) -> None:
    file = copy / defect.file
    text = file.read_text()
    if text.count(defect.right) != 1:
        raise SystemExit(f"{defect.name}: its place in {defect.file} has changed; mend this script")
    file.write_text(text.replace(defect.right, defect.wrong))


def make_copy(directory: Path) -> Path:
    """Of what the tests need."""
    directory.mkdir(parents=True)
    for part in ("dapo_jax", "configs", "tests", "launch", "pyproject.toml"):
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, directory / part)
    return directory


def main() -> int:
    """0 if every defect is found, 1 otherwise."""
    missed = []
    with tempfile.TemporaryDirectory() as temporary:
        right = make_copy(Path(temporary) / "right")
        every = sorted({defect.tests for defect in DEFECTS})
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            failed = threads.map(lambda tests: run(right, tests), every)
            for tests, fails in zip(every, failed, strict=True):
                if fails:
                    raise SystemExit(f"{tests} fails without any defect")

        def found(numbered: tuple[int, Defect]) -> bool:
            number, defect = numbered
            copy = make_copy(Path(temporary) / str(number))
            plant(copy, defect)
            return run(copy, defect.tests) == 1

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            verdicts = threads.map(found, enumerate(DEFECTS))
            for number, (defect, seen) in enumerate(zip(DEFECTS, verdicts, strict=True), 1):
                verdict = "found" if seen else "MISSED"
                place = f"{number}/{len(DEFECTS)}"
                print(f"{place} {verdict}: {defect.name} ({defect.tests})", flush=True)
                if not seen:
                    missed.append(defect.name)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
