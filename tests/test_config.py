"""The settings file: what it says is what is read, and what it does not know it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

import unlearnd
from unlearnd.config import FILE_NAME, Config, find_store, read_config, write_config
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError
from unlearnd.keys import create_keys, draw_id, draw_seed, draw_user_keys, open_keys

CONFIG = Config(store_id="ab" * 16, ledger="sqlite:///ledger.sqlite", storage="storage")


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, executor="processes", workers=4, device="cuda:1"),
        replace(CONFIG, executor="ray", executor_options={"num_gpus": 0.5, "resources": {"a100": 1}, "shards": 0}),
        replace(CONFIG, storage='C:\\data "quoted"\\store', ledger="sqlite:////tmp/ü 'x'.sqlite"),
        replace(CONFIG, storage="odd\nname\twith\x07control"),
    ],
    ids=["defaults", "all set", "for an executor", "quotes and backslashes", "control characters"],
)
def test_what_is_written_is_read_again(tmp_path: Path, config: Config) -> None:
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config


def test_build_settings_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('[store]\nid = "x"\nledger = "l"\nstorage = "s"\n')
    assert read_config(tmp_path) == Config(store_id="x", ledger="l", storage="s")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lacks id, ledger, storage"),
        ("[store]\nid = 'x'\nledger = 'l'\n", "lacks storage"),
        ("[store", "cannot be read"),
        ("[shop]\n", "unknown section 'shop'; known: store, build"),
        ("store = 1\n", "'store'"),
        ("[store]\nid = 1\nledger = 'l'\nstorage = 's'\n", "id"),
        ("[store]\nid = 'x'\nledger = 'l'\nstorage = 's'\nsotrage = 's'\n", "sotrage"),
        ("[store]\nid = 'x'\nledger = 'l'\nstorage = 's'\n[build]\nworkers = '2'\n", "workers"),
        ("[store]\nid = 'x'\nledger = 'l'\nstorage = 's'\n[build]\nworkers = true\n", "workers"),
        ("[store]\nid = 'x'\nledger = 'l'\nstorage = 's'\n[build]\nworkers = 0\n", "worker"),
    ],
    ids=lambda text: text.splitlines()[-1] if text.splitlines() else "empty",
)
def test_what_is_wrong_is_named_with_the_file(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(DamagedStoreError) as caught:
        read_config(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path / FILE_NAME) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_damage(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DamagedStoreError, match="cannot be read"):
        read_config(tmp_path)


def test_a_folder_without_the_file_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="unlearnd init"):
        read_config(tmp_path)


def test_the_nearest_store_above_is_found(tmp_path: Path) -> None:
    inner, deep = tmp_path / "a" / "b", tmp_path / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    with pytest.raises(NotFoundError, match=f"neither {deep}"):
        find_store(deep)
    write_config(tmp_path, CONFIG)
    assert find_store(deep) == tmp_path
    write_config(inner, CONFIG)
    assert find_store(deep) == inner
    assert find_store(inner) == inner
    # A folder of that name is not a settings file.
    (deep / FILE_NAME).mkdir()
    assert find_store(deep) == inner


# Keys


def test_keys_are_drawn_fresh_kept_for_their_owner_and_never_printed(tmp_path: Path) -> None:
    one, two = create_keys(tmp_path / "one"), create_keys(tmp_path / "two")
    assert len({one.placement, one.pepper, two.placement, two.pepper}) == 4
    assert open_keys(tmp_path / "one") == one
    assert one.pepper.hex() not in repr(one)
    assert one.placement.hex() not in repr(one)
    for path in (tmp_path / "one").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o700


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    keys = create_keys(tmp_path)
    with pytest.raises(RefusedError, match="never overwritten"):
        create_keys(tmp_path)
    assert open_keys(tmp_path) == keys


def test_a_placement_key_may_be_taken_from_elsewhere(tmp_path: Path) -> None:
    first = create_keys(tmp_path / "first")
    second = create_keys(tmp_path / "second", tmp_path / "first" / "placement.key")
    assert second.placement == first.placement
    assert second.pepper != first.pepper


@pytest.mark.parametrize("content", [b"", b"abc", b"zz" * 32, b"00" * 31, b"00" * 33, b"\xff\xfe"])
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "k").write_bytes(content)
    with pytest.raises(InputError, match="key file"):
        create_keys(tmp_path / "keys", tmp_path / "k")
    assert not (tmp_path / "keys" / "pepper.key").exists()


def test_handles_depend_on_the_pepper_and_the_whole_id(tmp_path: Path) -> None:
    one, two = create_keys(tmp_path / "one"), create_keys(tmp_path / "two")
    assert one.handles(["ada", "bob", "ada"]) == [*one.handles(["ada"]), *one.handles(["bob"]), *one.handles(["ada"])]
    assert len({*one.handles(["ada", "ada ", "Ada", "adä"]), *two.handles(["ada"])}) == 5
    assert all(len(handle) == 16 for handle in one.handles(["ada", "ü" * 1000]))


def test_draws_are_all_different() -> None:
    assert len(set(draw_user_keys(1000))) == 1000
    assert {len(key) for key in draw_user_keys(3)} == {32}
    assert draw_user_keys(0) == []
    assert len({draw_id() for _ in range(100)}) == 100
    assert all(0 <= draw_seed() < 2**63 for _ in range(100))


def test_what_an_executor_is_told_holds_no_secret(tmp_path: Path) -> None:
    write_config(tmp_path, replace(CONFIG, executor_options={"cluster": {"auth_token": "x"}}))
    with pytest.raises(InputError, match=r"the entry cluster.auth_token of \[executor\] is a secret"):
        read_config(tmp_path)


def test_settings_seen_from_elsewhere_have_whole_addresses(tmp_path: Path) -> None:
    seen = replace(CONFIG, receipts="evidence").seen_from(tmp_path)
    assert seen.ledger == f"sqlite:///{tmp_path}/ledger.sqlite"
    assert (seen.storage, seen.receipts) == (str(tmp_path / "storage"), str(tmp_path / "evidence"))
    far = replace(CONFIG, ledger="postgresql+psycopg://db/x", storage="s3://b/p")
    assert far.seen_from(tmp_path) == far


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("s3:/bucket/shop", "two slashes"),
        ("s3://bucket/../other/shop", r"has '\.\.' in it"),
        ("s3://", "names no bucket"),
    ],
)
def test_an_address_that_would_be_taken_for_another_place_is_refused_and_leaves_nothing(
    tmp_path: Path, address: str, told: str
) -> None:
    for given in ({"storage": address}, {"receipts": address}):
        with pytest.raises(InputError, match=told):
            unlearnd.create_store(str(tmp_path / "shop"), **given)
    assert not (tmp_path / "shop").exists()


def test_a_secret_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="secret is a secret") as refused:
        unlearnd.create_store(str(tmp_path / "shop"), storage="s3://b/shop", storage_options={"secret": "hush"})
    unlearnd.create_store(str(tmp_path / "near")).close()
    path = tmp_path / "near" / "unlearnd.toml"
    path.write_text(path.read_text() + '[storage]\nsecret_key = "hush"\n')
    with pytest.raises(InputError, match="secret_key is a secret") as unread:
        unlearnd.open_store(str(tmp_path / "near"))
    assert "hush" not in f"{refused.value}{unread.value}"
