"""The planner: what it compares, what it recommends, and how it is asked from the shell."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unlearnd.cli import main
from unlearnd.errors import InputError
from unlearnd.layouts import Risk
from unlearnd.planner import Question, make_plan

COUNTRIES = (Risk("c1", 3e-6, 0.7717), Risk("c2", 3e-5, 0.1001), Risk("c3", 6e-6, 0.1282))


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def asked(*arguments: object) -> Any:
    said = plan(*arguments, "--json")
    assert said.exit_code == 0, said.output
    return json.loads(said.stdout)


@pytest.mark.parametrize(
    ("points", "requests", "formula", "exact"),
    [(250_000, 8, 4.41, 4.23), (604_833, 18, 2.46, 2.24), (128_545, 4, 8.01, 7.86), (1_281_167, 39, 1.72, 1.42)],
)
def test_with_everything_given_json_holds_the_papers_product_and_what_it_exactly_is(
    points: int, requests: int, formula: float, exact: float
) -> None:
    said = asked("--points", points, "--requests", requests, "--shards", 20, "--slices", 50)
    assert round(said["formula_speedup"], 2) == formula
    assert round(said["exact_speedup"], 2) == exact
    assert said["options"][0]["speedup"] == pytest.approx(said["exact_speedup"])


def test_without_all_four_there_is_no_product_to_give() -> None:
    said = asked("--points", 250_000, "--requests", 8)
    assert said["formula_speedup"] is None
    assert said["exact_speedup"] is None
    assert len({(o["shards"], o["slices"]) for o in said["options"]}) == 12


def test_the_recommendation_is_one_sentence_about_a_row_of_the_table() -> None:
    said = plan("--points", 250_000, "--requests", 8)
    assert said.exit_code == 0
    table = said.stdout.splitlines()
    assert sum(" *" in line for line in table) == 1
    assert table[-1].startswith("Take 20 shards of 10 slices: an erasure retrains 76,413 samples on average, ")
    assert table[-1].endswith(".")
    made = make_plan(Question(250_000, 8))
    assert made.recommended in made.options
    # It costs at most 5 % more than the best that keeps accuracy in sight, and needs the fewest checkpoints for that.
    sound = [option for option in made.options if option.shards <= 20]
    least = min(option.samples_per_erasure for option in sound)
    near = [option for option in sound if option.samples_per_erasure <= 1.05 * least]
    assert made.recommended.checkpoints == min(option.checkpoints for option in near)


def test_with_prices_the_cheapest_month_is_recommended() -> None:
    dear_storage = Question(
        250_000, per_day=0.1, every=7, state_bytes=1e9, samples_per_second=1e5, compute_price=0.1, storage_price=1.0
    )
    made = make_plan(dear_storage)
    assert made.recommended.money == min(o.money for o in made.options if o.money is not None and o.shards <= 20)
    assert made.recommended.checkpoints == 5
    first = made.options[0]
    hours = 30 / 7 * first.samples_per_erasure * 0.7 / 1e5 / 3600
    assert first.money == pytest.approx(hours * 0.1 + first.checkpoints * 1.0)
    dear_compute = make_plan(
        Question(250_000, per_day=5, state_bytes=1e5, samples_per_second=100, compute_price=9.0, storage_price=0.02)
    )
    assert dear_compute.recommended.shards == 20
    assert dear_compute.recommended.kept is None


def test_priors_bring_placements_by_risk_and_the_gains_they_have() -> None:
    made = make_plan(Question(604_833, 1, shards=20, slices=50, risks=COUNTRIES))
    by = {o.placement: o for o in made.options if o.kept is None}
    gains = {name: round(by["uniform"].samples_per_erasure / o.samples_per_erasure, 2) for name, o in by.items()}
    assert gains == {
        "uniform": 1.0,
        "aware": 1.67,
        "aware-algorithm-1": 1.0,
        "aware-both": 1.01,
        "aware-square-root": 1.26,
    }
    assert made.recommended.placement == "aware"
    equal_work = make_plan(Question(604_833, 1, shards=20, slices=50, risks=COUNTRIES, schedule="equal-work"))
    best = min(o.samples_per_erasure for o in equal_work.options)
    assert by["uniform"].samples_per_erasure / best == pytest.approx(2.33, abs=0.01)


def test_scattered_points_of_a_user_count_as_that_many_requests() -> None:
    together, scattered = (
        make_plan(Question(604_833, 1, shards=20, slices=50, points_each=10, scattered=s)).options[0]
        for s in (False, True)
    )
    assert scattered.samples_per_erasure / together.samples_per_erasure == pytest.approx(8.5, abs=0.2)


def test_more_requests_than_shards_can_take_are_called_by_their_name() -> None:
    assert "hardly less" in make_plan(Question(250_000, 500)).sentence
    assert "though more than 20 shards" in make_plan(Question(250_000, 5, shards=100, slices=10)).sentence


def test_a_live_store_plans_with_what_it_measured(
    new_store: Callable[..., Any], people: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    store = new_store()
    add(store, people(), shards=3, slices=4)
    built = fit(store)
    known = store.planning_facts("m")
    assert (known.points, known.shards, known.slices) == (120, 3, 4)
    assert known.samples_per_second == pytest.approx(built.samples / built.seconds)
    sizes = [checkpoint.size for checkpoint in store.checkpoints("m")]
    assert known.state_bytes == pytest.approx(sum(sizes) / len(sizes))
    said = asked("--store", store.folder, "--model", "m", "--requests", 2, "--compute-price", 1, "--storage-price", 1)
    assert said["question"]["samples_per_second"] == known.samples_per_second
    assert said["recommended"]["money"] > 0
    # What is given goes before what is known.
    assert asked("--store", store.folder, "--model", "m", "--slices", 2)["options"][0]["slices"] == 2


@pytest.mark.parametrize(("name", "magic"), [("plan.png", b"\x89PNG"), ("plan.SVG", b"<?xml")])
def test_a_plot_is_drawn_as_png_or_svg(tmp_path: Path, name: str, magic: bytes) -> None:
    file = tmp_path / name
    said = plan("--points", 50_000, "--requests", 5, "--risk", "a=0.1:0.2", "--risk", "b=0.01", "--plot", file)
    assert said.exit_code == 0, said.output
    assert file.read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if magic == b"<?xml":
        drawn = file.read_text()
        assert "<svg" in drawn
        assert len(drawn) > 20_000


def test_without_matplotlib_a_plot_is_refused_in_one_sentence_and_the_rest_works(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from unlearnd.cli import main\n"
        "main(['plan', '--points', '1000', *sys.argv[1:]])"
    )

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)

    refused = run("--plot", str(tmp_path / "a.png"))
    assert refused.returncode == 1
    assert refused.stderr == "unlearnd: plots need matplotlib, which is not installed: pip install 'unlearnd[plot]'\n"
    assert run().returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "give --points"),
        (["--points", "many"], 2, "not a valid integer"),
        (["--points", 1], 1, "at least 2 points"),
        (["--points", 100, "--shards", 101], 1, "101 shards of 1 slices cannot be made of 100 points"),
        (["--points", 100, "--shards", 0], 1, "at least 1"),
        (["--points", 10**9, "--shards", 10**4, "--slices", 10**4], 1, "slices in all shards"),
        (["--points", 100, "--requests", 100], 1, "would erase all"),
        (["--points", 100, "--requests", -1], 1, "requests must be more than 0"),
        (["--points", 100, "--requests", "nan"], 1, "requests must be more than 0"),
        (["--points", 100, "--requests", 1, "--requests-per-day", 1], 1, "not both"),
        (["--points", 100, "--schedule", "lazy"], 1, "no schedule 'lazy'"),
        (["--points", 100, "--keep", "few"], 1, "keep takes a number"),
        (["--points", 100, "--keep", 0], 1, "keep at least 1"),
        (["--points", 100, "--slices", 5, "--keep", 6], 1, "not more than it has slices"),
        (["--points", 100, "--slices", 3000, "--keep", 6], 1, "cannot be thinned"),
        (["--points", 100, "--compute-price", 1], 1, "needs samples per second"),
        (["--points", 100, "--storage-price", 1], 1, "needs the size of a state"),
        (["--points", 100, "--risk", "a=2"], 1, "from 0 to 1"),
        (["--points", 100, "--risk", "a=x"], 1, "the risk of 'a' must be"),
        (["--points", 100, "--risk", "a=0.1:0.2:0.3"], 1, "the risk of 'a' must be"),
        (["--points", 100, "--risk", "nowhere.json"], 1, "there is no file 'nowhere.json'"),
        (["--points", 100, "--plot", "plan.pdf"], 1, "a plot is a .png or .svg file"),
        (["--points", 100, "--plot", "no/such/folder/plan.svg"], 1, "cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(arguments: list[Any], code: int, says: str) -> None:
    said = plan(*arguments)
    assert said.exit_code == code, said.output
    assert says in said.stderr
    assert "Traceback" not in said.output


def test_risks_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "risks.json"
    file.write_text('{"ca": 0.01, "eu": [0.2, 0.3]}')
    said = asked("--points", 1000, "--risk", file)
    assert said["question"]["risks"] == [
        {"group": "ca", "probability": 0.01, "share": None},
        {"group": "eu", "probability": 0.2, "share": 0.3},
    ]
    for wrong in ("[1]", "{", '{"a": true}', '{"a": [1]}x'):
        file.write_text(wrong)
        assert plan("--points", 1000, "--risk", file).exit_code == 1


def test_probabilities_come_from_a_policy_and_shares_from_the_command_line(
    new_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store()
    folder = store.folder / "policies"
    folder.mkdir(exist_ok=True)
    (folder / "ours.yaml").write_text(
        "apiVersion: unlearnd.policy/v1\nid: ours\nextends: gdpr\nversion: '1'\ntitle: ours\nnot_legal_advice: true\n"
        "law: {reviewed_on: 2026-11-01}\n"
        "placement: {erasure_probability: {ca: 0.01, eu: 0.2}, cite: our own requests of last year}\n"
    )
    given = ("--store", store.folder, "--points", 1000, "--policy", "ours")
    assert [r["probability"] for r in asked(*given)["question"]["risks"]] == [0.01, 0.2]
    said = asked(*given, "--risk", "eu=:0.3", "--risk", "us=0.05")["question"]["risks"]
    assert {r["group"]: (r["probability"], r["share"]) for r in said} == {
        "eu": (0.2, 0.3),
        "us": (0.05, None),
        "ca": (0.01, None),
    }
    monkeypatch.chdir(store.folder.parent)
    noted = plan("--points", 1000, "--policy", "gdpr", "--json")
    assert noted.exit_code == 0
    assert "states no erasure probabilities" in noted.stderr
    assert {option["placement"] for option in json.loads(noted.stdout)["options"]} == {"uniform"}
    assert plan("--points", 1000, "--policy", "nowhere").exit_code == 1


def test_a_question_without_sense_is_refused_by_the_library_too() -> None:
    with pytest.raises(InputError, match="epochs"):
        make_plan(Question(100, epochs=float("inf")))
