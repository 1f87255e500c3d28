from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel

import train.config
from cvpo import METHODS, CurriculumConfig, StochasticityConfig
from train.config import Config, ConfigError, Dataset, Section, load_config, require_device

LAPTOP = Path(train.config.__file__).parent / "configs" / "laptop.yaml"

MakeConfig = Callable[..., Config]


def raw() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(LAPTOP.read_text())
    return loaded


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone or in a tuple."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def leaves(section: type[BaseModel] = Config, path: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or (inner is Dataset and name == "benchmarks"):
            yield path + name
        else:
            yield from leaves(inner, f"{path}{name}.")


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


# ---------------------------------------------------------------- the laptop file and the classes


def test_laptop_file_is_the_default() -> None:
    assert load_config(None) == load_config(LAPTOP)


def test_the_weights_defaults_are_the_library_s() -> None:
    assert train.config.Stochasticity().declared() == StochasticityConfig()
    assert train.config.Curriculum().declared() == CurriculumConfig()


def test_every_key_of_the_configuration_stands_in_the_laptop_file() -> None:
    def missing(section: type[BaseModel], held: dict[str, Any], path: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            inner = section_of(field.annotation)
            if name not in held:
                yield path + name
            elif inner is not None and name != "benchmarks":
                yield from missing(inner, held[name], f"{path}{name}.")

    assert list(missing(Config, raw(), "")) == []


def test_every_line_of_the_laptop_file_that_opens_a_choice_keeps_it_in_reach() -> None:
    # Whoever reads "ppo vc-ppo ... cvpo-curriculum" beside `method` must see every method there is.
    line = next(line for line in LAPTOP.read_text().splitlines() if line.startswith("method:"))
    assert set(line.partition("#")[2].split()) == set(METHODS)


@pytest.mark.parametrize("key", sorted(leaves()))
def test_every_key_refuses_a_value_of_another_kind_and_names_itself(key: str) -> None:
    message = refused(f"{key}={{no: 1}}")
    assert message.startswith(f"{LAPTOP}: {key}")
    assert message.count("\n") == 0


@pytest.mark.parametrize("key", sorted(leaves()))
def test_a_slip_of_the_pen_in_any_key_is_answered_with_that_key(key: str) -> None:
    parents, dot, last = key.rpartition(".")
    slip = last + "x"
    message = refused(f"{parents}{dot}{slip}=1")
    assert message == f"{LAPTOP}: {parents}{dot}{slip}: '{slip}' is unknown; did you mean '{last}'?"


def test_an_unknown_key_without_a_neighbour_lists_what_is_known() -> None:
    message = refused("checkpoints.qqqqqq=1")
    assert message == f"{LAPTOP}: checkpoints.qqqqqq: 'qqqqqq' is unknown; known: every, keep"


def test_an_unknown_key_of_a_benchmark_is_named_with_its_number() -> None:
    message = refused("evaluation.benchmarks=[{source: addition}, {source: addition, levls: [1]}]")
    assert "evaluation.benchmarks.1.levls: 'levls' is unknown; did you mean 'levels'?" in message


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file}: data: is missing and has no default"


def test_several_faults_come_in_one_message() -> None:
    message = refused("steps=0", "rollout.top_p=2", "actor.lrr=1")
    assert message.startswith(f"{LAPTOP}: ")
    lines = message.removeprefix(f"{LAPTOP}: ").split("\n  ")
    assert sorted(line.split(":")[0] for line in lines) == ["actor.lrr", "rollout.top_p", "steps"]


# ---------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "steps=0",
        "steps=2.5",
        "verifier=strict",
        "model.dtype=float16",
        "model.device=gpu",
        "data.train.limit=0",
        "data.max_prompt_tokens=0",
        "rollout.backend=sglang",
        "rollout.prompts=0",
        "rollout.temperature=0",
        "rollout.temperature=.nan",
        "rollout.temperature=.inf",
        "rollout.top_p=0",
        "rollout.top_p=1.01",
        "rollout.max_tokens=0",
        "rollout.lag=2",
        "rollout.max_refills=-1",
        "rollout.max_refills=.inf",
        "rollout.max_refills=1.5",
        "rollout.overlong_cache=-1",
        "algorithm.gamma=1.01",
        "algorithm.gamma=.nan",
        "algorithm.lambda_critic=-0.1",
        "algorithm.lambda_policy=1.1",
        "algorithm.length_adaptive_alpha=0",
        "algorithm.clip_low=1",
        "algorithm.clip_high=-0.1",
        "algorithm.reduction=mean",
        "algorithm.whiten=true",
        "algorithm.kl_coefficient=-1",
        "stochasticity.alpha_n=1",
        "stochasticity.alpha_p=-0.1",
        "stochasticity.arm=litteral",
        "curriculum.discount=0",
        "curriculum.discount=1.1",
        "curriculum.window=3",
        "curriculum.min_prompts=0",
        "curriculum.high_delta=.nan",
        "curriculum.early=[1, 2, 3]",
        "curriculum.early=[1, 2, 3, .nan]",
        "curriculum.round_steps=0",
        "actor.lr=0",
        "actor.lr=fast",
        "actor.betas=[0.9]",
        "actor.betas=[0.9, 1.0]",
        "actor.minibatches=0",
        "critic.max_grad_norm=0",
        "critic.value_clip=0",
        "engine.kind=fsdp",
        "engine.micro_batch_tokens=0",
        "pretraining.max_steps=-1",
        "pretraining.min_explained_variance=1",
        "evaluation.verifiers=[exact, strict]",
        "evaluation.samples=0",
        "checkpoints.every=0",
        "checkpoints.keep=0",
        "log.text_share=1.5",
        "warmstart.steps=0",
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(override: str) -> None:
    key = override.partition("=")[0]
    message = refused(override)
    assert message.startswith(f"{LAPTOP}: {key}")
    assert "\n" not in message


# ----------------------------------------------------------------------------------- combinations


@pytest.mark.parametrize(
    ("overrides", "named", "said"),
    [
        (["method=cvppo"], "method", "'cvppo' is unknown; did you mean 'cvpo'?"),
        (["rollout.sampler=unifrm"], "rollout.sampler", "did you mean 'uniform'?"),
        (
            ["rollout.prompts=1", "rollout.samples=2", "actor.minibatches=3"],
            "actor.minibatches",
            "3 updates of 2 trajectories",
        ),
        (
            ["rollout.prompts=1", "rollout.samples=2", "actor.minibatches=1"],
            "critic.minibatches",
            "4 updates of 2 trajectories",
        ),
        (["method=grpo", "rollout.samples=1"], "rollout.samples", "at least 2"),
        (["method=rloo", "rollout.samples=1"], "rollout.samples", "at least 2"),
        (["method=grpo", "algorithm.stochasticity=true"], "algorithm.stochasticity", "no critic"),
        (
            ["method=vapo", "algorithm.lambda_policy=0.9"],
            "algorithm.lambda_policy",
            "algorithm.length_adaptive_alpha exclude each other",
        ),
        (["rollout.overlong_cache=73"], "rollout.overlong_cache", "rollout.max_tokens"),
        (["curriculum.low=0.9"], "curriculum", "low (0.9) must be below high (0.8)"),
        (
            ["evaluation.benchmarks=[{source: addition}, {source: addition}]"],
            "evaluation.benchmarks",
            "names must differ",
        ),
        (["verifier=exact", "evaluation.verifiers=[symbolic]"], "evaluation.verifiers", "exact"),
    ],
)
def test_a_combination_that_cannot_run_is_refused(
    overrides: list[str], named: str, said: str
) -> None:
    message = refused(*overrides)
    assert message.startswith(f"{LAPTOP}: {named}")
    assert said in message


def test_a_method_with_a_critic_may_have_one_rollout_a_prompt() -> None:
    assert load_config(None, ["method=ppo", "rollout.samples=1"]).rollout.samples == 1


def test_ppo_may_set_lambda_policy_beside_the_alpha_it_ignores() -> None:
    config = load_config(None, ["method=ppo", "algorithm.lambda_policy=0.9"])
    assert config.declared().lambda_policy == 0.9


# -------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("actor.lr=3e-4", lambda c: c.actor.lr == 3e-4),
        ("actor.lr=1E-3", lambda c: c.actor.lr == 1e-3),
        ("actor.betas=[0.8, 0.99]", lambda c: c.actor.betas == (0.8, 0.99)),
        ("data.train.levels=[2,3]", lambda c: c.data.train.levels == (2, 3)),
        ("rollout.lag=1", lambda c: c.rollout.lag == 1),
        (
            "algorithm.length_adaptive_alpha=null",
            lambda c: c.algorithm.length_adaptive_alpha is None,
        ),
        ("evaluation.benchmarks=[]", lambda c: c.evaluation.benchmarks == ()),
        ("log.tensorboard=false", lambda c: c.log.tensorboard is False),
        ("run_dir=runs/a=b", lambda c: c.run_dir == "runs/a=b"),
        ("seed=7", lambda c: c.seed == 7),
    ],
)
def test_overrides_are_yaml_values(override: str, read: Callable[[Config], bool]) -> None:
    assert read(load_config(None, [override]))


def test_the_last_override_of_a_key_wins() -> None:
    assert load_config(None, ["seed=2", "seed=3"]).seed == 3


def test_an_override_leaves_its_neighbours_alone() -> None:
    before, after = load_config(None), load_config(None, ["actor.lr=0.5"])
    assert after.actor == before.actor.model_copy(update={"lr": 0.5})
    assert after.model_copy(update={"actor": before.actor}) == before


@pytest.mark.parametrize("override", ["seed", "=3", "", "seed:3"])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    assert "overrides are written section.key=value" in refused(override)


def test_an_override_below_a_value_is_refused() -> None:
    assert refused("seed.x=3").startswith("seed.x: seed holds a value")


def test_an_override_that_is_no_yaml_is_refused() -> None:
    assert refused("actor.betas=[1,").startswith("actor.betas: '[1,' is not a YAML value")


def test_the_run_folder_is_filled_in() -> None:
    config = load_config(None, ["method=vapo", "seed=4", "run_dir=x/{seed}/{method}-{other}"])
    assert config.folder == Path("x/4/vapo-{other}")


# ------------------------------------------------------------------------------------------ files


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [1", "not valid YAML"),
        (b"\xff\xfe", "not valid YAML"),
        (b"", "must be a mapping of keys, is NoneType"),
        (b"- a\n- b", "must be a mapping of keys, is list"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


# ------------------------------------------------------------------------------- the method itself


@pytest.mark.parametrize("name", sorted(METHODS))
def test_nulls_keep_what_the_method_declares(name: str) -> None:
    nothing = ["algorithm.length_adaptive_alpha=null", "pretraining.max_steps=null"]
    assert load_config(None, [f"method={name}", *nothing]).declared() == METHODS[name]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_length_adaptive_alpha_reaches_only_methods_that_adapt(name: str) -> None:
    declared = load_config(None, [f"method={name}", "algorithm.length_adaptive_alpha=0.7"])
    adapts = METHODS[name].length_adaptive_alpha is not None
    assert declared.declared().length_adaptive_alpha == (0.7 if adapts else None)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_value_pretraining_reaches_only_methods_that_have_it(name: str) -> None:
    declared = load_config(None, [f"method={name}", "pretraining.max_steps=3"]).declared()
    assert declared.value_pretraining_steps == (3 if METHODS[name].value_pretraining_steps else 0)


def test_lambda_policy_turns_the_adaptive_one_off() -> None:
    declared = load_config(
        None,
        ["method=cvpo", "algorithm.length_adaptive_alpha=null", "algorithm.lambda_policy=0.9"],
    ).declared()
    assert (declared.length_adaptive_alpha, declared.lambda_policy) == (None, 0.9)


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("algorithm.lambda_critic", 0.1, "lambda_critic"),
        ("algorithm.clip_low", 0.1, "clip_low"),
        ("algorithm.clip_high", 0.0, "clip_high"),
        ("algorithm.reduction", "fixed", "reduction"),
        ("algorithm.lm_coefficient", 0.0, "lm_coefficient"),
        ("algorithm.dynamic_sampling", True, "dynamic_sampling"),
        ("algorithm.overlong_penalty", True, "overlong_penalty"),
        ("algorithm.stochasticity", False, "stochasticity"),
        ("algorithm.curriculum", False, "curriculum"),
        ("rollout.lag", 1, "lag"),
    ],
)
def test_an_override_replaces_one_field_of_the_declaration(
    key: str, value: object, field: str
) -> None:
    before = load_config(None).declared()
    after = load_config(None, [f"{key}={yaml.safe_dump(value).splitlines()[0]}"]).declared()
    assert getattr(before, field) != value
    assert vars(after) == vars(before) | {field: value}


def test_the_log_keeps_every_key_and_what_the_method_came_to() -> None:
    config = load_config(None, ["method=vapo"])
    resolved = config.resolved()
    assert set(resolved) == set(Config.model_fields) | {"declared"}
    assert resolved["declared"]["length_adaptive_alpha"] == 1.0
    assert yaml.safe_load(yaml.safe_dump(resolved)) == resolved


# -------------------------------------------------------------- what YAML would silently make of it


@pytest.mark.parametrize(
    "override", ["steps=yes", "seed=true", "rollout.max_refills=off", "actor.lr=true"]
)
def test_yes_and_no_are_no_numbers(override: str) -> None:
    key = override.partition("=")[0]
    assert f"{key}: yes or no (true, false) stands where a number belongs" in refused(override)


@pytest.mark.parametrize("value", ["yes", "true", "on"])
def test_switches_take_yes_and_no(value: str) -> None:
    assert load_config(None, [f"data.train.deduplicate={value}"]).data.train.deduplicate is True


@pytest.mark.parametrize(
    "content",
    ["seed: 1\nsteps: 3\nseed: 2\n", "actor: {lr: 1, lr: 2}\n", "a:\n  - b: 1\n    b: 2\n"],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"the key '\w+' stands twice(.|\n)*line \d"):
        load_config(file)


def test_an_override_with_a_key_twice_is_refused() -> None:
    assert "the key 'limit' stands twice" in refused("data.train={limit: 3, limit: 4}")


def test_anchors_and_merge_keys_are_no_repeated_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    shared = (
        "actor: &optimizer {lr: 1.0e-3, minibatches: 2}\ncritic: {<<: *optimizer, lr: 2.0e-3}\n"
    )
    file.write_text(
        f"{shared}model: {{path: here}}\ndata: {{train: {{source: addition, split: rl}}}}\n"
    )
    config = load_config(file)
    assert (config.critic.lr, config.critic.minibatches) == (2e-3, 2)


@pytest.mark.parametrize(
    "override",
    [
        "run_dir=''",
        "model.path=''",
        "model.critic_path=''",
        "data.train.source=''",
        "data.train.levels=[]",
        "data.template=the problem",
        "model.device=meta",
        "rollout.temperature=1e-300",
        "evaluation.temperature=1e-300",
    ],
)
def test_a_value_that_only_looks_like_one_is_refused(override: str) -> None:
    assert refused(override).startswith(f"{LAPTOP}: {override.partition('=')[0]}: ")


def test_a_device_this_machine_lacks_is_refused_before_anything_is_loaded() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA device")
    config = load_config(None, ["model.device=cuda:0"])  # it can be planned without the device
    with pytest.raises(ConfigError, match="PyTorch finds no such device on this machine"):
        require_device(config)


def test_the_home_folder_is_meant_by_a_tilde() -> None:
    assert load_config(None, ["run_dir=~/runs/{method}"]).folder == Path.home() / "runs" / "cvpo"
