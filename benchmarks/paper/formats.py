"""Read the paper's data sets in the formats in which they are published, and check that files are what was published.

Where a digest is published for a file, it is checked before a byte is believed. Digests of your own, for files that
have none (Kaggle gives none) or that you have cut down, go into a file `SHA256SUMS` beside them, as `sha256sum` writes
it; for the files it names it counts instead of ours. Whatever is wrong with a file is said in one sentence, as a
`DataError`. Nothing here downloads anything, and nothing is unpickled: of CIFAR, take the binary version.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Split = tuple[Array, Array, Array, Array]
"""Features and labels to train on, features and labels to test on."""

PUBLISHED = {
    # MNIST, as torchvision and others have them.
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
    # SVHN, the same.
    "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
    "extra_32x32.mat": "md5:a93ce644f1a588dc4d68dda5feec44a7",
    # CIFAR, from the page of its authors.
    "cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8",
}
IDX_IMAGES, IDX_LABELS = 0x00000803, 0x00000801
PURCHASE_FEATURES = 600
PURCHASE_CUSTOMERS = 250_000
_PROBLEMS = (OSError, EOFError, ValueError, zlib.error)
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")


class DataError(Exception):
    """A file is missing, is not what was published, or cannot be read: the message says which and why."""


def check_file(path: Path) -> None:
    """Raise `DataError` unless a file is there and has the digest published for it, or your own."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    expected = _own_digests(path.parent).get(path.name) or PUBLISHED.get(path.name)
    if expected is None:
        return
    kind, _, digest = expected.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    if found != digest:
        raise DataError(f"{path}: its {kind} is {found}, and {digest} was expected: it is damaged or another file")


def read_mnist(folder: Path) -> Split:
    """Read the four idx files of MNIST, compressed or not: images (n, 28, 28) of bytes."""
    parts = []
    for stem in ("train", "t10k"):
        images = read_idx(_either(folder, f"{stem}-images-idx3-ubyte"), IDX_IMAGES)
        labels = read_idx(_either(folder, f"{stem}-labels-idx1-ubyte"), IDX_LABELS)
        _check_as_many(folder, stem, images, labels)
        parts += [images, labels.astype(np.int64)]
    return parts[0], parts[1], parts[2], parts[3]


def read_idx(path: Path, magic: int) -> Array:
    """Read one idx file of bytes whose magic number must be `magic`."""
    check_file(path)
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except _PROBLEMS as error:
        raise DataError(f"{path}: it cannot be unpacked: {error}") from None
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    found = int.from_bytes(data[:4], "big")
    if len(data) >= 4 and found != magic:
        raise DataError(f"{path}: its magic number is {found:#010x}, and {magic:#010x} was expected")
    if len(data) < header:
        raise DataError(f"{path}: it ends within its header, after {len(data)} bytes")
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4))
    if len(data) - header != int(np.prod(shape)):
        raise DataError(
            f"{path}: it says it holds {' × '.join(map(str, shape))} bytes, and has {len(data) - header}: truncated?"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def read_svhn(folder: Path, *, extra: bool = True) -> Split:
    """Read SVHN's cropped digits: images (n, 32, 32, 3), the extra ones after those to train on, if there."""
    parts = [_read_svhn_file(folder / "train_32x32.mat")]
    if extra and (folder / "extra_32x32.mat").exists():
        parts.append(_read_svhn_file(folder / "extra_32x32.mat"))
    test = _read_svhn_file(folder / "test_32x32.mat")
    x, y = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    return x, y, *test


def _read_svhn_file(path: Path) -> tuple[Array, Array]:
    from scipy.io import loadmat  # heavy; scikit-learn brings it
    from scipy.io.matlab import MatReadError

    check_file(path)
    try:
        held = loadmat(path, variable_names=("X", "y"))
    except (*_PROBLEMS, IndexError, TypeError, NotImplementedError, MatReadError) as error:
        raise DataError(f"{path}: it is no whole MATLAB 5 file: {error}") from None
    if "X" not in held or "y" not in held:
        raise DataError(f"{path}: it has no arrays X and y")
    x, y = held["X"], held["y"].ravel().astype(np.int64)
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.dtype != np.uint8 or x.shape[3] != len(y):
        raise DataError(f"{path}: X is {x.dtype} {x.shape} for {len(y)} labels, and uint8 (32, 32, 3, n) was expected")
    # The digit 0 has the label 10.
    return np.ascontiguousarray(x.transpose(3, 0, 1, 2)), y % 10


def read_cifar(folder: Path, classes: int) -> Split:
    """Read CIFAR-10 or CIFAR-100, binary version, from its archive or unpacked: images (n, 32, 32, 3)."""
    if classes == 10:
        inside, train = "cifar-10-batches-bin", [f"data_batch_{number}.bin" for number in range(1, 6)]
        test, archive, label_bytes = "test_batch.bin", folder / "cifar-10-binary.tar.gz", 1
    else:
        inside, train = "cifar-100-binary", ["train.bin"]
        test, archive, label_bytes = "test.bin", folder / "cifar-100-binary.tar.gz", 2
    if archive.exists():
        check_file(archive)
        held = dict(_members(archive, [f"{inside}/{name}" for name in [*train, test]]))
        parts = [_cifar_records(archive / inside / name, held[f"{inside}/{name}"], label_bytes) for name in train]
        x_test, y_test = _cifar_records(archive / inside / test, held[f"{inside}/{test}"], label_bytes)
    else:
        home = folder / inside if (folder / inside).is_dir() else folder
        for name in [*train, test]:
            check_file(home / name)
        parts = [_cifar_records(home / name, (home / name).read_bytes(), label_bytes) for name in train]
        x_test, y_test = _cifar_records(home / test, (home / test).read_bytes(), label_bytes)
    x, y = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    for labels in (y, y_test):
        if labels.max() >= classes:
            raise DataError(f"{folder}: there is a label {labels.max()}, and CIFAR-{classes} has {classes} classes")
    return x, y, x_test, y_test


def _members(archive: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield files of an archive, without unpacking it to disk."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name in names:
                file = tar.extractfile(name)
                if file is None:
                    raise DataError(f"{archive}: {name} in it is no file")
                yield name, file.read()
    except KeyError:
        raise DataError(f"{archive}: there is no {name} in it") from None
    except (*_PROBLEMS, tarfile.TarError) as error:
        raise DataError(f"{archive}: it cannot be unpacked: {error}") from None


def _cifar_records(path: Path, data: bytes, label_bytes: int) -> tuple[Array, Array]:
    """Split records into images and their last label byte, which in CIFAR-100 is the fine one."""
    size = label_bytes + 3072
    if not data or len(data) % size:
        raise DataError(f"{path}: {len(data)} bytes are no whole number of records of {size}: truncated?")
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), rows[:, label_bytes - 1].astype(np.int64)


def read_purchase(folder: Path, customers: int = PURCHASE_CUSTOMERS, features: int = PURCHASE_FEATURES) -> Split:
    """Prepare Purchase from Kaggle's `transactions.csv`, compressed or not, as the paper does.

    A row is a customer, a column one of the 600 categories bought most often, a 1 says that the customer bought of it.
    The file is streamed twice: once to count, once to fill. The two classes are k-means clusters, as with Shokri et
    al., on whom the paper draws; such a label depends on every row, which no unlearning of rows undoes.
    """
    path = _either(folder, "transactions.csv")
    check_file(path)
    bought: dict[int, int] = {}
    found: list[Array] = []
    for people, categories in _transactions(path):
        values, counts = np.unique(categories, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            bought[value] = bought.get(value, 0) + count
        found.append(np.unique(people))
        if len(found) > 64:
            found = [np.unique(np.concatenate(found))]
    if not bought:
        raise DataError(f"{path}: there is no transaction in it")
    ids = np.unique(np.concatenate(found))[:customers]
    # Among categories bought equally often, the lower number, so that everybody gets the same columns.
    chosen = np.sort([value for value, _ in sorted(bought.items(), key=lambda one: (-one[1], one[0]))[:features]])
    x = np.zeros((len(ids), len(chosen)), np.uint8)
    for people, categories in _transactions(path):
        row, column = np.searchsorted(ids, people), np.searchsorted(chosen, categories)
        here = (row < len(ids)) & (column < len(chosen))
        row, column = row[here], column[here]
        same = (ids[row] == people[here]) & (chosen[column] == categories[here])
        x[row[same], column[same]] = 1
    y = _two_clusters(x)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(x))
    test, train = np.split(order, [max(1, len(x) // 10)])
    return x[train], y[train], x[test], y[test]


def _transactions(path: Path) -> Iterator[tuple[Array, Array]]:
    """Yield customers and categories of a transactions file, some MB at a time."""
    import pyarrow as pa  # heavy
    from pyarrow import csv

    columns = {"id": pa.int64(), "category": pa.int64()}
    options = csv.ConvertOptions(include_columns=list(columns), column_types=columns)
    try:
        with csv.open_csv(path, csv.ReadOptions(block_size=16 << 20), convert_options=options) as reader:
            for batch in reader:
                yield batch.column(0).to_numpy(zero_copy_only=False), batch.column(1).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError, EOFError) as error:
        first = str(error).splitlines()[0]
        raise DataError(f"{path}: it is no CSV file with columns id and category: {first}") from None


def _two_clusters(x: Array) -> Array:
    from sklearn.cluster import MiniBatchKMeans  # heavy

    means = MiniBatchKMeans(2, random_state=0, n_init=3, batch_size=4096).fit(x.astype(np.float32))
    labels: Array = means.labels_.astype(np.int64)
    return labels


def read_images(folder: Path, *, size: int = 224, most: int | None = None) -> Split:
    """Read ImageNet or mini-ImageNet from folders: `train/CLASS/…` and `val/CLASS/…`, images (n, size, size, 3).

    Without `val`, every fifth image of a class is held out. So it is where `train`, `val` and `test` have no class in
    common, as mini-ImageNet is handed on for few-shot learning: all its classes make one task of supervised
    classification, as in the paper. Images are scaled to 8/7 of the size at their shorter side and cropped in the
    middle. `most` takes only that many images of each class. Needs Pillow (the extra `paper`).
    """
    train = folder / "train" if (folder / "train").is_dir() else folder
    classes, held = _classes_in(train), None
    if not classes:
        raise DataError(f"{folder}: there is no folder per class in it")
    if train != folder and (folder / "val").is_dir():
        held = _classes_in(folder / "val")
        if not held:
            raise DataError(f"{folder / 'val'}: there is no folder per class in it")
        if not held.keys() & classes.keys():
            classes, held = {**classes, **held, **_classes_in(folder / "test")}, None
    sides: tuple[list[Path], list[Path]] = ([], [])
    labels: tuple[list[int], list[int]] = ([], [])
    for label, name in enumerate(sorted(classes)):
        files = _images_in(classes[name])[:most]
        chosen = [(file, int(held is None and number % 5 == 4)) for number, file in enumerate(files)]
        if held is not None:
            if name not in held:
                raise DataError(f"{folder}: there is a folder for {name} in train, and none in val")
            chosen += [(file, 1) for file in _images_in(held[name])[:most]]
        for file, side in chosen:
            sides[side].append(file)
            labels[side].append(label)
    if not sides[0] or not sides[1]:
        raise DataError(f"{folder}: there are {len(sides[0])} images to train on and {len(sides[1])} to test on")
    x, x_test = (np.stack([read_image(file, size) for file in files]) for files in sides)
    return x, np.asarray(labels[0], np.int64), x_test, np.asarray(labels[1], np.int64)


def read_image(path: Path, size: int) -> Array:
    """Read one image as (size, size, 3) bytes."""
    try:
        from PIL import Image, UnidentifiedImageError  # an extra
    except ImportError:
        raise DataError(
            "folders of images need Pillow, which is not installed: pip install 'unlearnd[paper]'"
        ) from None
    try:
        with Image.open(path) as image:
            colours = image.convert("RGB")
            scale = size * 8 / 7 / min(colours.size)
            wide, high = (max(size, round(side * scale)) for side in colours.size)
            left, top = (wide - size) // 2, (high - size) // 2
            resized = colours.resize((wide, high), Image.Resampling.BILINEAR)
            return np.asarray(resized.crop((left, top, left + size, top + size)), np.uint8)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise DataError(f"{path}: it is no whole image: {error}") from None


def _classes_in(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else {}


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _own_digests(folder: Path) -> dict[str, str]:
    path = folder / "SHA256SUMS"
    if not path.exists():
        return {}
    digests = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        digest, _, name = line.partition(" ")
        if len(digest) != 64 or not name.strip(" *"):
            raise DataError(f"{path}: line {number} is no digest and file name as `sha256sum` writes them")
        digests[name.strip(" *")] = f"sha256:{digest.lower()}"
    return digests


def _either(folder: Path, name: str) -> Path:
    """Return the path of a file that may be compressed; of both, the one as published."""
    compressed = folder / f"{name}.gz"
    return compressed if compressed.exists() else folder / name


def _check_as_many(folder: Path, what: str, images: Array, labels: Array) -> None:
    if len(images) != len(labels):
        raise DataError(f"{folder}: there are {len(images)} images and {len(labels)} labels in {what}")
