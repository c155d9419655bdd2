"""Take the screenshot of the study's page that README.md shows.

    python examples/estimator_study --out study.html
    PYTHONPATH=tools python examples/estimator_study/screenshot.py study.html

writes study.png. Needs Chromium, chromedriver and selenium.
"""

import argparse
import tempfile
from pathlib import Path

from screenshot_report import browser, take

HERE = Path(__file__).resolve().parent
VIEW = {"width": 1280, "height": 1500, "dark": False, "mobile": False}


def main() -> None:
    """Take the screenshot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="study.html")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the screenshot")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        try:
            picture = take(driver, options.page, VIEW, whole=False, at="")
        finally:
            driver.quit()
    path = options.out / "study.png"
    path.write_bytes(picture)
    print(f"{path}: {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
