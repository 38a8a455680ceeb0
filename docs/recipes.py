"""Writes docs/recipes.md, what differs between the project's recipes: python docs/recipes.py"""

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs import ablation
from configs import recipes as published
from dapo_jax.config.cli import definitions, load_config

FILE = Path(__file__).with_suffix(".md")
WIDTH = 120
HEAD = """# Recipes

Made by `python docs/recipes.py` from the configs; a test compares. Each recipe is given by the
fields in which it differs from DAPO on the same task. Where `reward.overlong_buffer_tokens` is 0,
`reward.overlong_penalty` is 0 too. The configs say where a value comes from.
"""
TINY = """
## On the tiny task

`python launch/train.py --config=configs/tiny.py:RECIPE`, differences from `configs/tiny_dapo.py`.
All share its model, problems and number of steps. What each reached: [log.md](log.md). Equations:
[objective.md](objective.md).
"""
ROWS = """
## The paper's Table 1

`python launch/train.py --config=configs/qwen32b_dapo.py:ROW`, differences from
`configs/qwen32b_dapo.py`; `configs/ablation.py:ROW` is the same on a small model
([table1.md](table1.md)).
"""
SINCE = """
## Recipes since DAPO

`python launch/train.py --config=configs/recipes.py:RECIPE`, differences from
`configs/qwen32b_dapo.py` in model, method and sizes, and stages by their first step;
`configs/tiny.py:RECIPE` is the method alone on the tiny task. Their own problems, prompts and
scorers are left out, and what this project does otherwise stands in `configs/recipes.py`. Not yet
run at these sizes.
"""
QWEN = """
## Other Qwen models

`python launch/train.py --config=configs/RECIPE.py`, differences from `configs/qwen32b_dapo.py` in
model, method and sizes. Meshes, data, checkpoints and rows are left out.
"""
LEFT_OUT = (
    "model.", "mesh.", "data.", "checkpoint.", "log.", "pretrain.", "train.row", "reward.workers",
    "rollout.page_tokens", "rollout.cache_gib", "rollout.slots",
    "rollout.prefill_prompts", "rollout.decode_steps",
)  # fmt: skip
METHOD = ("model.path", "model.head_dtype", "data.pass_rate_band")  # all the same


def fields_of(place: str) -> dict[str, Any]:
    """Returns the values of a config by the names of their fields."""

    def flat(values: Any, name: str) -> dict[str, Any]:
        if not isinstance(values, dict) or not values:
            return {name: values}
        return {
            k: v for key, value in values.items() for k, v in flat(value, f"{name}.{key}").items()
        }

    found = flat(load_config(place, {}).to_dict(), "")
    return {name.removeprefix("."): value for name, value in found.items()}


def differences(place: str, base: str) -> list[str]:
    """Returns `field value` of each field of a config that differs from another's."""
    ours, theirs = fields_of(place), fields_of(base)
    if not ours["reward.overlong_buffer_tokens"]:
        del ours["reward.overlong_penalty"]  # a factor of nothing
    return [
        f"`{name}` {'none' if value is None else value}"
        for name, value in ours.items()
        if name in METHOD or not name.startswith(LEFT_OUT)
        if theirs.get(name, {}) != value
    ]


def entry(name: str, about: str | None, found: list[str]) -> str:
    """Returns a recipe as an item of a list."""
    source = re.search(r"arXiv:(\d{4}\.\d{5})", about or "")
    title = f"- `{name}`" + (f" (arXiv {source[1]})" if source else "")
    text = f"{title}: {', '.join(found) or 'no difference'}"
    return textwrap.fill(
        text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def recipes() -> str:
    """Returns the text of docs/recipes.md."""
    tiny, methods = "configs/tiny_dapo.py", definitions("configs/tiny.py")[1]
    names = [n for n, f in methods.items() if getattr(f, "__module__", "") == "<run_path>"]
    names = [n for n in names if not n.startswith(("_", "get_config"))]
    parts = [HEAD + TINY]
    parts += [
        entry(n, methods[n].__doc__, differences(f"configs/tiny.py:{n}", tiny)) for n in names
    ]
    base = "configs/qwen32b_dapo.py"
    parts.append(ROWS)
    parts += [
        entry(row.__name__, None, differences(f"{base}:{row.__name__}", base))
        for row in ablation.TABLE_1
    ]
    parts.append(SINCE)
    parts += [
        entry(name, run.method.__doc__, differences(f"configs/recipes.py:{name}", base))
        for name, run in published.RUNS.items()
    ]
    parts.append(QWEN)
    files = sorted((FILE.parent.parent / "configs").glob("qwen*.py"))
    others = [f"configs/{file.name}" for file in files if file.name not in base]
    parts += [entry(Path(place).stem, None, differences(place, base)) for place in others]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(recipes())
    print(FILE)
