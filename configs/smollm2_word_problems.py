"""DAPO on a pretrained model of 135 million parameters and generated word problems, on a laptop.

Command:   python launch/train.py --config=configs/smollm2_word_problems.py
           --config=configs/smollm2_word_problems.py:grpo is the baseline, :lora trains adapters
           --model=DIRECTORY where the hub cannot be reached
Hardware:  one device, such as 2 CPU cores; for more, another mesh and micro-batch
Time:      14 minutes on 2 cores of an AMD EPYC, 24 to 30 on those of a Xeon with other work, with
           two evaluations; 6 GB of memory
Result:    held-out avg@8 from 18.6, 17.0 and 17.8 to 70.1, 67.8 and 66.8 % (seeds 0, 1, 2; Xeon)
           and to 65.2, 61.5 and 69.3 % (EPYC), see docs/results.md; with :lora 69.9, 53.1 and
           67.6 %, see docs/lora.md
"""

from ml_collections import ConfigDict

from configs import tiny, tiny_dapo

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ONE_STEP = dict(path="word_problems", levels=(1,))
TWO_STEPS = dict(path="word_problems", levels=(2,))


def get_config(method: str = "") -> ConfigDict:
    """Returns tiny_dapo with a pretrained model, its chat template and word problems; with "lora"
    adapters of rank 16; of a method of configs/tiny.py, the lines that differ."""
    c = tiny_dapo.get_config() if method in ("", "lora") else tiny.get_config(method, ("lora",))
    c.pretrain = None
    c.model.update(path=NAME, tokenizer=NAME, vocab_size=49_152, num_layers=30, hidden_size=576)
    c.model.update(intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64)
    c.model.update(rope_theta=100_000.0, rms_norm_eps=1e-5, qkv_bias=False)
    c.mesh.data = 1
    c.model.update(stop_token_ids=(2,), log_prob_chunk_tokens=1024, remat="dots")
    c.data.update(chat=True, max_prompt_tokens=64)
    c.data.train = dict(
        one_step=dict(ONE_STEP, split="train", weight=3.0, num_problems=1200),
        two_steps=dict(TWO_STEPS, split="train", weight=1.0, num_problems=600),
    )
    c.data.heldout = dict(
        one_step=dict(ONE_STEP, split="heldout", num_problems=48),
        two_steps=dict(TWO_STEPS, split="heldout", num_problems=16),
    )
    # At temperature 1 the model is right half as often, see docs/log.md.
    c.rollout.update(max_response_tokens=64, temperature=0.6)
    c.reward.scorer = "last_number"
    c.dynamic_sampling.max_prompts = 48  # the first steps train on fewer groups
    # At a constant rate accuracy fell in the last steps of one seed, see docs/results.md.
    c.optimizer.update(learning_rate=4e-5, final_rate_share=0.1)
    c.train.update(num_steps=16, prompts_per_step=16, prompts_per_update=4, row_tokens=320)
    c.train.update(rows_per_micro_batch=2, share_prompts=True)
    c.evaluation.update(every_steps=16, num_samples=8, temperature=0.6, top_p=1.0)
    if method == "lora":  # the schedule is that of the runs of docs/lora.md
        c.model.lora_rank = 16
        c.optimizer.update(learning_rate=4e-4, final_rate_share=None)  # ten times the rate
        c.train.num_steps = c.evaluation.every_steps = 13
    return c
