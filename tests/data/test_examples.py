"""Supervised examples: which tokens the assistant writes, and errors of records and templates."""

import re

import numpy as np
import pytest

from dapo_jax.config.sft import SftConfig
from dapo_jax.data import examples
from dapo_jax.rewards.scorers import last_number
from dapo_jax.types import UserError
from tests.support.helpers import tiny_dict
from tests.support.problems import character_tokenizer, write_rows

# ~ is the end of sequence; a new line follows each turn.
CHAT = (
    "{% for message in messages %}{{ '[' + message.role[0] + ']' + message.content + '~\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
IGNORES = CHAT.replace("{% if add_generation_prompt %}[a]{% endif %}", "")
# As Qwen3's: what the last turn has, earlier turns lose.
LATER = "('#' if message.role == 'assistant' and not loop.last else '')"
REWRITES = CHAT.replace("message.content", f"{LATER} + message.content")
ENDLESS = CHAT.replace("~", "")
STRICT = "{{ raise_exception('no such roles') }}"
TURNS = [
    ("system", "S"),
    ("user", "1+1?"),
    ("assistant", "2"),
    ("user", "+1?"),
    ("assistant", "3!"),
]


def messages(turns=TURNS):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def load(tmp_path, rows, *, template=None, source=None, say=lambda _: None, **data):
    """The examples of a file with these rows; `data` are fields of config.data."""
    row_tokens = data.pop("row_tokens", 64)
    file = write_rows(tmp_path / "rows.jsonl", rows)
    train = {"rows": source or {"path": str(file)}}
    model = tiny_dict()["model"] | {"tokenizer": "none", "vocab_size": 128}
    config = SftConfig.from_dict(
        {
            "model": model,
            "data": {"train": train} | data,
            "train": {"num_steps": 1, "row_tokens": row_tokens},
        }
    )
    tokenizer = character_tokenizer(template)
    return examples.load(config, config.data.train, tokenizer, field="config.data.train", say=say)


def text(example):
    """Its prompt, then its response with trained characters in brackets of their own."""
    response = "".join(
        chr(token) if trained else f"<{chr(token)}>"
        for token, trained in zip(example.response, example.trained)
    )
    return "".join(map(chr, example.prompt)), response.replace("><", "")


def test_every_assistant_turn_with_its_end_is_trained(tmp_path):
    (found,) = load(tmp_path, [messages()], template=CHAT)
    assert text(found) == ("[s]S~\n[u]1+1?~\n[a]", "2~<\n[u]+1?~\n[a]>3!~")


def test_turns_after_the_assistants_last_are_left_out(tmp_path):
    (found,) = load(tmp_path, [messages([*TURNS, ("user", "Bye")])], template=CHAT)
    assert text(found)[1].endswith("3!~")


def test_a_prompt_with_its_response(tmp_path):
    rows = [{"prompt": "1+1?", "response": "2"}, {"question": "2?", "completion": " 2\n"}]
    chats = load(tmp_path, rows, template=CHAT, system_prompt="S")
    assert [text(each) for each in chats] == [
        ("[s]S~\n[u]1+1?~\n[a]", "2~"),
        ("[s]S~\n[u]2?~\n[a]", " 2\n~"),
    ]
    plain = load(tmp_path, rows, chat=False, prompt_template="Q: {prompt}\n")
    assert [text(each) for each in plain] == [("^Q: 1+1?\n", "2~"), ("^Q: 2?\n", " 2\n~")]
    named = {"path": str(tmp_path / "rows.jsonl"), "prompt_key": "in", "response_key": "o.ut"}
    rows = [messages() | {"in": "1?", "o": {"ut": "1"}}]
    (found,) = load(tmp_path, rows, source=named, chat=False)
    assert text(found) == ("^1?", "1~")


def test_a_tokenizer_without_a_chat_template_gets_the_prompts_of_a_dapo_run(tmp_path):
    (found,) = load(tmp_path, [{"prompt": "1+1?", "response": "2"}], row_tokens=512)
    prompt, response = text(found)
    assert prompt.startswith("^Solve the following math problem") and response == "2~"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "a"}, "has none of 'response', 'completion'.*Name the column in .*response_"),
        ({"response": "a"}, "has none of 'prompt'.*it has 'response'.*prompt_key"),
        ({"prompt": "a", "response": 3}, "line 1: 'response' must be text, not a number"),
        ({"prompt": "a", "response": " \n"}, "line 1: a response is empty. Correct it, or set"),
        ({"prompt": "", "response": "a"}, "line 1: the prompt is empty.*unusable_examples to 'd"),
        (messages(TURNS[:2]), "'messages' has no message of the role 'assistant'"),
        (messages(TURNS[2:]), "'messages' begins with the assistant: no prompt"),
        (messages([("user", "a"), ("assistant", "")]), "line 1: a response is empty"),
        ({"messages": "a"}, "line 1: 'messages' must be a list of messages, not a text"),
        ({"prompt": "a", "response": "b" * 90}, r"rows, example 1 has \d+ tokens, .*tokens \(64\)"),
        ({"prompt": "a", "response": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, [row], template=CHAT)


def test_unusable_examples_are_left_out_and_counted(tmp_path):
    said = []
    rows = [{"prompt": "a", "response": ""}, {"prompt": "b", "response": "c" * 90}]
    rows += [{"prompt": "d", "response": "e"}]
    found = load(tmp_path, rows, chat=False, unusable_examples="drop", say=said.append)
    assert [text(each) for each in found] == [("^d", "e~")]
    assert re.match("train.rows: 1 examples, 4 tokens, 2 of them trained; 2 unusable left", said[0])
    with pytest.raises(UserError, match="rows: no example is left"):
        load(tmp_path, rows[:2], chat=False, unusable_examples="drop")


@pytest.mark.parametrize(
    "template, message",
    [
        (IGNORES, r"ignores add_generation_prompt: the model would have to write '\[a\]'"),
        (REWRITES, "writes the turns before '3!' differently.*an example of its own"),
        (ENDLESS, "with none of the tokens that end a response .*stop_token_ids"),
        (STRICT, "does not take the prompt '1.1.': no such roles"),
        (None, "has several turns, which need a chat template"),
    ],
)
def test_a_template_that_does_not_fit_is_an_error(tmp_path, template, message):
    rows = [messages(TURNS[1:])]
    with pytest.raises(UserError, match=message):
        load(tmp_path, rows, template=template)


def test_a_template_without_a_header_needs_no_generation_prompt(tmp_path):
    end = "{{ '~' if m.role == 'assistant' else ' -> ' }}"
    template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
    (found,) = load(tmp_path, [{"prompt": "a", "response": "b"}], template=template)
    assert text(found) == ("a -> ", "b~")


def test_examples_with_one_prompt_are_held_out_together():
    many = [
        examples.Example((i // 2,), np.array([i], np.int32), np.ones(1, bool)) for i in range(400)
    ]
    train, heldout = examples.split_heldout(many, 0.25)
    assert sorted([*train, *heldout], key=lambda e: e.response[0]) == many
    assert len(heldout) == 100
    assert not {e.prompt for e in train} & {e.prompt for e in heldout}
    with pytest.raises(
        UserError, match=r"heldout_share \(0.5\) of 1 different prompts leaves none"
    ):
        examples.split_heldout(many[:2], 0.5)


def test_generated_solutions_lead_to_the_answer(tmp_path):
    """By the scorer of the word problems, with equations that hold."""
    from dapo_jax.data.word_problems import generate_problems, generate_solved

    asked = dict(levels=(1, 2), heldout=False, seed=3)
    problems, solved = generate_problems(140, **asked), generate_solved(140, **asked)
    for (prompt, answer), (same, solution) in zip(problems, solved, strict=True):
        assert prompt == same and last_number(solution, answer).correct
        equations = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\. ", solution)
        assert 1 <= len(equations) <= 2 and equations[-1][-1] == answer
        for a, sign, b, result in equations:
            assert eval(f"{a} {sign} {b}") == int(result)
    source = dict(path="word_problems", split="train", num_examples=3, levels=(1,))
    found = load(tmp_path, [], source=source, chat=False, row_tokens=256)
    assert len(found) == 3 and text(found[0])[1].endswith("~")
