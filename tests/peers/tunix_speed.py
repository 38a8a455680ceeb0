"""Times Tunix 0.1.7 on the work of launch/bench.py; `tests.peers.speed` calls it.

Command: uv run --no-project --isolated --with google-tunix==0.1.7 --with jax==0.10.2 \
             python -m tests.peers.tunix_speed rollout|update|step [--vocab=512] [--runs=3]

Random weights. No token ends a response, so all have the same length. An update has the pass for
old log-probs, which Tunix needs where a rollout gives none.
"""

import os
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from tests.peers.work import Work, even_share, parse, prompt_texts, report, timed

FOREVER = 10**6


class NumberTokenizer:
    """Tokens written as numbers. Padding and the end are no tokens of the model."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return 0  # means none

    def pad_id(self) -> int:
        return -1

    def eos_id(self) -> int:
        return -2


def make_model(work: Work) -> nnx.Module:
    config = qwen2.ModelConfig(
        num_layers=work.layers,
        vocab_size=work.vocab,
        embed_dim=work.width,
        hidden_dim=work.d_ff,
        num_heads=work.heads,
        head_dim=work.width // work.heads,
        num_kv_heads=work.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=np.float32,
        param_dtype=np.float32,
        remat_config=qwen2.RematConfig.NONE,
    )
    model = qwen2.Qwen2(config, rngs=nnx.Rngs(params=0))
    # Tunix begins with feed-forward layers of zeros: its logits would be those of the embedding.
    leaves, tree = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    small = lambda x, key: x if x.ndim == 1 else 0.02 * jax.random.normal(key, x.shape)
    nnx.update(model, jax.tree.unflatten(tree, list(map(small, leaves, keys))))
    return model


def make_cluster(work: Work, max_steps: int) -> rl_cluster.RLCluster:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=work.gen_len,
        max_prompt_length=work.prompt_len,
        kv_cache_size=work.prompt_len + work.gen_len,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[NumberTokenizer().eos_id()],
        seed=0,
    )
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-6),
        eval_every_n_steps=FOREVER,
        max_steps=max_steps,
        mini_batch_size=work.prompts,
        train_micro_batch_size=work.prompts,
        rollout_micro_batch_size=work.prompts,
        compute_logps_micro_batch_size=work.prompts,
    )
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        training_config=training,
        rollout_config=rollout,
    )
    return rl_cluster.RLCluster(
        actor=make_model(work), reference=None, tokenizer=NumberTokenizer(), cluster_config=config
    )


def make_learner(work: Work, cluster: rl_cluster.RLCluster) -> grpo_learner.GRPOLearner:
    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        return [even_share([int(word) for word in text.split()]) for text in completions]

    config = grpo_learner.GRPOConfig(
        num_generations=work.group, num_iterations=1, beta=0.0, loss_agg_mode="token-mean"
    )
    return grpo_learner.GRPOLearner(cluster, config, reward)


def time_rollout(work: Work) -> tuple[list[float], int]:
    cluster = make_cluster(work, FOREVER)
    prompts = [text for text in prompt_texts(work, 0) for _ in range(work.group)]

    def once() -> None:
        sampled = cluster.generate(prompts=prompts)
        assert sum(map(len, sampled.tokens)) == work.sampled_tokens

    return timed(once, work.runs), work.sampled_tokens


def time_update(work: Work) -> tuple[list[float], int]:
    cluster = make_cluster(work, FOREVER)
    make_learner(work, cluster)  # gives the cluster its loss
    rng = np.random.default_rng(0)
    tokens = lambda length: rng.integers(0, work.vocab, (work.responses, length)).astype(np.int32)
    prompts, responses = map(jax.numpy.asarray, (tokens(work.prompt_len), tokens(work.gen_len)))
    advantages = jax.numpy.asarray(rng.standard_normal(work.responses), np.float32)

    def once() -> None:
        old = cluster.get_old_per_token_logps(
            prompts, responses, micro_batch_size=work.prompts * work.group
        )
        example = grpo_learner.TrainExample(
            prompt_ids=prompts,
            prompt_mask=np.ones_like(prompts, bool),
            completion_ids=responses,
            completion_mask=np.ones_like(responses, bool),
            advantages=advantages,
            ref_per_token_logps=None,
            old_per_token_logps=old,
        )
        cluster.update_actor([example], None)
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))

    return timed(once, work.runs), work.trained_tokens


def time_step(work: Work) -> tuple[list[float], int]:
    # The first step compiles; the loop asks for another batch at the end of each.
    steps = work.runs + 2
    learner = make_learner(work, make_cluster(work, steps))
    asked = []

    def batches() -> Any:
        for number in range(steps):
            asked.append(time.perf_counter())
            yield {"prompts": np.array(prompt_texts(work, number))}

    learner.train(batches())
    return np.diff(asked)[1:].tolist(), work.sampled_tokens


if __name__ == "__main__":
    report(parse(__doc__), {"rollout": time_rollout, "update": time_update, "step": time_step})
    os._exit(0)  # Tunix leaves threads that would keep the process alive
