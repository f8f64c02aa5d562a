"""`unbroken why` tells the run's lives, and what the engine would choose now without claiming anything."""

import shutil

import pytest
from cli_roots import Life, flip, reseal, run, snapshot

from unbroken import _engine


def test_each_life_says_what_it_went_on_from_and_left_behind(root, names):
    document = run("why", root, "--json").json
    lives = {life["generation"]: life for life in document["generations"]}
    assert [life["origin"]["kind"] for life in lives.values()] == ["fresh", "attempt", "attempt"]
    assert lives[2]["origin"]["attempt"] == names["20"]
    assert lives[2]["origin"]["step"] == 20
    assert [life["orphaned"] for life in lives.values()] == [[], [names["30"]], []]
    assert [life["host"] for life in lives.values()] == ["node-1", "node-2", "node-3"]
    assert lives[1]["saved"] == [names["30"], names["20"], names["10"]]
    assert lives[3]["saved"] == [names["40"]]
    assert len({life["life_id"] for life in lives.values()}) == 3
    assert {life["run_id"] for life in lives.values()} == {document["run_id"]}


def test_the_text_tells_the_same(root, names):
    answer = run("why", root)
    assert answer.code == 0
    first, second, third = answer.out.split("\n\n")[1:4]
    assert "started fresh, at step 0" in first
    assert f"went on from step 20 ({names['20']})" in second
    assert f"left behind {names['30']}" in second
    assert "host node-2  1 rank " in second
    assert f"saved {names['40']}: complete" in third
    assert answer.out.endswith(f"a start now would go on from step 40 ({names['40']}), the newest checkpoint\n")


def test_an_orphan_belongs_to_the_first_life_that_left_it(root, names):
    Life(root, step=10).settle()
    lives = {life["generation"]: life["orphaned"] for life in run("why", root, "--json").json["generations"]}
    assert lives == {1: [], 2: [names["30"]], 3: [], 4: [names["40"], names["25"], names["20"]]}


def test_refusals_are_told_with_their_reasons(root, names):
    Life(root).settle("damaged", "bytes 0 to 4 differ")
    document = run("why", root, "--json").json
    assert document["generations"][-1]["refused"] == [{"attempt": names["40"], "reason": "rank 0: bytes 0 to 4 differ"}]
    assert f"refused {names['40']}: rank 0: bytes 0 to 4 differ" in run("why", root).out


def damage_nothing(root, names):
    pass


def lose_a_shard(root, names):
    (root / names["40"] / "__0_0.distcp").unlink()


def lose_the_marker(root, names):
    (root / names["40"] / ".metadata").unlink()


def retire_the_newest(root, names):
    (root / names["40"] / "retired").touch()


def lose_the_two_newest(root, names):
    flip(root / names["40"] / "manifest.json", 60)
    shutil.rmtree(root / names["25"])


def spoil_a_record(root, names):
    flip(root / "generations" / "000002.json", 40)


def lose_the_last_record(root, names):
    (root / "generations" / "000003.json").unlink()


@pytest.mark.parametrize(
    "harm",
    [
        damage_nothing,
        lose_a_shard,
        lose_the_marker,
        retire_the_newest,
        lose_the_two_newest,
        spoil_a_record,
        lose_the_last_record,
    ],
)
def test_the_next_start_does_what_why_foretold(root, names, harm):
    harm(root, names)
    foretold = run("why", root, "--json").json["next_start"]
    start = Life(root).start
    assert foretold["outcome"] == "attempt"
    assert foretold["attempt"] == start.attempt
    assert foretold["step"] == start.step
    assert foretold["generation"] == start.generation


def test_a_fresh_start_is_foretold(tmp_path):
    Life(tmp_path / "run").settle()
    foretold = run("why", tmp_path / "run", "--json").json["next_start"]
    assert foretold["outcome"] == "fresh"
    assert Life(tmp_path / "run").start.fresh


def spoil_all(root, names):
    for name in names.values():
        flip(root / name / "manifest.json", 60)


def lose_all_attempts(root, names):
    for name in names.values():
        shutil.rmtree(root / name)


def lose_all_records(root, names):
    for record in (root / "generations").iterdir():
        record.unlink()


def make_the_newest_newer(root, names):
    reseal(root / names["40"] / "manifest.json", lambda body: body.update(format=99))


@pytest.mark.parametrize("harm", [spoil_all, lose_all_attempts, lose_all_records, make_the_newest_newer])
def test_a_start_that_would_fail_is_foretold(root, names, harm):
    harm(root, names)
    answer = run("why", root)
    assert answer.code == 1
    assert "a start now would stop with an error" in answer.out
    assert ("allow_fresh" in answer.hints()[0]) == (harm is not make_the_newest_newer)
    with pytest.raises((_engine.NotFoundError, _engine.UnsupportedError)):
        Life(root)


def test_a_record_that_cannot_be_read_is_shown_as_such(root, names):
    flip(root / "generations" / "000002.json", 40)
    answer = run("why", root)
    assert answer.code == 0
    assert "generation 2  its record cannot be read: " in answer.out
    assert "generations/000002.json" in answer.out
    life = run("why", root, "--json").json["generations"][1]
    assert life["readable"] is False
    assert life["origin"] is None
    assert life["saved"] == [names["25"]]


def test_attempts_of_lives_without_a_record_are_told_apart(root, names):
    (root / "generations" / "000003.json").unlink()
    assert f"of no life that has a record here\n  {names['40']}: orphan" in run("why", root).out


def test_passed_over_ones_are_named_with_reasons(root, names):
    (root / names["40"] / "__0_0.distcp").unlink()
    (line,) = run("why", root, "--json").json["next_start"]["passed_over"][:1]
    assert names["40"] in line
    assert "damaged" in line
    assert "__0_0.distcp is missing" in line


def test_nothing_is_claimed(root):
    before = snapshot(root)
    assert run("why", root).code == 0
    assert snapshot(root) == before
