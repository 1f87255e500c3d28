"""Every method end to end, three steps each."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BartConfig, BartForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cvpo import (
    ARMS,
    METHODS,
    SAMPLERS,
    read_calibration,
    read_evals,
    read_events,
    read_metrics,
    read_problems,
    read_prompts,
    read_run,
    read_tokens,
    read_trajectories,
)
from cvpo.runlog import COLUMNS, METRICS
from train.addition import problems
from train.config import Config, ConfigError
from train.loop import train
from train.models import ModelError, load_actor, load_critic, load_tokenizer

MakeConfig = Callable[..., Config]

CRITIC = {name for name in METRICS if name.startswith(("critic/", "sigma/"))}
PRETRAINING = {name for name in METRICS if name.startswith("pretraining/")}
ROUND = {f"curriculum/{name}" for name in ("low_delta", "high_delta", "low_count", "high_count")}
SELDOM = {"policy/kl", "lm/loss", "eval/<benchmark>"}
SAMPLER = {name for name in METRICS if name.startswith("sampler/")} - {"sampler/epoch"}
ALWAYS = set(METRICS) - CRITIC - PRETRAINING - ROUND - SELDOM - SAMPLER
# Not a number where a class is empty or a quantity does not vary.
MAY_BE_MISSING = {"length/correct", "weights/advantage_ratio"}


def applicable(name: str) -> set[str]:
    method = METHODS[name]
    names = ALWAYS | ROUND
    if method.critic:
        names |= CRITIC
    if method.lm_coefficient:
        names |= {"lm/loss"}
    if method.value_pretraining_steps:
        names |= PRETRAINING
    return names


@pytest.mark.parametrize("name", sorted(METHODS))
def test_three_steps_of_every_method(tiny_config: MakeConfig, name: str) -> None:
    method = METHODS[name]
    config = tiny_config(f"method={name}", "rollout.prompts=6")
    run = train(config)
    folder = config.folder

    metrics = read_metrics(folder).set_index("step")
    assert metrics.index.tolist() == [0, 1, 2, 3]
    logged = set(metrics.columns) - {"time", "device_seconds", "tokens"}
    evaluations = {"eval/add-1", "eval/add-2", "eval/all"}
    assert logged == applicable(name) | evaluations
    assert metrics.loc[[0, 3], sorted(evaluations)].notna().all(axis=None)
    steps = metrics.loc[1:]
    for metric in ALWAYS - MAY_BE_MISSING:
        if not metric.startswith(("advantage/", "weights/w_s_", "length/")):
            assert steps[metric].notna().all(), metric
    assert steps["rollout/lag"].tolist() == [0, method.lag, method.lag]
    old = steps["rollout/lag"] == 1
    assert (steps["rollout/logprob_gap"][~old] < 1e-4).all()
    assert (steps["rollout/logprob_gap"][old] > 1e-4).all()
    assert steps["policy/skipped_updates"].eq(0).all()
    assert steps["policy/grad_norm"].gt(0).any()
    assert metrics["tokens"].is_monotonic_increasing
    assert metrics["device_seconds"].is_monotonic_increasing
    pretrained = metrics.loc[0, "tokens"] > 0
    assert pretrained == (method.value_pretraining_steps > 0)
    if pretrained:
        assert metrics.loc[0, "pretraining/tokens"] == metrics.loc[0, "tokens"]
        assert metrics.loc[0, "pretraining/steps"] == 1
    assert metrics.loc[3, "tokens"] == metrics.loc[0, "tokens"] + steps["rollout/tokens"].sum()

    rows = read_trajectories(folder)
    assert list(rows) == [column.name for column in COLUMNS["trajectories"]]
    assert rows["step"].unique().tolist() == [1, 2, 3]
    counts = rows.groupby("step").size()
    assert counts.eq(24).all() if not method.dynamic_sampling else counts.le(24).all()
    for column in ("sigma", "mu", "value_first", "value_mean"):
        assert rows[column].notna().all() == method.critic, column
    assert rows["w_s"].ne(1).any() == method.stochasticity
    assert rows["w_d"].ne(1).any() == method.curriculum
    assert rows["rho"].between(0, 1).all()
    assert rows["correct"].isin([0, 1]).all()
    if not method.overlong_penalty:
        assert rows["reward"].eq(2 * rows["correct"] - 1).all()
    assert rows["token_ids"].map(len).eq(rows["length"]).all()
    for step, group in rows.groupby("step"):
        assert group["correct"].mean() == pytest.approx(steps.loc[step, "accuracy/mean"])
        assert group["length"].mean() == pytest.approx(steps.loc[step, "length/mean"])

    # The tracker watches under every method: one round of 16 prompts is over within step 3.
    rounds = read_prompts(folder)
    assert rounds["prompt_id"].tolist() == list(range(16)) * rounds["round"].nunique()
    first = rounds[rounds["round"] == 0]
    if not method.dynamic_sampling:
        assert first["step"].unique().tolist() == [3]
        # Under lag 1 the batch that waits has not been observed.
        assert first["visits"].sum() == 18
        assert first["successes"].sum() == pytest.approx(rows["correct"].sum())
    assert first["rho"].to_numpy() == pytest.approx(
        (first["alpha"] / (first["alpha"] + first["beta"])).to_numpy()
    )

    table = read_problems(folder)
    expected = problems("rl", count=16, levels=[1])
    assert table["text"].tolist() == [problem.text for problem in expected]
    assert table["gold"].tolist() == [problem.gold for problem in expected]

    evals = read_evals(folder)
    assert evals.groupby("step").size().to_dict() == {0: 10, 3: 10}
    assert read_tokens(folder)["step"].unique().tolist() == [2]
    assert read_tokens(folder)["value_sum"].notna().all() == method.critic
    assert (folder / "calibration").exists() == method.critic
    if method.critic:
        assert read_calibration(folder)["n"].sum() == rows[rows["step"] == 2]["length"].sum()
    kinds = read_events(folder)["kind"].tolist()
    assert kinds.count("checkpoint") == 3
    assert read_run(folder)["config"]["declared"]["name"] == name

    # The last checkpoint is the policy that came out, and it has moved.
    saved = folder / "checkpoints" / "step-00000003"
    placement = {"dtype": "float32", "device": "cpu"}
    start = dict(load_actor(config.model.path, **placement).named_parameters())
    for key, weight in load_actor(str(saved / "actor"), **placement).named_parameters():
        assert torch.equal(weight, dict(run.engine.weights())[key])
    assert any(not torch.equal(w, start[key]) for key, w in run.engine.weights())
    assert (saved / "critic").exists() == method.critic
    if method.critic:
        assert load_critic(str(saved / "critic"), **placement).head.weight.ne(0).any()


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_of_the_stochasticity_weight_runs(tiny_config: MakeConfig, arm: str) -> None:
    config = tiny_config(
        f"stochasticity.arm={arm}", "steps=1", "rollout.prompts=8", "evaluation.benchmarks=[]"
    )
    train(config)
    rows = read_trajectories(config.folder)
    right, wrong = rows["correct"] == 1, rows["correct"] == 0
    assert right.any()
    assert wrong.any()
    if arm == "none":
        assert rows["w_s"].eq(1).all()
        return
    rounding = 1e-6
    assert rows["w_s"][right].between(1, 1.3 + rounding).all()
    assert rows["w_s"][wrong].between(0.7 - rounding, 1).all()
    assert rows["w_s"][right].gt(1).any() == (arm != "negative_only")
    assert rows["w_s"][wrong].lt(1).any() == (arm != "positive_only")


@pytest.fixture
def measured(tmp_path: Path) -> list[str]:
    """Overrides for problems whose difficulty has been measured."""
    file = tmp_path / "problems.jsonl"
    rows = [
        {"problem": problem.text, "answer": problem.gold, "difficulty": index / 16}
        for index, problem in enumerate(problems("rl", count=16, levels=[1]))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.train.source={file}", "data.train.levels=null"]


@pytest.mark.parametrize("sampler", sorted(SAMPLERS.keys() - {"oracle"}))
def test_every_sampler_runs(tiny_config: MakeConfig, measured: list[str], sampler: str) -> None:
    method = "vapo" if sampler == "pcl" else "grpo"
    config = tiny_config(
        *measured,
        f"method={method}",
        f"rollout.sampler={sampler}",
        "steps=2",
        "evaluation.benchmarks=[]",
    )
    run = train(config)
    metrics = read_metrics(config.folder)
    assert metrics["step"].tolist() == [0, 1, 2]
    own = run.collector.sampler.metrics()
    assert metrics.iloc[-1][list(own)].to_dict() == pytest.approx(own)
    assert {name for name in metrics if name.startswith("sampler/")} == own.keys()


@pytest.mark.parametrize(
    ("sampler", "method", "lacking"),
    [
        ("oracle", "cvpo", "truth"),
        ("pcl", "grpo", "predict"),
        ("e2h-cosine", "grpo", "difficulty"),
        ("bots", "cvpo", "difficulty"),
    ],
)
def test_a_sampler_that_lacks_what_it_needs_is_refused_before_anything_is_written(
    tiny_config: MakeConfig, sampler: str, method: str, lacking: str
) -> None:
    config = tiny_config(f"method={method}", f"rollout.sampler={sampler}")
    with pytest.raises(ConfigError, match=rf"^rollout\.sampler: {sampler} needs `{lacking}`"):
        train(config)
    assert not config.folder.exists()


def test_the_kl_to_the_reference_is_logged(tiny_config: MakeConfig) -> None:
    config = tiny_config(
        "method=grpo",
        "algorithm.kl_coefficient=0.1",
        "actor.minibatches=1",
        "steps=2",
        "evaluation.benchmarks=[]",
    )
    train(config)
    kl = read_metrics(config.folder).set_index("step")["policy/kl"]
    assert kl[1] == pytest.approx(0, abs=1e-9)  # the first update starts from the reference
    assert kl[2] > 1e-7


def test_value_pretraining_stops_once_the_critic_explains(tiny_config: MakeConfig) -> None:
    config = tiny_config(
        "method=vapo",
        "steps=1",
        "pretraining.max_steps=60",
        "pretraining.min_explained_variance=0.02",
        "rollout.prompts=16",
        "critic.lr=1e-2",
        "evaluation.benchmarks=[]",
    )
    train(config)
    first = read_metrics(config.folder).iloc[0]
    assert 0 < first["pretraining/steps"] < 60
    assert first["pretraining/explained_variance"] > 0.02
    assert "warning" not in read_events(config.folder)["kind"].tolist()


def test_value_pretraining_that_does_not_get_there_warns(tiny_config: MakeConfig) -> None:
    config = tiny_config(
        "method=vapo",
        "steps=1",
        "pretraining.min_explained_variance=0.999",
        "evaluation.benchmarks=[]",
    )
    train(config)
    (warning,) = read_events(config.folder).query("kind == 'warning'")["message"]
    assert warning.startswith("value pretraining ended after 1 batches")
    assert "pretraining.max_steps" in warning


def test_value_pretraining_leaves_the_actor_alone(tiny_config: MakeConfig) -> None:
    config = tiny_config("method=vapo", "steps=1", "pretraining.max_steps=3")
    train(config)
    placement = {"dtype": "float32", "device": "cpu"}
    start = dict(load_actor(config.model.path, **placement).named_parameters())
    saved = config.folder / "checkpoints" / "step-00000000" / "actor"
    for key, weight in load_actor(str(saved), **placement).named_parameters():
        assert torch.equal(weight, start[key])


def test_thinned_logs_keep_what_was_asked_for(tiny_config: MakeConfig) -> None:
    config = tiny_config(
        "method=grpo", "log.trajectories_every=2", "log.text_share=0.5", "log.tokens_every=0"
    )
    train(config)
    rows = read_trajectories(config.folder)
    assert rows["step"].unique().tolist() == [2]
    kept = rows["token_ids"].notna()
    assert 0 < kept.sum() < len(rows)
    assert rows["response"].notna().equals(kept)
    assert not (config.folder / "tokens").exists()


def test_tensorboard_shows_the_same_scalars(tiny_config: MakeConfig) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(
        "method=grpo", "steps=2", "log.tensorboard=true", "evaluation.benchmarks=[]"
    )
    train(config)
    board = EventAccumulator(str(config.folder / "tensorboard")).Reload()
    metrics = read_metrics(config.folder).set_index("step")
    for name in ("reward/mean", "policy/loss", "seconds/rollout"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        logged = metrics[name].dropna().to_dict()
        assert shown == pytest.approx(logged, rel=1e-5)


@pytest.mark.slow
def test_training_raises_the_reward(tiny_config: MakeConfig) -> None:
    config = tiny_config(
        "method=cvpo",
        "steps=40",
        "rollout.prompts=16",
        "rollout.samples=8",
        "actor.lr=2e-3",
        "critic.lr=3e-3",
        "pretraining.max_steps=4",
        "evaluation.benchmarks=[]",
        "checkpoints.every=40",
    )
    train(config)
    accuracy = read_metrics(config.folder).set_index("step")["accuracy/mean"]
    assert accuracy.loc[36:].mean() > accuracy.loc[1:4].mean() + 0.2


def test_a_skipped_update_is_an_event_of_its_step(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(*_: object, **__: object) -> torch.Tensor:
        return torch.tensor(torch.inf)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflow)
    config = tiny_config("method=grpo", "steps=1")
    train(config)
    events = read_events(config.folder).query("kind == 'skipped_step'")
    assert events["step"].tolist() == [1]
    assert "policy/skipped_updates" in events["message"].iloc[0]


def test_responses_longer_than_the_model_can_count_are_refused(tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"need \d+ positions, the model .* has 128"):
        train(tiny_config("rollout.max_tokens=126"))


def test_a_critic_that_does_not_know_the_actor_s_tokens_is_refused(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    small = Qwen2Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(small).save_pretrained(tmp_path / "small")
    config = tiny_config(f"model.critic_path={tmp_path / 'small'}")
    with pytest.raises(ConfigError, match="knows 8 tokens, but the tokenizer writes token 16"):
        train(config)
    assert not config.folder.exists()


def test_a_tokenizer_that_names_no_padding_will_do(
    tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model, plain)
    file = plain / "tokenizer_config.json"
    named = json.loads(file.read_text())
    del named["pad_token"]
    file.write_text(json.dumps(named))
    ways = {"named": tiny_model, "plain": plain}
    for way, model in ways.items():
        train(tiny_config("steps=2", f"model.path={model}", f"run_dir={tmp_path / way}"))
    # What fills the batch is never read.
    named_rows, plain_rows = (read_trajectories(tmp_path / way) for way in ways)
    assert plain_rows.equals(named_rows)


def test_a_model_that_misreads_padded_prompts_is_refused(
    tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    # Learned positions, counted from the first slot whatever stands there; no position_ids.
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(tiny_model))
    model = BartForCausalLM(
        BartConfig(
            vocab_size=len(tokenizer),
            d_model=16,
            decoder_layers=1,
            decoder_attention_heads=2,
            decoder_ffn_dim=32,
            max_position_embeddings=128,
            init_std=0.5,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            is_decoder=True,
            is_encoder_decoder=False,
        )
    )
    model.save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    with pytest.raises(ModelError, match="when padding stands before a prompt"):
        train(tiny_config("method=grpo", f"model.path={tmp_path / 'bart'}"))


def test_a_kl_reference_that_has_changed_is_refused_on_resume(
    tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(tiny_model, start)
    settings = ("method=grpo", "algorithm.kl_coefficient=0.1", f"model.path={start}")
    train(tiny_config(*settings, "steps=1"))
    assert train(tiny_config(*settings, "steps=2")).step == 2
    model = load_actor(str(start), dtype="float32", device="cpu")
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    model.save_pretrained(start)
    with pytest.raises(ModelError, match="is not the model that the run's KL loss started from"):
        train(tiny_config(*settings, "steps=3"))
