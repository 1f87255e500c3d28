from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from train import addition
from train.config import Config, Sampling
from train.engine import Engine
from train.models import end_of_sequence, load_actor, load_tokenizer
from train.rollout.backend import TransformersBackend, _SeededChoice
from train.rollout.batch import Responses, pad, ungraded

MakeConfig = Callable[..., Config]
Loaded = Callable[..., TransformersBackend]

PROMPTS = [addition.tokenizer().encode(p) for p in ("7+8=", "12+34=", "0+9=", "512+388=", "5+5=")]
SEEDS = [11, 12, 13, 14, 15]
SAMPLING = Sampling(max_tokens=20)
EOS = addition.tokenizer().eos_token_id


@pytest.fixture
def backend(tiny_model: Path) -> Loaded:
    def make(
        *, batch_size: int = 64, end_tokens: Sequence[int] = (EOS,), scale: float = 1.0
    ) -> TransformersBackend:
        model = load_actor(str(tiny_model), dtype="float32", device="cpu")
        with torch.no_grad():
            # A small scale flattens the distribution, so that every token may come.
            model.get_input_embeddings().weight.mul_(scale)
        return TransformersBackend(model, end_tokens=end_tokens, pad_id=0, batch_size=batch_size)

    return make


def assert_same(found: Responses, expected: Responses) -> None:
    assert found.tokens == expected.tokens
    assert found.truncated == expected.truncated
    for a, b in zip(found.log_probs, expected.log_probs, strict=True):
        assert a == pytest.approx(b, abs=2e-5)


# --------------------------------------------------------------------------------------- the seed


def test_the_same_seeds_give_the_same_responses(backend: Loaded) -> None:
    engine = backend()
    first, again = (engine.generate(PROMPTS, SEEDS, SAMPLING) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_response_does_not_depend_on_its_neighbours(backend: Loaded, batch_size: int) -> None:
    together = backend().generate(PROMPTS, SEEDS, SAMPLING)
    assert_same(backend(batch_size=batch_size).generate(PROMPTS, SEEDS, SAMPLING), together)


def test_a_response_does_not_depend_on_the_order(backend: Loaded) -> None:
    engine = backend()
    together, order = engine.generate(PROMPTS, SEEDS, SAMPLING), [3, 0, 4, 2, 1]
    found = engine.generate([PROMPTS[i] for i in order], [SEEDS[i] for i in order], SAMPLING)
    back = [order.index(i) for i in range(len(order))]
    assert_same(
        Responses(
            [found.tokens[i] for i in back],
            [found.log_probs[i] for i in back],
            [found.truncated[i] for i in back],
            0,
        ),
        together,
    )


def test_a_response_does_not_depend_on_the_global_generator(backend: Loaded) -> None:
    engine = backend()
    torch.manual_seed(1)
    first = engine.generate(PROMPTS, SEEDS, SAMPLING)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert engine.generate(PROMPTS, SEEDS, SAMPLING) == first
    assert torch.equal(torch.get_rng_state(), state)


def test_a_longer_limit_only_goes_on(backend: Loaded) -> None:
    engine = backend(end_tokens=[-1])
    short = engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=4))
    long = engine.generate(PROMPTS, SEEDS, Sampling(max_tokens=9))
    assert [row[:4] for row in long.tokens] == short.tokens


def test_other_seeds_give_other_responses(backend: Loaded) -> None:
    engine = backend(scale=0.1)
    drawn = engine.generate([PROMPTS[0]] * 20, list(range(20)), Sampling(max_tokens=12))
    assert len({tuple(row) for row in drawn.tokens}) > 15


# ------------------------------------------------------------------------------- the distribution


def drawn(
    scores: torch.Tensor, sampling: Sampling, count: int
) -> tuple[torch.Tensor, _SeededChoice]:
    """So many independent draws from one row of logits, each with a seed of its own."""
    choose = _SeededChoice(range(count), sampling, torch.device("cpu"))
    kept = choose(torch.zeros(count, 1, dtype=torch.long), scores.expand(count, -1))
    assert kept.isfinite().sum(1).eq(1).all()
    return kept.argmax(-1), choose


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_draws_follow_the_softmax(temperature: float) -> None:
    scores = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -torch.inf]])
    count = 20_000
    tokens, _ = drawn(scores, Sampling(temperature=temperature, max_tokens=1), count)
    expected = (scores[0] / temperature).softmax(-1) * count
    observed = torch.bincount(tokens, minlength=8).double()
    assert observed[7] == 0
    chi_square = ((observed - expected)[:7].square() / expected[:7]).sum().item()
    assert chi_square < 22.5  # the 99.9 % quantile at 6 degrees of freedom


def test_draws_of_consecutive_tokens_are_independent() -> None:
    count = 20_000
    choose = _SeededChoice(range(count), Sampling(max_tokens=2), torch.device("cpu"))
    scores, ids = torch.zeros(count, 2), torch.zeros(count, 1, dtype=torch.long)
    first, second = (choose(ids, scores).argmax(-1) for _ in range(2))
    table = torch.bincount(2 * first + second, minlength=4).double()
    assert ((table - count / 4).square() / (count / 4)).sum().item() < 16.3  # 3 degrees of freedom


def test_top_p_never_leaves_the_nucleus() -> None:
    probabilities = torch.tensor([[0.05, 0.4, 0.08, 0.3, 0.02, 0.15]])
    tokens, choose = drawn(probabilities.log(), Sampling(top_p=0.75, max_tokens=1), 20_000)
    # .4 + .3 is not yet .75, so .15 belongs to it.
    share = torch.bincount(tokens, minlength=6).double() / len(tokens)
    assert share.nonzero().flatten().tolist() == [1, 3, 5]
    expected = probabilities[0, [1, 3, 5]] / 0.85
    assert share[[1, 3, 5]].tolist() == pytest.approx(expected.tolist(), abs=0.012)
    # The log-probability is the policy's own, from before the tail was cut off.
    torch.testing.assert_close(choose.log_probs[0], probabilities[0].log()[tokens])


def test_the_likeliest_token_stays_whatever_top_p() -> None:
    tokens, _ = drawn(torch.tensor([[0.0, 3.0, 1.0]]), Sampling(top_p=1e-6, max_tokens=1), 200)
    assert tokens.unique().tolist() == [1]


def test_a_temperature_near_zero_is_greedy(backend: Loaded) -> None:
    engine = backend()
    sampling = Sampling(temperature=1e-4, max_tokens=12)
    found = engine.generate(PROMPTS, SEEDS, sampling)
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        ids = list(prompt)
        for token in tokens:
            with torch.no_grad():
                logits = engine.model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids.append(token)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9), (1.3, 0.6)])
def test_log_probs_are_those_the_trainer_computes(
    backend: Loaded, tiny_model: Path, tiny_config: MakeConfig, temperature: float, top_p: float
) -> None:
    config = tiny_config(
        "method=grpo", f"rollout.temperature={temperature}", f"rollout.top_p={top_p}"
    )
    responses = backend().generate(PROMPTS * 4, range(20), config.rollout)
    engine = Engine(
        config,
        config.declared(),
        actor=load_actor(str(tiny_model), dtype="float32", device="cpu"),
        critic=None,
    )
    batch = ungraded(PROMPTS * 4, responses.tokens, pad_id=0)
    behaviour = pad(PROMPTS * 4, responses, pad_id=0)["behaviour_log_probs"]
    log_probs, _ = engine.log_probs(batch)
    gap = (log_probs - behaviour)[batch.response_mask].abs()
    assert gap.max() < 1e-5


@pytest.mark.parametrize(
    "habit",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 15},
        {"temperature": 0.1, "do_sample": True},
        {"top_k": 1, "do_sample": True},
        {"suppress_tokens": [5, 6, 7]},
    ],
)
def test_habits_of_the_model_s_generation_config_do_not_bias(
    backend: Loaded, tiny_model: Path, habit: dict[str, object], tmp_path: Path
) -> None:
    model = load_actor(str(tiny_model), dtype="float32", device="cpu")
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0, **habit)
    model.save_pretrained(tmp_path)
    model = load_actor(str(tmp_path), dtype="float32", device="cpu")
    biased = TransformersBackend(model, end_tokens=[EOS], pad_id=0, batch_size=64)
    expected = backend().generate(PROMPTS, SEEDS, SAMPLING)
    assert biased.generate(PROMPTS, SEEDS, SAMPLING) == expected


# ----------------------------------------------------------------------------------- where it ends


def test_responses_end_with_the_end_token_or_are_truncated(backend: Loaded) -> None:
    engine = backend()
    found = engine.generate(PROMPTS * 10, range(50), Sampling(max_tokens=13))
    assert len(set(found.truncated)) == 2
    for tokens, log_probs, truncated in zip(
        found.tokens, found.log_probs, found.truncated, strict=True
    ):
        assert len(tokens) == len(log_probs)
        assert EOS not in tokens[:-1]
        assert truncated == (tokens[-1] != EOS)
        assert truncated <= (len(tokens) == 13)


def test_an_end_token_in_the_last_slot_is_not_truncated(backend: Loaded) -> None:
    engine = backend()
    whole = engine.generate(PROMPTS[:1], SEEDS[:1], SAMPLING).tokens[0]
    assert whole[-1] == EOS
    again = engine.generate(PROMPTS[:1], SEEDS[:1], Sampling(max_tokens=len(whole)))
    assert (again.tokens, again.truncated) == ([whole], [False])
    cut = engine.generate(PROMPTS[:1], SEEDS[:1], Sampling(max_tokens=len(whole) - 1))
    assert (cut.tokens, cut.truncated) == ([whole[:-1]], [True])


def test_every_token_of_the_list_ends_a_response(backend: Loaded) -> None:
    comma = addition.tokenizer().encode(",")[0]
    plain = backend().generate(PROMPTS, SEEDS, SAMPLING)
    found = backend(end_tokens=[EOS, comma]).generate(PROMPTS, SEEDS, SAMPLING)
    for tokens, before in zip(found.tokens, plain.tokens, strict=True):
        ends = [i for i, token in enumerate(before) if token in (EOS, comma)]
        assert tokens == before[: ends[0] + 1]
    assert comma in {tokens[-1] for tokens in found.tokens}


def test_end_tokens_are_the_tokenizer_s_and_the_generation_config_s(tiny_model: Path) -> None:
    model = load_actor(str(tiny_model), dtype="float32", device="cpu")
    tokenizer = load_tokenizer(str(tiny_model))
    for listed, expected in ((None, (EOS,)), (EOS, (EOS,)), (7, (EOS, 7)), ([7, EOS], (EOS, 7))):
        model.generation_config.eos_token_id = listed
        assert end_of_sequence(model, tokenizer) == expected


# ---------------------------------------------------------------------------------- weights arrive


def test_after_sync_it_generates_with_the_new_weights(backend: Loaded) -> None:
    source, target = backend(scale=0.5), backend()
    before = target.generate(PROMPTS, SEEDS, SAMPLING)
    assert before.version == 0
    target.sync(source.model.named_parameters(), version=3)
    for (name, a), (_, b) in zip(
        source.model.named_parameters(), target.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.data_ptr() != b.data_ptr()
    after = target.generate(PROMPTS, SEEDS, SAMPLING)
    assert after.version == 3
    assert after.tokens == source.generate(PROMPTS, SEEDS, SAMPLING).tokens != before.tokens


def test_a_weight_that_never_comes_is_an_error(backend: Loaded) -> None:
    target = backend()
    sent = [(n, p) for n, p in target.model.named_parameters() if n != "model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"never received \['model\.norm\.weight'\]"):
        target.sync(sent, version=1)


def test_a_weight_nobody_knows_is_an_error(backend: Loaded) -> None:
    target = backend()
    with pytest.raises(RuntimeError, match=r"has no parameter model\.norm\.bias"):
        target.sync([("model.norm.bias", torch.zeros(32))], version=1)


def test_a_weight_that_comes_twice_is_an_error(backend: Loaded) -> None:
    target = backend()
    sent = [*target.model.named_parameters()]
    with pytest.raises(RuntimeError, match="has no parameter"):
        target.sync([*sent, sent[0]], version=1)
