"""Evaluation of a model on benchmarks: the work of launch/evaluate.py."""

import dataclasses
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dapo_jax.config import Config, SourceConfig
from dapo_jax.data import dataset as problems
from dapo_jax.data.sources import DATASETS
from dapo_jax.data.tokenizer import load_tokenizer, stop_tokens
from dapo_jax.distributed.preemption import StopSignals
from dapo_jax.evaluation import benchmarks
from dapo_jax.evaluation.benchmark_page import table
from dapo_jax.evaluation.benchmarks import Benchmark
from dapo_jax.evaluation.majority_vote import equivalences
from dapo_jax.models import decoder, lora
from dapo_jax.models.sharding import make_mesh, param_shardings, with_shardings
from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.scorers import load_scorer
from dapo_jax.rewards.types import Rubric, parse_scorers
from dapo_jax.rollout import memory_budget
from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.end_of_thinking import EndOfThinking
from dapo_jax.rollout.engine import make_engine
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.runs import integrity, run_directory
from dapo_jax.runs.checkpoint import find_step, restore_part
from dapo_jax.training import base_model
from dapo_jax.types import Problem, StopRequested, UserError
from dapo_jax.utils.fields import NUM_SEEDS
from dapo_jax.utils.progress import Progress, duration
from dapo_jax.utils.telemetry import Telemetry
from dapo_jax.utils.watchdog import WATCHDOG_SECONDS, Watchdog

PROMPT_TOKENS_MULTIPLE = 16  # of the longest prompt, so that like benchmarks share programs


class Request(NamedTuple):
    """A request for an evaluation."""

    workdir: Path | None  # of a run; None: the base model of the config
    step: int | None  # of the run; None: its newest checkpoint
    benchmarks: tuple[str, ...]  # names, files, hub ids; empty: config.data.heldout
    num_samples: int
    num_problems: int | None  # the first so many of each benchmark; None: all
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    scorer: str | None  # None: as the config says
    output: Path | None  # None: below the workdir


def request(config: Config, flags: Any) -> Request:
    """Returns the request of a command line; defaults are those of the config.

    Raises:
        UserError: a flag is out of range, or contradicts another.
    """
    place = lambda value: None if value is None else Path(value).expanduser().resolve()
    e = config.evaluation
    sampling = {"temperature": e.temperature, "top_p": e.top_p, "top_k": 0, "min_p": 0.0}
    sampling |= {n: getattr(flags, n) for n in sampling if getattr(flags, n) is not None}
    greedy = sampling["temperature"] == 0  # all samples of a problem are the same
    num_samples = 1 if greedy else 32
    if flags.step is not None and flags.workdir is None:
        raise UserError(f"--step={flags.step} needs the --workdir of a run.")
    if flags.output is None and flags.workdir is None:
        raise UserError("--output is needed where there is no --workdir.")
    asked = Request(
        workdir=place(flags.workdir),
        step=flags.step,
        benchmarks=tuple(filter(None, (flags.benchmarks or "").split(","))),
        num_samples=num_samples if flags.num_samples is None else flags.num_samples,
        num_problems=flags.num_problems,
        seed=flags.seed or 0,
        scorer=flags.scorer,
        output=place(flags.output),
        **sampling,
    )
    for ok, name, wanted in (
        (asked.num_samples > 0, "num_samples", "above 0"),
        (asked.num_samples == 1 or not greedy, "num_samples", "1 at temperature 0"),
        (asked.num_problems is None or asked.num_problems > 0, "num_problems", "above 0"),
        (0 <= asked.seed < NUM_SEEDS, "seed", "from 0 to 2**32 - 1"),
    ):
        if not ok:
            raise UserError(f"--{name} must be {wanted}; got {getattr(asked, name)}.")
    SamplingParams.of(asked).check()
    if asked.scorer is not None:
        try:
            scorers = parse_scorers(asked.scorer)
        except ValueError as error:
            raise UserError(f"--scorer={asked.scorer}: {error}.") from error
        for name, _ in scorers:
            load_scorer(name, "--scorer")
    return asked


class Evaluation(NamedTuple):
    """The outcome of an evaluation, whole or stopped."""

    directory: Path | None  # of transcripts and pages; None: stopped before the model was loaded
    results: dict[str, Any]  # figures by benchmark
    stopped_by: int | None  # number of the signal


def evaluate_model(config: Config, request: Request) -> Evaluation:
    """Evaluates, prints the table, and writes transcripts, pages and figures to the output.

    Raises:
        UserError: for mistakes that the user can mend.
    """
    begun = time.monotonic()
    progress = Progress(0)
    whole, wanted, place = config, request.step, None
    if request.workdir is not None:
        run = _run_of(config, request.workdir)
        place = run_directory.checkpoints(request.workdir, run)
        request = request._replace(step=find_step(place, wanted))
    config = config.at(request.step or 1)  # with the limits of its stage, as the run evaluates
    chosen = _sources(config, request)
    tokenizer = load_tokenizer(config.model)
    # Every problem of a benchmark counts, whatever its length.
    everything = dataclasses.replace(config.data, max_prompt_tokens=2**30)
    found = problems.load(
        dataclasses.replace(config, data=everything),
        chosen,
        tokenizer,
        field="benchmark",
        say=progress.say,
    )
    rubrics = problems.rubrics(config, chosen)
    longest = _padded(max(len(problem.prompt_tokens) for problem in found))
    data, with_prompts = config.data, dataclasses.replace(config.data, max_prompt_tokens=longest)
    devices = jax.devices()
    config = memory_budget.with_replica_size(
        dataclasses.replace(config, data=with_prompts),
        devices,
        memory_budget.device_bytes(devices),
        progress.say,
        training=False,
    )
    mesh = make_mesh(config.mesh)
    names = {name for rubric in rubrics.values() for name in rubric.names}
    output, results = None, {}
    with (
        StopSignals(progress) as signals,
        Watchdog(WATCHDOG_SECONDS, progress.say) as watch,
        RewardPool(
            names | equivalences(rubrics),
            workers=config.reward.workers,
            timeout_seconds=config.reward.timeout_seconds,
        ) as pool,
    ):
        telemetry = Telemetry(progress, watch, signals.check)
        check_stop = watch.moving(signals.check)
        try:
            telemetry.phase("the model to be loaded")
            if place is not None and wanted is None:
                # A run that still trains may have replaced the newest checkpoint meanwhile.
                newest = find_step(place, None)
                if whole.at(newest or 1) == whole.at(request.step or 1):
                    request = request._replace(step=newest)
            of_run = dataclasses.replace(config, data=data)  # a base that is made depends on it
            label, params = load_params(
                of_run, request.workdir, request.step, mesh, tokenizer, progress, check_stop
            )
            output = _output(request, label)
            settings = _settings(config, request, label, params)
            benchmarks.open_directory(output, settings)
            for name in chosen:
                # Numbers of its own: other benchmarks change none of its samples.
                own = [problem for problem in found if problem.source == name]
                own = own[: request.num_problems]
                of_benchmark = [problem._replace(id=i) for i, problem in enumerate(own)]
                telemetry.phase(f"{name}: the device")
                collector = _collector(
                    config, request, mesh, tokenizer, of_benchmark, rubrics, pool, telemetry
                )
                key = jax.random.fold_in(jax.random.key(request.seed), zlib.crc32(name.encode()))
                benchmark = Benchmark(name, of_benchmark, rubrics[name])
                with collector.engine.weights(params):
                    results[name] = benchmarks.run(
                        benchmark, collector, key, output, progress=progress
                    )
        except StopRequested:
            progress.say("stopped; the same command resumes with the problems that are left")
            return Evaluation(output, results, signals.received)
    progress.say(
        f"\n{label}, temperature {request.temperature:g}, top-p {request.top_p:g}, "
        f"top-k {request.top_k}, min-p {request.min_p:g}, seed {request.seed}, in "
        f"{duration(time.monotonic() - begun)}; in brackets the 95 % interval over problems\n\n"
        f"{table(results)}\n\n{output}: results.json, transcripts and a page of each benchmark"
    )
    return Evaluation(output, results, None)


def _collector(
    config: Config,
    request: Request,
    mesh: jax.sharding.Mesh,
    tokenizer: Any,
    problems: Sequence[Problem],
    rubrics: Mapping[str, Rubric],
    pool: RewardPool,
    telemetry: Telemetry,
) -> RolloutCollector:
    """Returns the collector of a benchmark, which depends on no other benchmark."""
    longest = max(len(problem.prompt_tokens) for problem in problems)
    return RolloutCollector(
        make_engine(
            config, mesh, stop_tokens(config.model, tokenizer), max_prompt_tokens=_padded(longest)
        ),
        pool,
        rubrics,
        lambda tokens: tokenizer.batch_decode(tokens, skip_special_tokens=True),
        GenerationSettings(
            request.num_samples,
            SamplingParams.of(request),
            config.rollout.stop_strings,
            end_of_thinking=EndOfThinking.of(config.rollout, tokenizer),
        ),
        telemetry=telemetry,
    )


def _padded(tokens: int) -> int:
    return tokens + -tokens % PROMPT_TOKENS_MULTIPLE


def _sources(config: Config, request: Request) -> dict[str, SourceConfig]:
    """Returns the benchmarks by their names."""
    chosen = {name: _source(config, name) for name in request.benchmarks}
    if len({_name(path) for path in chosen}) < len(chosen):
        raise UserError(
            f"--benchmarks={','.join(chosen)}: two of them have one name (a file's is its stem, "
            "train/NAME's is NAME). Evaluate them in two calls, each with its own --output."
        )
    sources = {_name(path): source for path, source in chosen.items()} or config.data.heldout

    def changed(source: SourceConfig) -> SourceConfig:
        change: dict[str, Any] = {} if request.scorer is None else {"scorer": request.scorer}
        # Another number of generated problems would be other problems.
        if request.num_problems and not source.all_levels:
            change["num_problems"] = request.num_problems
        return dataclasses.replace(source, **change)

    return {name: changed(source) for name, source in sources.items()}


def _name(path: str) -> str:
    """Returns the name of a benchmark; for a file, its stem."""
    stem = path if path in DATASETS else Path(path.rstrip("/")).stem
    return re.sub(r"[^\w-]", "_", stem)


def _source(config: Config, path: str) -> SourceConfig:
    if path in config.data.heldout:
        return config.data.heldout[path]
    if (name := path.removeprefix("train/")) != path and not Path(path).exists():
        if name not in config.data.train:
            known = ", ".join(f"train/{source}" for source in config.data.train)
            raise UserError(f"--benchmarks: {path} is not a source of the config, {known}.")
        return dataclasses.replace(config.data.train[name], weight=None, pass_rates=None)
    return SourceConfig(path=path, split=DATASETS[path].heldout_split if path in DATASETS else None)


def load_params(
    config: Config,
    workdir: Path | None,
    step: int | None,
    mesh: jax.sharding.Mesh,
    tokenizer: Any,
    progress: Progress,
    check_stop: Callable[[], None],
) -> tuple[str, decoder.Params]:
    """Returns (label, parameters) of a run's checkpoint, the newest if no step is given, or without
    a run of the config's base model.

    Raises:
        UserError: there is no such run or checkpoint, or it is of another model.
    """

    def base(config: Config, directory: Path | None) -> decoder.Params:
        say = progress.say
        return base_model.load_or_make(
            config, mesh, tokenizer, directory, say=say, check_stop=check_stop
        )[0]

    if workdir is not None:
        run = _run_of(config, workdir)
        shardings = param_shardings(config.model, config.mesh, mesh)
        shapes = with_shardings(decoder.param_shapes(config.model), shardings)
        place = run_directory.checkpoints(workdir, run)
        trained, frozen = lora.split(shapes)
        step, trained, host = restore_part(place, step, ("policy", "params"), trained)
        label = f"{workdir.name}, step {step}"
        if frozen is None:
            return label, trained
        found = base(dataclasses.replace(config, seed=run["seed"]), workdir / "base")
        fingerprint = integrity.fingerprint(found)
        run_directory.check_base(fingerprint, host["base"], config.model.path, workdir)
        return label, lora.join(trained, lora.split(found)[1])
    return f"base model {config.model.path or ''}".strip(), base(config, None)


def _run_of(config: Config, workdir: Path) -> dict[str, Any]:
    """Returns the config of a run, which must have the model that `config` describes."""
    plain = lambda values: json.loads(json.dumps(values, default=str))  # lists for tuples
    defaults = {field.name: field.default for field in dataclasses.fields(config.model)}
    try:
        run = run_directory.read_config(workdir / "config.json")
        frozen = plain(defaults) | run["model"]  # an earlier version has no later fields
    except run_directory.UNREADABLE as error:
        raise UserError(f"--workdir={workdir} holds no run: {error}.") from error
    for name, value in plain(dataclasses.asdict(config.model)).items():
        if frozen[name] != value:
            raise UserError(
                f"config.model.{name} is {value!r}, and {frozen[name]!r} in {workdir}. Give the "
                "--config and the --model that the run was made with."
            )
    return run


def _output(request: Request, label: str) -> Path:
    if request.output is not None:
        return request.output
    assert request.workdir is not None
    step = label.rpartition(" ")[2]
    how = f"n{request.num_samples}_t{request.temperature:g}_p{request.top_p:g}"
    how += f"_k{request.top_k}" if request.top_k else ""
    how += f"_m{request.min_p:g}" if request.min_p else ""
    return request.workdir / "evaluations" / f"step_{step}_{how}_s{request.seed}"


def _settings(
    config: Config, request: Request, label: str, params: decoder.Params
) -> Mapping[str, Any]:
    """Returns all that the samples and their verdicts depend on, besides the problems."""
    names = ("num_samples", "temperature", "top_p", "top_k", "min_p", "seed")
    thinking = config.rollout.end_of_thinking
    return {
        "model": label,
        "parameters": integrity.fingerprint(params),
        **{name: getattr(request, name) for name in names},
        "max_response_tokens": config.rollout.max_response_tokens,
        "stop_strings": list(config.rollout.stop_strings),
        "stop_token_ids": list(config.model.stop_token_ids),
        **({} if thinking is None else {"end_of_thinking": list(thinking)}),
        "scorer": request.scorer or config.reward.scorer,
    }
