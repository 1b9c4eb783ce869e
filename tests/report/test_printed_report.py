"""The report on paper: light whatever the screen is, nothing cut off, and with the bars that show shares of time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from tests.report.test_report_page import recorded

from holdfast.report.report_page import report_page

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

A4_PX = 794
"""Width of a page in CSS pixels."""


def test_report_of_a_dark_screen_is_printed_light_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report_page([recorded(), recorded(step_s=1.2)]))
    with sync_playwright() as playwright:
        # Chromium refuses to sandbox itself for root, which CI is.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": A4_PX, "height": 1123}, color_scheme="dark")
        page.goto(file.as_uri())
        background = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(background) != "rgb(255, 255, 255)"
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(background) == "rgb(255, 255, 255)"
        assert page.evaluate("document.documentElement.scrollWidth") <= A4_PX
        for drawn in (".bar", ".key"):  # browsers leave out backgrounds, unless the page says that they are content
            kinds = page.locator(drawn).evaluate_all("all => all.map(each => getComputedStyle(each).printColorAdjust)")
            assert set(kinds) == {"exact"}
        assert page.pdf(format="A4", path=tmp_path / "report.pdf").startswith(b"%PDF")
        browser.close()
