"""The pages we write, in a real browser: they print on one sheet, run no script and fetch nothing."""

import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from unlearnd.cli import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture
def pages(
    tmp_path: Path, people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any]
) -> list[Path]:
    """The summary in an evidence pack, and a report on requests."""
    store = new_store("store")
    add(store, people())
    (outcome,) = store.erase(["u3"]).outcomes
    store.close()
    report = tmp_path / "report.html"
    for command in (
        ["receipt", "export", outcome.request, "-o", str(tmp_path / "pack")],
        ["report", "--from", date.today().isoformat(), "--format", "html", "--output", str(report)],
    ):
        main(["--store", str(store.folder), *command], standalone_mode=False)
    return [tmp_path / "pack" / "summary.html", report]


def test_a_page_carries_no_script_and_names_nothing_to_fetch(pages: list[Path]) -> None:
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<script|<link|<img|<iframe|\ssrc=|url\(|@import|\son\w+=", text, re.I), page.name
        assert "default-src 'none'" in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine to print pages with")
def test_a_browser_prints_a_page_on_one_sheet(pages: list[Path], tmp_path: Path) -> None:
    assert BROWSER is not None
    for page in pages:
        printed = tmp_path / f"{page.stem}.pdf"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", f"--print-to-pdf={printed}"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        subprocess.run([BROWSER, *options, profile, page.as_uri()], check=True, capture_output=True, timeout=120)
        assert len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) == 1, page.name
