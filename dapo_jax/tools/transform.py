"""Problems rewritten so that their answers are integers, for launch/transform_data.py.

Source: DAPO, arXiv:2503.14476, appendix A: read the answer's form, rewrite the problem, solve the
rewritten problem, give the integer. Here the first two are one reply and the last two others, so
that several solutions of one rewritten problem can be compared. The prompts and examples are ours.
"""

import collections
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax.data import sources
from dapo_jax.data.records import (
    ANSWER_KEYS,
    PROMPT_KEYS,
    Prompt,
    Record,
    Unusable,
    read_records,
)
from dapo_jax.tools import chat_endpoint
from dapo_jax.tools.chat_endpoint import Endpoint
from dapo_jax.tools.prompt_file import read_prompts
from dapo_jax.types import UserError
from dapo_jax.utils.files import make_writable, write_atomically

REWRITE = r"""Rewrite a mathematical problem so that its answer is one integer. Change nothing else.
First name the form of the given answer. Then add what turns the answer into an integer in one way
only, such as the sum of the numbers that it is made of. Do not solve the problem, and do not give
the answer away. Reply with the two lines "Form:" and "Rewritten problem:".

Problem: A bag holds 3 red and 5 blue marbles. Two are taken without looking. What is the
probability that both are red?
Answer: \frac{3}{28}
Form: a fraction
Rewritten problem: A bag holds 3 red and 5 blue marbles. Two are taken without looking. The
probability that both are red is m/n, where m and n are positive integers without a common divisor.
Find m + n.

Problem: Solve x^2 - 4x + 1 = 0 for the larger root.
Answer: 2+\sqrt{3}
Form: an integer plus the square root of an integer
Rewritten problem: The larger root of x^2 - 4x + 1 = 0 is a + \sqrt{b}, where a and b are positive
integers and b is divisible by no square above 1. Find a + b.

Problem: """
SOLVE = """A problem, its known answer, and the problem rewritten so that its answer is one integer.

Problem: {prompt}
Answer: {answer}
Rewritten problem: {rewritten}

Find the answer to the rewritten problem, step by step; the known answer may be used. The last line
of the reply is "Answer: " and the integer.
"""
INTEGER = re.compile(
    r"Answer:\s*\**\s*\$*\s*(?:\\boxed\{)?\s*"
    # Python reads no integer of more than 4,300 digits.
    r"([-+]?(?:\d{1,3}(?:,\d{3}){1,1000}|\d{1,4000}))"
    r"\s*\}?\s*\$*\s*\**\.?\s*$"
)
# Columns in which a data source looks for a prompt or an answer: those of the original would be
# found before ours.
SHADOWING = {key.partition(".")[0] for key in (*PROMPT_KEYS, *ANSWER_KEYS)}
INTEGER_ALREADY, KEPT = "kept: the answer is an integer", "kept: transformed"
REFUSED = "the endpoint refused the prompt"
FORM = re.compile(r"Form:\**\s*(.+)")
REWRITTEN = re.compile(r"Rewritten problem:\**\s*(.+)", re.DOTALL)


class Settings(NamedTuple):
    """The flags that decide what is kept."""

    source: str
    output: Path
    prompt_key: str  # "": found by name
    answer_key: str
    num_problems: int  # the first so many; 0: all
    num_samples: int  # solutions of each rewritten problem
    min_agreement: float  # share of them with the same integer, for a problem to be kept

    def check(self) -> None:
        """Raises UserError for a value out of range."""
        for ok, name, wanted in (
            (self.num_problems >= 0, "num_problems", "0 or more"),
            (self.num_samples > 0, "num_samples", "above 0"),
            (0 < self.min_agreement <= 1, "min_agreement", "above 0 and at most 1"),
        ):
            if not ok:
                raise UserError(f"--{name} must be {wanted}; got {getattr(self, name)!r}.")


# Writes num_samples replies to each prompt of a jsonl file into another; false: it was stopped.
Replies = Callable[[Path, Path, int], bool]


def transform(settings: Settings, replies: Replies) -> dict[str, Any] | None:
    """Writes the transformed problems into a directory and returns the report; None: stopped.

    rewrite.jsonl and solve.jsonl hold the replies, and a stopped call resumes in them. rows.jsonl
    has every record with its original, its replies, and why it was dropped. problems.jsonl has the
    problems that were kept, and is a data source.

    Raises:
        UserError: the input or a setting is wrong, or `output` holds other results.
    """
    settings.check()
    place = settings.output
    rows = list(_rows(settings))
    make_writable(place, "--output")
    open_rows = [row for row in rows if row["reason"] is None]
    prompts = [{"index": r["index"], "prompt": rewrite_prompt(r)} for r in open_rows]
    found = _replies(replies, place / "rewrite.jsonl", prompts, 1)
    if found is None:
        return None
    for row, texts in zip(open_rows, found, strict=True):
        if not texts:
            row["reason"] = REFUSED
            continue
        (text,) = texts
        row["rewriting"] = text
        row["form"], row["rewritten"] = parse_rewriting(text)
        if not row["rewritten"]:
            row["reason"] = "the reply holds no rewritten problem"
        elif " ".join(row["rewritten"].split()) == " ".join(_text(row["prompt"]).split()):
            row["reason"] = "the rewritten problem is the original"
    open_rows = [row for row in open_rows if row["reason"] is None]
    prompts = [{"index": r["index"], "prompt": solve_prompt(r)} for r in open_rows]
    found = _replies(replies, place / "solve.jsonl", prompts, settings.num_samples)
    if found is None:
        return None
    for row, texts in zip(open_rows, found, strict=True):
        row["solutions"] = texts
        row["integers"] = [parse_integer(text) for text in texts]
        row |= vote(row["integers"], settings.min_agreement) if texts else {"reason": REFUSED}
    return _write(place, rows)


def vote(integers: Sequence[int | None], min_agreement: float) -> dict[str, Any]:
    """Returns the `integer` that most solutions end with, its `agreement`, their share of all
    solutions, and a `reason` where the share is too small, or None."""
    counts = collections.Counter(n for n in integers if n is not None)
    if not counts:
        return {"integer": None, "agreement": 0.0, "reason": "no solution ends with an integer"}
    (integer, most), *rest = counts.most_common()
    agreement = most / len(integers)
    tied = bool(rest) and rest[0][1] == most
    reason = None if agreement >= min_agreement and not tied else "the solutions disagree"
    return {"integer": integer, "agreement": agreement, "reason": reason}


def parse_rewriting(reply: str) -> tuple[str, str]:
    """Returns the form and the rewritten problem of a reply; "" where there is none."""
    found = REWRITTEN.search(reply)
    form = FORM.search(reply)
    # A base model continues with a problem of its own.
    text = re.split(r"\n\s*\**Problem:", found[1])[0].strip() if found else ""
    return (form[1].strip() if form else ""), text


def parse_integer(reply: str) -> int | None:
    """Returns the integer of a reply's last answer; None: it is no integer."""
    last = reply[reply.rfind("Answer:") :].split("\n")[0].strip() if "Answer:" in reply else ""
    found = INTEGER.search(last)
    return int(found[1].replace(",", "")) if found else None


def rewrite_prompt(row: Mapping[str, Any]) -> str:
    """Returns the request for the form and the rewritten problem."""
    return f"{REWRITE}{_text(row['prompt'])}\nAnswer: {row['answer']}\n"


def solve_prompt(row: Mapping[str, Any]) -> str:
    """Returns the request for a solution of the rewritten problem."""
    named = {"prompt": _text(row["prompt"]), "answer": row["answer"], "rewritten": row["rewritten"]}
    return re.sub(r"\{(prompt|answer|rewritten)\}", lambda m: named[m[1]], SOLVE)


def _rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields a row for each record: its original, and a reason where nothing is to be done."""
    known = sources.DATASETS.get(settings.source)
    columns = sources.columns(
        settings.source, settings.prompt_key or None, settings.answer_key or None
    )
    split = known.splits[0] if known and known.splits else None
    index = 0
    for file in sources.find_files(settings.source, split, "--input"):
        if Path(file).resolve().parent == settings.output.resolve():
            raise UserError(
                f"--output={settings.output} holds the input, {file}; name another directory."
            )
        for record in read_records(file, columns, "--input"):
            if settings.num_problems and index == settings.num_problems:
                return
            row: dict[str, Any] = {"index": index, "reason": None}
            index += 1
            if isinstance(record, Unusable):
                yield row | {"prompt": "", "reason": f"unusable: {record.reason}"}
                continue
            yield row | _original(record)


def _original(record: Record) -> dict[str, Any]:
    row = {"prompt": record.prompt, "answer": record.answer, "metadata": record.metadata}
    if re.fullmatch(r"[-+]?\d{1,4000}", record.answer.strip()):
        return row | {"integer": int(record.answer), "reason": INTEGER_ALREADY}
    return row


def _text(prompt: Prompt) -> str:
    """Returns the text of a prompt, of a chat that of its last message."""
    return prompt if isinstance(prompt, str) else prompt[-1][1]


def _with_text(prompt: Prompt, text: str) -> Any:
    if isinstance(prompt, str):
        return text
    messages = [*prompt[:-1], (prompt[-1][0], text)]
    return [{"role": role, "content": content} for role, content in messages]


def _replies(
    replies: Replies, target: Path, prompts: Sequence[dict[str, Any]], num_samples: int
) -> list[list[str]] | None:
    """Returns the texts of the replies to each prompt, none to one that was refused; None:
    stopped."""
    if not prompts:
        return []
    source = target.with_name(f"{target.stem}_prompts.jsonl")
    source.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    if not replies(source, target, num_samples):
        return None
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    samples = {line["index"]: line["samples"] for line in lines}
    return [[sample["text"] for sample in samples[prompt["index"]]] for prompt in prompts]


def _write(place: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Writes rows.jsonl, problems.jsonl and report.json; returns the report."""
    problems = []
    for row in rows:
        if row["reason"] is None:
            row["reason"] = KEPT
        if not row["reason"].startswith("kept"):
            continue
        text = row.get("rewritten") or _text(row["prompt"])
        problem = {
            "prompt": _with_text(row["prompt"], text),
            "answer": str(row["integer"]),
            "original_prompt": _with_text(row["prompt"], _text(row["prompt"])),
            "original_answer": row["answer"],
            "form": row.get("form", ""),
            "agreement": row.get("agreement", 1.0),
            "index": row["index"],
        }
        others = {k: v for k, v in row["metadata"].items() if k not in SHADOWING}
        problems.append(others | problem)
    kind = lambda reason: "unusable" if reason.startswith("unusable") else reason
    reasons = collections.Counter(kind(row["reason"]) for row in rows)
    report = {"records": len(rows), "kept": len(problems), "reasons": dict(reasons.most_common())}
    for name, lines in (("rows", rows), ("problems", problems)):
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
        write_atomically(place / f"{name}.jsonl", text)
    write_atomically(place / "report.json", json.dumps(report, indent=1) + "\n")
    return report


def from_endpoint(endpoint: Endpoint, say: Callable[[str], None]) -> Replies:
    """Returns the replies of an endpoint."""
    endpoint.check()

    def replies(source: Path, target: Path, num_samples: int) -> bool:
        lines = read_prompts(source)
        chat_endpoint.ask_file(endpoint, lines, target, num_samples=num_samples, say=say)
        return True

    return replies


def from_model(flags: Mapping[str, Any]) -> Replies:
    """Returns the replies of a model in Hugging Face format, sampled here.

    Args:
        flags: model, temperature, max_new_tokens, seed, chat and slots.
    """
    from dapo_jax.tools.generate import Request, sample_file

    def replies(source: Path, target: Path, num_samples: int) -> bool:
        given = {name: flags[name] for name in flags if name in Request._fields}
        given |= dict(num_samples=num_samples, top_p=1.0, top_k=0, min_p=0.0, dtype="", stop="")
        request = Request(**given)
        request.check()
        return sample_file(request, source, target) is None

    return replies
