"""A JetStream `Engine` over the decoder: prefill, insert, generate.

JetStream brings the interface; model, cache and sampler are ours. What the scheduler calls is
`prefill_many`, `enqueue` and `decode`: prompts are prefilled in batches and handed over with the
number of samples wanted, and a call of `decode` samples several tokens in every slot and gives
free slots to waiting samples (see `slots`). JetStream's own `prefill`, `insert` and
`generate` work on the same state: one prompt, one slot, one token.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from dapo_jax.models import decoder
from dapo_jax.rollout import jetstream, paged
from dapo_jax.rollout.engine_config import DecodeOutput, EngineConfig, Prefix, bucket_sizes
from dapo_jax.rollout.programs import Programs, RolloutParams
from dapo_jax.rollout.sampling import Mode, SamplingParams
from dapo_jax.rollout.slots import DecodeState, NewRequests
from dapo_jax.types import RunError, UserError
from dapo_jax.utils.telemetry import SILENT, Telemetry


@struct.dataclass
class Results(jetstream.ResultTokens):
    """JetStream's result with the log-prob of each token under the distribution sampled from."""

    log_prob: Any = None

    def copy_to_host_async(self) -> None:
        super().copy_to_host_async()
        if not isinstance(self.log_prob, np.ndarray):
            self.log_prob.copy_to_host_async()

    def convert_to_numpy(self) -> "Results":
        return self.replace(data=np.asarray(self.data), log_prob=np.asarray(self.log_prob))  # type: ignore[attr-defined]


class DecoderEngine(jetstream.Engine):
    """The engine the trainer samples from, and evaluates with.

    Args:
        mesh: that this process draws on, see `sharding.own_mesh`.
        trained_on: the trainer's mesh; None: the same.

    Raises:
        UserError: a number of the spec's `params` is outside its range.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, trained_on: Mesh | None = None):
        config.params.check()
        layout = dataclasses.replace(config.layout, **mesh.shape)
        self.config = config = dataclasses.replace(config, layout=layout)
        self._mesh = mesh
        self._programs = Programs(config, mesh, trained_on or mesh)
        prompt = -(-config.max_prompt_tokens // config.page_tokens)
        # Longer ones are prompts with what was drawn before their pages were taken away.
        longer = bucket_sizes(config.table_pages) if config.num_pages is not None else ()
        self.prompt_pages = (*bucket_sizes(prompt), *(n for n in longer if n > prompt))
        self._loaded: RolloutParams | None = None

    @contextlib.contextmanager
    def weights(
        self, params: decoder.Params, telemetry: Telemetry = SILENT
    ) -> Iterator[RolloutParams]:
        """Holds the rollout copy of the parameters: it lives exactly as long as the block.

        Args:
            params: in the trainer's layout.
            telemetry: its timer "weights" gets the seconds of the copy.
        """
        with telemetry.timer("weights"):
            loaded = self._loaded = jax.block_until_ready(self.load_params(params))
        try:
            yield loaded
        finally:
            del loaded
            self._loaded = None

    @property
    def loaded(self) -> RolloutParams:
        """The parameters in the rollout layout, within `weights`."""
        assert self._loaded is not None, "generation needs `with engine.weights(params)`"
        return self._loaded

    def prefill_many(
        self,
        params: RolloutParams,
        tokens_RPT: np.ndarray,
        length_RP: np.ndarray,
        key_RP2: Any,
    ) -> Prefix:
        """Keys, values and last hidden states of prompts padded on the right to whole pages."""
        p = self._programs
        return p.prefill(params.prefill, *p.put((tokens_RPT, length_RP, key_RP2)))

    def enqueue(self, state: DecodeState, prefix: Prefix, arrivals: NewRequests) -> DecodeState:
        """The state with prompts whose samples wait for slots; every array of `arrivals` has a
        leading axis for the shards. The state is donated."""
        return self._programs.enqueue(state, prefix, self._programs.put(arrivals))

    def decode(
        self, params: RolloutParams, state: DecodeState, mode: Mode
    ) -> tuple[DecodeState, DecodeOutput]:
        """Up to `decode_steps` tokens in every slot; the state is donated.

        Args:
            mode: what the requests need, see `sampling`.
        """
        return self._programs.decode(mode, self.config.decode_steps)(params.decode, state)

    def warm_up(
        self,
        params: RolloutParams,
        modes: Iterable[Mode],
        *,
        cancels: bool = False,
        say: Callable[[str], None],
    ) -> None:
        """Compiles all that requests of these modes can need, whatever their lengths. A kernel on
        an accelerator is checked (`check_pool`): no test has a pool of that size.

        Args:
            cancels: whether samples will be cancelled, also where pages never run short.
        """
        config = self.config
        shape = config.shards, config.prefill_prompts // config.shards
        state = self.init_decode_state()
        for pages in self.prompt_pages:
            tokens = np.zeros((*shape, pages * config.page_tokens), np.int32)
            ones, keys = np.ones(shape, np.int32), np.zeros((*shape, 2), np.uint32)
            prefix = self.prefill_many(params, tokens, ones, keys)
            # Entries that there are not: nothing comes of it.
            nowhere = np.full(shape, config.requests, np.int32)
            zeros = lambda *more: np.zeros((*shape, *more), np.int32)
            real = np.ones(shape, np.float32)
            asked = SamplingParams(real, real, zeros(), real)
            arrivals = NewRequests(nowhere, zeros(), zeros(), zeros(), zeros(config.samples), asked)
            state = self.enqueue(state, prefix, arrivals)
        if cancels or config.num_pages is not None:
            nobody = np.full((config.shards, config.cancelled), -1, np.int32)
            state = self.cancel(state, nobody, nobody)
        for mode in modes:
            state, _ = self.decode(params, state, mode)
        if config.kernel != "xla" and self._mesh.devices.flat[0].platform != "cpu":
            say(self.check_pool(state))

    def check_pool(self, state: DecodeState) -> str:
        """Compares the kernel's attention to the pool's last page, in the last layer, with XLA's
        attention to the same keys and values, and returns a line about it. The state is donated.

        Raises:
            RunError: they differ by more than rounding does.
        """
        begun, config = time.monotonic(), self.config
        pool = config.pool_layout.pool(config.model, config.shard_pages)
        last = np.array([config.model.num_layers - 1, config.shard_pages - 1], np.int32)
        _, difference_R = self._programs.check_last_page(state, last)
        own = [np.asarray(part.data).max() for part in difference_R.addressable_shards]
        difference, elements = float(np.max(own)), max(math.prod(x.shape) for x in pool)
        where = f"the last page of the KV pool ({elements:,} elements an array and shard)"
        if not difference <= paged.MAX_DIFFERENCE:
            raise RunError(
                f"paged attention ({config.kernel}) differs by {difference:.3g} from XLA's "
                f"attention at {where}; rounding is at most {paged.MAX_DIFFERENCE:g}. Nothing "
                "was sampled. Set "
                "config.rollout.kernel='xla', or a smaller config.rollout.cache_gib."
            )
        return (
            f"paged attention ({config.kernel}) is that of XLA at {where}: they differ by "
            f"{difference:.2g}; {time.monotonic() - begun:.0f} s"
        )

    def cancel(
        self, state: DecodeState, request_RW: np.ndarray, sample_index_RW: np.ndarray
    ) -> DecodeState:
        """The state without these samples, W of each shard (the scheduler's calls have
        `EngineConfig.cancelled`), where -1 stands for none; it is donated."""
        return self._programs.cancel(state, *self._programs.put((request_RW, sample_index_RW)))

    def prefill(
        self,
        *,
        params: RolloutParams,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: int,
        key_2: Any = (0, 0),
    ) -> Prefix:
        """One prompt, on every shard. JetStream's interface has no place for its random key:
        `key_2` is key data, the same for every prompt unless given.

        Raises:
            UserError: there are more tokens than `max_prefill_length`, or not `true_length`.
        """
        if existing_prefix is not None:
            raise ValueError("existing_prefix is not supported: prompts are prefilled whole")
        A, R = self.config.page_tokens, self.config.shards
        tokens, most = np.asarray(padded_tokens), self.max_prefill_length
        if not 1 <= true_length <= len(tokens) <= most:
            raise UserError(
                f"prefill: true_length ({true_length}) and the number of padded_tokens "
                f"({len(tokens)}) must be 1 <= true_length <= tokens <= max_prefill_length ({most})"
            )
        pages = next(n for n in self.prompt_pages if n * A >= len(tokens))
        tokens_RPT = np.zeros((R, 1, pages * A), np.int32)
        tokens_RPT[:, 0, : len(tokens)] = tokens
        keys_RP2 = np.broadcast_to(np.asarray(key_2, np.uint32), (R, 1, 2))
        return self.prefill_many(
            params, tokens_RPT, np.full((R, 1), true_length, np.int32), keys_RP2
        )

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """The prompt of the prefix into one slot; its sample number is the slot's. Not for a state
        with prompts from `enqueue`: the pool is sized for the one or the other.

        Raises:
            UserError: there is no such slot; or the pool does not hold all of them at their
                longest: here nobody would notice that one waits for a page.
        """
        config = self.config
        if not 0 <= slot < config.slots:
            raise UserError(f"insert: slot ({slot}) must be from 0 to {config.slots - 1}")
        need = config.shards * (1 + config.slots // config.shards * config.table_pages)
        if config.num_pages is not None and config.num_pages < need:
            raise UserError(
                f"insert: num_pages ({config.num_pages}) must be {need} for {config.slots} slots "
                f"of {config.max_tokens} tokens: give more, or None, or use scheduler.generate"
            )
        return self._programs.place(decode_state, prefix, np.int32(slot))

    def generate(
        self, params: RolloutParams, decode_state: DecodeState
    ) -> tuple[DecodeState, Results]:
        """One more token in every slot; the state is donated. Invalid where a slot is empty."""
        one = self._programs.one(self.config.params.mode)
        state, data, log_prob = one(params.decode, decode_state)
        return state, Results(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
            log_prob=log_prob,
        )

    @property
    def copies_layers(self) -> bool:
        """Whether `load_params` has the layers once more, for decoding alone."""
        return self._programs.unroll

    def init_decode_state(self) -> DecodeState:
        """All slots empty."""
        return self._programs.init()

    def load_params(self, params: decoder.Params) -> RolloutParams:
        """The parameters as rollouts read them: split over the tensor axis only, matrices in the
        compute dtype. Where that is how they are, they are shared and nothing is copied but the
        layers for decoding on CPUs; of several processes each gets all of them, or its part of a
        team's."""
        return self._programs.load(params)

    def lower(self, params: decoder.Params, program: str, mode: Mode) -> Any:
        """One program, lowered, to be compiled ahead of time: "decode", "prefill" of the longest
        prompts, or "prefill_preempted" of the longest sequences whose pages were taken away, for
        shapes of the parameters; or "weights", what `load_params` runs where it copies, for shapes
        of the trainer's, with shardings."""
        p, config = self._programs, self.config
        if program == "weights":
            return p.to_rollout.lower(params)
        sharded = lambda shapes, at: jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, at
        )
        if program == "decode":
            one_by_one = functools.partial(jax.eval_shape, decoder.unstacked)
            params = sharded(p.for_decoding(params, one_by_one), p.decode_params_at)
            state = sharded(jax.eval_shape(p.init), p.state_at)
            return p.decode(mode, config.decode_steps).lower(params, state)
        params = sharded(params, p.params_at)
        R, P = config.shards, config.prefill_prompts // config.shards
        T = next(n for n in self.prompt_pages if n * config.page_tokens >= config.max_prompt_tokens)
        T = self.prompt_pages[-1] if program == "prefill_preempted" else T
        rows = lambda *shape: jax.ShapeDtypeStruct((R, P, *shape), jnp.int32)
        keys = jax.ShapeDtypeStruct((R, P, 2), jnp.uint32)
        return p.prefill.lower(params, rows(T * config.page_tokens), rows(), keys)

    def get_prefix_destination_sharding(self) -> Any:
        return None  # prefill and decode share one mesh

    def get_tokenizer(self) -> Any:
        raise NotImplementedError("tokenizers are transformers', outside the engine")

    @property
    def max_concurrent_decodes(self) -> int:
        return self.config.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.config.max_prompt_tokens

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None
