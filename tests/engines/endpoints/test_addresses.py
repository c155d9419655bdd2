"""Addresses of servers: what may be given, and that no part of a password is shown."""

import pytest

from kleash.cli import main
from kleash.engines.endpoints import server_root
from kleash.errors import OptionError

KEY = "key-of-the-secret"


@pytest.mark.parametrize(
    "end", ["", "/", "/v1", "/v1//", "/v1/completions", "/v1/chat/completions/", "/v1/models", "/generate"]
)
def test_an_address_may_end_with_a_path_of_the_api(end):
    assert server_root(f"HTTPS://[::1]:8000/models{end}", "--policy") == "https://[::1]:8000/models"


SECRETS = ("me:a#secret@127.0.0.1:1/v1", "me:a/secret@127.0.0.1:1/v1", "me:secret@[::1]:1/v1")
SECRETS += ("127.0.0.1:1/v1?key=secret", f"127.0.0.1:1/{KEY}/v1", "127.0.0.1:secret/v1")
MALFORMED = ("127.0.0.1:1/prefix-é/v1", "127.0.0.1:0/v1", "127.0.0.1:65536/v1", "[::1:8000/v1", "/v1")


@pytest.mark.parametrize("address", [*SECRETS, *MALFORMED, "127.0.0.1:1\\v1"])
def test_what_is_more_or_less_than_an_address_is_refused_without_quoting_it(address):
    with pytest.raises(OptionError, match="--policy is not an address") as raised:
        server_root(f"http://{address}", "--policy", KEY)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["localhost:8000", "127.0.0.1:8000/v1", "ws://localhost/v1", "http:/host"])
def test_an_address_without_its_scheme_is_not_taken_for_a_folder_alone(name, capsys):
    assert main(["measure", "--policy", name, "--text", "shipped:text", "--quiet"]) == 2
    assert "the address of a server, which begins with http://" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["cache", "--reference", "ADDRESS", "--text", "shipped:text"],
        ["sweep", "--candidates", "ADDRESS"],
        ["measure", "--policy", "ADDRESS", "--prompts", "shipped:prompts"],
        pytest.param(
            ["train", "rloo", "--policy", "ADDRESS", "--prompts", "shipped:prompts", "--reward", "math.fsum"],
            marks=pytest.mark.peers("trl"),
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_refused_address_is_shown_without_its_password(words, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    given = [word.replace("ADDRESS", "http://me:a/secret@127.0.0.1:1/v1") for word in words]
    assert main([*given, *out]) == 2
    error = capsys.readouterr().err
    assert "http://…" in error and "server" in error and "secret" not in error
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "words",
    [
        "measure --policy shipped:policy --tokenizer ADDRESS",
        "sweep --candidates shipped:policy --tokenizer ADDRESS",
        "cache --reference shipped:reference --text shipped:text --tokenizer ADDRESS",
        "measure --policy shipped:policy --text ADDRESS",
        "measure --policy shipped:policy --prompts ADDRESS",
        "sweep --candidates shipped:policy --responses ADDRESS",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_an_address_where_a_folder_or_file_is_expected_is_refused_without_its_password(
    words, scheme, tmp_path, capsys
):
    out = ["--out", str(tmp_path / "out")]
    address = f"{scheme}://me:secret@127.0.0.1:1/file.jsonl"
    assert main([*words.replace("ADDRESS", address).split(), *out]) == 2
    error = capsys.readouterr().err
    assert f"{scheme}://…" in error and "secret" not in error
    assert "secret" not in "".join(path.read_text() for path in tmp_path.rglob("*.json*"))
