from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cvpo import METHODS, difficulty_weight, estimate_advantages, stochasticity_weight
from train.config import Config
from train.rollout.batch import Batch
from train.timing import Phases
from train.weigh import Weighed, Weigher

MakeConfig = Callable[..., Config]
MakeBatch = Callable[..., Batch]

PLAIN = "algorithm.whiten=none"


def weigher_of(config: Config, num_prompts: int = 3) -> Weigher:
    return Weigher(config, config.declared(), num_prompts=num_prompts, phases=Phases())


def values_of(batch: Batch, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(batch.response_mask.shape, generator=generator)


def weigh(weigher: Weigher, batch: Batch, step: int = 1) -> Weighed:
    values = values_of(batch)
    return weigher.weigh(step, batch, values if weigher.method.critic else None, values.abs() + 0.1)


def outcomes(batch: Batch, correct: list[float]) -> Batch:
    """The same responses with other verdicts: rows 2k and 2k + 1 answer prompt k."""
    R = torch.tensor(correct)
    observed = batch.observed | {"successes": R.view(-1, 2).sum(1)}
    return replace(batch, correct=R, reward=2 * R - 1, observed=observed)


# ------------------------------------------------------------------------------------- the weights


def test_a_step_is_observed_before_it_is_weighed(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch = outcomes(ragged_batch(), [0, 0, 1, 0, 1, 1])
    weighed = weigh(weigher_of(tiny_config()), batch)
    rho = torch.tensor([1 / 4, 1 / 4, 2 / 4, 2 / 4, 3 / 4, 3 / 4])
    torch.testing.assert_close(weighed.rho.float(), rho)
    torch.testing.assert_close(weighed.w_d, difficulty_weight(rho, phase="early"))


def test_discarded_groups_count_for_the_tracker(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    observed = {
        "prompt": torch.tensor([0, 1, 2, 3]),
        "trials": torch.tensor([2.0, 2, 2, 4]),
        "successes": torch.tensor([1.0, 1, 1, 4]),
    }
    weigher = weigher_of(tiny_config(), num_prompts=5)
    weigh(weigher, replace(batch, observed=observed))
    assert weigher.tracker.rho.tolist() == pytest.approx([0.5, 0.5, 0.5, 5 / 6, 0.5])
    assert weigher.tracker.visits.tolist() == [1, 1, 1, 1, 0]


def test_both_weights_multiply_the_advantage(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch, config = outcomes(ragged_batch(), [0, 0, 1, 0, 1, 1]), tiny_config(PLAIN)
    weighed, mask = weigh(weigher_of(config), batch), batch.response_mask
    assert weighed.sigma is not None
    assert weighed.mu is not None
    for row in range(len(batch)):
        v = values_of(batch)[row][mask[row]]
        assert weighed.sigma[row].item() == pytest.approx(v.std(correction=0).item(), abs=1e-6)
    w_s = stochasticity_weight(
        weighed.sigma,
        weighed.sigma.view(3, 2).mean(1).repeat_interleave(2),
        batch.correct,
        alpha_p=0.3,
        alpha_n=0.3,
        lambda_p=50.0,
        lambda_n=50.0,
    )
    torch.testing.assert_close(weighed.w_s, w_s)
    raw = estimate_advantages(
        config.declared(), batch.reward, batch.prompt_id, mask, values=values_of(batch)
    ).advantages
    torch.testing.assert_close(weighed.raw, raw)
    torch.testing.assert_close(weighed.advantages, (w_s * weighed.w_d)[:, None] * raw)
    assert weighed.w_s.unique().numel() > 2
    assert weighed.w_d.unique().numel() > 2


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_without_a_weight_leaves_it_at_one(
    tiny_config: MakeConfig, ragged_batch: MakeBatch, name: str
) -> None:
    weighed = weigh(weigher_of(tiny_config(f"method={name}")), ragged_batch())
    assert weighed.w_s.ne(1).any() == METHODS[name].stochasticity
    assert weighed.w_d.ne(1).any() == METHODS[name].curriculum
    # What a critic says of the spread is logged under every method that has one.
    assert (weighed.sigma is not None) == METHODS[name].critic
    assert (weighed.returns is not None) == METHODS[name].critic


def test_whitening_by_scale_keeps_the_signs(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    mask = batch.response_mask
    scaled = weigh(weigher_of(tiny_config("algorithm.whiten=scale")), batch)
    plain = weigh(weigher_of(tiny_config(PLAIN)), batch)
    assert torch.equal(scaled.advantages.sign(), plain.advantages.sign())
    deviation = plain.raw[mask].std(correction=0)
    torch.testing.assert_close(scaled.advantages, plain.advantages / deviation)
    assert scaled.diagnostics["advantage/sd"] == pytest.approx(deviation.item(), rel=1e-6)
    full = weigh(weigher_of(tiny_config("algorithm.whiten=full")), batch)
    assert not torch.equal(full.advantages.sign(), plain.advantages.sign())


def test_whitening_comes_before_the_weights(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    weighed = weigh(weigher_of(tiny_config("algorithm.whiten=scale")), batch)
    unweighted = weighed.advantages / (weighed.w_s * weighed.w_d)[:, None]
    assert unweighted[batch.response_mask].std(correction=0).item() == pytest.approx(1, rel=1e-5)


def test_raw_and_returns_know_nothing_of_the_weights(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()
    with_weights = weigh(weigher_of(tiny_config("method=cvpo")), batch)
    without = weigh(weigher_of(tiny_config("method=vapo")), batch)
    assert torch.equal(with_weights.raw, without.raw)
    assert with_weights.returns is not None
    assert without.returns is not None
    assert torch.equal(with_weights.returns, without.returns)


def test_the_shuffled_arm_draws_by_seed_and_step(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch = outcomes(ragged_batch((5, 6, 7, 8, 9, 4), (3,) * 6), [1] * 6)
    batch = replace(batch, prompt_id=torch.zeros(6, dtype=torch.long))

    def drawn(seed: int, step: int) -> list[float]:
        config = tiny_config("stochasticity.arm=shuffled", f"seed={seed}")
        return weigh(weigher_of(config), batch, step).w_s.tolist()

    assert drawn(1, 1) == drawn(1, 1)
    assert len({tuple(drawn(1, step)) for step in range(8)}) > 3
    assert len({tuple(drawn(seed, 1)) for seed in range(8)}) > 3
    literal = weigh(weigher_of(tiny_config()), batch).w_s
    assert sorted(drawn(1, 1)) == pytest.approx(sorted(literal.tolist()), abs=1e-5)


def test_gamma_reaches_the_advantages(tiny_config: MakeConfig, ragged_batch: MakeBatch) -> None:
    batch = ragged_batch()
    one = weigh(weigher_of(tiny_config(PLAIN)), batch)
    less = weigh(weigher_of(tiny_config(PLAIN, "algorithm.gamma=0.9")), batch)
    assert one.returns is not None
    assert less.returns is not None
    # lambda_critic 1: the return is the discounted reward, whatever the values.
    for row, length in enumerate(batch.lengths.tolist()):
        r = batch.reward[row].item()
        assert one.returns[row, :length].tolist() == pytest.approx([r] * length, abs=1e-5)
        twin = [r * 0.9 ** (length - 1 - t) for t in range(length)]
        assert less.returns[row, :length].tolist() == pytest.approx(twin, abs=1e-5)


# -------------------------------------------------------------------------------------- the rounds


def test_a_round_is_one_pass_over_the_prompts(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    batch = ragged_batch()  # three groups
    weigher = weigher_of(tiny_config(), num_prompts=7)
    ended = []
    for step in range(1, 8):
        weigh(weigher, batch, step)
        ended.append(weigher.end_step(batch) is not None)
    # 3, 6, 9 -> 2 over, 5, 8 -> 1 over, 4, 7
    assert ended == [False, False, True, False, True, False, True]


def test_round_steps_count_steps(tiny_config: MakeConfig, ragged_batch: MakeBatch) -> None:
    weigher, batch = weigher_of(tiny_config("curriculum.round_steps=2")), ragged_batch()
    assert [weigher.end_step(batch) is not None for _ in range(5)] == [False, True] * 2 + [False]


def test_the_rows_of_a_round_hold_every_prompt_once(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    config = tiny_config("method=grpo", "curriculum.round_steps=2")
    weigher = weigher_of(config, num_prompts=4)
    batch = ragged_batch()
    weigh(weigher, outcomes(batch, [0, 0, 1, 0, 1, 1]))
    assert weigher.end_step(batch) is None
    weigh(weigher, outcomes(batch, [1, 0, 1, 0, 1, 1]))
    ended = weigher.end_step(batch)
    assert ended is not None
    rows = {name: torch.as_tensor(x).tolist() for name, x in ended.rows.items() if name != "phase"}
    assert ended.number == 0
    assert rows["prompt_id"] == [0, 1, 2, 3]
    assert rows["visits"] == [2, 2, 2, 0]
    assert rows["trials"] == [4, 4, 4, 0]
    assert rows["successes"] == [1, 2, 4, 0]
    assert rows["alpha"] == [2, 3, 5, 1]
    assert rows["beta"] == [4, 3, 1, 1]
    assert rows["rho"] == pytest.approx([1 / 3, 1 / 2, 5 / 6, 1 / 2])
    # rho went 1/4 -> 1/3, 1/2 -> 1/2, 3/4 -> 5/6; the last prompt was never seen.
    assert rows["delta"][:3] == pytest.approx([1 / 3, 0, 1 / 9])
    assert rows["delta"][3] != rows["delta"][3]
    assert rows["w_d"] == pytest.approx(
        difficulty_weight(torch.tensor(rows["rho"]), phase="early").tolist(), rel=1e-5
    )
    assert ended.rows["phase"] == ["early"] * 4
    # The next round counts from 0 again.
    weigh(weigher, outcomes(batch, [1, 1, 1, 1, 1, 1]))
    weigher.end_step(batch)
    weigh(weigher, outcomes(batch, [1, 1, 1, 1, 1, 1]))
    ended = weigher.end_step(batch)
    assert ended is not None
    assert ended.number == 1
    assert ended.rows["successes"].tolist() == [4, 4, 4, 0]


def test_a_switch_acts_from_the_next_step_on(
    tiny_config: MakeConfig, ragged_batch: MakeBatch
) -> None:
    config = tiny_config(
        "curriculum.round_steps=1", "curriculum.low_delta=9", "curriculum.high_delta=9"
    )
    weigher = weigher_of(config)
    batch = outcomes(ragged_batch(), [0, 0, 1, 1, 1, 0])
    switched, phases = [], []
    for step in range(1, 6):
        weighed = weigh(weigher, batch, step)
        phases.append(
            next(
                phase
                for phase in ("early", "bottleneck")
                if torch.allclose(weighed.w_d, difficulty_weight(weighed.rho, phase=phase).float())
            )
        )
        assert weighed.round == step - 1
        ended = weigher.end_step(batch)
        assert ended is not None
        switched.append(ended.report.switched)
        # The rows of a round are of the phase that its steps were weighed in.
        assert ended.rows["phase"] == [phases[-1]] * 3
        torch.testing.assert_close(ended.rows["w_d"][batch.prompt_id], weighed.w_d)
    # Always right: rho = 3/4, 5/6, ... the high set has a member after the second step.
    assert switched == [False, True, False, False, False]
    assert phases == ["early", "early", "bottleneck", "bottleneck", "bottleneck"]


def test_the_state_goes_on_where_it_was(tiny_config: MakeConfig, ragged_batch: MakeBatch) -> None:
    config = tiny_config("curriculum.low_delta=9", "curriculum.high_delta=9")
    batch = outcomes(ragged_batch(), [0, 0, 1, 1, 1, 0])
    first = weigher_of(config, num_prompts=5)
    for step in (1, 2):
        weigh(first, batch, step)
        first.end_step(batch)
    second = weigher_of(config, num_prompts=5)
    second.load_state_dict(first.state_dict())
    for step in (3, 4, 5):
        a, b = weigh(first, batch, step), weigh(second, batch, step)
        assert torch.equal(a.advantages, b.advantages)
        ends = first.end_step(batch), second.end_step(batch)
        assert (ends[0] is None) == (ends[1] is None)
    assert first.curriculum.phase == second.curriculum.phase == "bottleneck"


def test_a_state_of_another_problem_set_is_refused(tiny_config: MakeConfig) -> None:
    state = weigher_of(tiny_config(), num_prompts=5).state_dict()
    with pytest.raises(ValueError, match=r"5.* prompts"):
        weigher_of(tiny_config(), num_prompts=6).load_state_dict(state)
