"""Writes sft_loss.json: the supervised loss that transformers gives for a batch of chats.

Needs torch, see make_logits.py:

    /tmp/torchenv/bin/pip install jinja2
    /tmp/torchenv/bin/python tests/goldens/make_sft_loss.py

The model is one of logits.npz. The mask is transformers' own, by the `generation` block of the
chat template; it ends at the end-of-turn token. Read by `tests/training/test_supervised.py`.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PLACE = Path(__file__).parent / "sft_loss.json"
FAMILY = "qwen3-untied"
END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATS = [
    ["What is 2 + 3?", "2 + 3 = 5. The answer is 5."],
    ["Name a colour.", "blue", "Another one?", " red\n\nor green", "Thanks!", "Welcome."],
    ["Hm", "?"],
]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for every character."""
    characters = ["\n", *map(chr, range(32, 127))]
    vocab = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", END)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE
    )


def make_model() -> torch.nn.Module:
    with np.load(PLACE.with_name("logits.npz")) as file:
        entry = lambda name: file[f"{FAMILY}.{name}"]
        values, shapes = json.loads(entry("config").item()), json.loads(entry("shapes").item())
        weights = entry("weights").astype(np.float32)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(values))
        config = transformers.AutoConfig.from_pretrained(place)
    net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    net, start = net.float().eval(), 0
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            part = weights[start : start + parameter.numel()].reshape(shapes[name])
            parameter.copy_(torch.from_numpy(part))
            start += parameter.numel()
    assert start == len(weights)
    return net


def main() -> None:
    tokenizer, net = make_tokenizer(), make_model()
    role = lambda i: "user" if i % 2 == 0 else "assistant"
    chats = [[{"role": role(i), "content": t} for i, t in enumerate(chat)] for chat in CHATS]
    rendered = tokenizer.apply_chat_template(
        chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, masks = rendered["input_ids"], rendered["assistant_masks"]
    longest = max(map(len, tokens))
    ids = torch.zeros((len(tokens), longest), dtype=torch.long)
    attended, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, (row, mask) in enumerate(zip(tokens, masks)):
        ids[i, : len(row)], attended[i, : len(row)] = torch.tensor(row), 1
        labels[i, : len(row)] = torch.where(torch.tensor(mask) > 0, torch.tensor(row), -100)
    with torch.no_grad():
        loss = net(ids, attention_mask=attended, labels=labels).loss.item()
    out = {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "family": FAMILY,
        "tokenizer": json.loads(tokenizer.backend_tokenizer.to_str()),
        "chat_template": TEMPLATE,
        "chats": chats,
        "input_ids": tokens,
        "labels": [labels[i, : len(row)].tolist() for i, row in enumerate(tokens)],
        "loss": loss,
    }
    PLACE.write_text(json.dumps(out, separators=(",", ":")) + "\n")
    print(f"{PLACE}: {PLACE.stat().st_size} bytes, loss {loss:.7f}, {out['version']}")


if __name__ == "__main__":
    main()
