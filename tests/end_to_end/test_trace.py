"""README's trace is what a rollout step really does, in that order."""

import re
import sys

from dapo_jax import train_loop
from dapo_jax.training.learner import Learner
from tests.conftest import ROOT
from tests.support.runs import run_here


def documented():
    """(file, function) of each row of README's table."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\|[^|]*\|((?: ?`[\w/]+\.py`,?)+) \| ([^|]*) \|", text, re.M)
    assert len(rows) == 9
    found = []
    for files, names in rows:
        found += zip(
            re.findall(r"`([\w/]+\.py)`", files), re.findall(r"`(\w+)`", names), strict=True
        )
    return found


def test_a_rollout_step_calls_what_readme_says_in_that_order(tmp_path, home, monkeypatch):
    calls = []
    step = train_loop.TrainLoop.one_step
    here = f"{ROOT}/dapo_jax/"

    def record(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(here):
            call = (frame.f_code.co_filename.removeprefix(here), frame.f_code.co_name)
            if call not in calls:
                calls.append(call)

    def recorded(loop, state):
        sys.setprofile(record)
        try:
            return step(loop, state)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(train_loop.TrainLoop, "one_step", recorded)
    # Without it the update is traced within the step.
    monkeypatch.setattr(Learner, "compile", lambda _: None)
    scorer = f"{ROOT / 'tests' / 'support' / 'scorers.py'}:even"
    settings = {"pretrain__num_steps": 2, "train__num_steps": 1, "reward__scorer": scorer}
    assert run_here(tmp_path / "run", home, **settings)[0] is None
    assert [call for call in calls if call in documented()] == documented()
