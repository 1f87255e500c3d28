import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cvpo import SAMPLERS, Feedback, Pool, ShuffledEpochs, extract_answer
from train.config import Config
from train.rollout.batch import Batch
from train.run import Run

MakeConfig = Callable[..., Config]
MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tiny_config: MakeConfig, tmp_path: Path) -> MakeRun:
    made = Counter[str]()

    def make(*overrides: str) -> Run:
        made["runs"] += 1
        return Run(tiny_config(f"run_dir={tmp_path / str(made['runs'])}", *overrides))

    return make


def responses_of(batch: Batch) -> dict[tuple[int, int], list[int]]:
    """Response tokens by prompt and sample."""
    return {
        (int(batch.prompt_id[row]), int(batch.sample[row])): batch.response_ids[row][
            batch.response_mask[row]
        ].tolist()
        for row in range(len(batch))
    }


# ---------------------------------------------------------------------------------- what is drawn


def test_a_batch_holds_whole_groups_with_their_prompts(make_run: MakeRun) -> None:
    run = make_run()
    batch = run.collector.next(1)
    assert len(batch) == 16
    assert batch.prompt_id.view(4, 4).eq(batch.prompt_id.view(4, 4)[:, :1]).all()
    assert batch.sample.view(4, 4).tolist() == [[0, 1, 2, 3]] * 4
    for row in range(16):
        prompt = batch.input_ids[row, : batch.prompt_width]
        real = prompt[batch.attention_mask[row, : batch.prompt_width].bool()]
        assert real.tolist() == list(run.collector.prompts[int(batch.prompt_id[row])])
        text = run.tokenizer.decode(
            batch.response_ids[row][batch.response_mask[row]], skip_special_tokens=True
        )
        assert batch.responses[row] == text
        assert batch.answers[row] == extract_answer(text)
        gold = run.collector.problems[int(batch.prompt_id[row])].gold
        assert batch.correct[row] == (extract_answer(text) == gold)
    assert torch.equal(batch.reward, 2 * batch.correct - 1)
    assert 0 < batch.correct.mean() < 1


def test_a_response_depends_on_its_address_only(make_run: MakeRun) -> None:
    narrow = make_run("rollout.prompts=3", "rollout.samples=2")
    wide = make_run("rollout.prompts=12", "rollout.samples=5", "rollout.batch_size=7")
    found = responses_of(narrow.collector.next(5))
    others = responses_of(wide.collector.next(5))
    assert found.items() <= others.items()


@pytest.mark.parametrize("other", ["seed", "step", "stream"])
def test_every_part_of_the_address_counts(make_run: MakeRun, other: str) -> None:
    everything = ["rollout.prompts=16", "rollout.samples=2"]
    first = responses_of(make_run(*everything).collector.next(5))
    collector = make_run(*everything, f"seed={9 if other == 'seed' else 1}").collector
    if other == "stream":
        second = responses_of(collector.frozen(5))
    else:
        second = responses_of(collector.next(6 if other == "step" else 5))
    assert first.keys() == second.keys()
    changed = sum(first[key] != second[key] for key in first)
    assert changed > len(first) // 3


def test_a_prompt_drawn_twice_goes_on_counting_its_samples(make_run: MakeRun) -> None:
    batch = make_run("data.train.limit=3", "rollout.prompts=7").collector.next(1)
    samples: dict[int, list[int]] = {}
    for prompt, sample in zip(batch.prompt_id.tolist(), batch.sample.tolist(), strict=True):
        samples.setdefault(prompt, []).append(sample)
    assert sorted(map(len, samples.values())) == [8, 8, 12]
    assert all(found == list(range(len(found))) for found in samples.values())
    assert len(batch.observed["prompt"]) == 7


def test_every_group_is_observed(make_run: MakeRun) -> None:
    batch = make_run().collector.next(1)
    assert batch.observed["prompt"].tolist() == batch.prompt_id.view(4, 4)[:, 0].tolist()
    assert batch.observed["trials"].tolist() == [4] * 4
    assert torch.equal(batch.observed["successes"], batch.correct.view(4, 4).sum(1))
    assert batch.generated_tokens == int(batch.lengths.sum())


# ------------------------------------------------------------------------------- dynamic sampling


def test_dynamic_sampling_keeps_groups_with_a_signal(make_run: MakeRun) -> None:
    run = make_run("method=dapo", "rollout.prompts=6", "rollout.max_refills=8")
    batch = run.collector.next(1)
    share = batch.correct.view(-1, 4).mean(1)
    assert len(share) == 6
    assert ((share > 0) & (share < 1)).all()


def test_discarded_groups_are_reported_and_paid_for(make_run: MakeRun) -> None:
    run = make_run("method=dapo", "rollout.prompts=16", "rollout.max_refills=0")
    batch = run.collector.next(1)
    successes = batch.observed["successes"]
    useful = (successes > 0) & (successes < 4)
    assert 0 < useful.sum() < 16
    assert batch.observed["prompt"].sort().values.tolist() == list(range(16))
    assert batch.prompt_id.view(-1, 4)[:, 0].tolist() == batch.observed["prompt"][useful].tolist()
    # The same step without dynamic sampling trains on all of them and pays the same.
    plain = make_run("method=grpo", "rollout.prompts=16").collector.next(1)
    assert batch.generated_tokens == plain.generated_tokens > int(batch.lengths.sum())
    assert torch.equal(successes, plain.observed["successes"])


@pytest.mark.parametrize("refills", [0, 2])
def test_refilling_gives_up(make_run: MakeRun, refills: int) -> None:
    # One token is no answer: no group ever has a signal.
    run = make_run(
        "method=dapo",
        f"rollout.max_refills={refills}",
        "rollout.max_tokens=1",
        "rollout.overlong_cache=0",
    )
    batch = run.collector.next(1)
    assert len(batch.observed["prompt"]) == 4 * (1 + refills)
    assert batch.generated_tokens == 16 * (1 + refills)
    # There is a batch all the same; its advantages are 0.
    assert len(batch) == 16
    assert batch.correct.sum() == 0


def test_without_dynamic_sampling_nothing_is_dropped(make_run: MakeRun) -> None:
    batch = make_run("method=grpo", "rollout.max_tokens=1").collector.next(1)
    assert len(batch) == 16
    assert len(batch.observed["prompt"]) == 4


# -------------------------------------------------------------------------------------- the reward


@pytest.mark.parametrize(("cache", "expected"), [("null", 3), ("8", 8), ("0", 0)])
def test_the_overlong_penalty_falls_over_its_zone(
    make_run: MakeRun, cache: str, expected: int
) -> None:
    run = make_run(
        "method=grpo",
        "algorithm.overlong_penalty=true",
        "rollout.prompts=16",
        f"rollout.overlong_cache={cache}",
    )
    batch = run.collector.next(1)
    seen = set()
    for length, correct, reward in zip(
        batch.lengths.tolist(), batch.correct.tolist(), batch.reward.tolist(), strict=True
    ):
        penalty = max(0.0, length - (16 - expected)) / expected if expected else 0.0
        assert reward == pytest.approx(2 * correct - 1 - penalty)
        seen.add(penalty)
    assert len(seen) > 1 or expected == 0


def test_a_long_answer_that_is_right_stays_right(make_run: MakeRun) -> None:
    run = make_run(
        "method=grpo",
        "algorithm.overlong_penalty=true",
        "rollout.prompts=16",
        "rollout.overlong_cache=16",
    )
    batch = run.collector.next(1)
    assert set(batch.correct.tolist()) == {0.0, 1.0}
    assert (batch.reward < 2 * batch.correct - 1).all()


# ----------------------------------------------------------------------------------------- the lag


@pytest.mark.parametrize(("lag", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_versions_under_lag(make_run: MakeRun, lag: int, expected: list[int]) -> None:
    run = make_run("method=grpo", f"rollout.lag={lag}")
    versions = []
    for step in range(1, 5):
        versions.append(run.collector.next(step).version)
        run.backend.sync(run.engine.weights(), version=step)
    assert versions == expected


def disturbed(run: Run) -> list[tuple[str, Tensor]]:
    return [(name, 0.3 * tensor) for name, tensor in run.engine.weights()]


def test_under_lag_1_an_update_reaches_the_next_batch_but_one(make_run: MakeRun) -> None:
    still, lagged = make_run("method=grpo"), make_run("method=grpo-async")
    still.collector.next(1)
    lagged.collector.next(1)
    lagged.backend.sync(disturbed(lagged), version=1)
    assert responses_of(lagged.collector.next(2)) == responses_of(still.collector.next(2))
    assert responses_of(lagged.collector.next(3)) != responses_of(still.collector.next(3))


def test_the_pending_batch_is_part_of_the_state(make_run: MakeRun, tmp_path: Path) -> None:
    first = make_run("method=grpo-async")
    first.collector.next(1)
    torch.save(first.collector.state_dict(), tmp_path / "state.pt")
    second = make_run("method=grpo-async")
    # A collector that made it anew would make it with these weights.
    second.backend.sync(disturbed(second), version=1)
    second.collector.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    found, expected = second.collector.next(2), first.collector.next(2)
    assert found.version == expected.version == 0
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if isinstance(value, Tensor):
            assert torch.equal(value, other), name
        elif name != "observed":
            assert value == other, name
    assert all(torch.equal(found.observed[k], v) for k, v in expected.observed.items())


def test_a_state_with_other_fields_is_refused(make_run: MakeRun) -> None:
    collector = make_run("method=grpo").collector
    state = collector.state_dict()
    del state["pending"]
    with pytest.raises(ValueError, match="pending"):
        collector.load_state_dict(state)


# ------------------------------------------------------------------------ what the sampler is told


class Listening:
    """A sampler that takes prompts in order and remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[Feedback] = []

    def next(self, count: int) -> Tensor:
        return torch.arange(count)

    def observe(self, feedback: Feedback) -> None:
        self.told.append(feedback)

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state


def test_the_sampler_is_told_of_every_group(make_run: MakeRun) -> None:
    run = make_run("method=dapo", "rollout.max_refills=0", "rollout.prompts=16")
    sampler = run.collector.sampler = Listening()
    batch = run.collector.next(1)
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(batch.response_mask.shape, generator=generator)
    values = torch.randn(batch.response_mask.shape, generator=generator)
    run.collector.observe(batch, advantages.masked_fill(~batch.response_mask, math.nan), values)
    (told,) = sampler.told
    assert told.prompt.tolist() == list(range(16))
    assert told.trials.tolist() == [4] * 16
    assert torch.equal(told.successes, batch.observed["successes"])
    assert told.value_first is not None
    for prompt in range(16):
        rows = (batch.prompt_id == prompt).nonzero().flatten().tolist()
        if not rows:  # discarded: no critic was asked
            assert told.mean_abs_advantage[prompt].isnan()
            assert told.value_first[prompt].isnan()
            continue
        size = [advantages[row][batch.response_mask[row]].abs().mean().item() for row in rows]
        assert told.mean_abs_advantage[prompt].item() == pytest.approx(sum(size) / 4, rel=1e-5)
        assert told.value_first[prompt] in values[rows, 0]
    assert told.value_first.isnan().any()


def test_without_critic_the_sampler_hears_of_no_value(make_run: MakeRun) -> None:
    run = make_run("method=dapo", "rollout.max_refills=0", "rollout.prompts=16")
    sampler = run.collector.sampler = Listening()
    batch = run.collector.next(1)
    run.collector.observe(batch, torch.ones(batch.response_mask.shape), None)
    (told,) = sampler.told
    assert told.value_first is None
    kept = torch.isin(told.prompt, batch.prompt_id)
    assert kept.any()
    assert not kept.all()
    assert told.mean_abs_advantage.tolist() == kept.float().tolist()  # discarded: worth 0


# ---------------------------------------------------------------------- a sampler that is selective


class Choosy(Listening):
    """Takes prompts in order, and keeps those with an even id."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def next(self, count: int) -> Tensor:
        first = sum(self.asked)
        self.asked.append(count)
        return torch.arange(first, first + count)

    def keep(self, prompt: Tensor, trials: Tensor, successes: Tensor) -> Tensor:
        assert trials.tolist() == [4] * len(prompt)
        assert ((successes >= 0) & (successes <= 4)).all()
        return prompt % 2 == 0


@pytest.mark.parametrize(
    ("refills", "asked", "kept"), [(3, [4, 2, 1], [0, 2, 4, 6]), (1, [4, 2], [0, 2, 4])]
)
def test_what_a_sampler_does_not_keep_is_replaced_reported_and_paid_for(
    make_run: MakeRun, refills: int, asked: list[int], kept: list[int]
) -> None:
    run = make_run("method=grpo", f"rollout.max_refills={refills}")
    sampler = run.collector.sampler = Choosy()
    batch = run.collector.next(1)
    assert sampler.asked == asked
    assert batch.prompt_id.view(-1, 4)[:, 0].tolist() == kept
    assert batch.observed["prompt"].tolist() == list(range(sum(asked)))
    assert batch.generated_tokens > int(batch.lengths.sum())
    run.collector.observe(batch, torch.ones(batch.response_mask.shape), None)
    (told,) = sampler.told
    assert told.prompt.tolist() == list(range(sum(asked)))
    # A dropped group is worth 0 only where its verdicts are equal; else nobody knows.
    for prompt, successes, size in zip(
        told.prompt.tolist(), told.successes.tolist(), told.mean_abs_advantage.tolist(), strict=True
    ):
        expected = 1.0 if prompt in kept else 0.0 if successes in (0, 4) else math.nan
        assert size == pytest.approx(expected, nan_ok=True)
    assert told.mean_abs_advantage.isnan().any()


def test_a_group_must_please_both_dynamic_sampling_and_the_sampler(make_run: MakeRun) -> None:
    run = make_run("method=dapo", "rollout.prompts=5", "rollout.max_refills=2")
    run.collector.sampler = Choosy()
    batch = run.collector.next(1)
    assert len(batch) > 0
    assert (batch.prompt_id % 2 == 0).all()
    share = batch.correct.view(-1, 4).mean(1)
    assert ((share > 0) & (share < 1)).all()


def test_value_pretraining_does_not_ask_the_sampler(make_run: MakeRun) -> None:
    run = make_run("method=vapo")
    sampler = run.collector.sampler = Choosy()
    assert len(run.collector.frozen(1)) == 16
    assert not sampler.asked


# -------------------------------------------------------------------------- what a sampler may know


class Curious(ShuffledEpochs):
    """Remembers what it was made of."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.pool = pool


def pool_of(run: Run) -> Pool:
    assert isinstance(run.collector.sampler, Curious)
    return run.collector.sampler.pool


def test_a_sampler_may_ask_the_critic_for_the_value_of_a_prompt(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAMPLERS, "curious", Curious)
    run = make_run("method=vapo", "rollout.sampler=curious", "rollout.prompts=16", "steps=7")
    pool = pool_of(run)
    assert (pool.num_prompts, pool.seed, pool.steps, pool.rollouts) == (16, 1, 7, 4)
    assert pool.truth is None
    assert pool.predict is not None
    batch = run.collector.next(1)
    for _ in range(2):
        values = run.engine.values(batch)
        assert torch.allclose(pool.predict(batch.prompt_id), values[:, 0], atol=1e-6)
        # A fresh head says 0 of everything; the prediction follows the critic as it learns.
        returns = torch.where(batch.response_mask, batch.reward[:, None], 0)
        run.engine.update_critic(batch, returns, values, passes=2)
    assert values[:, 0].std() > 0
    assert run.phases.seconds["values"] > 0


def test_a_run_says_what_it_does_not_know(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SAMPLERS, "curious", Curious)
    pool = pool_of(make_run("method=grpo", "rollout.sampler=curious"))
    assert pool.predict is None
    assert pool.difficulty is None
    file = tmp_path / "problems.jsonl"
    lines = [f'{{"problem": "{a}+1=", "answer": {a + 1}, "difficulty": 0.{a}}}\n' for a in range(5)]
    source = [f"data.train.source={file}", "data.train.levels=null", "rollout.sampler=curious"]
    file.write_text("".join(lines))
    difficulty = pool_of(make_run("method=grpo", *source)).difficulty
    assert difficulty is not None
    assert difficulty.tolist() == [0.0, 0.1, 0.2, 0.3, 0.4]
    # One problem without it, and no sampler may rely on it.
    file.write_text("".join([*lines, '{"problem": "1+1=", "answer": 2}\n']))
    assert pool_of(make_run("method=grpo", *source)).difficulty is None
