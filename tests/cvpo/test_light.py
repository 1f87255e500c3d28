"""`import cvpo` stays light, for whoever wants the math alone, in a trainer of their own."""

import re
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("torch", "numpy", "jaxtyping")
HEAVY = {
    "datasets", "latex2sympy2_extended", "math_verify", "matplotlib", "pandas", "pyarrow",
    "pydantic", "scipy", "sklearn", "sympy", "tensorboard", "tokenizers", "tqdm", "transformers",
    "yaml",
}  # fmt: skip

LOADED_BY_CVPO = """
import sys
import torch, numpy, jaxtyping
before = set(sys.modules)
import cvpo
for name in sorted(set(sys.modules) - before):
    # What has no file was made by a library in memory.
    if getattr(sys.modules[name], "__file__", None):
        print(name)
"""


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def tops(modules: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def allowed_distributions() -> set[str]:
    """torch, numpy, jaxtyping and what they require everywhere."""
    seen: set[str] = set()
    waiting = list(NEEDED)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        for requirement in distribution(name).requires or []:
            required, _, marker = requirement.partition(";")
            # Behind a marker stand extras and other platforms: nothing that cvpo would need.
            if not marker.strip():
                found = re.match(r"[\w.-]+", required)
                assert found is not None
                waiting.append(found.group())
    return seen


def test_importing_cvpo_loads_nothing_of_its_own_beyond_torch_numpy_and_jaxtyping() -> None:
    added = tops(run(LOADED_BY_CVPO))
    strangers = added - {"cvpo"} - sys.stdlib_module_names
    owners = packages_distributions()
    allowed = allowed_distributions()
    for name in sorted(strangers):
        makers = {re.sub(r"[-_.]+", "-", maker).lower() for maker in owners.get(name, [])}
        assert makers & allowed, f"import cvpo loads {name}"


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    return tops(run("import cvpo, sys; print(*sys.modules, sep='\\n')"))


def test_importing_cvpo_loads_no_heavy_library(loaded: set[str]) -> None:
    assert "cvpo" in loaded
    # torch imports a few libraries of its own accord where it finds them; those are not ours.
    with_torch = tops(run("import torch, numpy, jaxtyping, sys; print(*sys.modules, sep='\\n')"))
    assert not (loaded & HEAVY) - with_torch


def test_importing_cvpo_loads_nothing_else_of_this_repository(loaded: set[str]) -> None:
    assert not loaded & {"sim", "train", "analysis", "paper_figures"}
