"""Generation with a Hugging Face model, for launch/generate.py."""

import json
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax

from dapo_jax.config import ModelConfig, hf_config, model_config
from dapo_jax.data import prompts
from dapo_jax.data.tokenizer import load_tokenizer, stop_tokens, text_stream
from dapo_jax.distributed.preemption import StopSignals
from dapo_jax.models import pretrained
from dapo_jax.models.sharding import fitting, make_mesh
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.engine import DecoderEngine
from dapo_jax.rollout.engine_config import EngineConfig
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.scheduler import GenerationLoop, NewTokens, SchedulerOutput
from dapo_jax.tools.prompt_file import done_before, prompt_of, read_prompts
from dapo_jax.types import Problem, Response, StopRequested, UserError
from dapo_jax.utils.fields import NUM_SEEDS
from dapo_jax.utils.progress import Progress, duration
from dapo_jax.utils.telemetry import Telemetry
from dapo_jax.utils.watchdog import Watchdog

PROMPT_TOKENS_MULTIPLE = 16  # the longest prompt is rounded up to it, to share programs
DECODE_STEPS = 4  # few, so that text comes in short pieces
PREFILL_PROMPTS = 8  # of a call on each shard, at most
REPORT_EVERY_SECONDS = 10.0
WATCHDOG_SECONDS = 60.0  # without movement until the watchdog reports


class Request(NamedTuple):
    """The flags that decide what is generated."""

    model: str  # Hugging Face directory or hub id
    num_samples: int  # of each prompt
    temperature: float  # 0: greedy
    top_p: float  # 1: all
    top_k: int  # 0: all
    min_p: float  # 0: all
    max_new_tokens: int
    seed: int
    chat: bool  # put prompts into the tokenizer's chat template
    slots: int  # sequences decoded at once
    dtype: str  # of the computation; "": float32 on CPUs, elsewhere the checkpoint's
    stop: str  # text after which a sample ends, or a JSON list of texts; "": none
    system_prompt: str = ""  # in the chat template, for prompts without one; "": the template's

    @property
    def stop_strings(self) -> list[str]:
        """The texts of `stop`."""
        if not self.stop.startswith("["):
            return [self.stop] if self.stop else []
        try:
            return json.loads(self.stop)
        except ValueError:
            return [self.stop]

    def check(self) -> None:
        """Raises UserError for a value out of range."""
        stops = all(isinstance(text, str) and text for text in self.stop_strings)
        for ok, name, wanted in (
            (self.num_samples > 0, "num_samples", "above 0"),
            (self.max_new_tokens > 0, "max_new_tokens", "above 0"),
            (0 <= self.seed < NUM_SEEDS, "seed", "from 0 to 2**32 - 1"),
            (self.slots > 0, "slots", "above 0"),
            (self.dtype in ("", "float32", "bfloat16"), "dtype", "float32 or bfloat16"),
            (stops, "stop", "a text, or a JSON list of texts that are not empty"),
        ):
            if not ok:
                raise UserError(f"--{name} must be {wanted}; got {getattr(self, name)!r}.")
        if self.system_prompt and not self.chat:
            raise UserError("--system_prompt is written by the chat template: give --chat too.")
        SamplingParams.of(self).check()


def generate(flags: Mapping[str, Any]) -> int | None:
    """Runs launch/generate.py with these flags.

    Returns:
        The number of the signal that stopped it, or None when it is done.

    Raises:
        UserError: a flag, the model or a prompt is wrong.
    """
    request = Request(**{name: flags[name] for name in Request._fields})
    sources = [name for name in ("prompt", "prompt_token_ids", "prompts") if flags[name]]
    if len(sources) != 1:
        raise UserError("one of --prompt, --prompt_token_ids and --prompts is needed, not empty.")
    if bool(flags["prompts"]) != bool(flags["output"]):
        raise UserError("--prompts=FILE.jsonl and --output=FILE.jsonl are given together.")
    if flags["prompts"] and flags["json"]:
        raise UserError("--json is for --prompt: --output is JSON already.")
    request.check()
    if flags["prompts"]:
        return sample_file(
            request, *(Path(flags[name]).expanduser() for name in ("prompts", "output"))
        )
    prompt, ids = flags["prompt"], flags["prompt_token_ids"]
    if not prompt:
        try:
            prompt = [int(token) for token in ids.split(",")]
        except ValueError:
            raise UserError(f"--prompt_token_ids={ids} must be integers and commas.") from None
    return print_samples(request, prompt, as_json=flags["json"])


def print_samples(request: Request, prompt: str | Sequence[int], *, as_json: bool) -> int | None:
    """Prints samples of one prompt, a text or token ids: as they come, or as one JSON object."""
    if as_json:
        (found,), stopped_by = samples(request, [prompt])
        if stopped_by is None:
            print(json.dumps({"model": request.model} | found))
        return stopped_by
    writer = _Writer(request, needs_text=isinstance(prompt, str))
    streams = _Streams(request.num_samples, writer.stream, sys.stdout)
    for output in writer.outputs([writer.problem(0, prompt)], stream=True):
        if output.tokens:
            streams.show(output.tokens)
    return writer.stopped_by


def samples(
    request: Request, prompts: Sequence[str | Sequence[int]]
) -> tuple[list[dict[str, Any]], int | None]:
    """Returns samples of each prompt, a text or token ids, and the number of the signal that
    stopped it, or None.

    Raises:
        UserError: a value of the request, the model or a prompt is wrong.
    """
    request.check()
    prompts = [_plain(number, prompt) for number, prompt in enumerate(prompts, 1)]
    if not prompts:
        return [], None
    writer = _Writer(request, needs_text=any(isinstance(prompt, str) for prompt in prompts))
    problems = [writer.problem(number, prompt) for number, prompt in enumerate(prompts)]
    ended: list[dict[int, Response]] = [{} for _ in problems]
    for output in writer.outputs(problems):
        for index, sample, response, _ in output.finished:
            ended[index][sample] = response
    found = [
        {"prompt": problem.prompt if isinstance(prompt, str) else list(prompt)}
        | _said(problem, responses)
        for prompt, problem, responses in zip(prompts, problems, ended)
    ]
    return found, writer.stopped_by


def sample_file(request: Request, source: Path, target: Path) -> int | None:
    """Writes samples of every prompt of a jsonl file, a line of `target` for each, in order.

    Each line is the source's with "samples" and the settings in "sampled_with". A sample depends on
    the seed, its line and its number alone: after a stop the same call resumes.
    """
    lines = read_prompts(source)
    settings = request._asdict()
    del settings["slots"]  # samples do not depend on it
    lines = [line | {"sampled_with": settings} for line in lines]
    done = done_before(target, lines)
    writer = _Writer(request, needs_text=any("prompt" in line for line in lines))
    if done:
        writer.progress.say(f"{done} of {len(lines)} prompts were done before")
    problems = [
        writer.problem(number, line.get("prompt_token_ids") or prompt_of(line))
        for number, line in enumerate(lines)
    ][done:]
    if not problems:
        return None
    ended: list[dict[int, Response]] = [{} for _ in problems]
    written, num, tokens = 0, 0, 0
    start = reported = time.monotonic()
    with target.open("a", encoding="utf-8") as out:
        for output in writer.outputs(problems):
            for index, sample, response, _ in output.finished:
                ended[index][sample] = response
                tokens += len(response.tokens)
            num += len(output.finished)
            # In prompt order: a stopped file is a prefix of the whole one.
            while written < len(problems) and len(ended[written]) == request.num_samples:
                said = lines[done + written] | _said(problems[written], ended[written])
                out.write(json.dumps(said) + "\n")
                out.flush()
                written += 1
            now, total = time.monotonic(), len(problems) * request.num_samples
            if num and output.finished and (now - reported > REPORT_EVERY_SECONDS or num == total):
                reported = now
                writer.progress.say(
                    f"{num} of {total} samples, {tokens / (now - start):,.0f} tokens per second, "
                    f"about {duration((now - start) * (total - num) / num)} left"
                )
    return writer.stopped_by


class _Writer:
    """A model with its tokenizer, and the generation loop over prompts."""

    def __init__(self, request: Request, *, needs_text: bool):
        self.request = request
        self.stopped_by: int | None = None  # number of the signal
        self.progress = Progress(0, out=sys.stderr)
        self.config = _model(request)
        try:
            self.tokenizer = load_tokenizer(self.config)
        except UserError:
            if needs_text or request.stop:
                raise
            self.tokenizer = None  # token ids in, token ids out

    def problem(self, number: int, prompt: Any) -> Problem:
        """Returns the problem of a prompt: a text, messages or token ids."""
        if isinstance(prompt, str) or not all(isinstance(part, int) for part in prompt):
            text = prompts.render(
                self.tokenizer,
                prompt,
                template=None,
                chat=self.request.chat,
                system_prompt=self.request.system_prompt or None,
            )
            if text != text.encode(errors="replace").decode():
                raise UserError(
                    f"prompt {number + 1} ({text[:40]!r}) holds half of a surrogate pair, which no "
                    "tokenizer takes. Give it as UTF-8."
                )
            (tokens,) = prompts.encode(self.tokenizer, [text], chat=self.request.chat)
        else:
            text, tokens = "", tuple(prompt)
        outside = [t for t in tokens if not 0 <= t < self.config.vocab_size]
        if not tokens or outside:
            what = f"token {outside[0]} is not in the vocabulary" if outside else "it has no tokens"
            raise UserError(f"prompt {number + 1} ({text[:40]!r}): {what}.")
        return Problem(number, text, tokens, "", "prompts")

    def stream(self) -> Callable[[int], str]:
        """Returns a function from one token after another to text."""
        if self.tokenizer is None:
            return lambda token: f"{token} "
        return text_stream(self.tokenizer)

    def outputs(
        self, problems: Sequence[Problem], *, stream: bool = False
    ) -> Iterator[SchedulerOutput]:
        """Yields after each engine call, until all responses end or a signal comes.

        Args:
            stream: report tokens as they are sampled.
        """
        request, c = self.request, self.config
        layout = fitting(c, jax.device_count())
        mesh, shards = make_mesh(layout), layout.data * layout.fsdp
        up = lambda n, multiple: n + -n % multiple
        longest = max(len(problem.prompt_tokens) for problem in problems)
        ends = c.stop_token_ids if self.tokenizer is None else stop_tokens(c, self.tokenizer)
        engine_config = EngineConfig(
            model=c,
            layout=layout,
            slots=up(min(request.slots, len(problems) * request.num_samples), shards),
            prefill_prompts=min(up(len(problems), shards), PREFILL_PROMPTS * shards),
            max_prompt_tokens=up(longest, PROMPT_TOKENS_MULTIPLE),
            max_response_tokens=request.max_new_tokens,
            stop_tokens=ends,
            params=SamplingParams.of(request),
            samples=request.num_samples,
            decode_steps=DECODE_STEPS,
        )
        with (
            StopSignals(self.progress) as signals,
            Watchdog(WATCHDOG_SECONDS, self.progress.say) as watch,
        ):
            telemetry = Telemetry(self.progress, watch, signals.check)
            try:
                telemetry.phase("the model to be loaded")
                say, check_stop = self.progress.say, watch.moving(signals.check)
                params = pretrained.load(c, layout, mesh, 0, say=say, check_stop=check_stop)
                engine = DecoderEngine(engine_config, mesh)
                telemetry.phase("the device")
                with engine.weights(params):
                    stops = tuple(request.stop_strings)
                    loop = GenerationLoop(
                        engine,
                        iter(problems),
                        self._detokenize,
                        jax.random.key(request.seed),
                        GenerationSettings(request.num_samples, stop_strings=stops, stream=stream),
                        telemetry,
                    )
                    for output in loop.run():
                        yield output
                        telemetry.check_stop()
            except StopRequested:
                self.stopped_by = signals.received

    def _detokenize(self, sequences: Sequence[Any]) -> list[str]:
        if self.tokenizer is None:
            return [""] * len(sequences)
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=True)


def _plain(number: int, prompt: Any) -> str | list[int]:
    """Returns a prompt, its token ids as Python's integers; raises UserError for another kind."""
    if isinstance(prompt, str):
        return prompt
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise UserError(
            f"prompt {number} must be a text or a list of token ids; got {prompt!r:.60}. For the "
            "chat template give a text, with chat=True."
        ) from error


def _model(request: Request) -> ModelConfig:
    stored = hf_config.stored_dtype(request.model)
    dtype = request.dtype or ("float32" if jax.default_backend() == "cpu" else stored)
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype"), dtype)
    return model_config(hf_config.filled({"path": request.model} | dtypes))


class _Streams:
    """Prints samples one below the other: the first unfinished one as it comes. Text of the others
    is held until their turn."""

    def __init__(self, num: int, stream: Callable[[], Callable[[int], str]], out: TextIO):
        self.num, self.out, self.shown = num, out, 0
        self.streams = [stream() for _ in range(num)]
        self.held = [""] * num
        self.over = [False] * num
        self.has_text = False

    def show(self, news: Sequence[NewTokens]) -> None:
        """Takes the tokens of one engine call."""
        if not self.has_text:  # earlier, the model is still being loaded
            self.has_text = True
            self._head()
        for _, sample, tokens, is_last in news:
            self.held[sample] += "".join(map(self.streams[sample], tokens))
            self.over[sample] = is_last
        while self.shown < self.num:
            self.out.write(self.held[self.shown])
            self.held[self.shown] = ""
            if not self.over[self.shown]:
                break
            self.out.write("\n")
            self.shown += 1
            self._head()
        self.out.flush()

    def _head(self) -> None:
        if self.num > 1 and self.shown < self.num:
            self.out.write(f"--- {self.shown + 1} of {self.num}\n")


def _said(problem: Problem, responses: Mapping[int, Response]) -> dict[str, Any]:
    arrays = {"token_ids": "tokens", "log_probs": "log_probs", "model_log_probs": "model_log_probs"}
    return {
        "prompt_token_ids": list(problem.prompt_tokens),
        "samples": [
            {
                "text": response.text,
                **{key: getattr(response, name).tolist() for key, name in arrays.items()},
                "finish_reason": response.finish_reason,
            }
            for _, response in sorted(responses.items())
        ],
    }
