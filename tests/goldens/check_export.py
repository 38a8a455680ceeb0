"""The checkpoints that we write give transformers the logits it had before: run by hand.

Needs both environments, ours to write and one with torch (see make_logits.py) to read:

    .venv/bin/python -m tests.goldens.check_export write /tmp/exported
    /tmp/torchenv/bin/python tests/goldens/check_export.py read /tmp/exported

`write` takes each model of logits.npz through `weights.load`, `weights.save` and `hf_config.to_hf`.
`read` opens each with AutoModelForCausalLM.from_pretrained, prints the worst difference to the
logits of logits.npz, and fails above 1e-4, or if a tensor is missing or left over. With
transformers 5.23.0 and torch 2.15.0 the difference is 0.0 for all eleven: the weights come back
bit for bit.
"""

import json
import sys
from pathlib import Path

import numpy as np

ATOL = 1e-4
GOLDENS = Path(__file__).parent / "logits.npz"


def write(place: Path) -> None:
    """A directory `in` as transformers wrote it and `out` as we do, for each family."""
    from dapo_jax.config import hf_config
    from dapo_jax.models import hf_weights
    from tests.support import checkpoints

    for family in checkpoints.golden_families():
        golden = checkpoints.golden(family)
        ours, out = place / family / "in", place / family / "out"
        out.mkdir(parents=True, exist_ok=True)
        checkpoints.write(ours, golden.config, golden.weights)
        config = checkpoints.config_of(ours).model
        hf_weights.save(config, checkpoints.load(checkpoints.config_of(ours)), out, "float32")
        values = hf_config.to_hf(config, eos=[2], bos=1, dtype="float32")
        (out / "config.json").write_text(json.dumps(values))


def read(place: Path) -> bool:
    """Whether transformers finds the same logits in each of them."""
    import torch
    import transformers

    file = np.load(GOLDENS)
    families = [name.removesuffix(".config") for name in file.files if name.endswith(".config")]
    same = True
    for family in families:
        net, report = transformers.AutoModelForCausalLM.from_pretrained(
            place / family / "out",
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        with torch.no_grad():
            tokens = torch.from_numpy(file[f"{family}.tokens"].astype(np.int64))[None]
            logits = net.eval()(tokens).logits[0, file[f"{family}.positions"].tolist()].numpy()
        worst = np.abs(logits - file[f"{family}.logits"]).max()
        left = {kind: names for kind, names in report.items() if names}
        same &= bool(worst < ATOL) and not left
        print(f"    {family:20} {worst:.1e} {left or ''}")
    return same


if __name__ == "__main__":
    command, directory = sys.argv[1:]
    if command == "write":
        write(Path(directory))
    else:
        sys.exit(0 if read(Path(directory)) else 1)
