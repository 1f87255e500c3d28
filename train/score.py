"""Scores logged responses, of any policy, with one frozen critic.

Every policy of a comparison has its own critic, so the spread of its values mixes two things: how
the responses differ and how the critics do. Under one critic only the responses differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from cvpo import RunLog, read_problems, trajectory_std
from cvpo.runlog import RunLogError, list_steps, read_trajectories
from train.config import Config, ConfigError
from train.data import render_prompt
from train.engine import PlainEngine
from train.models import load_actor, load_critic, load_tokenizer
from train.rollout.batch import Batch, Responses, pad
from train.run import require_warm_start


def score(config: Config, *, run: Path, critic: Path, name: str) -> int:
    """Writes `scores/<name>/<step>.parquet` for every logged step of a run; done steps are kept.

    Args:
        config: Template, micro-batch size and device.
        run: The run log whose responses are scored. It must hold token ids
            (`log.text_share` above 0); rows without are left out.
        critic: A checkpoint folder, or the `critic` folder in it.
        name: Of the critic, in the log.

    Returns:
        Trajectories scored.

    Raises:
        ConfigError: No critic there, or no token ids in the log.
        RunLogError: No such log.
    """
    require_warm_start(config)
    folder = critic / "critic" if (critic / "critic").is_dir() else critic
    if not (folder / "value_head.safetensors").is_file():
        raise ConfigError(f"critic {critic}: no critic there; give a checkpoint of a run with one")
    placement = config.model.model_dump(include={"dtype", "device"})
    tokenizer = load_tokenizer(config.model.path)
    engine = PlainEngine(
        config,
        config.declared(),
        actor=load_actor(config.model.path, **placement),
        critic=load_critic(str(folder), **placement),
    )
    texts = read_problems(run, columns=["prompt_id", "text"])
    prompts = {
        prompt: render_prompt(text, template=config.data.template, tokenizer=tokenizer)
        for prompt, text in zip(texts["prompt_id"], texts["text"], strict=True)
    }
    log = RunLog.open(run)
    try:
        done = set(list_steps(run, f"scores/{name}"))
    except RunLogError:
        done = set()
    scored = 0
    steps = [step for step in list_steps(run, "trajectories") if step not in done]
    for step in tqdm(steps, desc=f"scoring {run.name}", unit="step"):
        rows = read_trajectories(run, columns=["prompt_id", "sample", "token_ids"], steps=[step])
        if "token_ids" not in rows or rows["token_ids"].isna().all():
            raise ConfigError(
                f"{run}: step {step} holds no token ids to score; log them with log.text_share=1"
            )
        rows = rows[rows["token_ids"].notna()]
        tokens = [[int(t) for t in ids] for ids in rows["token_ids"]]
        batch = _batch(rows["prompt_id"].tolist(), rows["sample"].tolist(), tokens, prompts)
        values, mask = engine.values(batch), batch.response_mask
        log.scores(
            name,
            step,
            {
                "prompt_id": batch.prompt_id,
                "sample": batch.sample,
                "sigma": trajectory_std(values, mask),
                "value_first": values[:, 0],
                "value_mean": values.masked_fill(~mask, 0).sum(1) / batch.lengths.clamp(min=1),
            },
        )
        scored += len(batch)
    return scored


def _batch(
    prompt_ids: list[int],
    samples: list[int],
    tokens: list[list[int]],
    prompts: dict[int, list[int]],
) -> Batch:
    B = len(prompt_ids)
    unknown = torch.zeros(B)
    responses = Responses(tokens, [[0.0] * len(t) for t in tokens], [False] * B, version=0)
    return Batch(
        prompt_id=torch.tensor(prompt_ids),
        sample=torch.tensor(samples),
        **pad([prompts[prompt] for prompt in prompt_ids], responses, pad_id=0),
        truncated=torch.zeros(B, dtype=torch.bool),
        correct=unknown,
        reward=unknown,
        responses=[""] * B,
        answers=[None] * B,
        version=0,
        observed={},
        generated_tokens=0,
    )
