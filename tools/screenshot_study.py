"""Take the picture of the study's page that docs/study.md shows.

    python examples/estimator_study.py --out study.html
    python tools/screenshot_study.py study.html --out docs/images

writes study.png. Needs Chromium, chromedriver and selenium.
"""

import argparse
import tempfile
from pathlib import Path

from screenshot_report import browser, take

VIEW = {"width": 1280, "height": 1500, "dark": False, "mobile": False}


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="study.html")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the picture")
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        try:
            picture = take(driver, wanted.page, VIEW, whole=False, at="")
        finally:
            driver.quit()
    path = wanted.out / "study.png"
    path.write_bytes(picture)
    print(f"{path}: {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
