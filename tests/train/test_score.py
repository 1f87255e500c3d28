import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cvpo import read_problems, read_scores, read_trajectories
from cvpo.runlog import RunLogError, list_steps
from train.__main__ import main
from train.addition import VOCABULARY
from train.config import Config, ConfigError
from train.loop import train
from train.models import load_critic, load_tokenizer
from train.score import score

MakeConfig = Callable[..., Config]


@pytest.fixture
def judged(tiny_config: MakeConfig, tmp_path: Path) -> tuple[Config, Path]:
    """A run without critic, and the last checkpoint of another one that has one."""
    judge = tiny_config(
        "method=vapo", "steps=2", "critic.lr=1e-2", "seed=8", f"run_dir={tmp_path / 'judge'}"
    )
    train(judge)
    config = tiny_config("method=grpo", "steps=2", f"run_dir={tmp_path / 'judged'}")
    train(config)
    return config, judge.folder / "checkpoints" / "step-00000002"


def test_scores_are_the_critic_s_values_of_the_logged_responses(
    judged: tuple[Config, Path],
) -> None:
    config, critic_path = judged
    assert score(config, run=config.folder, critic=critic_path, name="judge") == 32
    scores = read_scores(config.folder, "judge")
    rows = read_trajectories(config.folder)
    keys = ["step", "prompt_id", "sample"]
    assert scores[keys].equals(rows[keys])
    critic = load_critic(str(critic_path / "critic"), dtype="float32", device="cpu")
    tokenizer = load_tokenizer(config.model.path)
    texts = read_problems(config.folder)["text"]
    for row, found in zip(rows.itertuples(), scores.itertuples(), strict=True):
        prompt = tokenizer.encode(texts[row.prompt_id])
        ids = torch.tensor([[*prompt, *row.token_ids]])
        with torch.no_grad():
            values = critic(input_ids=ids)[0, len(prompt) - 1 : -1]
        assert found.value_first == pytest.approx(values[0].item(), abs=1e-5)
        assert found.value_mean == pytest.approx(values.mean().item(), abs=1e-5)
        assert found.sigma == pytest.approx(values.std(correction=0).item(), abs=1e-5)
    assert scores["sigma"].gt(0).any()


def test_steps_so_far_apart_are_scored_and_the_last(
    judged: tuple[Config, Path], tiny_config: MakeConfig
) -> None:
    config, critic = judged
    train(tiny_config("method=grpo", "steps=5", f"run_dir={config.folder}"))
    score(config, run=config.folder, critic=critic, name="late", every=2, first=3)
    assert list_steps(config.folder, "scores/late") == [4, 5]
    score(config, run=config.folder, critic=critic, name="judge", every=2)
    assert list_steps(config.folder, "scores/judge") == [2, 4, 5]
    score(config, run=config.folder, critic=critic, name="judge")
    assert list_steps(config.folder, "scores/judge") == [1, 2, 3, 4, 5]


def test_scoring_again_scores_what_is_new(
    judged: tuple[Config, Path], tiny_config: MakeConfig
) -> None:
    config, critic = judged
    assert score(config, run=config.folder, critic=critic, name="judge") == 32
    before = read_scores(config.folder, "judge")
    assert score(config, run=config.folder, critic=critic, name="judge") == 0
    assert read_scores(config.folder, "judge").equals(before)
    # Under another name everything is new; after more steps, those.
    assert score(config, run=config.folder, critic=critic / "critic", name="other") == 32
    train(tiny_config("method=grpo", "steps=3", f"run_dir={config.folder}"))
    assert score(config, run=config.folder, critic=critic, name="judge") == 16


def test_only_rows_with_token_ids_are_scored(
    judged: tuple[Config, Path], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    critic = judged[1]
    config = tiny_config("method=grpo", "log.text_share=0.5", f"run_dir={tmp_path / 'half'}")
    train(config)
    kept = int(read_trajectories(config.folder)["token_ids"].notna().sum())
    assert score(config, run=config.folder, critic=critic, name="judge") == kept < 48


def test_a_run_without_token_ids_says_how_to_log_them(
    judged: tuple[Config, Path], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    critic = judged[1]
    config = tiny_config(
        "method=grpo", "steps=1", "log.text_share=0", f"run_dir={tmp_path / 'silent'}"
    )
    train(config)
    with pytest.raises(ConfigError, match=r"step 1 holds no token ids .*log\.text_share=1"):
        score(config, run=config.folder, critic=critic, name="judge")


def test_a_checkpoint_without_critic_is_refused(judged: tuple[Config, Path]) -> None:
    config, _ = judged
    without = config.folder / "checkpoints" / "step-00000002"
    with pytest.raises(ConfigError, match="no critic there; give a checkpoint of a run with one"):
        score(config, run=config.folder, critic=without, name="judge")


def test_a_folder_without_run_is_refused(judged: tuple[Config, Path], tmp_path: Path) -> None:
    config, critic = judged
    with pytest.raises(RunLogError, match="is not a run log"):
        score(config, run=tmp_path, critic=critic, name="judge")


def test_the_command_scores_several_runs(
    judged: tuple[Config, Path], tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config, critic = judged
    judge = critic.parents[1]
    command = ["score", "--critic", str(critic), "--run", str(config.folder), "--run", str(judge)]
    assert main([*command, *tiny_arguments]) == 0
    out = capsys.readouterr().out
    assert f"{config.folder}: 32 trajectories scored as frozen" in out
    assert f"{judge}: 32 trajectories scored as frozen" in out
    # The judge's own values, but after the last update instead of before each.
    own = read_trajectories(judge)["value_first"]
    assert not read_scores(judge, "frozen")["value_first"].equals(own)


def test_prompts_are_asked_with_the_run_s_own_template(
    judged: tuple[Config, Path], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    _, critic = judged
    template = "data.template='0{problem}'"
    config = tiny_config("method=vapo", "steps=1", template, f"run_dir={tmp_path / 'asked'}")
    train(config)
    # By whoever scores it, under whatever template of his own.
    others = tiny_config("method=grpo")
    score(others, run=config.folder, critic=critic, name="others")
    score(config, run=config.folder, critic=critic, name="own")
    found = [read_scores(config.folder, name) for name in ("others", "own")]
    assert found[0].equals(found[1])


def copied(model: Path, folder: Path, words: list[str]) -> Path:
    """The same weights, with the vocabulary in another order."""
    shutil.copytree(model, folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["vocab"] = {word: index for index, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder


def test_another_tokenizer_than_the_run_s_is_refused(
    judged: tuple[Config, Path], tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path
) -> None:
    config, critic = judged
    special, others = list(VOCABULARY[:2]), list(VOCABULARY[2:])
    other = copied(tiny_model, tmp_path / "other", [*special, *reversed(others)])
    with pytest.raises(ConfigError, match=r"not written by the tokenizer of model\.path"):
        score(tiny_config(f"model.path={other}"), run=config.folder, critic=critic, name="judge")


def test_a_critic_of_a_smaller_vocabulary_is_refused(
    judged: tuple[Config, Path], tmp_path: Path
) -> None:
    config, critic = judged
    small = load_critic(str(critic / "critic"), dtype="float32", device="cpu")
    small.trunk.resize_token_embeddings(8)
    (tmp_path / "small").mkdir()
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="knows 8 tokens, but the tokenizer writes token"):
        score(config, run=config.folder, critic=tmp_path / "small", name="judge")
