"""The user's cache folder is used only where no other user could have written into it."""

import os
from pathlib import Path

import pytest

from kleash.user_cache import is_private_file, user_cache_folder

OTHER_USER = 54321


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def change_owner(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, OTHER_USER, OTHER_USER)


def test_the_folder_is_created_with_mode_700(home: Path) -> None:
    folder = user_cache_folder()
    assert folder == home / "cache" / "kleash" and folder.stat().st_mode & 0o777 == 0o700
    assert user_cache_folder() == folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("where", ["cache/kleash", "cache"])
def test_a_folder_that_others_can_write_is_rejected(home: Path, where: str, mode: int) -> None:
    assert user_cache_folder() is not None
    os.chown(home / where, -1, 4 if os.geteuid() == 0 else -1)  # not a group of this user alone
    (home / where).chmod(mode)
    if where == "cache" and mode == 0o770 and os.geteuid() != 0:
        pytest.skip("the group may be the user's own")
    assert user_cache_folder() is None


def test_a_sticky_parent_folder_is_safe(home: Path) -> None:
    assert user_cache_folder() is not None
    (home / "cache").chmod(0o1777)
    assert user_cache_folder() is not None


@pytest.mark.parametrize("where", ["cache/kleash", "cache"])
def test_a_folder_of_another_user_is_rejected(home: Path, where: str) -> None:
    assert user_cache_folder() is not None
    change_owner(home / where)
    assert user_cache_folder() is None


def test_the_target_of_a_link_is_checked(home: Path) -> None:
    (home / "elsewhere").mkdir(mode=0o700)
    (home / "cache").symlink_to(home / "elsewhere")
    assert user_cache_folder() is not None
    (home / "elsewhere").chmod(0o777)
    assert user_cache_folder() is None


def test_a_relative_folder_is_ignored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(home))
    folder = user_cache_folder()
    assert folder is not None and folder.is_absolute() and not (home / "cache").exists()


def test_only_a_regular_file_of_this_user_is_private(home: Path) -> None:
    path = home / "library.so"
    path.write_bytes(b"")
    path.chmod(0o700)
    assert is_private_file(path)
    (home / "link.so").symlink_to(path)
    assert not is_private_file(home / "link.so")
    path.chmod(0o722)
    assert not is_private_file(path)
    path.chmod(0o700)
    change_owner(path)
    assert not is_private_file(path)
