"""The check of names finds each planted fault and nothing else."""

from pathlib import Path

import check_names
import name_rules
import pytest
from name_rules import Exemption, SharedNoun

PLANTED = {
    "src/kleash/__init__.py": '"""All."""\n',
    "src/kleash/linear/__init__.py": "from kleash.linear.lean import Same as found\n",
    "src/kleash/linear/lean.py": """
class Same:
    given: int = 0
    value: int = 1
    def __init__(self, told, fine):
        self._held = told
        self.fine = [one for one in fine]
        with open("x") as said, open("y") as file:
            pass
        for a, (kept, b) in fine:
            room = kept
        try:
            def asked_value(*others, **theirs): ...
        except ValueError as wanted:
            lambda own: own
        if (together := 1):
            global here
            here = 1
""",
    "src/kleash/leash/lean.py": "class Same: ...\nroom = 1\nsteer = 2\n",
    "src/kleash/leash/api.py": "class Different: ...\n" + "\n" * 400,
    "src/kleash/linear/api.py": "x = '''\n" + "\n" * 70 + "found = 1'''\nfoundation = not_defined.found\n",
    "src/kleash/training/running.py": "class Journal: ...\n",
    "tools/page.py": "def apart(): ...\nclass Same: ...\nroom = 1\n",
    "tests/test_page.py": "found = 1\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in PLANTED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def hits(tree: Path, rule: str, *folders: str) -> set[tuple[str, str, str]]:
    texts = check_names.read_files(tree, folders or check_names.FOLDERS)
    return {
        (hit.definition.kind, hit.definition.name, hit.definition.path.removeprefix("src/kleash/"))
        for hit in check_names.hits_of(texts)
        if hit.rule == rule
    }


def test_stop_words_of_every_kind(tree: Path) -> None:
    lean = "linear/lean.py"
    assert hits(tree, "stop-word") == {
        ("variable", "found", "linear/__init__.py"),
        ("attribute", "given", lean),
        ("argument", "told", lean),
        ("attribute", "_held", lean),
        *(("variable", name, lean) for name in ("one", "said", "kept", "wanted", "together", "here")),
        *(("argument", name, lean) for name in ("others", "theirs", "own")),
        ("function", "apart", "tools/page.py"),
    }
    assert hits(tree, "stop-word", "tests") == {("variable", "found", "tests/test_page.py")}


def test_names_that_were_replaced(tree: Path) -> None:
    assert hits(tree, "old-name") == {
        ("module", "lean", "linear/lean.py"),
        ("variable", "room", "linear/lean.py"),
        ("variable", "steer", "leash/lean.py"),
        ("class", "Journal", "training/running.py"),
    }


def test_classes_and_modules_of_one_name(tree: Path) -> None:
    assert hits(tree, "class-twice") == {
        ("class", "Same", "linear/lean.py"),
        ("class", "Same", "leash/lean.py"),
    }
    assert hits(tree, "module-twice") == {
        ("module", "lean", "linear/lean.py"),
        ("module", "lean", "leash/lean.py"),
    }
    assert hits(tree, "module-name") == {("module", "running", "training/running.py")}


def test_modules_of_one_noun_may_share_a_name_in_the_packages_of_the_table(tree: Path) -> None:
    (tree / "src/kleash/losses").mkdir()
    (tree / "src/kleash/losses/lean.py").write_text("")
    texts = check_names.read_files(tree, ["src"])
    modules = list(check_names.modules_of(texts))

    def outside(*packages: str) -> set[str]:
        nouns = [SharedNoun("lean", "one noun", packages)]
        return {
            check_names.top_level(h.definition.path) for h in check_names.repeated_modules(modules, nouns)
        }

    assert outside() == {"linear", "leash", "losses"}
    assert outside("linear", "leash") == {"losses"}
    assert outside("linear", "leash", "losses") == set()
    texts["src/kleash/leash/impl/lean.py"] = ""
    modules = list(check_names.modules_of(texts))
    assert outside("linear", "leash", "losses") == {"leash"}, "two in one package"


def test_shared_nouns_must_be_there_and_reasoned(tree: Path) -> None:
    texts = check_names.read_files(tree, ["src"])

    def errors(name: str, noun: str, *packages: str) -> list[str]:
        return check_names.table_errors([], [], texts, {}, [SharedNoun(name, noun, packages)])

    assert errors("lean", "one noun", "linear", "leash") == []
    assert errors("lean", "one noun", "linear", "losses") == ["shared noun lean: no such module in losses"]
    assert len(errors("lean", " ", "linear", "leash")) == len(errors("lean", "one noun", "linear")) == 1
    assert (
        check_names.table_errors([], [], {}, {}, [SharedNoun("lean", "one noun", ("linear", "leash"))]) == []
    )


def test_short_and_long_modules(tree: Path) -> None:
    assert {path for _, _, path in hits(tree, "short-module")} == {
        "linear/lean.py",
        "leash/lean.py",
        "training/running.py",
    }
    assert {path for _, _, path in hits(tree, "long-module")} == {"leash/api.py"}


def test_exemptions_must_be_needed_few_and_reasoned(tree: Path) -> None:
    texts = check_names.read_files(tree, ["src"])
    every = check_names.hits_of(texts)

    def errors(*exemptions: Exemption, short: dict[str, str] | None = None) -> list[str]:
        return check_names.table_errors(every, exemptions, texts, short or {})

    needed = Exemption("class-twice", "Same", "src/kleash", "a framework wants it")
    assert errors(needed) == []
    assert sum(check_names.covers(needed, hit) for hit in every) == 2
    assert len(errors(needed._replace(where="src/kleash/training"))) == 1
    assert len(errors(needed._replace(rule="stop-word"))) == 1
    assert len(errors(needed._replace(reason=" "))) == 1
    assert errors(needed._replace(where="tests")) == [], "what was not read is not judged"
    assert errors(*[needed] * 41) == ["41 exemptions; at most 40"]
    short = "src/kleash/leash/lean.py"
    assert errors(short={short: "a reason"}) == []
    assert len(errors(short={short: ""})) == 1
    assert len(errors(short={"src/kleash/leash/api.py": "it has 400 lines"})) == 1
    assert len(errors(short={"src/kleash/gone.py": "it is not there"})) == 1


def test_the_command_fails_and_the_report_does_not(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_names, "SHORT_MODULES", {})
    monkeypatch.setattr(check_names, "EXEMPTIONS", ())
    monkeypatch.setattr(check_names, "SHARED_NOUNS", ())
    assert check_names.main(["--root", str(tree)]) == 1
    assert "src/kleash/linear/lean.py:3: stop-word: attribute given" in capsys.readouterr().out
    assert check_names.main(["--root", str(tree), "--report"]) == 0
    assert "short-module: module running" in capsys.readouterr().out
    assert check_names.main(["--root", str(tree), "--report", "--summary"]) == 0
    table = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert table["package"][:3] == ["stop-word", "old-name", "class-twice"]
    assert table["total"] == ["14", "4", "2", "2", "1", "3", "1"]
    assert check_names.main(["--root", str(tree), "tests", "--list"]) == 0
    assert check_names.main(["--root", str(tree / "src" / "kleash" / "training"), "."]) == 0


def test_words_to_be_read_are_single_participles() -> None:
    text = "written = running_mean = given = 1\nclass A:\n    moved: int\n    string = thing_\ndef going(led): ...\n"
    words = check_names.to_be_read({"src/kleash/a.py": text})
    assert set(words) == {"written", "moved"}


def test_no_rule_contradicts_another() -> None:
    replaced = {(old.old, old.kind, old.package) for old in name_rules.OLD_NAMES}
    assert len(replaced) == len(name_rules.OLD_NAMES)
    news = {old.new for old in name_rules.OLD_NAMES}
    assert not news & name_rules.STOP_WORDS
    assert not news & {old.old for old in name_rules.OLD_NAMES}
