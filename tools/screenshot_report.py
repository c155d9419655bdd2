"""Take pictures of a report: for the README, in dark mode, and at a phone's width.

    python tools/screenshot_report.py kleash-runs/…/report.html --out docs/images

writes report.png (desktop, the top of the page), report-dark.png and report-phone.png. Needs
Chromium, chromedriver and selenium.
"""

import argparse
import base64
import shutil
import tempfile
from pathlib import Path
from typing import Any

VIEWS = {
    "report": {"width": 1280, "height": 1300, "dark": False, "mobile": False},
    "report-dark": {"width": 1280, "height": 1360, "dark": True, "mobile": False},
    "report-phone": {"width": 390, "height": 1700, "dark": False, "mobile": True},
}


AT_HELP = "begin at this anchor, the id of a section of the page"


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


def take(driver: Any, report: Path, view: dict[str, Any], *, whole: bool, at: str) -> bytes:
    """A PNG of ``report`` in one view: the whole page, or a window that begins at the anchor ``at``."""
    size = {
        "width": view["width"],
        "height": view["height"],
        "deviceScaleFactor": 1,
        "mobile": view["mobile"],
    }
    scheme = "dark" if view["dark"] else "light"
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    driver.get(report.resolve().as_uri())
    if at:
        scroll = "const e = document.getElementById(arguments[0]); e?.scrollIntoView(); return e !== null"
        if not driver.execute_script(scroll, at):
            ids = driver.execute_script("return [...document.querySelectorAll('section[id]')].map(e => e.id)")
            raise SystemExit(f"{report} has no anchor {at}; its sections are {', '.join(ids)}")
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
    return base64.b64decode(shot["data"])


def main() -> None:
    """Take the pictures of the chosen views."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="report.html")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    parser.add_argument("--whole", action="store_true", help="the whole page instead of its top")
    parser.add_argument("--at", default="", help=AT_HELP)
    parser.add_argument("--only", choices=list(VIEWS), action="append", help="only this view")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        try:
            for name in options.only or VIEWS:
                picture = take(driver, options.report, VIEWS[name], whole=options.whole, at=options.at)
                (options.out / f"{name}.png").write_bytes(picture)
                print(f"{options.out / name}.png: {len(picture) / 1000:.0f} kB")
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
