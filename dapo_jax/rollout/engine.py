"""A JetStream `Engine` over the decoder: prefill, insert, generate.

JetStream brings the interface; model, cache and sampler are ours. `rollout.scheduler` prefills
prompts in batches, inserts each with the number of samples wanted, and generates several tokens in
every slot a call; waiting samples get the slots that become free. JetStream's own use, one prompt
into one slot, is a batch of one prompt with one sample.
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
from jax.sharding import Mesh

from dapo_jax.config import Config
from dapo_jax.models import decoder
from dapo_jax.models.sharding import own_mesh, rollout_mesh, with_shardings
from dapo_jax.rollout import jetstream, paged
from dapo_jax.rollout.engine_config import EngineConfig, bucket_sizes, make_engine_config
from dapo_jax.rollout.jetstream import DecodeOutput
from dapo_jax.rollout.programs import Programs, RolloutParams
from dapo_jax.rollout.sampling import Mode, problem_keys
from dapo_jax.rollout.slots import DecodeState, NewRequests, Prefix
from dapo_jax.types import RunError, UserError
from dapo_jax.utils.telemetry import SILENT, Telemetry


class DecoderEngine(jetstream.Engine):
    """Generates responses for the trainer and for evaluations.

    Args:
        mesh: devices that this process generates on, see `sharding.own_mesh`.
        trained_on: the trainer's mesh; None: the same.

    Raises:
        UserError: a number of the config's `params` is outside its range.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, trained_on: Mesh | None = None):
        config.params.check()
        layout = dataclasses.replace(config.layout, **mesh.shape)
        self.config = config = dataclasses.replace(config, layout=layout)
        self._mesh = mesh
        self._programs = Programs(config, mesh, trained_on or mesh)
        prompt = config.pages(config.max_prompt_tokens)
        # Longer ones are prompts with the tokens sampled before they were preempted.
        longer = bucket_sizes(config.table_pages) if config.num_pages is not None else ()
        self.prompt_pages = (*bucket_sizes(prompt), *(n for n in longer if n > prompt))
        self._loaded: RolloutParams | None = None

    @contextlib.contextmanager
    def weights(
        self, params: decoder.Params, telemetry: Telemetry = SILENT
    ) -> Iterator[RolloutParams]:
        """Holds the rollout copy of the parameters exactly as long as the block.

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

    def load_params(self, params: decoder.Params) -> RolloutParams:
        """Returns the parameters as rollouts read them: split over tensor, in the compute dtype.

        Where they already lie so they are shared, and only CPUs copy the layers for decoding. Each
        process gets all of them, or its part of its replica's.
        """
        return self._programs.load(params)

    def init_decode_state(self) -> DecodeState:
        """Returns the state with all slots free."""
        return self._programs.init()

    def prefill(
        self,
        *,
        params: RolloutParams,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: Any,
        key_2: Any = (0, 0),
    ) -> Prefix:
        """Prefills a batch of P prompts for each of R shards, or one prompt for all shards.

        Args:
            padded_tokens: int32 [R, P, T], padded on the right to one of `prompt_pages`; or the
                tokens [T] of the one prompt, padded or not.
            true_length: tokens of each prompt, int32 [R, P]; or of the one prompt.
            key_2: uint32 key data [R, P, 2] of each prompt; or of the one prompt, the same for
                every prompt unless given.

        Raises:
            UserError: the one prompt has more tokens than `max_prefill_length`, or not
                `true_length`.
        """
        if existing_prefix is not None:
            raise ValueError("existing_prefix is not supported: prompts are prefilled whole")
        if np.ndim(padded_tokens) == 1:
            tokens, most = np.asarray(padded_tokens, np.int32), self.max_prefill_length
            if not 1 <= true_length <= len(tokens) <= most:
                raise UserError(
                    f"prefill: true_length ({true_length}) and the number of padded_tokens "
                    f"({len(tokens)}) must be 1 <= true_length <= tokens <= max_prefill_length "
                    f"({most})"
                )
            pages = next(n for n in self.prompt_pages if n >= self.config.pages(len(tokens)))
            tokens = np.pad(tokens, (0, pages * self.config.page_tokens - len(tokens)))
            one = lambda x: np.broadcast_to(x, (self.config.shards, 1, *np.shape(x)))
            padded_tokens, true_length = one(tokens), one(np.int32(true_length))
            key_2 = one(np.asarray(key_2, np.uint32))
        p = self._programs
        return p.prefill(params.prefill, *p.put((padded_tokens, true_length, key_2)))

    def insert(
        self, prefix: Prefix, decode_state: DecodeState, slot: int | NewRequests
    ) -> DecodeState:
        """Inserts prefilled prompts, whose samples wait for slots; the state is donated.

        Args:
            slot: what is wanted of each prompt; or a slot for one sample of the one prompt, which
                ends the sample inserted there before. The sample's number is the slot's.

        Raises:
            UserError: there is no such slot; or the pool of pages is bounded: JetStream's drivers
                resume no sample whose pages were taken away.
        """
        if not isinstance(slot, NewRequests):
            config, number = self.config, slot
            if not 0 <= number < config.slots:
                raise UserError(f"insert: slot ({number}) must be from 0 to {config.slots - 1}")
            if config.num_pages is not None:
                raise UserError(
                    f"insert: num_pages must be None, for a slot of its own; got "
                    f"{config.num_pages}. Use scheduler.generate, or an engine without a bound."
                )
            slot = NewRequests.none(config, 1, config.params)
            shard, request = divmod(number, config.shard_slots)
            slot.request_P[shard], slot.num_samples_P[shard] = request, 1
            slot.first_sample_P[shard] = number
        return self._programs.insert(decode_state, prefix, self._programs.put(slot))

    def generate(
        self, params: RolloutParams, decode_state: DecodeState, mode: Mode | None = None
    ) -> tuple[DecodeState, DecodeOutput]:
        """Samples up to `decode_steps` tokens in every slot; the state is donated.

        Args:
            mode: what the requests need, see `sampling`; None: the config's `params`.
        """
        program = self._programs.decode(mode or self.config.params.mode)
        return program(params.decode, decode_state)

    def cancel(
        self, state: DecodeState, request_RW: np.ndarray, sample_index_RW: np.ndarray
    ) -> DecodeState:
        """Ends samples that are in slots; the state is donated.

        Args:
            request_RW: requests of W = `config.shard_slots` samples of each shard; -1: none.
            sample_index_RW: places of the samples in their requests.
        """
        return self._programs.cancel(state, *self._programs.put((request_RW, sample_index_RW)))

    def warm_up(
        self,
        params: RolloutParams,
        modes: Iterable[Mode],
        *,
        cancels: bool = False,
        say: Callable[[str], None],
    ) -> None:
        """Compiles all programs that requests of these modes need, whatever their lengths.

        A kernel on an accelerator is checked (`check_pool`): no test has a pool of that size.

        Args:
            cancels: whether samples will be cancelled, also where pages never run short.
        """
        config = self.config
        state, P = self.init_decode_state(), config.prefill_prompts // config.shards
        shape = config.shards, P
        for pages in self.prompt_pages:
            prefix = self.prefill(
                params=params,
                padded_tokens=np.zeros((*shape, pages * config.page_tokens), np.int32),
                true_length=np.ones(shape, np.int32),
                key_2=problem_keys(np.zeros(2, np.uint32), np.zeros((*shape, 2), np.uint32)),
            )
            state = self.insert(prefix, state, NewRequests.none(config, P, config.params))
        if cancels or config.num_pages is not None:
            nothing = np.full((config.shards, config.shard_slots), -1, np.int32)
            state = self.cancel(state, nothing, nothing)
        for mode in modes:
            state, _ = self.generate(params, state, mode)
        if config.kernel != "xla" and self._mesh.devices.flat[0].platform != "cpu":
            say(self.check_pool(state))

    def pool_difference(
        self, state: DecodeState, layer: int, page: int
    ) -> tuple[DecodeState, float]:
        """Returns the state, which is donated and whose page is overwritten, and the largest
        difference of the kernel's attention over that page from XLA's."""
        at = np.array([layer, page], np.int32)
        state, difference_R = self._programs.check_page(state, at)
        own = [np.asarray(part.data).max() for part in difference_R.addressable_shards]
        return state, float(np.max(own))

    def check_pool(self, state: DecodeState) -> str:
        """Compares the kernel's attention with XLA's at the last page of the last layer.

        Returns a line about it. The state is donated.

        Raises:
            RunError: they differ by more than rounding does.
        """
        begun, config = time.monotonic(), self.config
        pool = config.pool_layout.pool(config.model, config.shard_pages)
        last = config.model.num_layers - 1, config.shard_pages - 1
        _, difference = self.pool_difference(state, *last)
        elements = max(math.prod(x.shape) for x in pool)
        where = f"the last page of the KV pool ({elements:,} elements an array and shard)"
        if not difference <= paged.MAX_DIFFERENCE:
            raise RunError(
                f"paged attention ({config.kernel}) differs by {difference:.3g} from XLA's "
                f"attention at {where}; rounding is at most {paged.MAX_DIFFERENCE:g}. Nothing was "
                "sampled. Set config.rollout.kernel='xla', or a smaller config.rollout.cache_gib."
            )
        return (
            f"paged attention ({config.kernel}) agrees with XLA's at {where}: they differ by "
            f"{difference:.2g}; {time.monotonic() - begun:.0f} s"
        )

    def lower(self, params: decoder.Params, program: str, mode: Mode) -> Any:
        """Returns one program, lowered, to be compiled ahead of time.

        Args:
            params: shapes of the rollout's parameters; for "weights" of the trainer's, with
                shardings.
            program: "decode"; "prefill" of the longest prompts; "prefill_preempted" of the longest
                preempted sequences; or "weights", the copy that `load_params` makes.
        """
        p, config = self._programs, self.config
        if program == "weights":
            return p.lower_move(params)
        if program == "decode":
            unstacked = functools.partial(jax.eval_shape, decoder.unstacked)
            params = with_shardings(p.for_decoding(params, unstacked), p.decode_params_at)
            return p.decode(mode).lower(params, with_shardings(jax.eval_shape(p.init), p.state_at))
        pages = self.prompt_pages[-1]
        if program == "prefill":
            pages = config.pages(config.max_prompt_tokens)
        R, P = config.shards, config.prefill_prompts // config.shards
        rows = lambda *shape: jax.ShapeDtypeStruct((R, P, *shape), jnp.int32)
        keys = jax.ShapeDtypeStruct((R, P, 2), jnp.uint32)
        tokens = rows(pages * config.page_tokens)
        return p.prefill.lower(with_shardings(params, p.params_at), tokens, rows(), keys)

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


def make_engine(
    config: Config, mesh: Mesh, stop_tokens: tuple[int, ...], *, max_prompt_tokens: int
) -> DecoderEngine:
    """Returns the engine of a run's config, with this process's share of the slots.

    Each process generates on its own devices; those of an inference replica do on theirs together.

    Raises:
        UserError: see `make_engine_config`.
    """
    own = own_mesh(rollout_mesh(mesh, config.mesh.rollout_tensor))
    engine_config = run_engine_config(
        config, mesh, stop_tokens, max_prompt_tokens=max_prompt_tokens
    )
    return DecoderEngine(engine_config, own, mesh)


def run_engine_config(
    config: Config, mesh: Mesh, stop_tokens: tuple[int, ...], *, max_prompt_tokens: int
) -> EngineConfig:
    """Returns the config of `make_engine`'s engine.

    Raises:
        UserError: see `make_engine_config`.
    """
    everywhere = rollout_mesh(mesh, config.mesh.rollout_tensor)
    own = own_mesh(everywhere)
    return make_engine_config(
        config,
        own.shape,
        max_prompt_tokens,
        stop_tokens,
        platform=own.devices.flat[0].platform,
        run_sizes=everywhere.shape,
    )
