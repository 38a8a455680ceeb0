"""JetStream 0.2.2's interface, imported without seqio and TensorFlow.

`engine_api` imports seqio and tiktoken for tokenizers that are not used here. Where they are not
installed, empty modules stand in for them while JetStream is imported, and only then.
"""

import logging
import sys
import types

from absl import logging as absl_logging


def _import_engine_api() -> types.ModuleType:
    class Unavailable:
        """Named in JetStream's annotations only."""

    stand_ins: dict[str, types.ModuleType] = {}
    for name, attributes in {
        "seqio": (),
        "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary"),
        "tiktoken": (),
        "tiktoken.load": ("load_tiktoken_bpe",),
    }.items():
        # An installed seqio is left out as well: importing it would load TensorFlow.
        module = types.ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, Unavailable)
        stand_ins[name] = module
    shadowed = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    level = logging.getLogger().level, absl_logging.get_verbosity()
    sys.modules.update(stand_ins)
    try:
        from jetstream.engine import engine_api
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(shadowed)
        logging.getLogger().setLevel(level[0])
        absl_logging.set_verbosity(level[1])
    return engine_api


engine_api = _import_engine_api()
Engine = engine_api.Engine
ResultTokens = engine_api.ResultTokens
SlotData = engine_api.SlotData
