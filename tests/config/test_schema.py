"""A wrong field, source or combination of fields is an error with its name and value."""

import ast
import dataclasses
import typing

import pytest

from dapo_jax.config import Config, schema, sft
from dapo_jax.config.sft import SftConfig
from dapo_jax.types import UserError
from tests.conftest import ROOT
from tests.support.helpers import source_dict, tiny_dict, with_fields

FILE = source_dict("problems.jsonl")
WEIGHED = FILE | {"weight": 1.0}
TEMPLATES = ["Q: ", "{prompt} \\boxed{}", "{prompt}{", "{prompt.a}", "{prompt[a]}", "{other}"]
TEMPLATES += ["{{prompt}}", "{prompt[0]}", "{prompt!r}"]
YARN = {"type": "yarn", "factor": 2.0}
LONG = YARN | {"original_max_position_embeddings": 8}
TOO_MANY = {"type": "linear", "factor": 2.0, "beta_fast": 32}
CHECKS = {"schema.py", "sft.py", "checks.py", "objective_checks.py"}  # they read all fields


def changed(*changes):
    """The test config as nested dicts with fields replaced, each as ("group.field", value)."""
    return with_fields(tiny_dict(), dict(changes))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("seed", "0", "must be int; got '0'"),
        ("seed", -1, "must be 0 or more; got -1"),
        ("seed", None, "must be int; got None"),
        ("model", None, "must be a group of fields, not None"),
        ("model.path", "here", r"must be None with config\.pretrain.* got 'here'"),
        ("model.tokenizer", "here", r"must be None with config\.pretrain.* got 'here'"),
        ("model.stop_token_ids", (32,), "must be in the vocabulary: from 0 to 31; got 32"),
        ("model.num_kv_heads", 3, r"\(3\) must divide config\.model\.num_heads \(4\).* 3 or 6"),
        ("model.rope_scaling", {"rope_type": "dynamic"}, "its rope type must be default, lin"),
        ("model.rope_scaling", {"rope_type": "linear"}, "its factor is needed"),
        ("model.rope_scaling", {"type": "linear", "factor": "2"}, "its factor must be a num"),
        ("model.rope_scaling", YARN, "its original_max_position_embeddings is needed"),
        ("model.rope_scaling", TOO_MANY, "beta_fast is not known here"),
        ("model.rope_scaling", {"rope_typ": "yarn"}, "a rope type is needed with rope_typ"),
        ("model.rope_scaling", {"factor": 4.0}, "a rope type is needed with factor"),
        ("model.rope_scaling", LONG | {"attention_factor": "x"}, "its attention_factor must be a"),
        ("model.rope_scaling", LONG | {"truncate": "no"}, "its truncate must be True or False"),
        ("model.sliding_window", (16, (2,)), r"must be layers from 0 to 1, each once; got \(2,\)"),
        ("model.sliding_window", (16, (-1,)), "must be layers from 0 to 1"),
        ("model.sliding_window", (16, (0, 0)), "must be layers from 0 to 1, each once"),
        ("model.sliding_window", (16, ()), "must be layers from 0 to 1"),
        ("mesh.rules", (("embed", "row"),), "sends 'embed' to 'row'"),
        ("mesh.rules", (("mlp", "tensor"),), "must be rules for vocab, .* got .*'mlp'"),
        ("mesh.rules", (("ff", None), ("ff", "tensor")), "one for each; got .*'ff'"),
        ("mesh.fsdp", -1, "at most one axis may be -1"),
        ("data.train", {"q": FILE | {"weight": 1.0}}, "add a source with path 'ar"),
        ("data.train", {}, "names no source; give at least one"),
        ("data.pass_rate_band", (0.5, 0.5), r"must be \(low, high\), low < high; got"),
        ("data.heldout", {}, "names no source"),
        ("data.train", None, "must be a group of named fields, not None"),
        ("data.train.sums", None, "must be a group of fields, not None"),
        ("data.train.a/b", WEIGHED, "'a/b' cannot be the name of a source"),
        ("data.train.", WEIGHED, "'' cannot be the name of a source"),
        ("data.heldout", {3: FILE}, "3 cannot be the name of a source"),
        ("data.train.sums.weight", None, "must be greater than 0.* got None"),
        ("data.train.sums.weight", 0.0, r"must be greater than 0.* got 0\.0"),
        ("data.train.sums.weight", float("inf"), "must be finite; got inf"),
        ("data.train.sums.weight", float("nan"), "must be finite; got nan"),
        ("data.heldout.sums.weight", 1.0, "must be None"),
        ("data.train.sums.levels", None, "must be a non-empty tuple"),
        ("data.train.sums.levels", (1,), "must be .* 2, 3, .* 11; got"),
        ("data.train.sums.num_problems", None, "must be given for arithmetic"),
        ("data.train.sums.num_problems", 0, "must be greater than 0; got 0"),
        ("data.train.sums.split", "test", "must be 'train' or 'heldout'; got 'test'"),
        ("data.train.sums.prompt_key", "x", "is not read when .* 'arithmetic'"),
        ("data.train.sums.answer_key", "x", "is not read when .* 'arithmetic'"),
        ("data.train.sums.path", "gsm8k", r"levels is not read when .*path is 'gsm8k'"),
        ("data.train.sums.prompt_template", "Q: ", r"must be .* template with \{prompt\}.*'Q: '"),
        *(
            ("data.prompt_template", text, r"must be .* template with \{prompt\}")
            for text in TEMPLATES
        ),
        ("data.system_prompt", "Think.", r"is not read when config\.data\.chat is Fa"),
        ("data.train.sums.scorer", "boxed + ", r"\('boxed \+ '\) must be a scor"),
        ("data.heldout.sums.scorer", "0 * boxed", r"'0 \* boxed' is not"),
        ("reward.scorer", "x * boxed", r"\('x \* boxed'\) must be a scorer"),
        ("reward.scorer", (("exactly", 1.0),), "must be str"),
        ("reward.incorrect", 1.0, "must be less than 1, the reward of a"),
        ("reward.overlong_penalty", 0.0, "both 0 .* or both positive"),
        ("reward.overlong_buffer_tokens", 32, r"must be less than .*\(32\); got 32"),
        ("rollout.stop_strings", ("a", ""), "must be texts .* got"),
        (
            "model.kernel_blocks",
            (("splash_k", 512),),
            "must be one of 'splash_q', .* got 'splash_k'",
        ),
        ("model.kernel_blocks", (("splash_q", 0),), "must be greater than 0; got 0"),
        (
            "model.kernel_blocks",
            (("splash_q", 384),),
            r"\['splash_q'\] must be a power of two .* 384",
        ),
        ("model.kernel_blocks", (("splash_q", 64),), r"from 128 to 8192; got 64"),
        ("model.kernel_blocks", (("paged_kv", 8),), r"from 16 to 8192; got 8"),
        ("model.kernel_blocks", (("paged_kv", 32), ("paged_kv", 64)), "names, each once"),
        ("model.kernel_blocks", (("splash_kv_compute", 1024),), r"at most .*kv' \(512\); got 1024"),
        ("rollout.end_repetition", 32, r"less than .*_tokens \(32\).* got 32"),
        ("rollout.end_repetition", 0, "must be greater than 0; got 0"),
        ("rollout.end_of_thinking", (0, "Answer: "), "must be greater than 0; got 0"),
        ("rollout.end_of_thinking", (24, "Answer: "), r"\[0\] must be .*\(32\) - 8, .* got 24"),
        ("rollout.end_of_thinking", (9, " \n"), r"\[1\] must be a phrase whose last word"),
        (
            "rollout",
            {
                "max_response_tokens": 32,
                "end_of_thinking": (9, "\nAnswer: "),
                "stop_strings": ("\n",),
            },
            "stop_strings must be texts that .*Answer: .* does not hold; got",
        ),
        ("rollout.watchdog_limit_seconds", -1.0, "must be .* got -1"),
        ("rollout.watchdog_limit_seconds", 17.0, "0, or above 17: .* where a scorer hangs"),
        ("rollout.top_p", 1.5, r"must be in \(0, 1\]; got 1\.5"),
        ("rollout.top_p", 0.9, "log_prob_source to 'recompute', or top_p to 1"),
        ("rollout.top_k", 5, "log_prob_source to 'recompute', or top_k to 0"),
        ("rollout.top_k", 2**31, r"must be from 0 to 2\*\*31 - 1; got 2147483648"),
        ("train.num_steps", 2**63, r"must be below 2\*\*32; got 9223372036854775808"),
        ("log.profile_steps", (1, 2**63), r"profile_steps\[1\] must be below 2\*\*32"),
        ("rollout.min_p", 0.1, "log_prob_source to 'recompute', or min_p to 0"),
        ("rollout.group_size", 1, "must be at least 2 with .*enabled"),
        ("dynamic_sampling.max_prompts", 3, r"at least config.train.prompts_per_step .* with"),
        ("dynamic_sampling", {"enabled": False, "exhausted": "stop"}, "exhausted is not read"),
        ("evaluation", {"temperature": 0.0, "num_samples": 4}, "must be 1 with .* 0: all samples"),
        ("rollout.max_staleness", -1, "must be 0 to 8; got -1"),
        ("rollout.max_staleness", 9, "must be 0 to 8; got 9"),
        ("dynamic_sampling.exhausted", "error", "must be one of 'train', 'skip', 'stop'"),
        ("train.prompts_per_update", 5, r"\(5\) must divide config\.train\.prompts_per_step"),
        ("train.row_tokens", 50, r"\(50\) is shorter .* Set it to 56"),
        ("train.num_steps.x", 1, "must be int"),
        ("pretrain", {"num_steps": 1}, r"num_steps must be at least 2; got 1"),
        ("optimizer.learning_rate", float("inf"), "must be finite; got inf"),
        ("optimizer", {"warmup_steps": 625, "final_rate_share": 0.1}, "warmup_steps must be below"),
        ("objective.clip_higher", 0.3, "is not a field"),
        ("objective.clip_low", 1.5, r"must be in \(0, 1\]; got 1\.5"),
        ("objective.top_entropy_share", 0.0, r"must be in \(0, 1\]; got 0\.0"),
        ("objective.entropy_adaptation", (3.5, 0.005), r"over 32 tokens .* more than 3\.466"),
        ("objective.entropy_adaptation", (0.2, 0.0), "must be greater than 0; got 0"),
        ("objective.clip_dual", 0.5, "must be above 1; got 0.5"),
        ("objective.aggregation", "mean", "must be one of token-mean, .* got 'mean'"),
        ("objective.advantage_args", {"normalise_std": 1}, r"must be bool; got 1 \(int\)"),
        ("objective.overlong_in_baseline", False, "not read when .*overlong_filter is False"),
        ("objective.kl_estimator", "k1", "not read when .*reward_kl_coefficient are 0"),
        (
            "objective",
            {"reward_kl_coefficient": 0.1, "kl_estimator": "k2+"},
            r"kl_estimator must be without \+ in the reward .* got 'k2\+'",
        ),
        ("objective.reward_kl_adaptation", (0.1, 100), "with coefficient 0.0"),
        ("objective.advantage", "gae", "critic is needed when .* 'gae' and critic None"),
        ("objective.advantage", "maxrl", r"reward\.incorrect must be 0 or more for .*'maxrl'"),
        ("objective.advantage", "gpg", r"reward\.incorrect must be 0 for .*'gpg'.* got -1"),
        ("seed", 2**32, r"config.seed must be below 2\*\*32; got 4294967296"),
        ("critic", {"learning_rate": 1e-4}, "is needed when .*'gae'.* critic given"),
        ("correction", {"policy": "current"}, "corrects nothing"),
        ("correction", {"policy": "old"}, r"correction\.policy 'old' corrects the"),
        ("correction", {"policy": "proximal"}, r"correction\.policy 'proximal' corrects the"),
        (
            "correction",
            {"policy": "current", "importance": ("token", 3.0, 2.0)},
            r"importance must be .* a floor of at most the cap; got \('token', 3.0, 2.0\)",
        ),
    ],
)
def test_a_wrong_field_is_named(field, value, message):
    if field == "train.num_steps.x":
        field, value = "train.num_steps", {"x": value}
    with pytest.raises(UserError, match=message) as error:
        Config.from_dict(changed((field, value)))
    assert "config." in str(error.value) and field.split(".")[-1] in str(error.value)


@pytest.mark.parametrize(
    "field, value, unread",
    [
        ("model.attention", "xla", ("splash_q", 512)),
        ("model.attention", "flash", ("splash_q", 512)),
        ("rollout.kernel", "xla", ("paged_kv", 256)),
        ("rollout.kernel", "gpu", ("paged_kv", 256)),
    ],
)
def test_blocks_of_a_kernel_that_is_not_there_are_refused(field, value, unread):
    """Of those that are given, the error names those that nothing reads."""
    blocks = (("splash_q", 512), ("paged_kv", 256))
    with pytest.raises(UserError, match=f"not read when config.{field} is '{value}'") as error:
        Config.from_dict(changed((field, value), ("model.kernel_blocks", blocks)))
    assert "config.model.kernel_blocks is not read" in str(error.value)
    assert f"(got {(unread,)!r})" in str(error.value)
    others = tuple(block for block in blocks if block != unread)
    Config.from_dict(changed((field, value), ("model.kernel_blocks", others)))


def test_a_block_of_keys_has_a_page_at_least():
    """A smaller one would leave the kernel, and decode with XLA's attention."""
    pages, blocks = ("rollout.page_tokens", 64), "model.kernel_blocks"
    Config.from_dict(changed(pages, (blocks, (("paged_kv", 64),))))
    message = r"blocks\['paged_kv'\] must be at least config\.rollout\.page_tokens \(64\); got 32"
    with pytest.raises(UserError, match=message):
        Config.from_dict(changed(pages, (blocks, (("paged_kv", 32),))))


def test_carried_tokens_have_the_log_probs_of_all_tokens():
    carry, recompute = ("rollout.max_staleness", 2), ("rollout.log_prob_source", "recompute")
    assert Config.from_dict(changed(carry, recompute)).rollout.carries
    with pytest.raises(UserError, match=r"top_p \(0.9\) leaves tokens out.*max_staleness to 0"):
        Config.from_dict(changed(carry, recompute, ("rollout.top_p", 0.9)))
    weighted = {"policy": "proximal", "importance": ("token", None, 2.0)}
    Config.from_dict(changed(carry, recompute, ("correction", weighted)))
    with pytest.raises(UserError, match="max_staleness must be above 0 .*'proximal'.* got 0"):
        Config.from_dict(changed(recompute, ("correction", weighted)))


def test_gspo_needs_log_probs_of_the_training_program():
    gspo = [("objective", {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4})]
    bfloat16 = ("model.compute_dtype", "bfloat16")
    Config.from_dict(changed(*gspo))
    Config.from_dict(changed(*gspo, bfloat16, ("rollout.log_prob_source", "recompute")))
    with pytest.raises(UserError, match=r"model\.compute_dtype 'bfloat16' .* 'gspo'"):
        Config.from_dict(changed(*gspo, bfloat16))
    # Stale tokens keep those of the rollout, unless all are computed again.
    stale = [
        *gspo,
        bfloat16,
        ("rollout.log_prob_source", "recompute"),
        ("rollout.max_staleness", 2),
    ]
    weighted = {"policy": "proximal", "importance": ("token", None, 2.0)}
    Config.from_dict(changed(*stale, ("correction", weighted)))
    with pytest.raises(UserError, match=r"'gspo'.* set config\.correction\.policy to 'proximal'"):
        Config.from_dict(changed(*stale))


def test_a_policy_gradient_makes_one_update_or_has_a_correction():
    loss = ("objective", {"loss": "policy-gradient", "clip_low": None, "clip_high": None})
    weights = {"policy": "current", "importance": ("token", None, 2.0)}
    Config.from_dict(changed(loss, ("train.prompts_per_update", 4)))
    Config.from_dict(changed(loss, ("correction", weights)))
    with pytest.raises(UserError, match=r"prompts_per_update to 4 .*got 2"):
        Config.from_dict(changed(loss))
    stale = [loss, ("train.prompts_per_update", 4), ("rollout.max_staleness", 2)]
    Config.from_dict(changed(*stale, ("correction", weights)))
    with pytest.raises(UserError, match=r"max_staleness to 0 \(got 2\), or give config.correction"):
        Config.from_dict(changed(*stale))
    with pytest.raises(UserError, match="'ppo-clip' .* count it twice"):
        Config.from_dict(changed(("correction", weights)))


@pytest.mark.parametrize("field, value", [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
def test_a_correction_needs_the_whole_distribution(field, value):
    recompute = ("rollout.log_prob_source", "recompute")
    mask = ("correction", {"policy": "old", "reject": (("seq-mean-k1", 0.99, 1.01),)})
    Config.from_dict(changed(recompute, mask))
    Config.from_dict(changed(recompute, (f"rollout.{field}", value)))
    with pytest.raises(UserError, match=rf"{field} \({value}\) leaves .* config\.correction would"):
        Config.from_dict(changed(recompute, mask, (f"rollout.{field}", value)))


def test_the_coefficient_of_the_kl_keeps_its_sign():
    """A step has 16 responses, and the error of the KL is at most a fifth."""
    kl = {"reward_kl_coefficient": 0.1, "reward_kl_adaptation": (0.1, 4)}
    Config.from_dict(changed(("objective", kl)))
    kl["reward_kl_adaptation"] = (0.1, 3)
    with pytest.raises(UserError, match="horizon of 3 responses, and a step has 16: .* above 3"):
        Config.from_dict(changed(("objective", kl)))


@pytest.mark.parametrize(
    "logical, axis, message",
    [
        ("vocab", "fsdp", "sends 'vocab' to 'fsdp', over which the rows .* 'tensor' or None"),
        ("vocab", "data", "sends 'vocab' to 'data'"),
        ("embed", "tensor", "sends 'embed' to 'tensor', over which the activations are whole"),
    ],
)
def test_rules_that_the_training_program_cannot_follow_are_refused(logical, axis, message):
    others = tuple((name, None) for name in ("embed", "vocab", "heads", "ff") if name != logical)
    with pytest.raises(UserError, match=message):
        Config.from_dict(changed(("mesh.rules", ((logical, axis), *others))))


def test_sources_of_every_kind_are_right():
    train = {
        "a-1": WEIGHED | {"scorer": "boxed + 0.5 * gsm8k", "num_problems": 1},
        "ü_2": FILE | {"weight": 1e-3, "prompt_template": "{prompt} = {{}}"},
        "sums": tiny_dict()["data"]["train"]["sums"],  # pretraining is on sums as long
    }
    chat = [("data.chat", True), ("data.system_prompt", "Think.")]
    config = Config.from_dict(
        changed(("data.train", train), *chat, ("data.prompt_template", "Q: {prompt}"))
    )
    assert list(config.data.train) == ["a-1", "ü_2", "sums"]
    assert config.data.train["a-1"].weight == 1.0


@pytest.mark.parametrize("group, field", [("model", "vocab_size"), ("data", "heldout")])
def test_a_missing_field_is_named(group, field):
    values = tiny_dict()
    del values[group][field]
    with pytest.raises(UserError, match=rf"config\.{group}\.{field} is missing and has no default"):
        Config.from_dict(values)


def test_every_field_is_read():
    """A field that no code reads is a promise that nothing keeps."""
    read = set()
    for file in (ROOT / "dapo_jax").rglob("*.py"):
        if not (file.parent.name == "config" and file.name in CHECKS):
            nodes = ast.walk(ast.parse(file.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    groups = {c for module in (schema, sft) for c in vars(module).values() if isinstance(c, type)}
    groups = {c for c in groups if dataclasses.is_dataclass(c)} - {Config, SftConfig}
    assert len(groups) > 20
    for group in groups:
        unread = {field.name for field in dataclasses.fields(group)} - read
        assert not unread, f"{group.__name__}: {unread}"


def num_fields(section):
    """Number of leaf fields; those of config.data.heldout count with config.data.train's."""
    count = 0
    for name, hint in typing.get_type_hints(section).items():
        inner = [h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)]
        count += 0 if name == "heldout" else num_fields(inner[0]) if inner else 1
    return count


def test_the_config_of_a_run_is_read_where_its_fields_contradict_each_other():
    values = changed(("train.row_tokens", 8), ("stages", ((2, {"train.row_tokens": 9}),)))
    with pytest.raises(UserError, match="is shorter than the longest sequence"):
        Config.from_dict(values)
    config = Config.of_run(values)
    assert [config.at(step).train.row_tokens for step in (1, 2)] == [8, 9]
    with pytest.raises(UserError, match=r"config\.seed must be 0 or more; got -1"):
        Config.of_run(changed(("seed", -1)))


@pytest.mark.parametrize("method", ["loss", "advantage", "aggregation"])
def test_the_config_of_a_run_may_have_a_method_of_the_config_file(method):
    """Programs that read a run, such as launch/export.py, do not run its config file."""
    stages = ((2, {"train.row_tokens": 900, "objective.clip_high": 0.3}),)
    values = changed((f"objective.{method}", "mine"), ("stages", stages))
    with pytest.raises(UserError, match=rf"objective\.{method} must be one of .* got 'mine'"):
        Config.from_dict(values)
    assert getattr(Config.of_run(values).at(2).objective, method) == "mine"


def test_the_config_has_few_fields():
    """A new field takes the place of one that no recipe sets."""
    assert 100 < num_fields(Config) <= 125
