"""The contract for backends can be kept, and each of its rules can be broken alone.

The backends of `tests/contract/broken_backends.py` go through `unlearnd.testing.BackendContract` in a pytest of
their own; what fails there is compared with what each is broken in. Ours go through it here and in `plugins/`.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest

from unlearnd.default_plugins.linear import LinearBackend
from unlearnd.testing import BackendContract

BROKEN = Path(__file__).parent / "contract" / "broken_backends.py"
RULES = {name for name in vars(BackendContract) if name.startswith("test_")}

TESTS = """
import broken_backends, pytest
from unlearnd.testing import BackendContract

def contract_for(kind):
    class Contract(BackendContract):
        @pytest.fixture
        def backend(self):
            return kind()
    return Contract

for name, kind in list(vars(broken_backends).items()):
    if isinstance(kind, type) and issubclass(kind, broken_backends.Good):
        globals()[f"Test{name}"] = contract_for(kind)
"""

# What the author of each is told to mend.
ADVICE = {
    "NearlyTrue": "`sliceable` must be True or False, it is 1",
    "TupleInSettings": "return lists instead of tuples",
    "IgnoresWhatItDoesNotKnow": "names the setting 'no_such_setting'",
    "RaisesWhateverComes": "it raised TypeError: float() argument must be a string or a real number",
    "TakesAnyDevice": "must raise InputError for a device that is not there",
    "NumberInState": "returns 0 as 'steps': a state holds numpy arrays",
    "WritesToWhatItIsGiven": "copy arrays before changing them (differs: mean)",
    "OneSeedForAll": "derive every random stream from `job.seed`",
    "LooksAtAddresses": "begins on a 64-byte boundary",
    "FirstComesFirst": "depends on what was trained before it: keep nothing on the backend",
    "OddOneOut": "`train_many` gives other bits than `train`",
    "TellsTotals": "samples since the last call, not in total",
    "CannotBeStopped": "let whatever it raises pass",
    "LosesAnAxis": "keep all three axes",
    "CountsNothing": "return `job.state` when there are none",
    "DividesByZero": "guard divisions by a spread or a count of zero",
    "WantsTwoClasses": "train on 20 points raised ValueError: the number of classes has to be greater than one",
    "DropsSmallBatches": "train the last batch of an epoch however small it is",
    "KeepsMomentumToItself": "must be in the state, not kept on the backend",
    "KeepsMomentumInTheProcess": "must be in the state, not kept on the backend",
    "CachesByTheWrongName": "outlived them outside the state",
    "LooksAtOneDifferently": "`features` have other bits when computed one at a time",
}


class TestLinear(BackendContract):
    @pytest.fixture
    def backend(self):
        return LinearBackend()


def breaks_of_each() -> dict[str, set[str]]:
    """Return what every backend of the file says it is broken in."""
    named: dict[str, object] = {}
    exec(BROKEN.read_text(), named)
    good = named["Good"]
    assert isinstance(good, type)
    kinds = [kind for kind in named.values() if isinstance(kind, type) and issubclass(kind, good)]
    return {kind.__name__: set(kind.breaks) for kind in kinds}


def run_contract(folder: Path, code: str) -> dict[str, dict[str, str]]:
    """Run tests in a pytest of their own where `broken_backends` is an installed plugin; return what failed and how."""
    site = folder / "site"
    about = site / "broken_backends-1.dist-info"
    about.mkdir(parents=True)
    (site / "broken_backends.py").write_text(BROKEN.read_text())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-backends\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[unlearnd]\nbroken = broken_backends\n")
    (folder / "test_broken.py").write_text(code)
    report = folder / "report.xml"
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_broken.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert report.exists(), said.stdout + said.stderr
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)
    for case in ET.parse(report).getroot().iter("testcase"):
        who, rule = case.attrib["classname"].split(".Test")[1], case.attrib["name"].partition("[")[0]
        assert case.find("error") is None, f"{who}, {rule}: an error, not a failure\n{said.stdout[-3000:]}"
        failure, skipped = case.find("failure"), case.find("skipped")
        if failure is not None:
            outcomes[who][rule] = f"{failure.attrib['message']}\n{failure.text}"
        else:
            outcomes[who][rule] = "skipped" if skipped is not None else ""
    return outcomes


def test_each_broken_backend_fails_exactly_the_rule_it_breaks_and_is_told_what_to_mend(tmp_path: Path) -> None:
    outcomes = run_contract(tmp_path, TESTS)
    expected = breaks_of_each()
    failed = {
        who: {rule for rule, how in rules.items() if how not in ("", "skipped")} for who, rules in outcomes.items()
    }
    assert failed == expected
    for who, advice in ADVICE.items():
        (rule,) = expected[who]
        assert advice in re.sub(r"\s+", " ", outcomes[who][rule]), f"{who}: {outcomes[who][rule]}"
    # Every rule is somebody's only fault, and every fault comes with advice.
    alone = [rules for rules in expected.values() if len(rules) == 1]
    assert set().union(*alone) == RULES
    assert ADVICE.keys() == {who for who, rules in expected.items() if len(rules) == 1}

    def skipped(who: str) -> set[str]:
        return {rule for rule, how in outcomes[who].items() if how == "skipped"}

    # Only what cannot be asked is skipped: a kill needs an installed backend, comparisons a deterministic one.
    # And features are asked of those who make some.
    kill, seen = "test_a_build_goes_on_after_a_kill_at_each_slice", "test_features_depend_on_the_point_alone"
    assert skipped("Good") == skipped("GoodWhole") == {kill, seen}
    assert skipped("GoodOnFeatures") == {kill}
    assert skipped("KeepsMomentumInTheProcess") == {seen}
    assert skipped("GoodGuess") == {
        kill,
        seen,
        "test_the_seed_decides_what_is_drawn",
        "test_where_points_lie_in_memory_changes_nothing",
        "test_constituents_share_nothing",
        "test_erasing_gives_the_bits_of_a_store_that_never_met_them",
    }


def test_a_contract_without_a_backend_says_what_is_missing(tmp_path: Path) -> None:
    code = "from unlearnd.testing import BackendContract\nclass TestNothing(BackendContract):\n    pass\n"
    (tmp_path / "test_nothing.py").write_text(code)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "test_nothing.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "define a fixture `backend` in the subclass that returns a new instance of your backend" in ended.stdout


def test_the_core_needs_no_pytest() -> None:
    code = "import sys, unlearnd.cli, unlearnd.store, unlearnd.plugins; unlearnd.plugins.load_plugins()\n"
    subprocess.run([sys.executable, "-c", code + "sys.exit('pytest' in sys.modules)"], check=True)
