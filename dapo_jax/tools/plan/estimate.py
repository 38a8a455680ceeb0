"""Operations, bytes and times of a run's programs, by arithmetic.

Nothing is read from a compiler. A multiplication with its addition counts as two operations. Only
matrix products count, and only bytes that must move: matrices, the KV cache, inputs and outputs of
products. Formulas use the letters of `types`.

A program takes the longest of three times: operations at a share of the chip's peak, bytes at a
share of its memory's rate, bytes received at a share of its links' rate. "At best" has shares of 1.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dapo_jax.config import Config, ModelConfig, RolloutConfig
from dapo_jax.models import decoder, lora
from dapo_jax.models.attention import kernels, xla
from dapo_jax.models.sharding import rollout_shape
from dapo_jax.rollout import paged
from dapo_jax.rollout.engine_config import PREFILL_CHUNK_TOKENS
from dapo_jax.rollout.programs import rollout_dtypes
from dapo_jax.tools.plan.chips import Chip
from dapo_jax.training.packing import max_micro_batches

LINK_SHARE = 0.5  # assumed; no source
ROW_FILL = 0.95  # share of a packed row that holds tokens; assumed
# A TPU makes a float32 product of six of bfloat16, whose rate a chip's peak is. On GPU it is slower
# still, which is not counted.
FLOAT32_PRODUCTS = 6
SLOTS_BUSY = 0.9  # share of the slots in use while responses wait; assumed
TRAINED = ("train", "critic_train")
BATCHED = ("old_logprobs", "train", "critic_values", "critic_train")  # programs over packed rows


class Work(NamedTuple):
    """Costs of one call of a program, on one device."""

    flops: float
    memory_bytes: float  # least number read or written
    received_bytes: float = 0.0  # from other devices


class Seconds(NamedTuple):
    """Times of one call, each as if it were the only one."""

    compute: float
    memory: float
    links: float

    @property
    def longest(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return self._fields[self.index(self.longest)]


def at_best(work: Work, chip: Chip) -> Seconds | None:
    """Returns times at the chip's stated rates; None where they are not known."""
    if chip.flops is None or chip.memory_rate is None or chip.link_rate is None:
        return None
    return Seconds(
        work.flops / chip.flops,
        work.memory_bytes / chip.memory_rate,
        work.received_bytes / chip.link_rate,
    )


def expected(work: Work, chip: Chip) -> Seconds | None:
    """Returns times at the shares of those rates that programs should reach."""
    best = at_best(work, chip)
    if best is None:
        return None
    return Seconds(
        best.compute / chip.products_share, best.memory / chip.memory_share, best.links / LINK_SHARE
    )


class Matrices(NamedTuple):
    """Elements of the matrices that multiply each token."""

    attention: int  # L D H (2 N + 2 K): q, k, v and the output projection
    gate_up: int  # 2 L D F
    down: int  # L F D
    head: int  # V D

    @property
    def layers(self) -> int:
        return self.attention + self.gate_up + self.down


def matrices(c: ModelConfig) -> Matrices:
    """Returns the matrix sizes of a model."""
    return Matrices(
        c.num_layers * c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads),
        2 * c.num_layers * c.hidden_size * c.intermediate_size,
        c.num_layers * c.hidden_size * c.intermediate_size,
        c.vocab_size * c.hidden_size,
    )


def head_products(c: ModelConfig) -> int:
    """Returns the elements of the head that multiply each token, in products of the compute
    dtype."""
    is_wider = c.compute_dtype == "bfloat16" and c.base_dtype == "float32"
    return matrices(c).head * (FLOAT32_PRODUCTS if c.head_dtype is not None and is_wider else 1)


def with_dtype(chip: Chip, c: ModelConfig) -> Chip:
    """Returns the chip with its peak in products of the model's compute dtype."""
    if chip.flops is None or c.compute_dtype != "float32":
        return chip
    return chip._replace(flops=chip.flops / FLOAT32_PRODUCTS)


@functools.cache
def adapters(c: ModelConfig) -> int:
    """Returns the elements of all adapters."""
    return sum(x.size for x in jax.tree.leaves(lora.split(decoder.param_shapes(c))[0]))


def attention_flops(c: ModelConfig, pairs: float) -> float:
    """Returns the forward operations of attention for `pairs` of a query and a key in each layer:
    4 L N H pairs. A score and a weighted value take 2 H each.
    """
    return 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs


def model_flops(config: Config, sequence_tokens: float) -> float:
    """Returns the operations that training needs for one token, if nothing is computed twice:

        6 (matrix elements) + 6 L N H S

    The second term is causal attention, 3 x 4 L N H x S / 2, in a sequence of S tokens. With
    adapters the first is 4 (matrix elements): no gradients of matrices.
    """
    c, m = config.model, matrices(config.model)
    attention = 3 * attention_flops(c, sequence_tokens / 2)
    return product_passes(c) * (m.layers + m.head) + attention


def product_passes(c: ModelConfig) -> float:
    """Returns the operations that training needs for one element of a matrix and one token."""
    return 4.0 if c.lora_rank else 6.0


def kernel(config: Config, platform: str) -> str:
    """Returns the attention program of the update, see `kernels.Choice`."""
    c, share_prompts = config.model, config.train.share_prompts
    if c.attention != "auto":
        return "xla" if share_prompts else c.attention
    chosen, rules = kernels.KERNELS.get(platform, "xla"), dict(config.mesh.rules)
    unaligned = None if rules.get("heads") == rules.get("kv_heads") else "heads and kv_heads"
    refused = kernels.refusal(
        c, chosen, context=config.mesh.context, unaligned=unaligned, share_prompts=share_prompts
    )
    return chosen if refused is None else "xla"


def keys_per_query(config: Config, platform: str, sequence_tokens: float) -> float:
    """Returns the mean number of keys that training computes per query.

    Splash attention computes the blocks of b tokens that a sequence of S touches below the
    diagonal: S^2 / 2 + 3 S b / 2 pairs, at most a whole row; b is the mean of the blocks of queries
    and of keys, where they differ. So does cuDNN's. Flash attention computes all blocks of a row
    below the diagonal. XLA's computes each part of a row against all keys up to the end of
    the part, and whole rows where a row lies on several devices.
    """
    row, name = config.train.row_tokens, kernel(config, platform)
    if name == "flash":
        return (row + kernels.FLASH_BLOCK) / 2
    if name == "cudnn":
        return min(sequence_tokens + 3 * kernels.FLASH_BLOCK, row + kernels.FLASH_BLOCK) / 2
    if name == "splash":
        blocks = config.model.kernel_blocks
        full, of_queries = kernels.splash_sizes(row, kernels.OF_QUERIES, blocks)
        full_kv, of_keys = kernels.splash_sizes(row, kernels.OF_KEYS, blocks)
        full, block = max(full, full_kv), (of_queries["q"] + of_keys["kv"]) / 2
        return min(sequence_tokens + 3 * block, full + block) / 2
    if config.mesh.context > 1:
        return row
    size = max(xla.LEAST_PART, -(-row // xla.PARTS))
    size += -size % xla.QUERY_CHUNK if row > xla.LONG_ROW else 0
    ends = [min(start + size, row) for start in range(0, row, size)]
    return sum((end - start) * end for start, end in zip([0, *ends], ends)) / row


class Passes(NamedTuple):
    """Repetitions of the forward pass of each product in an update, for `model.remat`."""

    attention: float  # q, k, v and the output projection
    gate_up: float
    down: float
    scores: float  # of attention itself


def recomputed(config: Config, platform: str) -> Passes:
    """Returns what the backward pass computes again. A layer's last product is never needed again.

    Splash attention alone names what its backward pass reads, so that remat can keep it. `dots`
    keeps XLA's scores; those of a long row are always computed again.
    """
    remat, name = config.model.remat, kernel(config, platform)
    long = name == "xla" and config.train.row_tokens > xla.LONG_ROW
    scores = {
        "none": 0.0,
        "dots": 0.0 if name == "xla" else 1.0,
        "dots_no_batch": 1.0,
        "attention_mlp": 0.0 if name == "splash" else 1.0,
        "attention": 0.0 if name == "splash" else 1.0,
        "full": 1.0,
    }[remat]
    again = {"attention_mlp": (1, 0), "attention": (1, 1), "full": (1, 1)}.get(remat, (0, 0))
    return Passes(*again, 0, scores + long)


def batch_work(
    config: Config,
    sizes: Mapping[str, int],
    platform: str,
    program: str,
    *,
    micro_batches: float,
    sequence_tokens: float,
) -> Work:
    """Returns the costs of a program over packed rows, one of BATCHED.

    Operations for each token of the rows, padding included:

        scoring   2 (layers + head) + attention
        update    3 x 2 (layers + head) for the loss and its gradients; 2 head for the logits again;
                  what `recomputed` names; attention 1 forward and 3.5 backward in kernels (7
                  products against 2), 2 in XLA's

    Each pass moves the matrices once, and inputs and outputs of products once. An update also adds
    to the gradients, and at its end reads and writes parameters and moments. With adapters there
    are no gradients of the matrices; the adapters' own products are left out.

    Received: matrices gathered over fsdp and context, forward and backward, and their gradients
    reduced; a device's part of these summed over data; activations summed over tensor, after
    attention and after the MLP, each pass; and with context keys and values of whole rows, and
    their gradients in float32.

    Args:
        sizes: sizes of the mesh's axes.
        sequence_tokens: mean length of a sequence, prompt included.
    """
    c, t = config.model, config.train
    m, update = matrices(c), program in TRAINED
    devices = math.prod(sizes.values())
    tensor, parts = sizes["tensor"], sizes["fsdp"] * sizes["context"]
    width = jnp.dtype(c.compute_dtype).itemsize
    tokens = t.rows_per_micro_batch * t.row_tokens
    own_tokens = tokens * tensor / devices  # of a device: tensor splits no tokens
    head = 0 if program.startswith("critic") else m.head
    again = recomputed(config, platform) if update else Passes(0, 0, 0, 0)
    remade = again.attention * m.attention + again.gate_up * m.gate_up

    # Passes over layers, head and attention, in units of a forward pass.
    grads = 0 if c.lora_rank else 1  # products that make the gradients of matrices
    backward = 2 if kernel(config, platform) == "xla" else 3.5
    of_scores = 1 + (backward + again.scores if update else 0)
    of_layers, of_head = (2 + grads, 3 + grads) if update else (1, 1)
    head_work = head_products(c) if head else 0
    pairs = keys_per_query(config, platform, sequence_tokens)
    in_layers = 2 * (of_layers * m.layers + remade) + of_scores * attention_flops(c, pairs)
    flops = tokens * (in_layers + 2 * of_head * head_work)

    passes = of_layers + remade / m.layers
    heads, kv, ff = (n / tensor for n in (c.num_heads, c.num_kv_heads, c.intermediate_size))
    ends = 4 * c.hidden_size + (2 * heads + 2 * kv) * c.head_dim + 3 * ff
    weights = matrix_width(c) * m.layers + width * head
    moved = passes * (weights / tensor + width * own_tokens * c.num_layers * ends)
    own = (m.layers + head) / tensor / parts
    if c.lora_rank:
        own = adapters(c) / tensor / parts
    if update:
        moved += 2 * 4 * own

    stage = 2 if update else 1
    reduced = width * grads * (m.layers + head) if update else 0
    gathered = (stage * weights + reduced) / tensor * (1 - 1 / parts)
    gathered += 2 * reduced / tensor / parts * (1 - 1 / sizes["data"])
    sums = 2 * stage + (1 if again.attention else 0)
    summed = sums * c.num_layers * own_tokens * c.hidden_size * 2 * (1 - 1 / tensor)
    rows = own_tokens * sizes["context"] * 2 * kv * c.head_dim * (1 - 1 / sizes["context"])
    received = gathered
    received += width * (summed + (stage + bool(again.attention)) * c.num_layers * rows)
    received += 4 * c.num_layers * rows if update else 0

    total = Work(micro_batches * flops / devices, micro_batches * moved, micro_batches * received)
    if not update:
        return total
    # Parameters and moments are read and written, gradients read.
    state_bytes = own * (2 * jnp.dtype(c.trained_dtype).itemsize + 4 * 4 + 4)
    return total._replace(memory_bytes=total.memory_bytes + state_bytes)


def decode_token(config: Config, devices: int, *, slots: int, cached_tokens: float) -> Work:
    """Returns the costs of one token in all slots of one replica:

        operations   2 (layers + head) slots + attention of `cached_tokens` pairs
        bytes        all weights once, and the cache of every sequence

    Args:
        devices: of the replica. They share both evenly; their exchange is left out.
        cached_tokens: of all sequences in slots together.
    """
    c = config.model
    in_layers = 2 * slots * matrices(c).layers + attention_flops(c, cached_tokens)
    flops = in_layers + 2 * slots * head_products(c)
    read = weight_bytes(config.model) + cached_tokens * token_bytes(config.model, config.rollout)
    return Work(flops / devices, read / devices)


def prefill_call(config: Config, devices: int, *, prompts: int, prompt_tokens: int) -> Work:
    """Returns the costs of one prefill call of one replica. A chunk attends to all of a padded
    prompt, reads the layers' weights and the cache of the prompts; it computes no logits.

    Args:
        prompt_tokens: length to which prompts are padded.
    """
    c, tokens = config.model, prompts * prompt_tokens
    flops = 2 * tokens * matrices(c).layers + attention_flops(c, tokens * prompt_tokens)
    chunks = math.ceil(prompt_tokens / PREFILL_CHUNK_TOKENS)
    layers = matrices(c).layers * matrix_width(c)
    read = chunks * (layers + tokens * token_bytes(c, config.rollout))
    return Work(flops / devices, read / devices)


def weights_call(config: Config, sizes: Mapping[str, int]) -> Work:
    """Returns the costs of weight resharding: a device reads its share of the trainer's parameters,
    writes its share of the replica's, and receives what it lacks of that."""
    c, parts = config.model, math.prod(sizes.values()) // sizes["data"]  # of the parameters
    m, whole = matrices(c), replica_bytes(c)
    ends = m.head * (1 if c.tie_embeddings else 2)
    width = lambda dtype: jnp.dtype(dtype).itemsize
    copy = whole / rollout_shape(sizes, config.mesh.rollout_tensor)["tensor"]
    read = (m.layers * width(c.matrix_dtype) + ends * width(c.base_dtype)) / parts
    return Work(0.0, read + copy, max(0.0, copy - whole / parts))


def replica_bytes(c: ModelConfig) -> int:
    """Returns the bytes of the parameters of a replica of the rollout."""
    m, width = matrices(c), lambda dtype: jnp.dtype(dtype).itemsize
    head = c.compute_dtype if c.head_dtype is None else c.base_dtype
    embedding = 0 if c.tie_embeddings else m.head * width(c.compute_dtype)
    return m.layers * matrix_width(c) + m.head * width(head) + embedding


def matrix_width(c: ModelConfig) -> int:
    """Returns the bytes of a weight of a layer as products read it."""
    return jnp.dtype("int8" if c.matrix_dtype == "int8" else c.compute_dtype).itemsize


@functools.cache
def weight_bytes(c: ModelConfig) -> int:
    """Returns the bytes of the parameters that a decode step reads, in the dtypes of decoding. An
    embedding that is not also the unembedding does not count."""
    shapes: Any = jax.eval_shape(functools.partial(rollout_dtypes, c), decoder.param_shapes(c))
    size = lambda x: x.size * x.dtype.itemsize
    whole = sum(map(size, jax.tree.leaves(shapes)))
    return whole - (0 if c.tie_embeddings else size(shapes["embed"]))


@functools.cache
def token_bytes(c: ModelConfig, r: RolloutConfig) -> float:
    """Returns the bytes of keys and values of one token in all layers."""
    layout = paged.Layout("xla", r.page_tokens, c.compute_dtype)
    return paged.page_bytes(c, layout) / r.page_tokens


def scoring_passes(config: Config) -> int:
    """Returns how often a step computes log-probs of its batch outside the update."""
    o, recompute = config.objective, config.rollout.log_prob_source == "recompute"
    passes = recompute, config.reads_current_log_probs
    return sum((*passes, o.reads_reference, o.reads("energy_M"), o.reads_entropy))


def group_tokens(config: Config, prompt_tokens: int, response_tokens: int) -> int:
    """Returns the tokens in packed rows of the G responses to a prompt, with all its copies."""
    t, G = config.train, config.rollout.group_size
    copies = G
    if t.share_prompts:  # once in each row that the group needs; all but its last token is shared
        copies = min(G, math.ceil(G * (response_tokens + 1) / (t.row_tokens - prompt_tokens + 1)))
    return G * (response_tokens + 1) + copies * (prompt_tokens - 1)


def step(
    config: Config,
    sizes: Mapping[str, int],
    chip: Chip,
    *,
    response_tokens: int,
    prompt_tokens: int,
    trained_prompts: int | None = None,
) -> dict[str, Any]:
    """Returns an RL step of these mean lengths: batch arithmetic, and calls, costs and seconds of
    each program. `assumptions` lists what they rest on.

    Responses to prompts that dynamic sampling leaves out are not included: the simulator has them.

    Args:
        trained_prompts: of a short batch; None: of a full one.
    """
    t, r, chip = config.train, config.rollout, with_dtype(chip, config.model)
    batch = t.prompts_per_step if trained_prompts is None else trained_prompts
    responses = batch * r.group_size
    tokens = batch * group_tokens(config, prompt_tokens, response_tokens)
    updates = math.ceil(batch / t.prompts_per_update)
    rows = math.ceil(tokens / max(1, updates) / (t.row_tokens * ROW_FILL))
    micro = min(math.ceil(rows / t.rows_per_micro_batch), max_micro_batches(config))
    replica = rollout_shape(sizes, config.mesh.rollout_tensor)
    devices = replica["tensor"]
    shards = math.prod(replica.values()) // devices
    slots, prompts = r.slots // shards, r.prefill_prompts // shards
    tokens_a_slot = max(responses * response_tokens / (r.slots * SLOTS_BUSY), r.max_response_tokens)
    live = min(slots * SLOTS_BUSY, responses / shards)
    cached = live * (prompt_tokens + response_tokens / 2)
    token = decode_token(config, devices, slots=slots, cached_tokens=cached)
    prefill = prefill_call(config, devices, prompts=prompts, prompt_tokens=prompt_tokens)
    weights = weights_call(config, sizes)
    m = config.model
    in_dtype = bool(m.lora_rank) or m.param_dtype == m.compute_dtype
    shared = in_dtype and not weights.received_bytes
    works = {
        "weights": (0 if shared else 1, weights),
        "prefill": (math.ceil(t.prompts_per_step / r.prefill_prompts), prefill),
        "decode": (
            math.ceil(tokens_a_slot / r.decode_steps),
            Work(*(r.decode_steps * x for x in token)),
        ),
    }
    times = {"old_logprobs": scoring_passes(config) * updates, "train": updates}
    if config.critic is not None:
        times |= {"critic_values": updates, "critic_train": updates}
    lengths = dict(micro_batches=micro, sequence_tokens=prompt_tokens + response_tokens)
    for name, calls in times.items():
        works[name] = calls, batch_work(config, sizes, chip.platform, name, **lengths)
    parts = {}
    for name, (calls, work) in works.items():
        best, likely = at_best(work, chip), expected(work, chip)
        if calls:
            parts[name] = {
                "calls": calls,
                **work._asdict(),
                "bound": None if likely is None else likely.bound,
                "seconds_at_best": None if best is None else calls * best.longest,
                "seconds": None if likely is None else calls * likely.longest,
            }
    known, is_float32 = chip.flops is not None, config.model.compute_dtype == "float32"
    total = lambda name: sum(part[name] for part in parts.values()) if known else None
    return {
        "response_tokens": response_tokens,
        "prompt_tokens": prompt_tokens,
        "responses": responses,
        "tokens": tokens,
        "updates": updates,
        "rows_per_update": rows,
        "micro_batches_per_update": micro,
        "parts": parts,
        "seconds_at_best": total("seconds_at_best"),
        "seconds": total("seconds"),
        "assumptions": (
            f"{chip.products_share:.0%} of the peak in products, {chip.memory_share:.0%} of the "
            f"rate of memory, {LINK_SHARE:.0%} of that of links; rows {ROW_FILL:.0%} full; "
            f"{SLOTS_BUSY:.0%} of the slots busy; one response as long as "
            "config.rollout.max_response_tokens; no time for rewards, the host, evaluation, "
            "checkpoints and prompts that dynamic sampling leaves out (see --simulate_hosts)"
            + (f"; a float32 product is {FLOAT32_PRODUCTS} of bfloat16" if is_float32 else "")
        ),
    }
