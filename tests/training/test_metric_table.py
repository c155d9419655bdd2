from make_metric_table import PAGE, page

from kleash.store.metrics import METRICS


def test_documented_metric_table_matches_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python tools/make_metric_table.py"
    for name, metric in METRICS.items():
        assert f"| `{name}` |" in text and metric.meaning in text
