"""TRL's GRPOTrainer on the model and the problems of configs/smollm2_word_problems.py, for a time.

Command: uv run --no-project --isolated --with torch==2.13.0 --with trl==1.16.0 \
             --with transformers --with accelerate --with datasets --with ml-collections \
             --with pebble python -m tests.peers.trl_word_problems --model=DIRECTORY \
             --output=DIRECTORY [--minutes=20]; then `launch/evaluate.py --model=OUTPUT
             --config=configs/smollm2_word_problems.py --num_samples=8 --output=...`
             evaluates what it has trained.

The settings are those of the config: groups of 8, 16 of them a rollout, DAPO's loss and clip
bounds, the soft overlong punishment, the same updates and rate, float32. TRL has no dynamic
sampling, so it trains on all groups of a rollout. Prints a line for each rollout, and at the end
the seconds for each trained response.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

from configs import smollm2_word_problems
from dapo_jax.data.word_problems import generate_problems
from dapo_jax.rewards.scorers import last_number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--output", required=True, help="where the trained model is written")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training")
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    trainer, times = make_trainer(args.model, args.output, args.minutes)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    c = smollm2_word_problems.get_config()
    trained = len(times) * c.train.prompts_per_step * c.rollout.group_size
    print(f"{len(times)} rollouts in {seconds:.0f} s: {seconds / trained:.3f} s a trained response")
    trainer.save_model(args.output)


def make_trainer(model: str, output: str, minutes: float) -> tuple[Any, list[float]]:
    """Returns a trainer that stops after `minutes`, and the list of seconds that its callback
    fills, an item for each rollout with its updates."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    c = smollm2_word_problems.get_config()
    records = []
    for source in c.data.train.values():  # in the ratio of their weights; TRL shuffles them
        num = int(400 * source.weight)
        for prompt, answer in generate_problems(num, levels=source.levels, heldout=False, seed=0):
            records.append({"prompt": [{"role": "user", "content": prompt}], "answer": answer})
    responses = c.train.prompts_per_step * c.rollout.group_size
    updates = c.train.prompts_per_step // c.train.prompts_per_update
    longest, buffer = c.rollout.max_response_tokens, c.reward.overlong_buffer_tokens
    right: list[bool] = []
    times: list[float] = []

    def reward(completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        rewards = []
        for messages, tokens, wanted in zip(completions, completion_ids, answer):
            correct = last_number(messages[0]["content"], wanted).correct
            right.append(correct)
            over = max(0, len(tokens) - (longest - buffer)) / buffer
            rewards.append((1.0 if correct else -1.0) - over * c.reward.overlong_penalty)
        return rewards

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.start = self.last = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step % updates:
                return
            now = time.perf_counter()
            times.append(now - self.last)
            share = sum(right[-responses:]) / responses
            print(f"rollout {len(times)}: {times[-1]:.1f} s, {share:.1%} right", flush=True)
            self.last = now
            control.should_training_stop = now - self.start > 60 * minutes

    rows = 16  # of a forward pass
    settings = GRPOConfig(
        output_dir=str(Path(output, "trainer")),
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=responses // updates // rows,
        steps_per_generation=responses // rows,
        num_generations=c.rollout.group_size,
        max_completion_length=longest,
        temperature=c.rollout.temperature,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=c.optimizer.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_steps=100_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=updates,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Clock()],
    )
    return trainer, times


if __name__ == "__main__":
    main()
