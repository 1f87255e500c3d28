"""The report in a browser: it asks for nothing, reports no error, its controls work, and it fits.

Needs Chromium and the Python package playwright (without a browser of its own).
"""

import shutil

import pandas as pd
import pytest

from analysis.report import report
from analysis.sources import open_sources
from cvpo.runlog import RunLog

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = "<img src='https://example.org/x.png' onerror='document.title=\"hacked\"'>"
EVIL += "</script><script>document.title = 'hacked'</script>" + "wide" * 100
PHONE, DESK = (390, 844), (1440, 900)


def make_run(path, method, seed):
    log = RunLog.create(path, config={"note": EVIL}, seed=seed, method=method, verifier="exact")
    log.problems({"prompt_id": [0], "dataset": ["d"], "text": [EVIL], "gold": ["4"]})
    for step in (0, 30):
        evaluation = {"benchmark": "b" * 60, "problem_id": [EVIL, "q"], "sample": 0}
        verdicts = {"exact": [0.0, step / 30], "length": 1, "truncated": False}
        log.evals(step, pd.DataFrame(evaluation | verdicts))
    for step in range(1, 31):
        scalars = {"reward/mean": seed + step % 7, "critic/explained_variance": 0.01 * step}
        # the axes are no multiples of each other, so that each has a picture of its own
        log.metrics(step, time=0, device_seconds=60.0 * step**2, tokens=step**3, scalars=scalars)
    response = {"prompt_id": [0], "sample": 0, "length": 5, "truncated": False}
    log.trajectories(30, pd.DataFrame(response | {"reward": -1, "correct": 0, "response": EVIL}))
    return path


@pytest.fixture(scope="module")
def browser():
    """Chromium with a profile of its own, which goes with it."""
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [make_run(folder / name, name, seed) for seed, name in enumerate(("cvpo", "vapo"))]
    page = folder / "report.html"
    page.write_text(report(open_sources(runs)), encoding="utf-8")
    return page


@pytest.fixture
def opened(browser, file):
    """The page, with what it asked for and what it complained of."""
    page = browser.new_page()
    page.asked, page.complaints = [], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))

    def refuse(route):
        page.asked.append(route.request.url)
        route.abort()

    page.route(lambda url: not url.startswith("file:"), refuse)
    page.goto(file.as_uri())
    yield page
    page.close()


def draw(page, act):
    """Act on a control and wait until every panel is drawn anew."""
    version = int(page.evaluate("document.body.dataset.drawn ?? '0'"))
    act()
    page.wait_for_function(f"Number(document.body.dataset.drawn) > {version}", timeout=30_000)


def panel(page, title):
    return page.locator("figure", has=page.get_by_text(title, exact=True))


def lines(page, title):
    drawn = panel(page, title).locator(".mark-line path")
    return [drawn.nth(i).get_attribute("d") for i in range(drawn.count())]


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_it_asks_for_nothing_complains_of_nothing_and_fits(opened, size):
    opened.set_viewport_size({"width": size[0], "height": size[1]})
    opened.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    draw(opened, lambda: opened.locator("input[value=tokens]").check(force=True))
    assert opened.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert opened.asked == []
    assert opened.complaints == []
    assert "hacked" not in opened.title()
    assert EVIL in opened.locator("pre").last.inner_text()


def test_the_x_axis_is_that_which_is_chosen(opened):
    draw(opened, lambda: opened.locator("input[value=tokens]").check(force=True))
    by_tokens = lines(opened, "Reward")
    assert "tokens" in panel(opened, "Reward").locator("svg").last.text_content()
    draw(opened, lambda: opened.locator("input[value=device_hours]").check(force=True))
    by_hours = lines(opened, "Reward")
    draw(opened, lambda: opened.locator("input[value=step]").check(force=True))
    by_steps = lines(opened, "Reward")
    assert len(by_steps) == len(by_tokens) == len(by_hours) == 4  # faint and bold, two runs
    assert len({by_steps[0], by_tokens[0], by_hours[0]}) == 3


def test_a_run_is_hidden_and_shown_again(opened):
    button = opened.locator("button[data-run]").first
    draw(opened, button.click)
    assert button.get_attribute("aria-pressed") == "false"
    assert len(lines(opened, "Reward")) == 2
    draw(opened, button.click)
    assert button.get_attribute("aria-pressed") == "true"
    assert len(lines(opened, "Reward")) == 4


def test_the_nearest_point_says_whose_it_is_and_its_numbers(opened):
    draw(opened, lambda: opened.locator("input[value=tokens]").check(force=True))
    figure = panel(opened, "Reward")
    figure.evaluate("(one) => one.scrollIntoView({ block: 'center' })")
    box = figure.locator("svg").last.bounding_box()
    # the last step: vapo's reward of 1 + 30 % 7, to the right and in the middle
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
    opened.mouse.move(box["x"] + box["width"] - 20, box["y"] + 90, steps=5)
    tooltip = opened.locator("#vg-tooltip-element.visible")
    tooltip.wait_for(timeout=10_000)
    said = " ".join(tooltip.inner_text().split())
    assert said == "run vapo response tokens, rollouts and updates 27,000 value 3"
    marked = figure.locator(".mark-symbol path[opacity='1']")
    assert marked.count() == 1


def test_clicks_that_overtake_each_other_end_in_the_last_choice(opened):
    opened.evaluate(
        "for (const axis of ['tokens', 'device_hours', 'tokens'])"
        " document.querySelector(`input[value=${axis}]`).click()"
    )
    opened.wait_for_function("document.body.dataset.drawn === '3'", timeout=30_000)
    assert panel(opened, "Reward").locator(".picture").count() == 1
    assert "tokens" in panel(opened, "Reward").locator("svg").last.text_content()


def test_the_page_obeys_its_policy(opened):
    refused = opened.evaluate(
        "new Promise((done) => {"
        " document.addEventListener('securitypolicyviolation', (e) => done(e.violatedDirective));"
        " const script = document.createElement('script');"
        " script.textContent = 'document.title = \"hacked\"';"
        " document.body.append(script); })"
    )
    assert refused.startswith("script-src")
    assert "hacked" not in opened.title()


def test_without_scripts_its_pictures_are_there(browser, file):
    page = browser.new_page(java_script_enabled=False)
    page.goto(file.as_uri())
    assert page.locator("figure svg .mark-line path").count() > 4
    assert not page.locator(".controls").is_visible()
    page.close()
