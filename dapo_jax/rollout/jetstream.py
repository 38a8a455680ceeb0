"""JetStream 0.2.2's interface, imported without seqio and TensorFlow, and our result of `generate`.

`engine_api` imports seqio and tiktoken for tokenizers that are not used here. Empty modules stand
in for them while JetStream is imported, and only then.
"""

import sys
import types
from typing import Any

import jax
import numpy as np
from flax import struct


def _import_engine_api() -> types.ModuleType:
    stand_ins: dict[str, types.ModuleType] = {}
    for name, attributes in {
        "seqio": (),
        "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary"),
        "tiktoken": (),
        "tiktoken.load": ("load_tiktoken_bpe",),
    }.items():
        # An installed seqio is left out as well: importing it would load TensorFlow.
        stand_ins[name] = module = types.ModuleType(name)
        vars(module).update(dict.fromkeys(attributes, object))  # named in annotations only
    shadowed = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        from jetstream.engine import engine_api
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(shadowed)
    return engine_api


engine_api = _import_engine_api()
Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
SlotData = engine_api.SlotData

VALID, OVER, NOT_FINITE = 1, 2, 4  # flags of a token: sampled; ends its response; logits not finite


@struct.dataclass
class DecodeOutput(ResultTokens):
    """Tokens of one `generate` call: R shards, up to k tokens in each of a shard's B slots.

    `data` [R, k, B, 3] holds the token, its flags and the response's length with it.
    """

    log_prob_RkB: Any  # float32, under the distribution that the token was sampled from
    model_log_prob_RkB: Any  # float32, under the untempered model
    request_RkB: Any  # int32
    sample_index_RkB: Any  # int32, place among the request's samples
    waiting_Rk: Any  # int32, samples without a slot when the tokens were sampled
    free_R: Any  # int32, free pages after the call

    @classmethod
    def of(cls, data: Any, *fields: Any) -> "DecodeOutput":
        """Returns the output with JetStream's description of `data`."""
        return cls(data, (0, 1), (1, 2), (2, 3), 1, *fields)

    @property
    def token_RkB(self) -> Any:
        return self.data[..., 0]

    @property
    def flags_RkB(self) -> Any:
        return self.data[..., 1]

    def copy_to_host_async(self) -> None:
        jax.tree.map(lambda x: x.copy_to_host_async(), self)

    def convert_to_numpy(self) -> "DecodeOutput":
        return jax.tree.map(np.asarray, self)

    def get_result_at_slot(self, slot: int) -> Any:
        """Returns the tokens of the prompt inserted at `slot`, as `SlotData` with k tokens.

        That prompt is request `slot % B` of shard `slot // B`. Its sequence may be in any slot.
        """
        shard, request = divmod(slot, self.request_RkB.shape[2])
        own_kB = (self.request_RkB[shard] == request) & (self.flags_RkB[shard] & VALID > 0)
        rows_k3 = np.where(own_kB[..., None], self.data[shard], 0).sum(axis=1)
        valid_1k = rows_k3[None, :, 1] & VALID
        return SlotData(rows_k3[None, :, 0], valid_1k, rows_k3[:, 2].max(keepdims=True))
