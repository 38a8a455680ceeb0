"""Writes lora.npz: adapters of peft on models of logits.npz, with their logits and gradients.

Needs torch and peft, which neither the trainer nor its tests do:

    python3 -m venv /tmp/torchenv
    /tmp/torchenv/bin/pip install torch transformers peft safetensors numpy
    /tmp/torchenv/bin/python tests/goldens/make_lora.py

Adapters are drawn, A and B alike, and saved by peft itself. The gradient is of the mean negative
log-prob of each token after the first, computed in float64. Read by tests/models/test_lora.py.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import peft
import safetensors.numpy
import torch
import transformers

PLACE = Path(__file__).parent / "lora.npz"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Name: model of logits.npz, rank, alpha, matrices with adapters.
CASES = {
    "qwen2-tied": ("qwen2-tied", 3, 7, LINEAR),
    "qwen3-untied": ("qwen3-untied", 1, 2, LINEAR),
    "llama": ("llama", 4, 4, LINEAR),
    "llama-qv": ("llama", 2, 16, ["q_proj", "v_proj"]),
}


def base_model(models: np.lib.npyio.NpzFile, family: str) -> torch.nn.Module:
    values = json.loads(models[f"{family}.config"].item())
    config = transformers.AutoConfig.for_model(**values)
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    flat, at, state = models[f"{family}.weights"].astype(np.float32), 0, {}
    for name, shape in json.loads(models[f"{family}.shapes"].item()).items():
        size = int(np.prod(shape))
        state[name] = torch.tensor(flat[at : at + size].reshape(shape))
        at += size
    missing, unknown = net.float().load_state_dict(state, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    net.tie_weights()
    return net.eval()


def main() -> None:
    models, out = np.load(PLACE.with_name("logits.npz")), {}
    for seed, (case, (family, rank, alpha, targets)) in enumerate(CASES.items()):
        settings = peft.LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"
        )
        net = peft.get_peft_model(base_model(models, family), settings)
        generator = torch.Generator().manual_seed(seed)
        adapters = {n: p for n, p in net.named_parameters() if "lora_" in n}
        for value in adapters.values():
            drawn = torch.randn(value.shape, generator=generator) / value.shape[1] ** 0.5
            with torch.no_grad():
                value.copy_(drawn.half().float())
        tokens = torch.tensor(models[f"{family}.tokens"].astype(np.int64))[None]
        net = net.double()
        logits = net(tokens).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
        loss.backward()
        with tempfile.TemporaryDirectory() as place:
            net.save_pretrained(place)
            values = json.loads((Path(place) / "adapter_config.json").read_text())
            saved = safetensors.numpy.load_file(Path(place) / "adapter_model.safetensors")
        values["target_modules"] = sorted(values["target_modules"])
        out |= {f"{case}.tensor.{n}": v.astype(np.float16) for n, v in saved.items()}
        for name, value in adapters.items():
            assert value.grad is not None
            grad = value.grad.numpy().astype(np.float32)
            out[f"{case}.grad.{name.replace('.default', '')}"] = grad
        out |= {
            f"{case}.family": np.array(family),
            f"{case}.config": np.array(json.dumps(values)),
            f"{case}.logits": logits.detach().numpy()[::5].astype(np.float32),
        }
        print(f"{case}: {len(saved)} tensors, loss {loss.item():.3f}")
    versions = f"peft {peft.__version__}, transformers {transformers.__version__}"
    out["version"] = np.array(f"{versions}, torch {torch.__version__}")
    np.savez_compressed(PLACE, **out)
    print(f"{PLACE}: {PLACE.stat().st_size} bytes, {out['version']}")


if __name__ == "__main__":
    main()
