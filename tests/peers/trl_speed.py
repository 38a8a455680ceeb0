"""Times TRL 1.16 on the work of launch/bench.py; `tests.peers.speed` calls it.

Command: uv run --no-project --isolated --with torch==2.13.0 --with trl==1.16.0 \
             --with transformers --with accelerate --with datasets \
             python -m tests.peers.trl_speed rollout|update|step [--vocab=512] [--runs=3]

Random weights. The ids of padding and of the end are beyond the model's logits, so no token ends a
response, and all have the same length. No gradient checkpointing, which TRL has on by default.
"""

import itertools
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

from tests.peers.work import Work, even_share, parse, prompt_texts, report, timed

FOREVER = 10**6


def make_tokenizer(work: Work) -> Any:
    """Tokens written as numbers."""
    vocabulary = {str(i): i for i in range(work.vocab)}
    vocabulary |= {"<end>": work.vocab, "<pad>": work.vocab + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", padding_side="left"
    )


def make_model(work: Work) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=work.vocab,
        hidden_size=work.width,
        intermediate_size=work.d_ff,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        max_position_embeddings=work.prompt_len + work.gen_len,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.Qwen2ForCausalLM(config)


def make_trainer(
    work: Work,
    *,
    num_steps: int = FOREVER,
    num_iterations: int = 1,
    callbacks: Sequence[Any] = (),
) -> Any:
    """Returns a trainer with DAPO's loss, whose every step has other prompts."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [even_share([int(word) for word in text.split()]) for text in completions]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=work.responses,
        num_generations=work.group,
        max_completion_length=work.gen_len,
        temperature=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        num_iterations=num_iterations,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=num_steps,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    batches = 1 if num_steps == FOREVER else num_steps
    prompts = [text for number in range(batches) for text in prompt_texts(work, number)]
    return GRPOTrainer(
        model=make_model(work),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=make_tokenizer(work),
        callbacks=list(callbacks),
    )


def time_rollout(work: Work) -> tuple[list[float], int]:
    trainer = make_trainer(work)
    trainer.model.train()
    trainer.model_wrapped = trainer.accelerator.prepare(trainer.model)
    prompts = [[int(word) for word in text.split()] for text in prompt_texts(work, 0)]
    prompts = [prompt for prompt in prompts for _ in range(work.group)]

    def once() -> None:
        sampled, *_ = trainer._generate_single_turn(prompts, None, {}, work.group)
        assert sum(map(len, sampled)) == work.sampled_tokens

    return timed(once, work.runs), work.sampled_tokens


def time_update(work: Work) -> tuple[list[float], int]:
    # So many passes over a batch that the trainer never samples another one.
    trainer = make_trainer(work, num_iterations=FOREVER)
    trainer.model.train()
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer = model, optimizer
    generator = torch.Generator().manual_seed(0)
    tokens = lambda length: torch.randint(
        0, work.vocab, (work.responses, length), generator=generator
    )
    prompts, responses = tokens(work.prompt_len), tokens(work.gen_len)
    rows = torch.cat([prompts, responses], 1)
    with torch.no_grad():
        old, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, rows, torch.ones_like(rows), work.gen_len
        )
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": responses,
        "completion_mask": torch.ones_like(responses),
        "advantages": torch.randn(work.responses, generator=generator),
        "old_per_token_logps": old,
        "num_items_in_batch": torch.tensor(work.sampled_tokens),
    }
    trainer._buffered_inputs, trainer._step = [batch], 1
    trainer.current_gradient_accumulation_steps = 1

    def once() -> None:
        trainer.training_step(model, None, None)
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        model.zero_grad()

    return timed(once, work.runs), work.trained_tokens


def time_step(work: Work) -> tuple[list[float], int]:
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    # The first step fills caches; the second is the first that is timed, from its end on.
    make_trainer(work, num_steps=work.runs + 1, callbacks=[Clock()]).train()
    return [later - end for end, later in itertools.pairwise(ends)], work.sampled_tokens


if __name__ == "__main__":
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_TELEMETRY="1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    report(parse(__doc__), {"rollout": time_rollout, "update": time_update, "step": time_step})
