"""``kleash report --picture``: what is drawn, with every kind of name and number."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from drawn_charts import dots
from synthetic_run import HOSTILE, synthetic_sweep, write_sweep_folder, write_synthetic_run

from kleash.cli import main
from kleash.errors import OptionError
from kleash.records import Measurement
from kleash.reports.drawing import matplotlib_style
from kleash.reports.pictures import picture_figure, write_picture
from kleash.reports.sweep import sweep_charts
from kleash.store.measurement import ModelRecord

HOSTILE_NAMES = (*HOSTILE, "$x_1^{$", "\\frac{1}{2}", "$" * 3, "日本語 🙂", "\udc80", "n" * 500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "run"
    write_synthetic_run(path, prompts=6, tokens=96, shards=1)
    return path


@pytest.fixture(scope="module")
def measurement(folder):
    return Measurement.read(folder)


def drawn(result):
    """The Matplotlib figure of a result's picture."""
    with matplotlib_style("test") as make_figure:
        figure = picture_figure(make_figure, result)
        figure.draw_without_rendering()
    return figure


def size_of_png(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.usefixtures("undrawn")
def test_the_command_draws_a_measurement_and_a_sweep(folder, tmp_path, capsys):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    write_sweep_folder(sweep, synthetic_sweep())
    for source, page, name in ((folder, "report.html", "run.png"), (sweep, "sweep.html", "sweep.SVG")):
        assert main(["report", str(source), "--picture", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"{source / page}\n{tmp_path / name}\n"
    assert min(size_of_png(tmp_path / "run.png")) > 600
    root = ET.fromstring((tmp_path / "sweep.SVG").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_files_give_the_same_bytes(measurement, tmp_path):
    few = replace(measurement, by_position=(), convergence=(), quantiles={})
    for suffix in (".svg", ".png"):
        first, second = (write_picture(tmp_path / f"{n}{suffix}", few).read_bytes() for n in "ab")
        assert first == second


def test_a_picture_has_the_charts_of_the_page(measurement):
    means, quantiles, positions, convergence = drawn(measurement).axes
    assert means.get_title("left") == "KL and one-sample estimators"
    assert quantiles.get_title("left").startswith("Quantiles of the KL over tokens\n")
    directions = [measurement.per_token[name] for name in ("kl_policy_reference", "kl_reference_policy")]
    assert [x for x, _ in dots(means)[0]] == [each.value for each in directions]
    assert [y for _, y in dots(positions)[0]] == [part.kl.value for part in measurement.by_position]
    assert convergence.get_title("left").startswith("Convergence of the mean\n")
    first = measurement.convergence[:1]
    assert len(drawn(replace(measurement, convergence=first, quantiles={}, estimators={})).axes) == 2


def test_a_sweep_s_picture_is_its_ranking_and_kl_against_size():
    sweep = synthetic_sweep(("q8", "q6", "q4"))
    rows, sizes = drawn(sweep).axes
    values = [candidate.numbers["kl_policy_reference"].value for candidate in sweep.ranking]
    assert [x for x, _ in dots(rows)[0]] == values and sizes.get_title("left").startswith("KL against size\n")
    unknown = tuple(
        replace(candidate, bytes_on_disk=None, bits_per_weight=None) for candidate in sweep.candidates
    )
    assert len(drawn(replace(sweep, candidates=unknown)).axes) == 1


def test_any_name_is_drawn_as_text(measurement, tmp_path):
    few = {"by_position": (), "convergence": (), "quantiles": {}}
    for name in ("$x_1^{$", "\udc80 \x00\x1b\n"):
        models = {
            role: ModelRecord(**{**vars(model), "path": name}) for role, model in measurement.models.items()
        }
        write_picture(tmp_path / "m.svg", replace(measurement, models=models, **few))
        ET.fromstring((tmp_path / "m.svg").read_text())
    sweep = replace(synthetic_sweep(HOSTILE_NAMES), reference="\\frac{1}{2}")
    ET.fromstring(write_picture(tmp_path / "s.svg", sweep).read_text())
    labels = [label.get_text() for label in drawn(sweep).axes[0].get_yticklabels()]
    assert len(labels) == len(HOSTILE_NAMES) and any("$x_1^{$" in label for label in labels)


def test_a_long_name_stays_within_the_picture(measurement):
    models = {
        role: ModelRecord(**{**vars(model), "path": "W" * 300}) for role, model in measurement.models.items()
    }
    unlike = replace(measurement, models=models, by_position=(), convergence=(), quantiles={})
    require_texts_fit(drawn(unlike))
    require_texts_fit(drawn(replace(synthetic_sweep(("W" * 300,) * 3), reference="W" * 300)))


def require_texts_fit(figure):
    """Check that the title lies within the picture, and above all panels."""
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    boxes = [text.get_window_extent() for text in figure.texts]
    for box in boxes:
        assert box.x0 >= 0 and box.x1 <= width and 0 <= box.y0 < box.y1 <= height, box
    assert max(axes.get_tightbbox().y1 for axes in figure.axes if axes.axison) <= min(box.y0 for box in boxes)


def test_of_many_candidates_the_nearest_are_drawn(tmp_path):
    sweep = synthetic_sweep(("q8", "q6"))
    first = sweep.candidates[0]
    candidates = tuple(replace(first, number=n, name=f"candidate {n}") for n in range(1, 61))
    many = replace(sweep, candidates=candidates, pairs=())
    assert len(dots(drawn(many).axes[0])[0]) == 40
    assert sweep_charts(many)[0].description.endswith("The 20 farthest are not shown.")
    with pytest.raises(OptionError, match="no candidate of the sweep could be measured"):
        write_picture(tmp_path / "none.png", synthetic_sweep((), ("a",)))


@pytest.mark.usefixtures("undrawn")
def test_a_picture_that_cannot_be_made_is_one_sentence(folder, tmp_path, monkeypatch, capsys):
    assert main(["report", str(folder), "--picture", str(tmp_path / "a.jpg")]) == 2
    assert "--picture must be a file that ends in .png or .svg; it is '/" in capsys.readouterr().err
    assert main(["report", str(folder), "--picture", str(tmp_path / "none" / "a.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr("kleash.extras.is_installed", lambda name: name != "matplotlib")
    assert main(["report", str(folder), "--picture", str(tmp_path / "a.png")]) == 2
    assert "matplotlib is not installed; run: pip install 'kleash[models]'" in capsys.readouterr().err
