"""Whether peft reads an exported adapter as we do.

Command: python launch/export.py --workdir=RUN --output=DIR --adapter
         python tests/goldens/check_adapter.py DIR FILE.npz   # where torch and peft are installed
         python -m tests.goldens.check_adapter DIR FILE.npz   # here

The first writes the logits of one text by peft, the second compares ours with them.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

TEXT = "Anna has 12 apples and gives 5 to Ben. How many apples does she have? The answer is 7."


def by_peft(adapter):
    """(tokens, logits)"""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)).eval()
    tokens = AutoTokenizer.from_pretrained(adapter)(TEXT, return_tensors="pt")
    with torch.no_grad():
        return tokens["input_ids"][0].numpy(), model(**tokens).logits[0].numpy()


def by_us(adapter, tokens_T):
    """Logits [T, V]."""
    from dapo_jax.models import pretrained
    from tests.support import checkpoints
    from tests.support.helpers import logits_of, make_mesh

    config = checkpoints.config_of(adapter)
    params = pretrained.load(config.model, config.mesh, make_mesh(config, 1), seed=0)
    return np.asarray(logits_of(config.model, params, tokens_T))


if __name__ == "__main__":
    adapter, file = map(Path, sys.argv[1:])
    if importlib.util.find_spec("peft"):
        tokens_T, logits_TV = by_peft(adapter)
        np.savez(file, tokens_T=tokens_T, logits_TV=logits_TV)
    else:
        stored = np.load(file)
        gap = np.abs(by_us(adapter, stored["tokens_T"]) - stored["logits_TV"]).max()
        print(
            f"largest difference {gap:.1e}, of logits up to {np.abs(stored['logits_TV']).max():.0f}"
        )
