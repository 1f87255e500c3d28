import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from train.__main__ import main
from train.checkpoint import checkpoints
from train.config import Config
from train.loop import train

MakeConfig = Callable[..., Config]

ROOT = Path(__file__).parents[2]
COMMANDS = ("warmstart", "run", "eval", "score")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error of a command that ends with status 2."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, captured.err
    assert captured.err.rstrip().endswith(errors[0])
    assert "Traceback" not in captured.err
    return errors[0]


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_tells_how_to_configure(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = help_of(capsys, command)
    assert "--config FILE" in text
    assert "key=value" in text
    assert "laptop.yaml" in text


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "usage: python -m train" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["warmstart", "run", "eval"])
def test_a_bad_configuration_stops_every_command(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    message = refused(capsys, command, "actr.lr=1")
    assert message.endswith("actr: 'actr' is unknown; did you mean 'actor'?")


def test_a_configuration_file_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    assert refused(capsys, "run", "--config", str(file)).startswith(f"error: {file}: cannot be")


@pytest.mark.parametrize("command", ["run", "eval"])
def test_a_missing_warm_start_says_how_to_make_it(
    capsys: pytest.CaptureFixture[str],
    tiny_arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(capsys, command, *tiny_arguments, "model.path=runs/warmstart")
    assert "runs/warmstart" in message
    assert "python -m train warmstart" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["run", "eval"])
def test_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path, command: str
) -> None:
    path = tmp_path / "no" / "model"
    message = refused(capsys, command, *tiny_arguments, f"model.path={path}")
    assert str(path) in message
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_no_model(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    message = refused(capsys, "run", *tiny_arguments, f"model.path={tmp_path / 'model'}")
    assert message.startswith(f"error: {tmp_path / 'model'}: no tokenizer can be loaded: ")
    assert not message.endswith(":")


def test_a_model_file_that_is_cut(
    capsys: pytest.CaptureFixture[str],
    tiny_arguments: list[str],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        (cut / file.name).write_bytes(content[:500] if file.suffix == ".safetensors" else content)
    assert str(cut) in refused(capsys, "run", *tiny_arguments, f"model.path={cut}")


def test_data_that_are_not_there(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "problems.jsonl"
    message = refused(
        capsys, "run", *tiny_arguments, f"data.train.source={file}", "data.train.levels=null"
    )
    assert str(file) in message
    assert not (tmp_path / "run").exists()


def test_more_problems_than_there_are(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str]
) -> None:
    message = refused(capsys, "run", *tiny_arguments, "data.train.limit=100000")
    assert message.startswith("error: addition: count is 100000")


def test_a_problem_the_model_cannot_read(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "two?", "answer": "2"}\n')
    message = refused(
        capsys, "run", *tiny_arguments, f"data.train.source={file}", "data.train.levels=null"
    )
    assert "problems-1" in message


def test_a_prompt_that_is_too_long(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    message = refused(capsys, "run", *tiny_arguments, "data.max_prompt_tokens=3")
    assert message.startswith("error: data.max_prompt_tokens: the prompt of problem ")
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tiny_config: MakeConfig
) -> None:
    config = tiny_config("method=grpo", "steps=1")
    train(config)
    _, last = checkpoints(config.folder / "checkpoints")[-1]
    (last / "state.pt").write_bytes(b"torn")
    message = refused(capsys, "run", *tiny_arguments, "method=grpo", "steps=1")
    assert message.startswith(f"error: {last / 'state.pt'}: damaged")


def test_a_folder_that_holds_another_run(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tiny_config: MakeConfig
) -> None:
    config = tiny_config("method=grpo", "steps=1")
    train(config)
    before = sorted(config.folder.rglob("*"))
    message = refused(capsys, "run", *tiny_arguments, "method=grpo", "steps=1", "seed=2")
    assert f"run_dir {config.folder}: holds a run of another configuration; seed was 1" in message
    assert sorted(config.folder.rglob("*")) == before


def test_checkpoints_without_their_log(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tiny_config: MakeConfig
) -> None:
    config = tiny_config("method=grpo", "steps=1")
    train(config)
    (config.folder / "run.yaml").unlink()
    message = refused(capsys, "run", *tiny_arguments, "method=grpo", "steps=1")
    assert "has checkpoints but no run.yaml" in message


def test_a_log_without_its_run_file(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert str(tmp_path / "run") in refused(capsys, "run", *tiny_arguments, "method=grpo")


def test_scoring_without_a_run_or_critic(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    command = ["score", "--critic", str(tmp_path), "--run", str(tmp_path), *tiny_arguments]
    assert refused(capsys, *command).startswith(f"error: critic {tmp_path}: no critic there")


def test_run_ends_with_what_to_do_next(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    assert main(["run", *tiny_arguments, "method=grpo", "steps=1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"run log: {tmp_path / 'run'}",
        f"next: python -m analysis summary {tmp_path / 'run'}",
    ]


@pytest.mark.slow
def test_the_whole_way_from_warm_start_to_evaluation(
    tiny_arguments: list[str], tmp_path: Path
) -> None:
    model = tmp_path / "warm"
    overrides = [
        *tiny_arguments,
        f"model.path={model}",
        f"warmstart.output={model}",
        "warmstart.steps=5",
        "warmstart.hidden_size=16",
        "warmstart.layers=1",
        "steps=1",
    ]

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "train", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    early = command("run", *overrides)
    assert early.returncode == 2
    assert early.stderr.rstrip().splitlines()[-1].startswith("error: ")
    assert "python -m train warmstart" in early.stderr
    for arguments in (
        ["warmstart", *overrides],
        ["run", *overrides],
        ["eval", "--model", str(tmp_path / "run" / "checkpoints" / "step-00000001"), *overrides],
    ):
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def environment_of_a_command() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_from_its_checkpoint(
    tiny_arguments: list[str], tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config("method=grpo", "steps=2")
    train(config)
    command = [sys.executable, "-m", "train", "run", *tiny_arguments, "method=grpo", "steps=4"]
    # No file may grow beyond 64 kB: the log fits, the optimisers' states do not.
    full = subprocess.run(
        ["bash", "-c", 'ulimit -f 64; trap "" XFSZ; exec "$@"', "bash", *command],
        cwd=tmp_path,
        env=environment_of_a_command(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    assert len([line for line in full.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert [step for step, _ in checkpoints(config.folder / "checkpoints")] == [0, 2]
    assert train(tiny_config("method=grpo", "steps=4")).step == 4


def test_a_folder_that_cannot_be_made_is_one_line(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["run", *tiny_arguments, "method=grpo", f"run_dir={tmp_path / 'file' / 'run'}"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert str(tmp_path / "file") in last


@pytest.mark.slow
def test_an_interrupted_run_says_that_it_goes_on(tiny_arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "train", "run", *tiny_arguments, "method=grpo", "steps=10000"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment_of_a_command(),
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        give_up = time.monotonic() + 60
        while not (tmp_path / "run" / "trajectories").exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "interrupted; the same command goes on" in stderr


def test_a_template_the_tokenizer_cannot_follow(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tmp_path: Path
) -> None:
    message = refused(capsys, "run", *tiny_arguments, "data.template=chat")
    assert message.startswith("error: data.template: ")
    assert not (tmp_path / "run").exists()


def altered(model: Path, folder: Path, file: str, **entries: object) -> Path:
    """A copy of a model with other entries in one of its JSON files; None takes one out."""
    shutil.copytree(model, folder)
    changed = json.loads((folder / file).read_text()) | entries
    kept = {key: value for key, value in changed.items() if value is not None}
    (folder / file).write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vocab_size": 30}, "no model can be loaded"),
        ({"num_attention_heads": 5}, "no model can be loaded"),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"model_type": "nothing"}, "no model can be loaded"),
        # transformers would draw what is missing at random and go on.
        ({"num_hidden_layers": 3, "layer_types": None}, "weights of a Qwen2ForCausalLM are not"),
        ({"model_type": "bert"}, "weights of a BertLMHeadModel are not there"),
    ],
)
@pytest.mark.parametrize("command", ["run", "eval"])
def test_a_model_whose_parts_do_not_fit(
    capsys: pytest.CaptureFixture[str],
    tiny_arguments: list[str],
    tiny_model: Path,
    tmp_path: Path,
    command: str,
    entries: dict[str, object],
    said: str,
) -> None:
    model = altered(tiny_model, tmp_path / "model", "config.json", **entries)
    message = refused(capsys, command, *tiny_arguments, f"model.path={model}")
    assert said in message
    assert str(model) in message


def test_a_folder_without_the_tokenizer(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("tokenizer*"))
    # transformers makes up an empty one.
    message = refused(capsys, "eval", *tiny_arguments, "--model", str(model))
    assert "has no tokens; does the tokenizer belong to the model?" in message


def test_evaluation_longer_than_the_model_can_count_is_refused(
    capsys: pytest.CaptureFixture[str], tiny_arguments: list[str]
) -> None:
    message = refused(capsys, "eval", *tiny_arguments, "evaluation.max_tokens=126")
    assert message.startswith("error: evaluation.max_tokens: ")


def test_tensorboard_that_is_not_installed(
    capsys: pytest.CaptureFixture[str],
    tiny_arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    message = refused(capsys, "run", *tiny_arguments, "method=grpo", "log.tensorboard=true")
    assert message.startswith("error: log.tensorboard: ")
    assert main(["run", *tiny_arguments, "method=grpo", "steps=1", "log.tensorboard=false"]) == 0
