"""The model card of an exported run: README.md, as the Hugging Face hub shows it.

`dapo_jax.tools.export` calls `write`. What the card says is read from the run directory. A path of
this machine is written as its last component.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_jax.config import Config
from dapo_jax.data.sources import DATASETS, HUB_ID, SUFFIXES
from dapo_jax.utils import hf_hub

TAGS = ("dapo_jax", "dapo", "reinforcement-learning", "jax")
# A path in a text: after a blank, a quote, an operator or at the beginning.
PATH = re.compile(r"(?<![\w.:/-])(?:gs:/|file:/|~[\w.-]*)?/[^\s'\"*+,;()\[\]]*")


def write(output: Path, workdir: Path, label: str, dtype: str, library: str) -> None:
    """Writes the card of an export into its directory.

    Args:
        workdir: of the run.
        label: "NAME, step N", the run and the exported step.
        dtype: of the tensors.
        library: that loads the directory: transformers, or peft for adapters alone.
    """
    frozen = json.loads((workdir / "config.json").read_text())
    metrics = workdir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("}")]
    (output / "README.md").write_text(card(frozen, steps, label, dtype, library))


def card(
    frozen: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    label: str,
    dtype: str,
    library: str = "transformers",
) -> str:
    """Returns the text of a card.

    Args:
        frozen: config.json of the run.
        steps: the lines of its metrics.jsonl.
        label, dtype, library: see `write`.
    """
    whole = Config.of_run(frozen["config"])
    name, _, step = label.rpartition(", step ")
    config = whole.at(int(step))
    stage = f" in the stage of step {step}" if whole.stages else ""
    name, versions = without_paths(name), frozen.get("versions", {})
    made = [f"commit `{frozen['git_commit']}`"] if frozen.get("git_commit") else []
    made += [
        f"{package} {versions[package]}" for package in ("python", "jax") if package in versions
    ]
    where = f" ({', '.join(made)})" if made else ""
    parts = [
        _front_matter(config, library),
        f"# {name}",
        f"{_base(config)} Trained by reinforcement learning in JAX with dapo_jax{where}: rollout "
        f"step {step} of {config.train.num_steps}, tensors in {dtype}.",
        f"## Method\n\n{_method(config, stage)}",
        f"## Results\n\n{_results(config, steps, int(step))}",
        f"## Commands\n\n{_commands(frozen.get('command', ''), name)}",
        "## Config\n\n<details>\n<summary>All fields</summary>\n\n```json\n"
        f"{json.dumps(_clean(frozen['config']), indent=1)}\n```\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def without_paths(text: str) -> str:
    """Returns the text with each absolute path as its last component."""
    if text.startswith(("/", "~", "gs://", "file:/")) and not re.search(r"\s[+*]\s", text):
        return Path(text).name  # one path, with blanks perhaps
    return PATH.sub(lambda match: Path(match[0]).name, text)


def _clean(values: Any) -> Any:
    """Returns nested values without paths."""
    if isinstance(values, Mapping):
        return {_clean(name): _clean(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_clean(value) for value in values]
    return without_paths(values) if isinstance(values, str) else values


def _front_matter(config: Config, library: str) -> str:
    lines = [f"library_name: {library}", "pipeline_tag: text-generation"]
    if config.model.path and hf_hub.is_repository(config.model.path):
        lines.append(f"base_model: {config.model.path.partition('@')[0]}")
    lines += ["tags:", *(f"- {tag}" for tag in TAGS)]
    if datasets := _datasets(config):
        lines += ["datasets:", *(f"- {dataset}" for dataset in datasets)]
    return "\n".join(["---", *lines, "---"])


def _datasets(config: Config) -> list[str]:
    """Returns the hub ids of the data sets that the run trains on."""
    paths = [source.path for source in config.data.train.values() if not source.all_levels]
    named = [DATASETS[path].path if path in DATASETS else path for path in paths]
    on_hub = (p for p in named if HUB_ID.fullmatch(p) and not p.endswith(SUFFIXES))
    names = ("/".join(p.split("/")[:2]) for p in on_hub if not Path(p).exists())
    return sorted({name.partition("@")[0] for name in names})


def _base(config: Config) -> str:
    if path := config.model.path:
        if hf_hub.is_repository(path):
            return f"Base model: [{path}](https://huggingface.co/{path.partition('@')[0]})."
        return f"Base model: the directory `{without_paths(path)}`."
    if config.pretrain is None:
        return "Base model: random parameters."
    return (
        "Base model: made by the project, a supervised fit of "
        f"{config.pretrain.num_steps} steps on generated arithmetic of mixed quality."
    )


def _method(config: Config, stage: str) -> str:
    o, rollout, train, reward = config.objective, config.rollout, config.train, config.reward
    higher = o.clip_low is not None and o.clip_high is not None and o.clip_high > o.clip_low
    tokens, buffer = o.aggregation == "token-mean", reward.overlong_buffer_tokens
    sampling = config.dynamic_sampling
    techniques = [
        ("Clip-Higher", higher, f"`clip_low` {o.clip_low}, `clip_high` {o.clip_high}"),
        (
            "Dynamic sampling",
            sampling.enabled,
            f"at most {sampling.max_prompts:,} prompts a step" if sampling.enabled else "",
        ),
        ("Token-level policy gradient loss", tokens, f"aggregation `{o.aggregation}`"),
        (
            "Overlong reward shaping",
            buffer > 0 or o.overlong_filter,
            ", ".join(
                [f"punishment over the last {buffer:,} tokens"] * (buffer > 0)
                + ["truncated responses masked in the loss"] * o.overlong_filter
            ),
        ),
    ]
    rows = [f"| {name} | {'on' if on else 'off'} | {text} |" for name, on, text in techniques]
    kl = [f"KL to the base model in the loss {o.kl_coefficient:g}"] * (o.kl_coefficient > 0)
    kl += [f"in the reward {o.reward_kl_coefficient:g}"] * (o.reward_kl_coefficient > 0)
    updates = train.prompts_per_step // train.prompts_per_update
    share = f" on the {100 * o.top_entropy_share:g} % of tokens of highest entropy"
    selected, c = share * (o.top_entropy_share < 1), config.model
    bonus = ""
    if o.entropy_adaptation is not None:
        target, change = o.entropy_adaptation
        bonus = (
            f"; entropy bonus at {target:g} nats per token and below, its coefficient from "
            f"{o.entropy_coefficient:g} in steps of {change:g}"
        )
    trained = f" LoRA: rank {c.lora_rank}, alpha {c.lora_alpha:g}, all linear layers."
    return (
        "| DAPO ([arXiv:2503.14476](https://arxiv.org/abs/2503.14476)) | | |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nLoss `{o.loss}`{selected}, advantage `{o.advantage}`; "
        f"{', '.join(kl) or 'no KL term'}{bonus}. A rollout step{stage}: "
        f"{train.prompts_per_step:,} "
        f"prompts, {rollout.group_size} responses each of at most "
        f"{rollout.max_response_tokens:,} tokens at temperature {rollout.temperature:g}, "
        f"and {updates} updates of AdamW at learning rate {config.optimizer.learning_rate:g}. "
        f"Scorer: `{without_paths(reward.scorer)}`. Seed {config.seed}."
        + trained
        * (c.lora_rank > 0)
    )


def _results(config: Config, steps: Sequence[Mapping[str, Any]], step: int) -> str:
    """Returns the table of held-out figures of the base model and at the exported step."""
    e, sources = config.evaluation, list(config.data.heldout)
    names = [f"{figure}@{e.num_samples}" for figure in ("avg", "cons", "pass")]
    first = next((numbers for numbers in steps if numbers["step"] == 0), {})
    evaluated = [n for n in steps if f"eval/{names[0]}" in n and 0 < n["step"] <= step]
    if not evaluated:
        return "The run has not been evaluated at this step."
    last = evaluated[-1]

    def cell(numbers: Mapping[str, Any], prefix: str, name: str) -> str:
        if (value := numbers.get(f"{prefix}/{name}")) is None:
            return ""
        text = f"{100 * value:.1f} %"
        if name.startswith("avg@") and f"{prefix}/interval_low" in numbers:  # that of avg@k
            low, high = (numbers[f"{prefix}/interval_{end}"] for end in ("low", "high"))
            text += f" [{100 * low:.1f}, {100 * high:.1f}]"
        return text

    places = {"all" if len(sources) > 1 else sources[0]: "eval"}
    places |= {source: f"eval/{source}" for source in sources if len(sources) > 1}
    rows = [
        f"| {place} | {name} | {cell(first, prefix, name)} | {cell(last, prefix, name)} |"
        for place, prefix in places.items()
        for name in names
        if f"{prefix}/{name}" in last
    ]
    sampled = f"temperature {e.temperature:g}, top-p {e.top_p:g}" if e.temperature else "greedily"
    return (
        f"| held-out | | base model | step {last['step']} |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n{e.num_samples} responses to each problem, {sampled}; in brackets the 95 % "
        "bootstrap interval over the choice of problems."
    )


def _commands(command: str, name: str) -> str:
    """Returns the commands that train and evaluate, from that of the run."""
    program, *arguments = shlex.split(command) or [""]
    joined: list[str] = []
    for argument in arguments:  # also "--config FILE"
        if joined and re.fullmatch(r"--?(config(\.[\w.]+)?|model)", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    given = [a for a in joined if re.match(r"--?(config(\.[\w.]+)?|model)=", a)]
    if Path(program).name != "train.py" or not given:
        return "The run was started from Python, by `dapo_jax.train` with the config below."
    flags = [
        f"{flag}={without_paths(value)}" for flag, _, value in (a.partition("=") for a in given)
    ]
    return "\n".join(
        f"    python launch/{program}.py {shlex.join([*flags, f'--workdir=runs/{name}'])}"
        for program in ("train", "evaluate")
    )
