"""Supervised fine-tuning of a pretrained model on written solutions, a warm start for DAPO.

Command:   python launch/sft.py --config=configs/sft_word_problems.py
           --model=DIRECTORY where the hub cannot be reached
           python launch/train.py --config=configs/smollm2_word_problems.py
           --model=runs/sft_word_problems --workdir=runs/smollm2_after_sft
           --config.optimizer.learning_rate=4e-6, a lower rate than the base's: docs/sft.md
Hardware:  one device, such as 2 CPU cores
Result:    10 steps; held-out loss from 1.280 to 0.073 nats a token, avg@8 on the held-out problems
           of smollm2_word_problems from 18.6 to 68.9 % (seed 0): docs/sft.md
"""

from ml_collections import ConfigDict

from configs import smollm2_word_problems


def get_config() -> ConfigDict:
    """Returns the model and the chat template of smollm2_word_problems, and its training problems
    with solutions. The held-out problems have other numbers."""
    rl = smollm2_word_problems.get_config()
    c = ConfigDict()
    c.model, c.mesh = rl.model, rl.mesh
    one, two = smollm2_word_problems.ONE_STEP, smollm2_word_problems.TWO_STEPS
    c.data = dict(chat=rl.data.chat)
    c.data.train = dict(
        one_step=dict(one, split="train", num_examples=240),
        two_steps=dict(two, split="train", num_examples=80),
    )
    c.data.heldout = dict(
        one_step=dict(one, split="heldout", num_examples=48),
        two_steps=dict(two, split="heldout", num_examples=16),
    )
    c.optimizer = dict(learning_rate=4e-5, warmup_steps=2, final_rate_share=0.1, betas=(0.9, 0.99))
    c.train = dict(num_epochs=1, examples_per_update=32, row_tokens=320, rows_per_micro_batch=2)
    c.evaluation = dict(every_steps=5)
    c.checkpoint = dict(every_steps=5)
    return c
