"""Replies of an OpenAI-compatible endpoint to a file of prompts; the key is never stored."""

import http.client
import itertools
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from dapo_jax.tools.prompt_file import done_in_any_order
from dapo_jax.types import UserError
from dapo_jax.utils.progress import duration

KEY = "OPENAI_API_KEY"  # the environment variable with the key, if the endpoint needs one
TIMEOUT_SECONDS = 600.0  # of one request
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # waits after an error that may pass
REPORT_EVERY_SECONDS = 10.0
MAY_PASS = (408, 409, 429, 500, 502, 503, 504)  # HTTP statuses
MOST_REFUSED = 32  # prompts in a row: the fault is in every request, such as the account's
OF_THE_PROMPT = (400, 413, 422)  # HTTP statuses: its content or length, where others are answered


class Endpoint(NamedTuple):
    """Where to ask, and how."""

    url: str  # up to and without /chat/completions, such as http://localhost:8000/v1
    model: str  # its name there
    temperature: float
    max_new_tokens: int
    seed: int
    concurrency: int  # requests at once

    def check(self) -> None:
        """Raises UserError for a value that cannot be used."""
        wanted = f"--endpoint must be a URL such as http://localhost:8000/v1; got {self.url!r}."
        try:
            parts = urllib.parse.urlsplit(self.url)
        except ValueError as error:  # of a bracket that does not close
            raise UserError(wanted) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(wanted)
        if parts.username or parts.password or parts.query:
            raise UserError(
                f"--endpoint holds a name, password or query, which would be stored. Put the key "
                f"into the environment variable {KEY}."
            )
        if not self.model:
            raise UserError("--endpoint_model is needed: the name of the model at --endpoint.")
        if self.concurrency < 1:
            raise UserError(f"--concurrency must be above 0; got {self.concurrency}.")


class Refused(Exception):
    """The endpoint does not answer this prompt, however often it is asked."""


def ask_file(
    endpoint: Endpoint,
    lines: Sequence[Mapping[str, Any]],
    target: Path,
    *,
    num_samples: int,
    say: Callable[[str], None],
) -> None:
    """Writes replies to every prompt, a line of `target` for each, in the order of arrival.

    Each line is the given one with "samples" and the settings in "sampled_with". Where the endpoint
    refuses a prompt, such as for its content or length, there are no samples, and "refused" is its
    reason. After a stop the same call resumes.

    Args:
        lines: objects with "prompt", a text, and the same other names. No two are equal.

    Raises:
        UserError: the endpoint refuses all prompts or stays out of reach; what is written stays.
    """
    settings = endpoint._asdict() | {"num_samples": num_samples}
    del settings["concurrency"]  # replies do not depend on it
    lines = [{**line, "sampled_with": settings} for line in lines]
    done = done_in_any_order(target, lines)
    waiting = iter([number for number in range(len(lines)) if number not in done])
    num_before, latest, failure = len(done), -1, None
    start = reported = time.monotonic()
    under_way: dict[Future[list[str]], int] = {}
    # Refused ones, each until a later prompt is answered.
    refused: list[tuple[int, dict[str, Any]]] = []
    as_text = lambda number, reply: json.dumps(lines[number] | reply) + "\n"
    with ThreadPoolExecutor(endpoint.concurrency) as pool, target.open("a") as out:
        while True:
            if failure is None and len(refused) < MOST_REFUSED:
                for number in itertools.islice(waiting, endpoint.concurrency - len(under_way)):
                    prompt = lines[number]["prompt"]
                    under_way[pool.submit(ask, endpoint, prompt, num_samples)] = number
            if not under_way:
                break
            ready: list[tuple[int, dict[str, Any]]] = []
            for answer in wait(under_way, return_when=FIRST_COMPLETED).done:
                number, reply = under_way.pop(answer), dict[str, Any](samples=[])
                try:
                    reply["samples"] = [{"text": text} for text in answer.result()]
                    ready.append((number, reply))
                    latest = max(latest, number)
                except Refused as error:
                    refused.append((number, reply | {"refused": str(error)}))
                except UserError as error:
                    failure = failure or error
            ready += [each for each in refused if each[0] < latest]
            refused = [each for each in refused if each[0] > latest]
            if not ready:
                continue
            out.writelines(as_text(*each) for each in ready)
            out.flush()
            done |= {number for number, _ in ready}
            now, num_left = time.monotonic(), len(lines) - len(done)
            if now - reported > REPORT_EVERY_SECONDS or not num_left:
                reported = now
                time_left = duration((now - start) * num_left / max(1, len(done) - num_before))
                say(f"{len(done)} of {len(lines)} prompts answered, about {time_left} left")
        if refused and (not done or len(refused) >= MOST_REFUSED):
            failure = failure or _failure(endpoint.url, refused[0][1]["refused"])
        elif failure is None:
            out.writelines(as_text(*each) for each in refused)
    if failure is not None:
        raise failure


def ask(endpoint: Endpoint, prompt: str, num_samples: int) -> list[str]:
    """Returns so many replies to a prompt.

    Raises:
        Refused: the endpoint does not take this prompt.
        UserError: it is out of reach or answers in another form.
    """
    texts: list[str] = []
    while len(texts) < num_samples:  # an endpoint may give one reply, however many are asked for
        body = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "n": num_samples - len(texts),
            "temperature": endpoint.temperature,
            "max_tokens": endpoint.max_new_tokens,
            "seed": endpoint.seed + len(texts),
        }
        answer = _post(endpoint.url, body)
        try:
            found = [choice["message"]["content"] or "" for choice in answer["choices"]]
            assert found and all(isinstance(text, str) for text in found)
        except (LookupError, TypeError, AssertionError) as error:
            raise UserError(
                f"--endpoint={endpoint.url} answers without choices[].message.content: "
                f"{json.dumps(answer)[:200]}"
            ) from error
        texts += found
    return texts[:num_samples]


def _body(error: urllib.error.HTTPError) -> str:
    """Returns the beginning of the text that came with an error, or the error's reason."""
    try:
        return error.read()[:200].decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):  # the connection was lost
        return str(error.reason)


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers
    )
    for seconds in (*RETRY_SECONDS, None):
        status = None
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            status, what = error.code, f"HTTP {error.code}: {_body(error)}"
            passes = status in MAY_PASS
        except (OSError, http.client.HTTPException, ValueError) as error:
            what, passes = f"{type(error).__name__}: {error}", True
        if status in OF_THE_PROMPT:
            raise Refused(what)
        if seconds is None or not passes:
            raise _failure(url, what)
        time.sleep(seconds)


def _failure(url: str, what: str) -> UserError:
    return UserError(
        f"--endpoint={url}: {what}. What was answered is kept; the same command resumes."
    )
