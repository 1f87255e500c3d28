"""Scores logged responses, of any policy, with one frozen critic.

Every policy of a comparison has its own critic, so the spread of its values mixes two things: how
the responses differ and how the critics do. Under one critic only the responses differ.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from cvpo import RunLog, read_problems, read_run, trajectory_std
from cvpo.runlog import RunLogError, list_steps, read_trajectories
from train.attention import pack
from train.config import Config, ConfigError
from train.data import render_prompt
from train.folder import claimed
from train.models import load_critic, load_tokenizer, text_of
from train.passes import all_values, parts
from train.rollout.batch import Batch, ungraded
from train.run import require_room, require_warm_start


def score(
    config: Config, *, run: Path, critic: Path, name: str, every: int = 1, first: int = 0
) -> int:
    """Writes `scores/<name>/<step>.parquet` for logged steps of a run; done steps are kept.

    Args:
        config: Tokenizer (`model.path`), micro-batch size and device. The template is the run's.
        run: The run log whose responses are scored. It must hold token ids
            (`log.text_share` above 0); rows without are left out.
        critic: A checkpoint folder, or the `critic` folder in it.
        name: Of the critic, in the log.
        every: The logged steps that are multiples of it are scored, and the last.
        first: None before this step is.

    Returns:
        Trajectories scored.

    Raises:
        ConfigError: No critic there, no token ids in the log, or tokens that are not those of this
            tokenizer or critic.
        RunLogError: No such log.
    """
    require_warm_start(config)
    folder = critic / "critic" if (critic / "critic").is_dir() else critic
    if not (folder / "value_head.safetensors").is_file():
        raise ConfigError(f"critic {critic}: no critic there; give a checkpoint of a run with one")
    placement = config.model.model_dump(include={"dtype", "device"})
    tokenizer = load_tokenizer(config.model.path)
    judge = load_critic(str(folder), **placement)
    packed = pack([judge.trunk], config.engine.packed)
    texts = read_problems(run, columns=["prompt_id", "text"])
    template = read_run(run)["config"].get("data", {}).get("template", config.data.template)
    try:
        prompts = {
            prompt: render_prompt(text, template=template, tokenizer=tokenizer)
            for prompt, text in zip(texts["prompt_id"], texts["text"], strict=True)
        }
    except ValueError as error:
        raise ConfigError(f"{run}: {error}") from error
    with claimed(run):
        log = RunLog.open(run)
        try:
            done = set(list_steps(run, f"scores/{name}"))
        except RunLogError:
            done = set()
        scored = 0
        logged = list_steps(run, "trajectories")
        wanted = {step for step in logged if step % every == 0 and step >= first} | {logged[-1]}
        steps = sorted(wanted - done)
        for step in tqdm(steps, desc=f"scoring {run.name}", unit="step"):
            batch = _logged(run, step, prompts, tokenizer)
            read = zip(batch.input_ids, batch.attention_mask.bool(), strict=True)
            states = [ids[here].tolist() for ids, here in read]
            require_room(judge.trunk, states, max_tokens=0, key=f"{run}, step {step}")
            cut = parts(
                batch,
                torch.arange(len(batch)),
                model=judge.trunk,
                packed=packed,
                budget=config.engine.micro_batch_tokens,
                device=judge.trunk.device,
            )
            values = all_values(judge, batch, cut)
            mask = batch.response_mask
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


def _logged(
    run: Path, step: int, prompts: dict[int, list[int]], tokenizer: PreTrainedTokenizerBase
) -> Batch:
    """A step's logged responses, as far as their tokens were kept."""
    rows = read_trajectories(
        run, columns=["prompt_id", "sample", "response", "token_ids"], steps=[step]
    )
    rows = rows[rows["token_ids"].notna()]
    if rows.empty:
        raise ConfigError(
            f"{run}: step {step} holds no token ids to score; log them with log.text_share=1"
        )
    tokens = [[int(t) for t in ids] for ids in rows["token_ids"]]
    if text_of(tokens[0], tokenizer) != rows["response"].iloc[0]:
        raise ConfigError(
            f"{run}: step {step} was not written by the tokenizer of model.path; set model.path to "
            "the model that the run started from"
        )
    batch = ungraded([prompts[prompt] for prompt in rows["prompt_id"]], tokens, pad_id=0)
    return replace(
        batch,
        prompt_id=torch.tensor(rows["prompt_id"].tolist()),
        sample=torch.tensor(rows["sample"].tolist()),
    )
