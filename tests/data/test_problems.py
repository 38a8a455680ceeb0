"""The problems of a run: which rows become one, and how they are put to the model."""

import dataclasses
import json
import random

import pytest

from dapo_jax.config import SourceConfig
from dapo_jax.data import arithmetic, sources
from dapo_jax.data import dataset as problems
from dapo_jax.data.dataset import load, rubrics
from dapo_jax.data.tokenizer import arithmetic_tokenizer
from dapo_jax.rewards.types import Rubric
from dapo_jax.types import Problem, UserError
from dapo_jax.utils import hf_hub
from tests.support.helpers import source_dict, tiny_config
from tests.support.problems import (
    CHAT_TEMPLATE,
    FIELD,
    character_tokenizer,
    prepare_rows,
    row,
    tokens_of,
    write_rows,
)


def test_a_problem_is_its_row(tmp_path):
    rows = [row(" Add 1\n", " 2 ", level=3), row("b", 7)]
    assert prepare_rows(tmp_path, rows).problems == [
        Problem(0, " Add 1\n", tokens_of("^ Add 1\n"), "2", "sums", 0, {"level": 3}),
        Problem(1, "b", tokens_of("^b"), "7", "sums", 0, None),
    ]


def test_every_row_is_counted_once(tmp_path):
    rows = [row("a"), row("clash", "1"), row("a"), row("", "3"), row("clash", "2"), row("x" * 9)]
    rows += [row("clash", "1"), row("x" * 9), row("x" * 7), row("c", " "), row("c")]
    found = prepare_rows(tmp_path, rows, max_prompt_tokens=8)
    assert [(p.id, p.prompt) for p in found.problems] == [(0, "a"), (1, "x" * 7), (2, "c")]
    counts = dict(records=11, unusable=2, repeated=4, conflicting=1, overlong=1, truncated=0)
    assert found.counts == counts | {"problems": 3}
    # Its field is not named: another source may have these problems from the cache.
    assert found.first_unusable == f"{tmp_path}/problems.jsonl, line 4: 'prompt' is empty"
    assert found.describe() == (
        "3 problems of 11 records (4 records repeat a prompt: 5 are distinct; 1 prompts with "
        "conflicting answers left out; 1 longer than config.data.max_prompt_tokens left out; 2 "
        f"unusable left out, the first: {found.first_unusable})"
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_counts_of_random_rows_are_those_of_a_plain_count(tmp_path, seed):
    rng = random.Random(seed)
    rows = [
        row(
            rng.choice(["", *("abcdefg"[:n] for n in range(1, 7)), "a long prompt"]),
            rng.choice("12 "),
        )
        for _ in range(rng.randrange(1, 40))
    ]
    usable = [(r["prompt"], r["answer"]) for r in rows if r["prompt"] and r["answer"] != " "]
    distinct = list(dict.fromkeys(prompt for prompt, _ in usable))
    answers = {prompt: {a for p, a in usable if p == prompt} for prompt in distinct}
    clear = [prompt for prompt in distinct if len(answers[prompt]) == 1]
    kept = [prompt for prompt in clear if len(prompt) < 10]
    found = prepare_rows(tmp_path, rows, max_prompt_tokens=10)
    assert [(p.prompt, {p.answer}) for p in found.problems] == [(p, answers[p]) for p in kept]
    assert found.counts == {
        "records": len(rows),
        "unusable": len(rows) - len(usable),
        "repeated": len(usable) - len(distinct),
        "conflicting": len(distinct) - len(clear),
        "overlong": len(clear) - len(kept),
        "truncated": 0,
        "problems": len(kept),
    }


def test_prompts_that_differ_in_white_space_only_are_one_problem(tmp_path):
    """As its first row has it; with several answers it is left out."""
    rows = [row("x + 1"), row("x+1\n"), row("y  z", "1"), row("y z", "2"), row("x\t+1"), row("xy")]
    found = prepare_rows(tmp_path, rows)
    assert [problem.prompt for problem in found.problems] == ["x + 1", "xy"]
    counts = {"records": 6, "repeated": 3, "conflicting": 1, "problems": 2}
    assert {name: found.counts[name] for name in counts} == counts
    chats = [[{"role": "user", "content": text}] for text in ("x + 1", "x+1", "xy")]
    tokenizer = character_tokenizer(chat_template=CHAT_TEMPLATE)
    found = prepare_rows(tmp_path, [row(chat) for chat in chats], tokenizer=tokenizer, chat=True)
    assert len(found.problems) == 2 and found.counts["repeated"] == 1


def test_white_space_between_numbers_separates_them(tmp_path):
    rows = [row("Sort 1 23", "1 23"), row("Sort 12 3", "3 12"), row("Sort  1\n23 ", "1 23")]
    found = prepare_rows(tmp_path, [*rows, row("Sort 123", "123")])
    assert [problem.prompt for problem in found.problems] == ["Sort 1 23", "Sort 12 3", "Sort 123"]
    assert found.counts["repeated"] == 1 and found.counts["conflicting"] == 0


def test_a_template_with_a_date_makes_the_same_prompts_every_day(tmp_path):
    dated = "Today is {{ strftime_now('%d %b %Y') }}.\n" + CHAT_TEMPLATE
    tokenizer = character_tokenizer(chat_template=dated)
    (problem,) = prepare_rows(tmp_path, [row("x")], tokenizer=tokenizer, chat=True).problems
    assert problem.prompt.startswith("Today is 26 Jul 2024.\n[system]default[user]x")


@pytest.mark.parametrize("overlong, num, done", [("drop", 1, "left out"), ("truncate", 2, "cut")])
def test_held_out_problems_that_the_run_does_not_evaluate_whole_are_reported(
    tmp_path, overlong, num, done
):
    """launch/evaluate.py keeps all of them, whole."""
    config = tiny_config()
    file = write_rows(tmp_path / "a.jsonl", [row("a"), row("long" * 9)])
    data = dataclasses.replace(config.data, max_prompt_tokens=8, overlong_prompts=overlong)
    config, said = dataclasses.replace(config, data=data), []
    chosen = {"aime": SourceConfig(**source_dict(str(file)))}
    arguments = (config, chosen, character_tokenizer())
    found = load(*arguments, field=FIELD, say=said.append, warns_of_changed=True)
    assert len(found) == num and len(said) == 2
    assert f"warning: 1 held-out problems of aime are {done} in this run's eval" in said[1]
    load(*arguments, field=FIELD, say=said.append)
    assert len(said) == 3, "of training problems the summary says it"


def test_held_out_problems_that_are_trained_on_are_counted(tmp_path):
    """As where one file without splits is both."""
    config, said = tiny_config(), []
    chosen = {
        name: SourceConfig(**source_dict(str(write_rows(tmp_path / f"{name}.jsonl", rows))))
        for name, rows in (("a", [row("x + 1"), row("y"), row("z")]), ("b", [row("x+1"), row("w")]))
    }
    arguments = (config, chosen, character_tokenizer())
    training = load(config, {"a": chosen["a"]}, character_tokenizer(), field=FIELD, say=said.append)
    load(*arguments, field=FIELD, say=said.append, training=training)
    warnings = [line for line in said if "warning" in line]
    assert len(warnings) == 2
    assert "3 of 3 held-out problems of a are training problems" in warnings[0]
    assert "1 of 2 held-out problems of b are training problems" in warnings[1]


def test_more_prompts_than_are_tokenised_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "TOKENISE_BATCH", 3)
    rows = [row(f"p{i}", str(i)) for i in range(8)]
    found = prepare_rows(tmp_path, rows).problems
    assert [(p.id, p.prompt, p.answer) for p in found] == [(i, f"p{i}", str(i)) for i in range(8)]
    assert [p.prompt_tokens for p in found] == [tokens_of(f"^p{i}") for i in range(8)]


@pytest.mark.parametrize(
    "prompts, note",
    [
        ("abcabc", "3 distinct prompts, 2 records of each"),
        ("aaaa", "1 distinct prompts, 4 records of each"),
        ("ab", None),
        ("aab", "1 records repeat a prompt: 2 are distinct"),
        ("aaab", "2 records repeat a prompt: 2 are distinct"),  # as many as two of each
    ],
)
def test_the_note_for_a_benchmark_that_repeats_its_prompts(tmp_path, prompts, note):
    found = prepare_rows(tmp_path, [row(prompt) for prompt in prompts])
    wanted = f"{len(set(prompts))} problems of {len(prompts)} records"
    assert found.describe() == wanted + (f" ({note})" if note else "")


@pytest.mark.parametrize(
    "num, wanted, num_rows", [(1, "a", 1), (2, "ab", 3), (3, "abc", 6), (4, "abc", 7)]
)
def test_the_first_so_many_prompts(tmp_path, num, wanted, num_rows):
    """Prompts and not rows; what follows them is not looked at."""
    rows = [row(prompt) for prompt in ("a", "a", "b", "", "b", "c", "a")]
    found = prepare_rows(tmp_path, rows, source={"num_problems": num})
    assert "".join(problem.prompt for problem in found.problems) == wanted
    assert found.counts["records"] == num_rows
    faulty = [row("a"), row("b"), {"prompt": "c"}]
    if num == 2:
        assert len(prepare_rows(tmp_path, faulty, source={"num_problems": num}).problems) == 2
    if num == 3:
        with pytest.raises(UserError, match="line 3 has no"):
            prepare_rows(tmp_path, faulty, source={"num_problems": num})


@pytest.mark.parametrize(
    "of_data, of_source, wanted",
    [
        (None, None, "{x}"),
        ("D {prompt}", None, "D {x}"),
        (None, "S {prompt}", "S {x}"),
        ("D {prompt}", "S {prompt} {{}} {prompt}", "S {x} {} {x}"),
    ],
)
def test_the_template_of_the_source_comes_first(tmp_path, of_data, of_source, wanted):
    settings = {"prompt_template": of_data, "source": {"prompt_template": of_source}}
    (problem,) = prepare_rows(tmp_path, [row("{x}")], **settings).problems
    assert problem.prompt == wanted and problem.prompt_tokens == tokens_of("^" + wanted)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    "prompt, system_prompt, wanted",
    [
        ("1+1?", None, "[system]default[user]<1+1?>[assistant]~"),
        ("1+1?", "Think.", "[system]Think.[user]<1+1?>[assistant]~"),
        # Messages are taken as they are: without the template around a text.
        (CHAT, None, "[system]Be brief.[user]1+1?[assistant]~"),
        (CHAT, "Think.", "[system]Be brief.[user]1+1?[assistant]~"),
        (CHAT[1:], None, "[system]default[user]1+1?[assistant]~"),
        (CHAT[1:], "Think.", "[system]Think.[user]1+1?[assistant]~"),
    ],
)
def test_a_prompt_as_a_chat(tmp_path, prompt, system_prompt, wanted):
    """The chat template writes its special tokens itself: no second `^` at the beginning."""
    settings = {"chat": True, "system_prompt": system_prompt, "prompt_template": "<{prompt}>"}
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    (problem,) = prepare_rows(tmp_path, [row(prompt)], tokenizer=tokenizer, **settings).problems
    assert (problem.prompt, problem.prompt_tokens) == (wanted, tokens_of(wanted))


def test_messages_without_a_chat_template(tmp_path):
    (problem,) = prepare_rows(tmp_path, [row(CHAT[1:])], prompt_template="<{prompt}>").problems
    assert problem.prompt == "1+1?"
    message = (
        r"a prompt is a chat of 2 messages \('Be brief.*a chat template.*data\.chat to True.*--chat"
    )
    for chat in (False, True):
        with pytest.raises(UserError, match=message):
            prepare_rows(tmp_path, [row(CHAT)], chat=chat)


def test_a_base_model_without_a_chat_template_gets_dapos_own_prompt(tmp_path):
    ask = lambda prompt, **settings: prepare_rows(tmp_path, [row(prompt)], chat=True, **settings)
    (problem,) = ask("1+1?", max_prompt_tokens=400).problems
    assert problem.prompt.startswith("Solve the following math problem step by step. The last line")
    assert "\n\n1+1?\n\nRemember to put your answer" in problem.prompt
    # Nothing else writes the special tokens then.
    assert problem.prompt_tokens == tokens_of("^" + problem.prompt)
    (problem,) = ask("1+1?", prompt_template="<{prompt}>").problems
    assert problem.prompt == "<1+1?>", "the config's own comes before it"
    (problem,) = ask(CHAT[1:]).problems
    assert problem.prompt == "1+1?", "as the rows of DAPO-Math-17k, which hold it already"
    with pytest.raises(UserError, match=r"data\.system_prompt .*is given, but the tokenizer has"):
        ask("1+1?", system_prompt="Think.")


def test_that_there_is_no_chat_template_is_said(tmp_path):
    long = {"data__max_prompt_tokens": 500, "train__row_tokens": 600}
    config = tiny_config(data__chat=True, pretrain=None, model__tokenizer="x", **long)
    for template, said in ((None, 1), (CHAT_TEMPLATE, 0)):
        lines = []
        chosen = {"sums": config.data.heldout["sums"]}
        load(config, chosen, character_tokenizer(template), field="f", say=lines.append)
        assert sum("no chat template: problems" in line for line in lines) == said


def test_what_does_not_fit_the_chat_template_is_reported(tmp_path):
    tool = [row([{"role": "tool", "content": "6 * 7"}])]
    with pytest.raises(UserError, match=r"does not take the prompt '6 \* 7': no tools here\. Set"):
        prepare_rows(tmp_path, tool, chat=True, tokenizer=character_tokenizer(CHAT_TEMPLATE))


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ 1 + messages[0].content }}", "does not take the prompt 'Add': unsupported operand"),
        ("{{ tools | length }}", "does not take the prompt 'Add': object of type 'NoneType'"),
        ({"a": "{{ 1 }}", "b": "{{ 2 }}"}, "does not take the prompt 'Add': .* has multiple"),
        # As templates of models for images: a message is a list of parts.
        (
            "{% for part in messages[0].content %}{{ part.text }}{% endfor %}:",
            "leaves out the prompt 'Add'",
        ),
    ],
)
def test_a_template_that_fails_or_drops_the_prompt_is_reported(tmp_path, template, message):
    tokenizer = character_tokenizer(chat_template=template)
    with pytest.raises(UserError, match=f"the chat template of config.model.tokenizer {message}"):
        prepare_rows(tmp_path, [row("Add")], tokenizer=tokenizer, chat=True)


def test_a_template_may_change_a_prompt(tmp_path):
    """As that of Nemotron Nano, which takes the switch for thinking out of a user's text."""
    template = "{{ messages[0].content.replace('/no_think', '').strip() }}:"
    tokenizer = character_tokenizer(chat_template=template)
    found = prepare_rows(tmp_path, [row("Add /no_think")], tokenizer=tokenizer, chat=True)
    assert [p.prompt for p in found.problems] == ["Add:"]


def test_an_overlong_prompt_is_an_error_left_out_or_cut(tmp_path):
    rows = [row("a"), row("a"), row("123456"), row("b")]
    message = (
        r"max_prompt_tokens is 6, but record 3 of config\.data\.train\.sums \('123456'.* has 7"
    )
    with pytest.raises(UserError, match=message):
        prepare_rows(tmp_path, rows, overlong_prompts="error", max_prompt_tokens=6)
    found = prepare_rows(tmp_path, rows, overlong_prompts="drop", max_prompt_tokens=6)
    assert [p.prompt for p in found.problems] == ["a", "b"] and found.counts["overlong"] == 1
    found = prepare_rows(tmp_path, rows, overlong_prompts="truncate", max_prompt_tokens=6)
    assert [p.prompt for p in found.problems] == ["a", "123456", "b"]
    assert found.problems[1].prompt_tokens == tokens_of("123456"), "the end, which asks, is kept"
    assert (found.counts["overlong"], found.counts["truncated"]) == (0, 1)
    assert "(1 records repeat" in found.describe() and "1 longer than" in found.describe()
    for overlong in ("error", "drop", "truncate"):
        settings = {"overlong_prompts": overlong, "max_prompt_tokens": 7}
        assert len(prepare_rows(tmp_path, rows, **settings).problems) == 3


@pytest.fixture
def two_sources(tmp_path, config):
    """A config of two files, and the sources."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row(c)) + "\n" for c in "aab"))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row(c)) + "\n" for c in "ac"))
    chosen = {
        name: SourceConfig(**source_dict(str(tmp_path / f"{name}.jsonl"), weight=1.0))
        for name in "ab"
    }
    data = dataclasses.replace(config.data, train=chosen)
    return dataclasses.replace(config, data=data), chosen


def test_problems_are_numbered_across_their_sources(two_sources):
    config, chosen = two_sources
    for _ in range(2):  # made, and from the cache
        said = []
        found = load(
            config, chosen, character_tokenizer(), field="config.data.train", say=said.append
        )
        wanted = [(0, "a", "a"), (1, "b", "a"), (2, "a", "b"), (3, "c", "b")]
        assert [(p.id, p.prompt, p.source) for p in found] == wanted
        assert said == [
            "train.a: 2 problems of 3 records (1 records repeat a prompt: 2 are distinct)",
            "train.b: 2 problems of 2 records",
        ]
    renamed = {"other": chosen["b"]}
    found = load(config, renamed, character_tokenizer(), field="--data", say=said.append)
    assert [(p.id, p.source) for p in found] == [(0, "other"), (1, "other")]
    assert said[-1] == "--data.other: 2 problems of 2 records"


@pytest.mark.parametrize(
    "content, wanted",
    [
        ("", r"config\.data\.train\.b: no problem is left\. 0 problems of 0 records\. Give more"),
        (
            '{"prompt": " ", "answer": "1"}',
            r"0 problems of 1 records \(1 unusable .*'prompt' is empty",
        ),
        ('{"prompt": "a long one, too long", "answer": "1"}', r"max_prompt_tokens \(20\)\."),
    ],
)
def test_a_source_without_problems_is_reported(two_sources, tmp_path, content, wanted):
    config, chosen = two_sources
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, max_prompt_tokens=20)
    )
    (tmp_path / "b.jsonl").write_text(content + "\n")
    with pytest.raises(UserError, match=wanted):
        load(
            config, chosen, character_tokenizer(), field="config.data.train", say=lambda text: None
        )


def test_several_files_are_one_source(tmp_path):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "1.jsonl", [row("a"), row("b", "1")])
    write_rows(tmp_path / "data" / "2.jsonl", [row("a"), row("d")])
    source = {"path": str(tmp_path / "data")}
    found = prepare_rows(tmp_path, [row("b", "2"), row("c")], file="data/3.jsonl", source=source)
    assert [p.prompt for p in found.problems] == ["a", "d", "c"], "in the order of their names"
    assert found.counts["records"] == 6 and found.counts["conflicting"] == 1


def test_a_file_that_cannot_be_read_is_reported(tmp_path):
    """As what remains in a hub's cache of a file that was deleted."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "1.jsonl").symlink_to(tmp_path / "gone")
    source = {"path": str(tmp_path / "data")}
    with pytest.raises(UserError, match=r"sums: a data file cannot be read: .*/data/1\.jsonl"):
        prepare_rows(tmp_path, [row()], source=source)


def test_the_columns_of_a_named_data_set_are_known(tmp_path, monkeypatch):
    """And are others if the config says so."""
    dataset = sources.Dataset("own/data", "x", "y.z", "####")
    monkeypatch.setitem(sources.DATASETS, "mine", dataset)
    monkeypatch.setattr(hf_hub, "snapshot", lambda *of_the_data_set: tmp_path / "data")
    (tmp_path / "data").mkdir()
    # None of them by the names that are tried, and each answer in the other's place.
    rows = [{"x": "X", "v": "V", "y": {"z": "1 #### 2"}, "u": "3\n#### 4"}]
    for changes, prompt, answer in (
        ({}, "X", "2"),
        ({"prompt_key": "v"}, "V", "2"),
        ({"answer_key": "u"}, "X", "4"),
    ):
        chosen = {"path": "mine"} | changes
        found = prepare_rows(tmp_path, rows, file="data/x.jsonl", source=chosen)
        assert [(p.prompt, p.answer) for p in found.problems] == [(prompt, answer)]


def test_generated_problems(config):
    chosen = config.data.train | {"far": config.data.heldout["sums"]}
    said = []
    tokenizer = arithmetic_tokenizer()
    found = load(config, chosen, tokenizer, field="config.data.train", say=said.append)
    again = load(config, chosen, tokenizer, field="config.data.train", say=said.append)
    assert found == again and said[:2] == [
        "train.sums: 64 problems of 64 records",
        "train.far: 8 problems of 8 records",
    ]
    near, far = ({p.prompt for p in found if p.source == name} for name in ("sums", "far"))
    assert len(near) == 64 and len(far) == 8
    for problem in found:
        terms = [int(word.partition("=")[2]) for word in problem.prompt.split()[1:]]
        assert sum(terms) == int(problem.answer) and len(terms) in (3, 4)
        assert arithmetic.is_heldout(problem.prompt) == (problem.source == "far")
    other = load(dataclasses.replace(config, seed=1), chosen, tokenizer, field="", say=said.append)
    assert {p.prompt for p in other} != near | far
    many = {"sums": dataclasses.replace(chosen["sums"], num_problems=10**6)}
    with pytest.raises(UserError, match=r"sums\.num_problems \(1000000\) with levels \(3, 4\): "):
        load(config, many, tokenizer, field="config.data.train", say=said.append)


def test_a_level_that_is_named_twice_gives_no_more_problems():
    found = arithmetic.generate_problems(50, levels=(2, 2), heldout=False, seed=0)
    assert len(set(found)) == 50
    with pytest.raises(ValueError, match="2 terms give about 6. distinct problems; 100 over"):
        arithmetic.generate_problems(100, levels=(2, 2), heldout=False, seed=0)


def test_the_rubric_of_the_source_comes_before_that_of_the_config():
    own = source_dict("a", scorer="math_dapo + 0.1 * answer_format")
    chosen = {"a": SourceConfig(**own), "b": SourceConfig(**source_dict("b"))}
    config = tiny_config(reward__scorer="boxed", reward__incorrect=0.5)
    assert rubrics(config, chosen) == {
        "a": Rubric((("math_dapo", 1.0), ("answer_format", 0.1)), 1.0, 0.5),
        "b": Rubric((("boxed", 1.0),), 1.0, 0.5),
    }
