"""The pages in a real browser: drawn, quiet, inert, and usable by mouse, finger and keyboard."""

import math

import pytest

from kleash.records import RunFolder
from kleash.store.summary import Name, Summary, SummaryTable, to_html

selenium = pytest.importorskip("selenium")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.browser

WIDE = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
BY_PROMPT = "#by-prompt"
IS_DRAWN = """
const box = document.getElementById("heat-tokens")
return document.readyState === "complete" && (!box || box.querySelector(".token") !== null)
"""


def visit(driver, page, view=WIDE):
    """Open ``page``, and wait until its script has drawn the tokens."""
    features = [{"name": "prefers-color-scheme", "value": "light"}]
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get_log("browser")
    driver.get(page.as_uri())
    WebDriverWait(driver, 30).until(lambda _: driver.execute_script(IS_DRAWN))


def panel(driver):
    """What the panel says of the token."""
    return driver.find_element(By.ID, "heat-panel").text


def selected(driver):
    """Which token is selected; there is exactly one, and it alone can be reached by Tab."""
    chosen, reachable = (
        driver.execute_script(
            "return Array.from(document.querySelectorAll('#heat-tokens .token'))"
            f".flatMap((token, at) => {condition} ? [at] : [])"
        )
        for condition in ("token.getAttribute('aria-selected') === 'true'", "token.tabIndex === 0")
    )
    assert chosen == reachable
    assert len(chosen) == 1
    return chosen[0]


def column(driver, place):
    """The values of a column of the table of prompts, from the top down."""
    values = driver.execute_script(
        "return Array.from(document.querySelectorAll(arguments[0]), cell => cell.dataset.value)",
        f"{BY_PROMPT} tbody tr > :nth-child({place})",
    )
    return [float(value) for value in values]


PAGES = ["report", "comparison_page", "audit_page", "sweep_page", "training_page"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_word_in_the_console_and_nothing_runs(driver, request, name):
    visit(driver, request.getfixturevalue(name))
    assert driver.get_log("browser") == []
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert driver.execute_script("return window.__pwned ?? window.broken ?? null") is None
    assert driver.execute_script("return document.querySelectorAll('.plot > svg text').length") > 10


def test_hostile_text_is_text_and_a_script_that_got_in_would_not_run(driver, report):
    visit(driver, report)
    for step in range(3):
        text = driver.find_element(By.ID, "heat-tokens").get_attribute("textContent")
        assert "<script>window.__pwned=1;alert(1)</script>" in text
        assert all(part in text for part in ("{{ 7*7 }}", "⟨U+202E⟩evil⟨U+202C⟩", "👩‍👩‍👧‍👦", "שלום", "⏎\n"))
        assert driver.execute_script("return window.__pwned === undefined"), step
        driver.find_element(By.ID, "heat-next").click()
    assert (
        driver.execute_script("return document.querySelectorAll('main img, main script:not([type])').length")
        == 0
    )
    assert "runs/<script>alert('path')</script>/policy" in driver.find_element(By.TAG_NAME, "h1").text
    assert driver.get_log("browser") == []
    driver.execute_script(
        "const script = document.createElement('script'); script.textContent = 'window.__pwned = 1';"
        "document.body.append(script);"
        "const image = new Image(); image.src = 'https://example.invalid/a.png'; document.body.append(image);"
    )
    assert driver.execute_script("return window.__pwned === undefined")
    refused = [entry["message"] for entry in driver.get_log("browser")]
    assert any("Content Security Policy" in message and "inline" in message for message in refused)
    assert any("Content Security Policy" in message and "example.invalid" in message for message in refused)


def test_hovering_over_a_token_shows_both_models(driver, report, run):
    visit(driver, report)
    worst = run[1].worst_sequences[0]
    assert f"{worst.tokens} tokens" in driver.find_element(By.CSS_SELECTOR, "#heat-choice option").text
    tokens = driver.find_elements(By.CSS_SELECTOR, "#heat-tokens .token")
    assert len(tokens) == worst.tokens
    ActionChains(driver).move_to_element(tokens[0]).perform()
    assert selected(driver) == 0
    text = panel(driver)
    assert "position 0" in text
    rows = ("Probability", "Entropy, nats", "Reference's rank", "KL(policy ‖ reference)", "Jensen–Shannon")
    assert all(row in text for row in rows)
    assert len(driver.find_elements(By.CSS_SELECTOR, "#heat-panel .alternatives li")) == 10
    row = {
        name: worst_sequence(run, name)[0]
        for name in ("logp_policy", "logp_reference", "kl_policy_reference", "kl_reference_policy")
    }
    probabilities = driver.find_elements(By.CSS_SELECTOR, "#heat-panel tbody tr:first-child td")
    shown = [float(cell.text.rstrip("%\u202f")) / 100 for cell in probabilities]
    assert shown == pytest.approx([math.exp(row["logp_policy"]), math.exp(row["logp_reference"])], rel=6e-3)
    cells = driver.find_elements(By.CSS_SELECTOR, "#heat-panel tbody td[colspan='2']")
    kls = [float(cell.text) for cell in cells[1:3]]
    assert kls == pytest.approx([row["kl_policy_reference"], row["kl_reference_policy"]], rel=6e-3)
    titles = driver.find_elements(By.CSS_SELECTOR, "#heat-panel h5")
    assert [title.text for title in titles] == ["Policy's top 5", "Reference's top 5"]


def test_arrow_keys_move_through_the_tokens(driver, report):
    visit(driver, report)
    box = driver.find_element(By.ID, "heat-tokens")
    count = len(box.find_elements(By.CSS_SELECTOR, ".token"))
    driver.find_element(By.ID, "heat-largest").click()
    steps = [(Keys.HOME, 0), (Keys.ARROW_LEFT, 0), (Keys.ARROW_RIGHT, 1), (Keys.END, count - 1)]
    for key, expected in steps:
        driver.switch_to.active_element.send_keys(key)
        assert selected(driver) == expected
        assert f"position {expected}," in panel(driver)
    driver.switch_to.active_element.send_keys(Keys.HOME, Keys.ARROW_DOWN)
    below = selected(driver)
    tops = driver.execute_script(
        "return Array.from(document.querySelectorAll('#heat-tokens .token'), t => t.getClientRects()[0].top)"
    )
    assert tops[below] > tops[0] + 10
    driver.switch_to.active_element.send_keys(Keys.ARROW_UP)
    assert tops[selected(driver)] == pytest.approx(tops[0], abs=8)
    driver.switch_to.active_element.send_keys(Keys.PAGE_DOWN)
    assert driver.find_element(By.ID, "heat-choice").get_property("value") == "1"
    driver.switch_to.active_element.send_keys(Keys.TAB)
    inside = driver.execute_script("return document.activeElement.closest('#heat-tokens') !== null")
    assert not inside, "one Tab leaves the tokens"


def test_a_drifted_token_is_shown_in_its_sequence(driver, report, run):
    visit(driver, report)
    worst = [(drift.prompt_id, drift.sample_id) for drift in run[1].worst_sequences]
    read = (  # in one command: the driver's own way to a text takes most of the time of the test
        "const text = each => each.checkVisibility() && each.innerText.replaceAll('\\t', ' ')\n"
        "const cells = arguments[0].closest('tr').querySelectorAll('td')\n"
        "return [document.getElementById('heat-panel'), ...cells].map(text)"
    )
    for button in driver.find_elements(By.CSS_SELECTOR, "button.show"):
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()
        said, kl, policy, reference, rank, position, prompt, _ = driver.execute_script(read, button)
        for text in (f"position {position},", f"{policy} {reference}", f"from 0 {rank}", f"reference) {kl}"):
            assert text in said, "the numbers of the table, rounded once"
        chosen = driver.find_element(By.ID, "heat-choice").get_property("value")
        assert worst[int(chosen)][0] == int(prompt)


def test_the_table_of_prompts_sorts_by_click_and_by_key(driver, report):
    visit(driver, report)
    headings = driver.find_elements(By.CSS_SELECTOR, f"{BY_PROMPT} thead th")
    assert headings[2].get_attribute("aria-sort") == "descending"
    before = column(driver, 3)
    assert before == sorted(before, reverse=True)
    button = headings[2].find_element(By.TAG_NAME, "button")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    assert headings[2].get_attribute("aria-sort") == "ascending"
    assert column(driver, 3) == sorted(before)
    headings[6].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert [heading.get_attribute("aria-sort") for heading in headings] == [None] * 6 + ["descending"]
    tokens = column(driver, 7)
    assert tokens == sorted(tokens, reverse=True)
    unknown = "const cells = document.querySelectorAll(arguments[0]); cells[2].dataset.value = 'nan'"
    driver.execute_script(unknown, f"{BY_PROMPT} tbody tr > :nth-child(3)")
    for _ in range(2):
        driver.execute_script(f"document.querySelectorAll('{BY_PROMPT} .sort')[2].click()")
        assert math.isnan(column(driver, 3)[-1]), "what has no number is last either way"


def worst_sequence(run, name):
    """A column of the worst sequence."""
    worst = run[1].worst_sequences[0]
    for part in RunFolder(run[0]).parts("tokens", ["prompt_id", "sample_id", name]):
        rows = (part["prompt_id"] == worst.prompt_id) & (part["sample_id"] == worst.sample_id)
        if rows.any():
            return part[name][rows]
    raise AssertionError("the worst sequence is in no part")


def test_colours_follow_the_kl_and_the_button_finds_the_largest(driver, report, run):
    visit(driver, report)
    kls = [float(kl) for kl in worst_sequence(run, "kl_policy_reference")]
    heat = driver.find_element(By.ID, "heat")
    limits = [float(limit) for limit in (heat.get_attribute("data-thresholds") or "").split()]
    classes = driver.execute_script(
        "return Array.from(document.querySelectorAll('#heat-tokens .token'), token => token.classList[1])"
    )
    assert classes == [f"h{sum(float(f'{kl:.3g}') >= limit for limit in limits)}" for kl in kls]
    largest = kls.index(max(kls))
    assert selected(driver) == largest, "it opens at the largest"
    driver.execute_script("document.querySelectorAll('#heat-tokens .token')[1].click()")
    assert selected(driver) == 1, "a click without a pointer, as a screen reader makes it"
    driver.find_element(By.ID, "heat-largest").click()
    assert selected(driver) == largest


@pytest.mark.parametrize("name", PAGES)
def test_on_a_phone_nothing_is_cut_and_every_text_of_a_chart_can_be_read(driver, request, name):
    visit(driver, request.getfixturevalue(name), PHONE)
    driver.execute_script("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    widths = driver.execute_script(
        "return [document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]"
    )
    assert widths == [360, 360, 360]
    gaps = driver.execute_script(
        "const box = part => part.getBoundingClientRect();"
        "return Array.from(document.querySelectorAll('.scroll + :is(.scroll, p)'),"
        "  below => box(below).top - box(below.previousElementSibling).bottom)"
    )
    assert min(gaps, default=8) >= 8
    smallest, outside = driver.execute_script(
        "const sizes = [], outside = [];"
        "document.querySelectorAll('.plot svg').forEach(chart => {"
        "  const frame = chart.getBoundingClientRect(), scale = frame.width / chart.viewBox.baseVal.width;"
        "  chart.querySelectorAll('text').forEach(text => {"
        "    const box = text.getBoundingClientRect();"
        "    sizes.push(parseFloat(getComputedStyle(text).fontSize) * scale);"
        "    if (box.left < frame.left - 1 || box.right > frame.right + 1 || frame.right > 361)"
        "      outside.push(text.textContent);"
        "  });"
        "});"
        "return [Math.min(...sizes), outside];"
    )
    assert smallest >= 8 and outside == []


def test_the_dark_page_has_other_colours_and_a_printed_one_those_of_the_light(driver, report, audit_page):
    look = (
        "const css = getComputedStyle(document.body); return [css.backgroundColor, css.color,"
        "getComputedStyle(document.querySelector('#quantiles svg use[style*=accent]')).fill,"
        "getComputedStyle(document.querySelector('#quantiles svg text')).fill,"
        "getComputedStyle(document.querySelector('.token.h8')).backgroundColor]"
    )
    visit(driver, report)
    light = driver.execute_script(look)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    dark = driver.execute_script(look)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert (dark[0], dark[2]) == ("rgb(19, 21, 25)", "rgb(132, 184, 236)")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    assert driver.execute_script(look) == light
    visit(driver, audit_page)
    is_seen = "return document.querySelector('details .verdicts').checkVisibility()"
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert driver.execute_script(is_seen), "a printed page is unfolded"
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert driver.get_log("browser") == []


def test_on_a_phone_the_panel_leaves_room_for_the_text(driver, report):
    visit(driver, report, PHONE)
    driver.execute_script("document.getElementById('heat-tokens').scrollIntoView()")
    heights = "return [document.getElementById('heat-panel').offsetHeight, innerHeight]"
    panel_height, window = driver.execute_script(heights)
    assert panel_height < 0.3 * window
    assert "Probability" in panel(driver) and "Entropy" not in panel(driver)
    driver.find_element(By.CSS_SELECTOR, ".unfold").click()
    assert "Entropy" in panel(driver) and "top 5" in panel(driver)
    assert driver.execute_script(heights)[0] <= 0.46 * window
    driver.find_element(By.CSS_SELECTOR, ".unfold").click()
    assert "Entropy" not in panel(driver)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert "Entropy" in panel(driver) and "top 5" in panel(driver)


def test_a_name_in_a_notebook_is_not_broken_for_wide_numbers_beside_it(driver, tmp_path):
    table = SummaryTable(
        header=("run", *"abcdef"), rows=((Name("checkpoint"), *["0.001597 to 0.001869"] * 6),)
    )
    page = tmp_path / "cell.html"
    page.write_text(to_html(Summary(headline="runs", tables=(table,))), encoding="utf-8")
    visit(driver, page, PHONE)
    assert driver.execute_script("return document.querySelector('code').offsetHeight") < 30
