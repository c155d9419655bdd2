"""``kleash report --picture``: what is drawn, with every kind of name and number."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import HOSTILE, synthetic_sweep, write_synthetic_run

from kleash.cli import main
from kleash.errors import OptionError, RunFolderError
from kleash.records import Measurement, Number
from kleash.store.measurement import ModelRecord
from kleash.store.sweep import Sweep

pytestmark = pytest.mark.peers("matplotlib")
HOSTILE_NAMES = (*HOSTILE, "$x_1^{$", "\\frac{1}{2}", "$" * 3, "日本語 🙂", "\udc80", "n" * 500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "run"
    write_synthetic_run(path, prompts=6, tokens=96, shards=1)
    return path


@pytest.fixture(scope="module")
def measurement(folder: Path) -> Measurement:
    return Measurement.read(folder)


def drawn(result: Measurement | Sweep) -> Any:
    """The Matplotlib figure of a result."""
    from kleash.reports import pictures

    kind = pictures._measurement_figure if isinstance(result, Measurement) else pictures._sweep_figure
    return kind(result)


def dots_of(axes: Any) -> list[tuple[float, float]]:
    """The values with intervals that stand on some axes."""
    return [
        (float(container.lines[0].get_xdata()[0]), float(container.lines[0].get_ydata()[0]))
        for container in axes.containers
    ]


def size_of_png(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_the_command_draws_a_measurement_and_a_sweep(folder: Path, tmp_path: Path, capsys: Any) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    synthetic_sweep().write(sweep)
    for source, page, name in ((folder, "report.html", "run.png"), (sweep, "sweep.html", "sweep.SVG")):
        assert main(["report", str(source), "--picture", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"{source / page}\n{tmp_path / name}\n"
    assert min(size_of_png(tmp_path / "run.png")) > 600
    root = ET.fromstring((tmp_path / "sweep.SVG").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert main(["report", str(folder), "--picture", str(tmp_path / "a.svg"), "--json"]) == 0
    assert capsys.readouterr().out.startswith("{") and (tmp_path / "a.svg").exists()


def test_the_same_files_give_the_same_bytes(measurement: Measurement, tmp_path: Path) -> None:
    from kleash.reports.pictures import write_picture

    few = replace(measurement, by_position=(), convergence=(), quantiles={})
    for suffix in (".svg", ".png"):
        first, second = (write_picture(tmp_path / f"{n}{suffix}", few).read_bytes() for n in "ab")
        assert first == second


def test_the_numbers_drawn_are_those_of_the_measurement(measurement: Measurement) -> None:
    means, quantiles, positions, convergence = drawn(measurement).axes
    directions = [measurement.per_token[name] for name in ("kl_policy_reference", "kl_reference_policy")]
    estimators = [record.number for record in measurement.estimators.values()]
    assert dots_of(means) == [(each.value, row) for row, each in enumerate((*directions, *estimators))]
    (segment,) = means.containers[0].lines[2][0].get_segments()
    (low, _), (high, _) = segment
    assert (low, high) == pytest.approx(measurement.per_token["kl_policy_reference"].ci95)
    expected = [each.value for name in measurement.quantiles for each in measurement.quantiles[name].values()]
    assert [x for x, _ in dots_of(quantiles)] == expected and quantiles.get_xscale() == "log"
    assert [y for _, y in dots_of(positions)] == [part.kl.value for part in measurement.by_position]
    assert list(convergence.lines[0].get_ydata()) == [point.mean for point in measurement.convergence]


def test_a_sweep_is_drawn_by_size_with_its_pareto_front() -> None:
    sweep = synthetic_sweep(("q8", "q6", "q4"))
    off_front = tuple(
        replace(candidate, is_on_pareto_front=candidate.name != "q6") for candidate in sweep.candidates
    )
    sizes, rows = drawn(replace(sweep, candidates=off_front)).axes
    values = [candidate.numbers["kl_policy_reference"].value for candidate in sweep.ranking]
    assert dots_of(sizes) == [(c.bytes_on_disk, v) for c, v in zip(sweep.ranking, values, strict=True)]
    front = sizes.lines[-1]
    assert list(front.get_xdata()) == sorted(c.bytes_on_disk for c in sweep.ranking if c.name != "q6")
    assert [text.get_text() for text in sizes.texts] == ["1", "2", "3"]
    assert [label.get_text() for label in rows.get_yticklabels()] == ["1  q8  a", "2  q6  b", "3  q4  c"]
    assert [x for x, _ in dots_of(rows)] == values


def test_any_name_is_drawn_as_text(measurement: Measurement, tmp_path: Path) -> None:
    from kleash.reports.pictures import write_picture

    few = {"by_position": (), "convergence": (), "quantiles": {}}
    for name in ("$x_1^{$", "\udc80 \x00\x1b\n", HOSTILE[0]):
        models = {
            role: ModelRecord(**{**vars(model), "path": name}) for role, model in measurement.models.items()
        }
        write_picture(tmp_path / "m.svg", replace(measurement, models=models, **few))
        ET.fromstring((tmp_path / "m.svg").read_text())
    sweep = replace(synthetic_sweep(HOSTILE_NAMES), reference="\\frac{1}{2}")
    ET.fromstring(write_picture(tmp_path / "s.svg", sweep).read_text())
    labels = [label.get_text() for label in drawn(sweep).axes[1].get_yticklabels()]
    assert len(labels) == len(HOSTILE_NAMES) and any("$x_1^{$" in label for label in labels)


def test_a_long_name_stays_within_the_picture(measurement: Measurement) -> None:
    models = {
        role: ModelRecord(**{**vars(model), "path": "W" * 300}) for role, model in measurement.models.items()
    }
    unlike = replace(measurement, models=models, by_position=(), convergence=(), quantiles={})
    require_texts_fit(drawn(unlike))
    require_texts_fit(drawn(replace(synthetic_sweep(("W" * 300,) * 3), reference="W" * 300)))


def require_texts_fit(figure: Any) -> None:
    """Check that the title lies within the picture, and above all panels."""
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    boxes = [text.get_window_extent() for text in figure.texts]
    for box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and 0 <= box.y0 < box.y1 <= height, box
    assert max(axes.get_tightbbox().y1 for axes in figure.axes if axes.axison) <= min(box.y0 for box in boxes)


def test_what_is_not_finite_or_not_known_is_not_drawn(measurement: Measurement, tmp_path: Path) -> None:
    from kleash.reports.pictures import write_picture

    unknown = Number(value=math.nan, unit="nats", standard_error=math.nan, ci95=(math.nan, math.nan))
    one_cluster = replace(unknown, value=0.5, ci95=(-math.inf, math.inf))
    per_token = {"kl_policy_reference": one_cluster, "kl_reference_policy": replace(unknown, value=math.inf)}
    zero = {"50": replace(one_cluster, value=0.0), "max": unknown}
    odd = replace(
        measurement,
        per_token=per_token,
        estimators={},
        quantiles={"kl_policy_reference": zero},
        by_position=measurement.by_position[:1],
        convergence=measurement.convergence[:1],
    )
    means, quantiles, *_ = drawn(odd).axes
    assert dots_of(means) == [(0.5, 0.0)] and dots_of(quantiles) == [(0.0, 0.0)]
    assert quantiles.get_xscale() == "linear"
    write_picture(tmp_path / "odd.png", odd)


def test_bounds_of_a_served_model_are_drawn(measurement: Measurement, tmp_path: Path) -> None:
    from kleash.reports.pictures import write_picture

    bounds = {
        f"kl_policy_reference_{end}": Number(
            value=value, unit="nats", standard_error=1e-6, ci95=(value - 2e-6, value + 2e-6)
        )
        for end, value in (("lower", 0.15), ("upper", 0.45))
    }
    served = replace(
        measurement, per_token=bounds, estimators={}, quantiles={}, by_position=(), convergence=()
    )
    (means,) = drawn(served).axes
    assert [x for x, _ in dots_of(means)] == pytest.approx([0.15, 0.45])
    assert "lower bound" in means.get_yticklabels()[0].get_text()
    write_picture(tmp_path / "bounds.png", served)
    require_texts_fit(drawn(served))


def test_a_sweep_without_sizes_of_one_or_of_many_candidates_is_drawn(tmp_path: Path) -> None:
    from kleash.reports.pictures import write_picture

    sweep = synthetic_sweep(("q8", "q6"))
    unknown = tuple(replace(candidate, bytes_on_disk=None) for candidate in sweep.candidates)
    assert len(drawn(replace(sweep, candidates=unknown)).axes) == 1
    write_picture(tmp_path / "one.png", synthetic_sweep(("q8",)))
    first = sweep.candidates[0]
    many = replace(
        sweep,
        candidates=tuple(replace(first, number=n, name=f"candidate {n}") for n in range(1, 61)),
        pairs=(),
    )
    figure = drawn(many)
    assert len(figure.axes[1].containers) == 40
    assert any("20 farthest are not shown" in text.get_text() for text in figure.texts)
    with pytest.raises(OptionError, match="no candidate of the sweep could be measured"):
        write_picture(tmp_path / "none.png", synthetic_sweep((), ("a",)))


def test_drawing_changes_no_setting_of_matplotlib(measurement: Measurement, tmp_path: Path) -> None:
    import matplotlib

    from kleash.reports.pictures import write_picture

    few = replace(measurement, by_position=(), convergence=(), quantiles={})
    with matplotlib.rc_context({"axes.linewidth": 7.0, "xtick.labelsize": 30.0}):
        before = dict(matplotlib.rcParams)
        with_own_style = write_picture(tmp_path / "a.svg", few).read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert write_picture(tmp_path / "b.svg", few).read_bytes() == with_own_style


def test_a_picture_that_cannot_be_made_is_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(["report", str(folder), "--picture", str(tmp_path / "a.jpg")]) == 2
    assert "--picture takes a file that ends in .png or .svg; it is" in capsys.readouterr().err
    assert main(["report", str(folder), "--picture", str(tmp_path / "none" / "a.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "steps.jsonl").write_text("")
    assert main(["report", str(tmp_path), "--picture", "a.png"]) == 2
    assert "--picture is for measurements and sweeps; " in capsys.readouterr().err
    monkeypatch.setattr("kleash.extras.is_installed", lambda name: name != "matplotlib")
    assert main(["report", str(folder), "--picture", str(tmp_path / "a.png")]) == 2
    assert "matplotlib is not installed; run: pip install 'kleash[pictures]'" in capsys.readouterr().err
    from kleash.reports.pictures import write_picture

    with pytest.raises(RunFolderError):
        write_picture(tmp_path / "none" / "a.png", Measurement.read(folder))
    with pytest.raises(OptionError, match=r"ends in \.png or \.svg"):
        write_picture(tmp_path / "a", Measurement.read(folder))
