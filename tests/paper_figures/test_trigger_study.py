"""When the phase switches, from the trigger study."""

import math

import pytest

from paper_figures.trigger_study import make
from tests.study_logs import write_study

NEVER = math.nan
CONTROL = "real run: {}; fires on {} of 20{}; draws of shape (epochs, prompts)"


def switch(shape="steady", growth=0.1, stop=NEVER, seed=0, round_=NEVER, **more):
    step = math.nan if math.isnan(round_) else 68 * (round_ + 1)
    setting = {"detector": "printed", "quantifier": "mean", "discount": 1.0} | more
    return (
        {"shape": shape, "growth": growth, "stop": stop, "seed": seed}
        | setting
        | {
            "round": round_,
            "step": step,
        }
    )


SWITCHES = [
    switch(round_=20.0),
    switch(seed=1),
    switch(stop=10.0, round_=12.0),
    switch(stop=10.0, seed=1, round_=14.0),
    switch("frozen", growth=0.0, stop=0.0, round_=18.0),
    switch("frozen", growth=0.0, stop=0.0, seed=1, round_=18.0),
    switch(detector="pooled", quantifier="", discount=0.9),
]
REAL = [
    {"quantity": "epoch of the switch", "setting": "real run: printed, mean, discount 1"},
    {
        "quantity": "epoch of the switch",
        "setting": "real run: pooled, margin 0.01, discount 0.9; never",
    },
    {
        "quantity": "epoch of the switch, frozen control",
        "setting": CONTROL.format("printed, mean, discount 1", 19, ", epochs 20-21"),
        "value": 20.5,
        "low": 20.2,
        "high": 20.8,
        "n": 19,
    },
    {
        "quantity": "epoch of the switch, frozen control",
        "setting": CONTROL.format("pooled, margin 0.01, discount 0.9", 0, ""),
        "n": 0,
    },
]
REAL[0]["value"] = 22.0


def study(path, rows=REAL, switches=SWITCHES, **options):
    options = {"num_prompts": 50, "rounds": 30} | options
    return write_study(path, "trigger", rows, {"switches": switches}, **options)


def test_switches_are_counted_by_setting_and_policy(tmp_path):
    found = make([study(tmp_path / "s")]).table
    by = found[found["panel"] == "synthetic"].set_index(["setting", "policy"])
    improving = by.loc[("printed, mean, d = 1", "improving")]
    assert (improving["switches"], improving["n"], improving["value"]) == (1, 2, 68 * 21)
    stopped = by.loc[("printed, mean, d = 1", "stopped")]
    assert (stopped["switches"], stopped["value"]) == (2, 68 * 14)
    assert (stopped["low"], stopped["high"]) == (68 * 13, 68 * 15)
    pooled = by.loc[("pooled, d = .9", "improving")]
    assert pooled["switches"] == 0
    assert math.isnan(pooled["value"])


def test_the_caption_counts_what_the_printed_rule_does(tmp_path):
    caption = make([study(tmp_path / "s")]).caption
    assert "1 of 2 improving, 2 of 2 stopped, 2 of 2 frozen policies" in caption
    assert "step 1000" in caption


def test_the_real_run_and_its_control_say_never_and_how_many(tmp_path):
    found = make([study(tmp_path / "s")]).table
    real = found[found["panel"] == "real run"].set_index(["setting", "policy"])
    assert real.loc[("printed, mean, d = 1", "improving"), "value"] == 22
    assert real.loc[("printed, mean, d = 1", "frozen"), "told"] == "19/20"
    assert real.loc[("pooled, margin .01, d = .9", "improving"), "told"] == "never"
    assert real.loc[("pooled, margin .01, d = .9", "frozen"), "told"] == "0/20"


def test_a_study_without_a_real_run_says_so(tmp_path):
    exhibit = make([study(tmp_path / "s", rows=[{}])])
    assert "without a real run" in exhibit.caption
    assert len(exhibit.figure.axes) == 1


def test_nothing_that_ever_switches_is_drawn_without_a_warning(tmp_path, recwarn):
    quiet = [switch(seed=seed, stop=stop) for seed in (0, 1) for stop in (NEVER, 10.0)]
    exhibit = make([study(tmp_path / "s", rows=[{}], switches=quiet)])
    assert (exhibit.table["switches"] == 0).all()
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("growths", [(0.1,), (0.03, 0.1, 0.2)])
def test_each_speed_has_a_panel(tmp_path, growths):
    switches = [switch(growth=growth) for growth in growths]
    exhibit = make([study(tmp_path / "s", rows=[{}], switches=switches)])
    assert len(exhibit.figure.axes) == len(growths)
