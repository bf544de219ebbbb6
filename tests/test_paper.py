"""What is behind `make paper`: loaders of published formats, a run that can be stopped, a report from figures alone."""

import gzip
import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import data, formats, linear_time
from benchmarks.paper.__main__ import main
from benchmarks.paper.cells import find_cell, key_of, save_cell
from benchmarks.paper.experiment import EXPERIMENTS, Cell, experiment
from benchmarks.paper.formats import DataError
from benchmarks.paper.report import write_report

ROOT = Path(__file__).parent.parent
RANDOM = np.random.Generator(np.random.PCG64(5))


def sums(folder: Path) -> None:
    """Write the digests of all files in a folder, as a user does who has cut files down."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(lines))


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path) -> dict[str, np.ndarray]:
    held = {}
    for part, count in (("train", 7), ("t10k", 3)):
        held[part] = RANDOM.integers(0, 256, (count, 28, 28), np.uint8)
        held[f"{part}-labels"] = RANDOM.integers(0, 10, count).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(held[part])))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(held[f"{part}-labels"]))
    return held


def test_mnist_is_read_from_idx_files_compressed_or_not(tmp_path):
    held = write_mnist(tmp_path)
    sums(tmp_path)
    x, y, x_test, y_test = formats.read_mnist(tmp_path)
    assert (x == held["train"]).all()
    assert (x_test == held["t10k"]).all()
    assert y.tolist() == held["train-labels"].tolist()
    assert y_test.tolist() == held["t10k-labels"].tolist()


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path):
    write_mnist(tmp_path)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: its md5 is .*, and f68b3c2d"):
        formats.read_mnist(tmp_path)


def test_a_file_that_changed_after_its_digest_was_written_is_refused(tmp_path):
    write_mnist(tmp_path)
    sums(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"other")
    with pytest.raises(DataError, match="its sha256 is"):
        formats.read_mnist(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b"\0\0\x08\x01" + struct.pack(">I", 4) + b"1234",
            "its magic number is 0x00000801, and 0x00000803 was expected",
        ),
        (b"\0\0\x08", "ends within its header"),
        (idx(np.zeros((2, 28, 28), np.uint8))[:-1], "it says it holds 2 × 28 × 28 bytes, and has 1567"),
    ],
)
def test_an_idx_file_that_is_none_is_refused_in_one_sentence(tmp_path, content, says):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        formats.read_idx(path, formats.IDX_IMAGES)
    assert "\n" not in str(caught.value)


def test_a_truncated_gzip_file_is_refused(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx(RANDOM.integers(0, 256, (2, 28, 28), np.uint8)))[:-20])
    with pytest.raises(DataError, match="cannot be unpacked"):
        formats.read_idx(path, formats.IDX_IMAGES)


def write_svhn(folder: Path) -> None:
    from scipy.io import savemat

    for part, count in (("train", 4), ("extra", 5), ("test", 3)):
        x = RANDOM.integers(0, 256, (32, 32, 3, count), np.uint8)
        y = np.array([[10], [1], [2], [9], [10]], np.uint8)[:count]
        savemat(folder / f"{part}_32x32.mat", {"X": x, "y": y}, do_compression=True)


def test_svhn_is_read_from_mat_files_and_its_tens_are_zeros(tmp_path):
    from scipy.io import loadmat

    write_svhn(tmp_path)
    sums(tmp_path)
    x, y, x_test, y_test = formats.read_svhn(tmp_path)
    assert x.shape == (9, 32, 32, 3)
    assert y.tolist() == [0, 1, 2, 9, 0, 1, 2, 9, 0]
    assert y_test.tolist() == [0, 1, 2]
    stored = loadmat(tmp_path / "test_32x32.mat")["X"]
    assert (x_test[1] == stored[:, :, :, 1]).all()
    assert len(formats.read_svhn(tmp_path, extra=False)[0]) == 4


@pytest.mark.parametrize("kept", [0, 60, 700])
def test_a_truncated_mat_file_is_refused(tmp_path, kept):
    write_svhn(tmp_path)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:kept])
    sums(tmp_path)
    with pytest.raises(DataError, match=r"train_32x32\.mat: "):
        formats.read_svhn(tmp_path)


def cifar(labels: list[int], label_bytes: int) -> tuple[bytes, np.ndarray]:
    images = RANDOM.integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    rows = [
        bytes([7] * (label_bytes - 1) + [label]) + i.transpose(2, 0, 1).tobytes()
        for label, i in zip(labels, images, strict=True)
    ]
    return b"".join(rows), images


def test_cifar_10_is_read_from_its_unpacked_files(tmp_path):
    home = tmp_path / "cifar-10-batches-bin"
    home.mkdir()
    parts = [cifar([number, 9], 1) for number in range(5)]
    for number, (records, _) in enumerate(parts, 1):
        (home / f"data_batch_{number}.bin").write_bytes(records)
    (home / "test_batch.bin").write_bytes(cifar([3], 1)[0])
    x, y, _, y_test = formats.read_cifar(tmp_path, 10)
    assert (x == np.concatenate([images for _, images in parts])).all()
    assert y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert y_test.tolist() == [3]
    (home / "data_batch_3.bin").write_bytes(parts[2][0][:-5])
    with pytest.raises(DataError, match=r"data_batch_3\.bin: .* truncated"):
        formats.read_cifar(tmp_path, 10)


def test_cifar_100_is_read_from_its_archive_by_the_fine_label(tmp_path):
    records, images = cifar([99, 0, 42], 2)
    archive = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in (("train.bin", records), ("test.bin", cifar([5], 2)[0])):
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match="03b5dce0"):
        formats.read_cifar(tmp_path, 100)
    sums(tmp_path)
    x, y, _, _ = formats.read_cifar(tmp_path, 100)
    assert (x == images).all()
    assert y.tolist() == [99, 0, 42]
    archive.write_bytes(archive.read_bytes()[:-200])
    sums(tmp_path)
    with pytest.raises(DataError, match="cannot be unpacked"):
        formats.read_cifar(tmp_path, 100)


def test_purchase_has_a_row_per_customer_and_a_column_per_category_bought_most(tmp_path):
    bought = [(30, 5), (30, 7), (10, 5), (10, 5), (20, 7), (20, 9), (20, 5), (40, 8)]
    rows = [f"{person},205,7,{category},107,1,2012-03-02,1,OZ,1,2.5" for person, category in bought]
    header = "id,chain,dept,category,company,brand,date,productsize,productmeasure,purchasequantity,purchaseamount"
    (tmp_path / "transactions.csv.gz").write_bytes(gzip.compress("\n".join([header, *rows, ""]).encode()))
    x, y, x_test, y_test = formats.read_purchase(tmp_path, features=2)
    everybody = np.concatenate([x, x_test])
    # Of customers 10, 20, 30, 40 and categories 5 and 7, in whatever order.
    assert sorted(everybody.tolist()) == [[0, 0], [1, 0], [1, 1], [1, 1]]
    assert everybody.dtype == np.uint8
    assert set(np.concatenate([y, y_test]).tolist()) == {0, 1}
    assert len(formats.read_purchase(tmp_path, customers=3, features=2)[0]) == 2


def test_a_file_of_other_columns_is_not_taken_for_purchase(tmp_path):
    (tmp_path / "transactions.csv").write_text("customer,thing\n1,2\n")
    with pytest.raises(DataError, match="no CSV file with columns id and category"):
        formats.read_purchase(tmp_path)


def test_images_are_read_from_folders_by_class(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is the extra `paper`")
    for name, colour in (("n01", (255, 0, 0)), ("n02", (0, 0, 255))):
        (tmp_path / "train" / name).mkdir(parents=True)
        for number in range(5):
            image.new("RGB", (40, 30), colour).save(tmp_path / "train" / name / f"{number}.png")
    x, y, x_test, y_test = formats.read_images(tmp_path, size=8)
    assert x.shape == (8, 8, 8, 3)
    assert (x[y == 1] == (0, 0, 255)).all()
    assert y_test.tolist() == [0, 1]
    (tmp_path / "val" / "n01").mkdir(parents=True)
    (tmp_path / "val" / "n02").mkdir()
    image.new("L", (9, 9), 200).save(tmp_path / "val" / "n02" / "grey.png")
    x, _, x_test, y_test = formats.read_images(tmp_path, size=8, most=2)
    assert (len(x), y_test.tolist()) == (4, [1])
    assert (x_test == 200).all()
    (tmp_path / "val" / "n01").rmdir()
    with pytest.raises(DataError, match="a folder for n01 in train, and none in val"):
        formats.read_images(tmp_path, size=8)
    (tmp_path / "val" / "n02" / "grey.png").unlink()
    (tmp_path / "val" / "n02").rmdir()
    with pytest.raises(DataError, match="val: there is no folder per class in it"):
        formats.read_images(tmp_path, size=8)
    # As for few-shot learning: other classes in every part.
    for part, name in (("val", "n03"), ("test", "n04")):
        (tmp_path / part / name).mkdir(parents=True)
        for number in range(5):
            image.new("RGB", (9, 9), (0, 255, 0)).save(tmp_path / part / name / f"{number}.png")
    _, y, _, y_test = formats.read_images(tmp_path, size=8)
    assert (len(y), y_test.tolist()) == (16, [0, 1, 2, 3])
    whole = tmp_path / "train" / "n01" / "0.png"
    whole.write_bytes(whole.read_bytes()[:40])
    with pytest.raises(DataError, match="no whole image"):
        formats.read_images(tmp_path, size=8)


def test_every_data_set_of_the_paper_takes_part_where_somebody_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("UNLEARND_PAPER_DATA", str(tmp_path))
    names = ("mnist", "svhn", "cifar-10", "cifar-100", "purchase", "mini-imagenet", "imagenet")
    for name in names:
        (tmp_path / name).mkdir()
    cells = [settings for name in EXPERIMENTS for settings in experiment(name).cells(quick=False)]
    used = {settings.get(what) for settings in cells for what in ("data", "base")}
    assert {name.replace("-", "_") for name in names} <= used


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(DataError, match="no folder per class"):
        formats.read_images(tmp_path)


def test_a_cell_is_found_by_its_settings_and_half_a_file_is_none(tmp_path):
    cell = Cell({"shards": 5, "data": "digits"}, {"accuracy": 97.123456789}, 1.5)
    save_cell(tmp_path, "sharding", cell)
    found = find_cell(tmp_path, "sharding", {"data": "digits", "shards": 5})
    assert found is not None
    assert found["accuracy"] == 97.1235
    assert find_cell(tmp_path, "sharding", {"data": "digits", "shards": 6}) is None
    assert find_cell(tmp_path, "slicing", {"data": "digits", "shards": 5}) is None
    (file,) = (tmp_path / "sharding").iterdir()
    assert file.stem == key_of("sharding", cell.settings)
    file.write_text(file.read_text()[:20])
    assert find_cell(tmp_path, "sharding", cell.settings) is None


def test_every_experiment_lists_cells_that_are_told_apart():
    for name in EXPERIMENTS:
        for quick in (True, False):
            keys = [key_of(name, settings) for settings in experiment(name).cells(quick)]
            assert len(set(keys)) == len(keys) > 0


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the evaluation as a user does who has no data but what comes with the project."""
    monkeypatch.setattr(data, "SHARED", tmp_path / "nothing")
    monkeypatch.delenv("UNLEARND_PAPER_DATA", raising=False)
    where = ("--out", str(tmp_path / "out"), "--work", str(tmp_path / "cells"))

    def run(*options: str) -> tuple[int, str]:
        code = main(["--quick", "--jobs", "0", *where, *options])
        return code, capsys.readouterr().err

    return run


def test_an_unknown_experiment_or_folder_is_refused(run, capsys):
    for options, says in (
        (("--only", "shardnig"), "no experiment 'shardnig'; there are: linear_time"),
        (("--data", "/nowhere"), "--data /nowhere: there is no such folder"),
    ):
        with pytest.raises(SystemExit) as refused:
            run(*options)
        assert refused.value.code == 2
        assert says in capsys.readouterr().err


def test_what_was_measured_is_not_measured_again_and_makes_the_same_report(run, tmp_path):
    # One cell short, as after a run that was stopped; the others have the figures of a real, tiny measurement.
    measured = linear_time.measure(data="digits", backend="convnet", points=60, repeat=0)
    wanted = linear_time.cells(quick=True)
    assert "digits" in wanted[1].values()
    for settings in wanted:
        save_cell(tmp_path / "cells", "linear_time", Cell(settings, measured, 0.5))
    (tmp_path / "cells" / "linear_time" / f"{key_of('linear_time', wanted[1])}.json").unlink()
    code, told = run("--only", "linear_time")
    assert (code, told.count("linear_time data")) == (0, 1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "data", "linear_time.svg"]
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*") if path.is_file()}
    document = json.loads((tmp_path / "out" / "data" / "linear_time.json").read_text())
    assert [cell["settings"] for cell in document["cells"]] == wanted
    code, told = run("--only", "linear_time")
    assert (code, told) == (0, "")
    assert {path: path.read_bytes() for path in before} == before
    page = (tmp_path / "out" / "README.md").read_text()
    assert "Small sizes" in page
    assert "SYNTHETIC Purchase" in page
    assert "python -m benchmarks.paper --quick --only linear_time" in page


def test_the_report_says_what_others_took_of_the_machine(run, tmp_path):
    measured = linear_time.measure(data="digits", backend="convnet", points=60, repeat=0)
    *_, last = wanted = linear_time.cells(quick=True)
    for settings in wanted:
        save_cell(tmp_path / "cells", "linear_time", Cell(settings, measured, 0.5))
    run("--only", "linear_time")
    page = tmp_path / "out" / "README.md"
    # Nobody watched when these cells were measured.
    assert "minutes of work; [data]" in page.read_text()
    path = tmp_path / "out" / "data" / "linear_time.json"
    for others, says in (
        (150.0, "**The machine was busy with other work** during `linear_time` (1.5 cores)"),
        (1.0, "Other work took at most 0.01 of a core during any experiment."),
        (None, "what else the machine did is not known"),
    ):
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "watch": {"seconds": 100.0, "others": others}}))
        assert says in write_report(tmp_path / "out", plots=False).read_text()
    assert "0.01 of" not in page.read_text()
    # A run that goes on adds to what the one before had seen.
    path.write_text(json.dumps({**document, "watch": {"seconds": 100.0, "others": 30.0}}))
    (tmp_path / "cells" / "linear_time" / f"{key_of('linear_time', last)}.json").unlink()
    run("--only", "linear_time")
    watch = json.loads(path.read_text())["watch"]
    assert watch["seconds"] > 100
    assert watch["others"] is None or watch["others"] >= 30


def test_fresh_leaves_nothing_of_an_earlier_run_even_where_every_cell_fails(run, tmp_path, monkeypatch):
    (tmp_path / "mine" / "mnist").mkdir(parents=True)
    monkeypatch.setenv("UNLEARND_PAPER_DATA", str(tmp_path / "mine"))
    left = [tmp_path / "out" / "data" / "samples_per_class.json", tmp_path / "out" / "samples_per_class.svg"]
    left[0].parent.mkdir(parents=True)
    for path in left:
        path.write_text("of an earlier run")
    code, told = run("--jobs", "1", "--only", "samples_per_class", "--fresh")
    assert code == 1
    assert "there is no such file" in told.replace("\n", " ")
    assert not any(path.exists() for path in left)
    assert "Nothing has been measured yet" in (tmp_path / "out" / "README.md").read_text()


def is_running(process: str) -> bool:
    try:
        return "State:\tZ" not in (Path("/proc") / process / "status").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="processes are looked up in /proc")
def test_a_worker_ends_with_the_run_that_was_killed():
    script = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from benchmarks.paper.runner import _begin_worker
if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), _begin_worker) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 60)
        time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = run.stdout.readline().strip()
        assert is_running(worker)
        run.kill()
        until = time.monotonic() + 20
        while is_running(worker):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_the_committed_report_is_what_its_data_says(tmp_path):
    committed = ROOT / "docs" / "results"
    guide = tmp_path / "how-to" / "run-the-papers-evaluation.md"
    guide.parent.mkdir()
    guide.touch()
    shutil.copytree(committed, tmp_path / "results")
    (tmp_path / "results" / "README.md").unlink()
    again = write_report(tmp_path / "results", plots=False)
    assert again.read_text() == (committed / "README.md").read_text()
    measured = {path.stem for path in (committed / "data").glob("*.json")}
    assert measured == {path.stem for path in committed.glob("*.svg")}
