"""Take the pictures of the demonstration that docs/train.md shows, or of any page of training.

    kleash train demonstration --out demonstration/
    python tools/screenshot_training.py demonstration/report.html --out docs/images

writes leashes.png, the window that begins at the anchor --at ("frontier-section" if not given). With --whole, the whole
page as leashes.png and, at a phone's width, as leashes-phone.png. Needs Chromium, chromedriver and selenium.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from screenshot_report import AT_HELP, browser, take

DESKTOP: dict[str, Any] = {"width": 1120, "height": 800, "dark": False, "mobile": False}
PHONE: dict[str, Any] = {"width": 390, "height": 1700, "dark": False, "mobile": True}


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="report.html")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    parser.add_argument("--whole", action="store_true", help="the whole page, on a desktop and on a phone")
    parser.add_argument("--at", default="frontier-section", help=AT_HELP)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    views = {"leashes": DESKTOP, "leashes-phone": PHONE} if options.whole else {"leashes": DESKTOP}
    with tempfile.TemporaryDirectory() as profile:
        driver = browser(profile)
        try:
            for name, view in views.items():
                at = "" if options.whole else options.at
                picture = take(driver, options.page, view, whole=options.whole, at=at)
                (options.out / f"{name}.png").write_bytes(picture)
                print(f"{options.out / name}.png: {len(picture) / 1000:.0f} kB")
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
