"""The rules of the house, read from the repository itself."""

import ast
import inspect
import re
import subprocess
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import cvpo

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "cvpo": set(),
    "sim": {"cvpo"},
    "train": {"cvpo"},
    "analysis": {"cvpo"},
    "paper_figures": {"cvpo", "analysis"},
}
OURS = {*MAY_IMPORT, "tests"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("needs a git checkout, to tell the repository's files from what lies beside")
    names = listing.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


# --------------------------------------------------------------------------------------- imports


def imports_of(file: Path) -> set[str]:
    """Top-level names of every absolute import in a file, those inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_go_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        forbidden = (imports_of(file) & OURS) - {package} - MAY_IMPORT[package]
        assert not forbidden, f"{file.relative_to(ROOT)} imports {sorted(forbidden)}"


def test_no_import_climbs_out_of_its_package() -> None:
    for package in MAY_IMPORT:
        for file in (ROOT / package).rglob("*.py"):
            depth = len(file.relative_to(ROOT).parts) - 1
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= depth, f"{file.relative_to(ROOT)}:{node.lineno}"


def test_the_wheel_holds_cvpo_alone() -> None:
    # setuptools' rule for `packages.find`: every folder is a candidate, `include` chooses.
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {file.parent.relative_to(ROOT) for file in tracked_files() if file.suffix == ".py"}
    names = {".".join(folder.parts) for folder in folders}
    chosen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in include)}
    assert "cvpo" in chosen
    assert {name.partition(".")[0] for name in names} >= MAY_IMPORT.keys()
    assert {name.partition(".")[0] for name in chosen} == {"cvpo"}
    assert "cvpo" in PROJECT["tool"]["setuptools"]["package-data"]
    assert (ROOT / "cvpo" / "py.typed").is_file()


# ---------------------------------------------------------------------------------- public names

SIGNATURES = {
    "gae": "(rewards, values, response_mask, *, gamma, lam)",
    "length_adaptive_lambda": "(lengths, *, alpha)",
    "group_advantage": "(rewards, group, *, kind)",
    "trajectory_std": "(values, response_mask)",
    "group_mean": "(x, group, *, valid=None)",
    "stochasticity_weight": "(sigma, mu, correct, *, alpha_p, alpha_n, lambda_p, lambda_n, "
    "arm='literal', valid=None)",
    "shuffle_within": "(x, group, outcome, *, generator)",
    "difficulty_weight": "(rho, *, phase, constants=None)",
    "BetaTracker": "(num_prompts, *, discount=1.0)",
    "BetaTracker.observe": "(self, prompt, trials, successes)",
    "BetaTracker.state_dict": "(self)",
    "DifficultyCurriculum": "(num_prompts, *, config=None)",
    "DifficultyCurriculum.observe": "(self, prompt, trials, successes)",
    "DifficultyCurriculum.end_round": "(self)",
    "DifficultyCurriculum.weight": "(self, prompt)",
    "DifficultyCurriculum.state_dict": "(self)",
    "explained_variance": "(values, returns)",
    "pass_at_k": "(num_samples, num_correct, k)",
    "avg_at_k": "(correct)",
    "extract_answer": "(response)",
    "verify": "(response, gold, *, verifier='exact')",
    "Sampler.next": "(self, count)",
    "Sampler.observe": "(self, feedback)",
    "Sampler.metrics": "(self)",
    "Sampler.state_dict": "(self)",
}
"""Fixed, so that everyone can write against them."""

OTHER_NAMES = [
    "Method", "METHODS", "policy_loss", "value_loss", "positive_lm_loss", "hierarchical_bootstrap",
    "paired_difference", "stochasticity", "Sampler", "RunLog", "RunLog.create", "RunLog.open",
    "BetaTracker.rho", "BetaTracker.load_state_dict", "DifficultyCurriculum.load_state_dict",
    "Sampler.load_state_dict", "read_run", "read_metrics", "read_events", "read_problems",
    "read_trajectories", "read_prompts", "read_evals", "read_tokens", "read_calibration",
    "read_scores", "read_table",
]  # fmt: skip


def public(name: str) -> object:
    found: object = cvpo
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_a_fixed_signature_has_its_names_kinds_and_defaults(name: str) -> None:
    function = public(name)
    assert callable(function)
    fixed = SIGNATURES[name]
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        # Keywords with a default may be added: nobody has to know of them.
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        or parameter.default is inspect.Parameter.empty
        or re.search(rf"\b{parameter.name}\b", fixed)
    ]
    assert str(inspect.Signature(parameters)) == fixed


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_fixed_name_is_importable_from_cvpo(name: str) -> None:
    public(name)


def test_the_trackers_have_their_fixed_attributes() -> None:
    tracker, curriculum = cvpo.BetaTracker(3), cvpo.DifficultyCurriculum(3)
    for name in ("rho", "delta", "visits"):
        assert getattr(tracker, name).shape == (3,)
    assert curriculum.phase == "early"


def test_everything_in_all_exists_once_and_in_order() -> None:
    assert len(set(cvpo.__all__)) == len(cvpo.__all__)
    for name in cvpo.__all__:
        public(name)
    fixed = {name.partition(".")[0] for name in [*SIGNATURES, *OTHER_NAMES]}
    assert fixed <= set(cvpo.__all__)


# --------------------------------------------------------------------------------------- the text

# A letter in brackets matches itself; with it, this file does not hold what it forbids.
FORBIDDEN = {
    "a package registry's host": r"[p]ypi\.org|[p]ythonhosted|[a]naconda\.(org|com)"
    r"|[d]ownload\.pytorch",
    "an index option": r"[-]-(extra-)?index-url",
    "a path of one machine": r"(?<![\w.\-}])/([w]ork|[t]mp|[h]ome|[r]oot|[U]sers|[m]nt)\b(?![\-.])",
    "unfinished business": r"\b(TOD[O]|FIXM[E])\b",
}


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_file_names_hosts_machine_paths_or_unfinished_business(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    for file in tracked_files():
        data = file.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
            found = pattern.search(line)
            assert not found, (
                f"{file.relative_to(ROOT)}:{number} holds {what}: {found and found[0]!r}"
            )


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry's host", "see https://pypi" + ".org/simple"),
        ("an index option", "pip install --index-" + "url x"),
        ("a path of one machine", 'open("/wor' + 'k/data")'),
        ("a path of one machine", "cd /tm" + "p"),
        ("unfinished business", "# TO" + "DO: later"),
    ],
)
def test_the_forbidden_patterns_find_what_they_forbid(what: str, line: str) -> None:
    assert re.search(FORBIDDEN[what], line)
    assert not re.search(FORBIDDEN[what], "the framework/tmpdir of a homework/root, todo or method")


# -------------------------------------------------------------------------------------- versions


def pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    versions = {canonicalize_name(name): Version(version) for name, version in pairs}
    assert len(versions) == len(pairs)
    return versions


NOT_IN_DEV = {"cluster", "wandb"}
"""What needs GPUs, or an account."""


def test_the_exact_versions_lie_in_the_ranges() -> None:
    project = PROJECT["project"]
    versions = pinned()
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras.keys() - NOT_IN_DEV)]
    for text in (requirement for group in groups for requirement in group):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name == "cvpo":
            assert requirement.extras <= project["optional-dependencies"].keys()
            continue
        assert name in versions, f"constraints.txt lacks {name}"
        assert requirement.specifier.contains(versions[name], prereleases=True), text


def test_cvpo_alone_needs_three_packages() -> None:
    names = {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "numpy", "jaxtyping"}


def test_dev_includes_every_other_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    reached, waiting = set(), ["dev"]
    while waiting:
        extra = waiting.pop()
        reached.add(extra)
        for requirement in map(Requirement, extras[extra]):
            if requirement.name == "cvpo":
                waiting += requirement.extras - reached
    assert reached == extras.keys() - NOT_IN_DEV


# ------------------------------------------------------------------------------------ front doors


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"])
def test_a_visitor_finds(name: str) -> None:
    assert (ROOT / name).stat().st_size > 200


def test_make_knows_its_targets() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE))
    wanted = {"demo", "test", "test-fast", "test-core", "bench", "figures", "lint"}
    assert wanted <= targets
    phony = re.search(r"^\.PHONY:(.*)$", text, flags=re.MULTILINE)
    assert phony is not None
    assert wanted <= set(phony[1].split())


def test_make_test_core_runs_files_that_exist_and_need_only_the_core() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    listed = re.search(r"^CORE_TESTS := \$\(addprefix (\S+),([^)]*)\)", text, flags=re.MULTILINE)
    assert listed is not None
    files = [ROOT / (listed[1] + name) for name in listed[2].split()]
    heavy = {"pandas", "pyarrow", "yaml", "transformers", "pydantic", "scipy", "packaging", "train"}
    for file in files:
        assert file.is_file(), file
        assert not imports_of(file) & heavy, file


def test_the_readme_shows_files_that_exist() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (ROOT / link).exists(), f"{name} links {link}"
