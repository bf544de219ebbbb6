"""The data that experiments run on: the paper's own where somebody has it, else what comes nearest.

Data is looked for in the folder that `--data` names (`mnist/`, `svhn/`, `cifar-10/`, `cifar-100/`, `purchase/`,
`mini-imagenet/`, `imagenet/`, as published, read by `formats`), then in `../shared/data` beside the repository, and
else it is the digits that come with scikit-learn, or made up. What was made up says so in its title, and so in every
table and plot.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper import formats

Array = np.ndarray[Any, Any]
SHARED = Path(__file__).parents[3] / "shared" / "data"


@dataclass(frozen=True)
class Data:
    """A data set, cut into what is trained on and what is tested on."""

    name: str
    title: str
    x: Array
    y: Array
    x_test: Array
    y_test: Array
    classes: int
    user: Array
    """Whose each training point is."""
    group: Array | None = None
    group_test: Array | None = None

    def first(self, points: int) -> Data:
        """Return the data with only its first training points."""
        return self.rows(np.arange(min(points, len(self.x))))

    def rows(self, chosen: Array) -> Data:
        """Return the data with only these training points."""
        group = None if self.group is None else self.group[chosen]
        return replace(self, x=self.x[chosen], y=self.y[chosen], user=self.user[chosen], group=group)

    def flat(self) -> Data:
        """Return the data with images as rows of numbers, for networks that do not know images."""
        return replace(self, x=self.x.reshape(len(self.x), -1), x_test=self.x_test.reshape(len(self.x_test), -1))


def best(*names: str) -> str:
    """Return the first of these data sets that is here; the last should be one that always is."""
    return next((name for name in names if is_here(name)), names[-1])


def purchase() -> str:
    """Return the name of the data that stands for the paper's Purchase."""
    return best("purchase", "baskets600", "synthetic_purchase")


def digits() -> str:
    """Return the name of the data that stands for the paper's MNIST."""
    return best("mnist", "digits")


def is_here(name: str) -> bool:
    """Say whether a data set can be loaded."""
    return name in _MADE or _own(name) is not None or (name in _SHARED and (SHARED / f"{name}.npz").exists())


def title_of(name: str) -> str:
    """Return what a data set is called in the report."""
    return _TITLES[name]


@lru_cache(maxsize=4)
def load(name: str) -> Data:
    """Load a data set; raise `formats.DataError` where a file is not what it should be."""
    folder = _own(name)
    if folder is not None:
        return _plain(name, *_OWN[name](folder))
    if name in _SHARED and (SHARED / f"{name}.npz").exists():
        with np.load(SHARED / f"{name}.npz", allow_pickle=False) as held:
            return _SHARED[name](name, held)
    if name in _MADE:
        return _MADE[name](name)
    raise formats.DataError(f"the data set '{name}' is not here: neither below --data nor in ../shared/data")


def _own(name: str) -> Path | None:
    given = os.environ.get("UNLEARND_PAPER_DATA")
    if given is None or name not in _OWN:
        return None
    folder = Path(given) / name.removesuffix("_32").replace("_", "-")
    return folder if folder.is_dir() else None


def _plain(name: str, x: Array, y: Array, x_test: Array, y_test: Array, user: Array | None = None) -> Data:
    """Return data in which, unless told otherwise, every point is somebody else's."""
    owner = np.arange(len(x)) if user is None else user
    y, y_test = y.astype(np.int64), y_test.astype(np.int64)
    return Data(name, _TITLES[name], x, y, x_test, y_test, int(max(y.max(), y_test.max())) + 1, owner)


def _mixed(split: formats.Split) -> formats.Split:
    """Return points to train on in a fixed random order: folders are read class by class, and often a few are taken."""
    x, y, *test = split
    order = np.random.Generator(np.random.PCG64(11)).permutation(len(x))
    return x[order], y[order], *test


def _images(name: str, held: Any) -> Data:
    return _plain(name, held["x_train"], held["y_train"], held["x_test"], held["y_test"])


def _baskets(name: str, held: Any) -> Data:
    x, x_test = (np.unpackbits(held[f"x_bits_{part}"], axis=1, count=600) for part in ("train", "test"))
    return _plain(name, x, held["y_train"], x_test, held["y_test"], held["subject_train"])


def _location(name: str, held: Any) -> Data:
    x = np.unpackbits(held["x_bits"], axis=1, count=446)
    order = np.random.Generator(np.random.PCG64(11)).permutation(len(x))
    test, train = order[:1000], order[1000:]
    return _plain(name, x[train], held["y"][train], x[test], held["y"][test])


def _retail(name: str, held: Any) -> Data:
    """Invoices as the 600 items bought most; is it worth more than £300? By customer, grouped by country."""
    counts = np.bincount(held["indices"])
    items = np.sort(np.argsort(-counts, kind="stable")[:600])
    start, indices = held["indptr"].astype(np.int64), held["indices"]
    row = np.repeat(np.arange(len(start) - 1), np.diff(start))
    column = np.searchsorted(items, indices)
    here = (column < len(items)) & (items[np.minimum(column, len(items) - 1)] == indices)
    x = np.zeros((len(start) - 1, len(items)), np.uint8)
    x[row[here], column[here]] = 1
    y = (held["revenue"] > 300).astype(np.int64)
    names = held["country_names"][held["country"]]
    group = np.where(names == "United Kingdom", "UK", np.where(np.isin(names, _NEAR), "DE, FR, IE", "elsewhere"))
    customer = held["subject"]
    # A customer is in one part only: nobody is tested on whom the model has met.
    people = np.random.Generator(np.random.PCG64(11)).permutation(np.unique(customer))
    test = np.isin(customer, people[: len(people) // 5])
    order = np.random.Generator(np.random.PCG64(12)).permutation(np.flatnonzero(~test))
    data = _plain(name, x[order], y[order], x[test], y[test], customer[order])
    return replace(data, group=group[order], group_test=group[test])


_NEAR = ("Germany", "France", "EIRE")


def _adult(name: str, held: Any) -> Data:
    """People of the census, grouped by age; does one earn more than 50,000?"""

    def rows(part: str) -> tuple[Array, Array]:
        numbers, codes = held[f"x_num_{part}"].astype(np.float32), held[f"x_cat_{part}"]
        # Public constants, the same for everybody: a mean over the data would carry every point into every shard.
        scaled = numbers / np.array([40, 200_000, 10, 5000, 500, 40], np.float32)
        wide = [np.eye(int(size), dtype=np.float32)[codes[:, at]] for at, size in enumerate(sizes)]
        age = numbers[:, 0]
        return np.hstack([scaled, *wide]), np.where(age < 30, "under 30", np.where(age < 50, "30 to 49", "50 and over"))

    sizes = np.maximum(held["x_cat_train"].max(axis=0), held["x_cat_test"].max(axis=0)).astype(int) + 1
    (x, group), (x_test, group_test) = rows("train"), rows("test")
    data = _plain(name, x, held["y_train"], x_test, held["y_test"])
    return replace(data, group=group, group_test=group_test)


def _digits(name: str) -> Data:
    from sklearn.datasets import load_digits  # heavy

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) * 15).astype(np.uint8)
    return _plain(name, x[:1437], y[:1437], x[1437:], y[1437:])


def _synthetic_purchase(name: str) -> Data:
    """Customers with a taste of their own, who buy by it; the class is on which side of a plane the taste is."""
    random = np.random.Generator(np.random.PCG64(600))
    people, held, features, tastes = 250_000, 20_000, 600, 20
    loads = random.normal(size=(tastes, features)).astype(np.float32) * 0.5
    often = random.normal(-2.0, 1.0, features).astype(np.float32)
    x = np.empty((people + held, features), np.uint8)
    y = np.empty(people + held, np.int64)
    for begin in range(0, len(x), 10_000):
        taste = random.normal(size=(10_000, tastes)).astype(np.float32)
        chance = 1 / (1 + np.exp(-(taste @ loads + often)))
        x[begin : begin + 10_000] = random.random(chance.shape, np.float32) < chance
        y[begin : begin + 10_000] = taste[:, 0] + 0.5 * taste[:, 1] > 0.3
    return _plain(name, x[:people], y[:people], x[people:], y[people:])


def _synthetic_groups(name: str) -> Data:
    """The paper's three countries, whose people differ in what they buy."""
    random = np.random.Generator(np.random.PCG64(3))
    people, features = 30_000, 60
    country = random.choice(3, people, p=[0.7717, 0.1001, 0.1282])
    tilt = random.normal(size=(3, features)) * 0.5
    x = (random.normal(size=(people, features)) + tilt[country]).astype(np.float32)
    weight = random.normal(size=features) + 0.3 * tilt
    y = ((x * weight[country]).sum(axis=1) > 0).astype(np.int64)
    names = np.array(["c1", "c2", "c3"])[country]
    data = _plain(name, x[:24_000], y[:24_000], x[24_000:], y[24_000:])
    return replace(data, group=names[:24_000], group_test=names[24_000:])


_OWN: dict[str, Callable[[Path], formats.Split]] = {
    "mnist": formats.read_mnist,
    "svhn": formats.read_svhn,
    "cifar_10": lambda folder: formats.read_cifar(folder, 10),
    "cifar_100": lambda folder: formats.read_cifar(folder, 100),
    "purchase": formats.read_purchase,
    "mini_imagenet": lambda folder: _mixed(formats.read_images(folder, size=84)),
    # A size and a number that fit into the memory of a desk machine; `formats.read_images` takes others.
    "imagenet": lambda folder: _mixed(formats.read_images(folder, size=64, most=100)),
    # As large as images of CIFAR, for a base that these can be put on.
    "imagenet_32": lambda folder: _mixed(formats.read_images(folder, size=32, most=100)),
}
_SHARED: dict[str, Callable[[str, Any], Data]] = {
    "mnist": _images,
    "fashion_mnist": _images,
    "cifar10_20k": _images,
    "baskets600": _baskets,
    "location30": _location,
    "online_retail": _retail,
    "adult": _adult,
}
_MADE: dict[str, Callable[[str], Data]] = {
    "digits": _digits,
    "synthetic_purchase": _synthetic_purchase,
    "synthetic_groups": _synthetic_groups,
}
_TITLES = {
    "mnist": "MNIST",
    "svhn": "SVHN",
    "cifar_10": "CIFAR-10",
    "cifar_100": "CIFAR-100",
    "purchase": "Purchase",
    "mini_imagenet": "mini-ImageNet (84 × 84)",
    "imagenet": "ImageNet (100 per class, 64 × 64)",
    "imagenet_32": "ImageNet (100 per class, 32 × 32)",
    "fashion_mnist": "Fashion-MNIST (tested on a part of its training set)",
    "cifar10_20k": "CIFAR-10 (a third of it)",
    "baskets600": "baskets600 (shopping baskets × 600 products; simulated by their publisher from real ones)",
    "location30": "Location-30",
    "online_retail": "UCI Online Retail",
    "adult": "UCI Adult",
    "digits": "handwritten digits of 8 × 8 (scikit-learn)",
    "synthetic_purchase": "SYNTHETIC Purchase (made up, 250,000 × 600)",
    "synthetic_groups": "SYNTHETIC people of three countries (made up)",
}
