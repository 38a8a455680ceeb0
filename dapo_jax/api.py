"""The public Python interface, for notebooks and scripts: `import dapo_jax; dapo_jax.train(...)`.

Each function is a program of launch/ without a command line; docs/api.md has an example of each.
Nothing heavy is imported before a function needs it: `import dapo_jax` stays cheap, also for the
processes that score. Runs on several hosts start with launch/train.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dapo_jax.config import Config
    from dapo_jax.config.sft import SftConfig
    from dapo_jax.tools.evaluate import Evaluation


class RunRecord(NamedTuple):
    """A finished run, as the files in its directory have it."""

    workdir: Path
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl, see docs/metrics.md
    summary: dict[str, Any]  # summary.json


def load_config(
    file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | Path | None = None,
) -> "Config":
    """Returns the checked config of a file.

    Args:
        file: such as "configs/tiny_dapo.py" or "configs/tiny.py:grpo", a file here or in the
            project's directory.
        overrides: values by field, such as {"train.num_steps": 3}.
        model: Hugging Face directory or hub id, in place of the config's model and tokenizer.

    Raises:
        UserError: the file or a field is wrong.
    """
    from dapo_jax.config.cli import load_config

    return load_config(str(file), overrides or {}, model=None if model is None else str(model))


def train(config: "Config", workdir: str | Path) -> RunRecord:
    """Runs the config in `workdir`, from the beginning or from its newest checkpoint.

    Raises:
        UserError: the config cannot be trained, or `workdir` holds another run.
        RunError: the run failed; what is saved is intact.
        KeyboardInterrupt: Ctrl-C, the notebook's stop button or SIGTERM stopped it, and it is
            saved. The same call resumes, on a CPU bit for bit.
    """
    from dapo_jax.config import Config
    from dapo_jax.config.checks import check_training
    from dapo_jax.train_loop import train

    _check_kind(config, Config, "load_config")
    check_training(config)
    _raise_if_stopped(train(config, _place(workdir)))
    return _record(_place(workdir))


def load_sft_config(
    file: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | Path | None = None,
) -> "SftConfig":
    """Returns the checked config of a supervised run; arguments and errors as `load_config`."""
    from dapo_jax.config.cli import load_config
    from dapo_jax.config.sft import SftConfig

    model = None if model is None else str(model)
    return load_config(str(file), overrides or {}, model=model, kind=SftConfig)


def sft(config: "SftConfig", workdir: str | Path) -> RunRecord:
    """Fine-tunes on written responses in `workdir`, as `train`. At the end `workdir` can be
    `config.model.path` of `train`, or `model` of `load_config`.

    Raises:
        UserError: the config or an example is wrong, or `workdir` holds another run.
        RunError: the run failed; what is saved is intact.
        KeyboardInterrupt: as `train`.
    """
    from dapo_jax.config.sft import SftConfig
    from dapo_jax.tools.sft import fine_tune

    _check_kind(config, SftConfig, "load_sft_config")
    _raise_if_stopped(fine_tune(config, _place(workdir)))
    return _record(_place(workdir))


def _raise_if_stopped(stopped_by: int | None) -> None:
    """Ends what comes after a call that was stopped, such as the next run of a loop."""
    if stopped_by is not None:
        raise KeyboardInterrupt("stopped and saved; the same call resumes")


def _record(place: Path) -> RunRecord:
    metrics = (place / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((place / "summary.json").read_text())
    return RunRecord(place, [json.loads(line) for line in metrics], summary)


def evaluate(
    config: "Config",
    workdir: str | Path | None = None,
    *,
    output: str | Path | None = None,
    step: int | None = None,
    benchmarks: Sequence[str] = (),
    num_samples: int | None = None,
    num_problems: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int = 0,
    scorer: str | None = None,
) -> "Evaluation":
    """Returns avg@n, cons@n and pass@k of a checkpoint, with their 95 % intervals over problems.

    Args:
        workdir: of a run with this config; None: the config's base model, which needs `output`.
        output: directory of the transcripts, default below the workdir.
        step: of the checkpoint, default the newest.
        benchmarks: names, files or hub ids, default the config's held-out problems.
        num_samples: responses to each problem, n; default 32, at temperature 0 one.
        num_problems: the first so many of each benchmark, default all.
        temperature, top_p, scorer: default the config's.

    Raises:
        UserError: no such run, checkpoint or benchmark, or a value is out of range.
        KeyboardInterrupt: it was stopped. The same call continues with the samples that it has.
    """
    from dapo_jax.tools.evaluate import evaluate_model, request

    _check_list("benchmarks", benchmarks)
    given = dict(workdir=workdir, output=output, step=step, benchmarks=",".join(benchmarks))
    given |= dict(num_samples=num_samples, num_problems=num_problems, temperature=temperature)
    given |= dict(top_p=top_p, top_k=None, min_p=None, seed=seed, scorer=scorer)
    found = evaluate_model(config, request(config, SimpleNamespace(**given)))
    _raise_if_stopped(found.stopped_by)
    return found


def report(workdir: str | Path, compare: Sequence[str | Path] = (), *, paper: bool = False) -> Path:
    """Writes report.html and report.png into the run's directory and returns the page's path.

    Args:
        compare: directories of other runs, in the same plots.
        paper: draw the curves of the DAPO paper, too.

    Raises:
        UserError: a directory holds no run.
    """
    from dapo_jax.runs.report.page import write_report
    from dapo_jax.runs.report.paper_curves import load_paper

    others = _places(compare)
    return write_report(_place(workdir), others=others, paper=load_paper() if paper else ())


def diagnose(
    workdir: str | Path, compare: Sequence[str | Path] = (), *, paper: bool = False
) -> list[str]:
    """Returns what the metrics of runs show to be wrong, as sentences (docs/diagnose.md).

    Arguments and errors: see `report`.
    """
    from dapo_jax.runs.report.data import load_runs
    from dapo_jax.runs.report.diagnosis import in_words
    from dapo_jax.runs.report.paper_curves import load_paper

    runs = load_runs([_place(workdir), *_places(compare)])
    return [line for run in runs for line in in_words(run, load_paper() if paper else ())]


def fit_curves(
    workdir: str | Path, compare: Sequence[str | Path] = (), *, compute: str = "tokens"
) -> list[str]:
    """Fits held-out accuracy against compute and returns parameters, extrapolations and warnings as
    sentences; writes fit.png into the run's directory (docs/diagnose.md).

    Args:
        compare: directories of other runs. Runs that differ in their seed alone are one method.
        compute: "tokens", those sampled, or "seconds", those of training without evaluations.

    Raises:
        UserError: a directory holds no run, or a run has too few evaluations.
    """
    from dapo_jax.runs.report import scaling
    from dapo_jax.runs.report.data import by_method, load_runs

    methods = by_method(load_runs([_place(workdir), *_places(compare)]))
    fits = [scaling.fit_method(method, compute) for method in methods]
    (_place(workdir) / "fit.png").write_bytes(scaling.plot(fits))
    return [line for fit in fits for line in scaling.in_words(fit)]


def generate(
    model: str | Path,
    prompts: Sequence[str | Sequence[int]],
    *,
    num_samples: int = 4,
    temperature: float = 1.0,
    top_p: float = 0.7,
    max_new_tokens: int = 256,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat: bool = False,
    system_prompt: str = "",
    dtype: str = "",
) -> list[dict[str, Any]]:
    """Returns for each prompt its "prompt", "prompt_token_ids" and "samples", a list of "text",
    "token_ids", "log_probs", "model_log_probs" and "finish_reason".

    Args:
        model: Hugging Face directory or hub id.
        prompts: texts or token ids.
        temperature: 0: greedy.
        stop: texts after which a sample ends.
        chat: put prompts into the tokenizer's chat template.
        system_prompt: with `chat`; default the template's.
        dtype: float32 or bfloat16, default the checkpoint's, on CPUs float32.

    Raises:
        UserError: the model, a prompt or a value is wrong.
        KeyboardInterrupt: it was stopped.
    """
    from dapo_jax.tools.generate import Request, samples

    _check_list("prompts", prompts)
    _check_list("stop", stop)
    request = Request(
        model=str(model),
        num_samples=num_samples,
        temperature=temperature,
        top_p=top_p,
        top_k=0,
        min_p=0.0,
        max_new_tokens=max_new_tokens,
        seed=seed,
        chat=chat,
        slots=64,
        dtype=dtype,
        stop=json.dumps(list(stop)) if stop else "",
        system_prompt=system_prompt,
    )
    found, stopped_by = samples(request, prompts)
    if stopped_by is not None:
        raise KeyboardInterrupt
    return found


def export(
    workdir: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> Path:
    """Writes a run's checkpoint as a Hugging Face directory and returns its path.

    Args:
        output: a new or empty directory.
        step: of the checkpoint, default the newest.
        dtype: float32 or bfloat16, default the run's compute dtype.
        adapter: write the adapters of a run with `config.model.lora_rank` alone, as peft keeps
            them; without this they are merged into the weights.

    Raises:
        UserError: no such run or checkpoint, or the output is not empty.
    """
    from dapo_jax.tools.export import export

    export(_place(workdir), step, _place(output), dtype, adapter=adapter)
    return _place(output)


def score(
    scorer: str,
    records: Sequence[Mapping[str, Any]],
    *,
    timeout_seconds: float = 5.0,
    workers: int = 2,
) -> list[dict[str, Any]]:
    """Returns each record with "correct", "extracted", "reward", "seconds" and "note".

    Args:
        scorer: as config.reward.scorer: a name, "path/to/file.py:function", or a weighted sum.
        records: with "prediction", a text, and "answer"; other keys are the scorer's metadata.
        timeout_seconds: hard limit for one record.

    Raises:
        UserError: no such scorer, or a record is malformed.
    """
    from dapo_jax.tools.score_file import score_records

    return score_records(scorer, records, timeout_seconds=timeout_seconds, workers=workers)


def plan(
    config: "Config",
    topology: str,
    *,
    program: str | None = None,
    search: bool = False,
    response_tokens: int | None = None,
    prompt_tokens: int | None = None,
    profile: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Returns the memory that the run's programs need, compiled for devices that may be absent, and
    an estimate of one step: `fits`, `programs`, `step` and more, see `dapo_jax.tools.plan.plan`.

    Args:
        topology: such as "v5p:4x4x4", which needs libtpu, or "local".
        program: one of docs/plan.md, default all, and for a search "train".
        search: try meshes and remat policies.
        response_tokens, prompt_tokens: mean lengths in the estimated step, default a quarter of
            the longest.
        profile: check.json of launch/check.py on one such chip, for the estimate.
        say: receives the progress.

    Raises:
        UserError: an unknown topology or program, or the mesh does not fit.
    """
    from dapo_jax.tools.plan import chips, plan, programs
    from dapo_jax.tools.plan import search as searching
    from dapo_jax.types import UserError

    known: dict[str, tuple[str, ...]] = {name: (name,) for name in programs.names(config)}
    known["all"] = tuple(known)
    program = program or ("train" if search else "all")
    if program not in known:
        raise UserError(f"--program must be one of {', '.join(known)}; got {program!r}.")
    lengths = {}
    for name, given, limit in (
        ("response_tokens", response_tokens, config.rollout.max_response_tokens),
        ("prompt_tokens", prompt_tokens, config.data.max_prompt_tokens),
    ):
        lengths[name] = max(1, limit // 4) if given is None else given
        if not 1 <= lengths[name] <= limit:
            raise UserError(f"--{name} must be from 1 to {limit:,}; got {given}.")
    find = searching.search if search else plan.plan
    target = chips.target(topology)
    if profile is not None:
        target = target._replace(chip=chips.with_profile(target.chip, profile))
    return find(config, target, known[program], say, **lengths)


def _check_kind(config: Any, kind: type, maker: str) -> None:
    """Raises UserError for the config of another program, or for no config."""
    from dapo_jax.types import UserError

    if not isinstance(config, kind):
        given = type(config).__name__
        raise UserError(f"config must come from dapo_jax.{maker}; got a {given}.")


def _check_list(name: str, values: Any) -> None:
    """Raises UserError for one text in place of a list, which would be read letter by letter."""
    from dapo_jax.types import UserError

    if isinstance(values, str | Path):
        raise UserError(f"{name} must be a list; got {values!r}. Write {name}=[...].")


def _places(paths: Sequence[str | Path]) -> list[Path]:
    _check_list("compare", paths)
    return [_place(path) for path in paths]


def _place(path: str | Path) -> Path:
    from dapo_jax.types import UserError

    if path == "":
        raise UserError("a directory is needed; got '', which would be the current directory.")
    return Path(path).expanduser().resolve()
