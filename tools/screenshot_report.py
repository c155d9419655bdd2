"""Take the picture of a report that README.md and docs/reference/report.md show: the top of the page on a desktop.

    python tools/screenshot_report.py kleash-runs/…/report.html --out docs/images

writes report.png. Needs Chromium, chromedriver and selenium.
"""

import argparse
import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

SIZE = {"width": 1280, "height": 1300, "deviceScaleFactor": 1, "mobile": False}


def browser(profile: str) -> Any:
    """Headless Chromium without background network access."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    flags = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    for flag in (*flags.split(), "disable-component-update", "disable-sync", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="report.html")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        try:
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
            driver.get(options.report.resolve().as_uri())
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        finally:
            driver.quit()
    (options.out / "report.png").write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
