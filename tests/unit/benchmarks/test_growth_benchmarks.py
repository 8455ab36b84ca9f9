"""Steps without a plan and their parts, the floor of a step, its growth, loss curves, and files of results."""

import argparse
import json
import math
from dataclasses import replace

import pytest
import torch
from benchmarks import accuracy, convergence, floor, growth, resumable
from benchmarks.peer_rows import ROWS
from benchmarks.row import row_parser
from benchmarks.shapes import random_model
from benchmarks.step import Loop
from tests.unit.planner.test_accuracy import FITTED, RUNS

import megatrain as mt
from megatrain.compute.compiled import Compiled

ROW = replace(ROWS["tiny"], layers=1, length=8)


@pytest.fixture(autouse=True)
def default_settings():
    """Rows set the limits of the process."""
    yield
    mt.init()


def model():
    return random_model("tiny", torch.bfloat16, num_hidden_layers=1).train()


def weights(loop):
    return [parameter.detach().clone() for parameter in loop.model.parameters()]


# ---- a loop


def test_a_step_is_timed_in_parts():
    loop = Loop(model(), 1, 8, (2, 1), plan=None)
    timed = loop.timed(steps=2, warm=1)
    assert len(timed) == 2
    assert all(min(forward, backward) > 0 and forward + backward <= whole for forward, backward, whole in timed)
    assert len(loop.step()) == 3
    assert next(iter(loop.optimizer.state_dict()["state"].values()))["step"] == 4
    loop.engine.close()


def test_without_updates_nothing_changes_and_nothing_is_left():
    loop = Loop(model(), 1, 8, (2,), updates=False, plan=None, held_weights=["*"], held_gradients=["*"])
    before = weights(loop)
    copied = loop.engine.counters.bytes_h2d
    first, second = (torch.stack(loop.step()) for _ in range(2))
    assert torch.equal(first, second)
    assert all(map(torch.equal, before, weights(loop)))
    assert loop.engine.grad_norm() == 0
    # Weights come in once, and nothing goes out.
    assert loop.engine.counters.bytes_h2d - copied == sum(slab.layout.nbytes for slab in loop.engine.slabs)
    assert loop.engine.counters.bytes_d2h == 0
    loop.engine.close()


# ---- the floor


def test_copies_in_are_what_a_forward_fetches():
    engine = mt.Engine(model(), device="cpu", debug=mt.Debug(slots=1))
    ids = torch.zeros(1, 8, dtype=torch.long)
    engine.model(input_ids=ids, labels=ids)
    assert floor.copied_in(engine.slabs, 1) == engine.counters.bytes_h2d
    assert floor.copied_in(engine.slabs, 3) == 3 * engine.counters.bytes_h2d
    engine.close()


@pytest.mark.parametrize("streamed", [(), ("*",)], ids=["weights", "states"])
def test_copies_in_of_held_weights_are_what_a_step_brings_in(streamed):
    trained = model()
    trained.model.embed_tokens.requires_grad_(False)
    loop = Loop(trained, 1, 8, (2,), plan=None, held_weights=["*"], held_gradients=["*"], streamed_states=streamed)
    loop.step()
    before = loop.engine.counters.bytes_h2d
    loop.step()
    brought = loop.engine.counters.bytes_h2d - before
    # The engine counts the gaps between states too.
    assert floor.copied_in(loop.engine.slabs, 5) == pytest.approx(brought, rel=0.01)
    loop.engine.close()


@pytest.fixture
def in_this_process(monkeypatch):
    # A forked process cannot compute if this one has, with several threads.
    monkeypatch.setattr(floor, "in_child", lambda work: json.loads(resumable._result(work)))
    monkeypatch.setattr(floor, "probed", lambda options: accuracy.ESTIMATED)


def test_a_row_and_its_floor(in_this_process):
    found = floor.floor_of(ROW, 1)
    assert sum(found["windows"]) == ROW.micro
    assert len(found["all_updates"]) == floor.UPDATES
    assert found["copies"] == found["bytes_in"] / accuracy.ESTIMATED.h2d
    assert found["floor"] == found["backward"] + max(found["forward"], found["update"], found["copies"])
    assert found["ratio"] == found["seconds"] / found["floor"]
    assert floor.line({"row": "tiny"} | found).count("|") == floor.HEADER.splitlines()[0].count("|")


def test_compute_alone_has_the_graphs_of_the_trainer(in_this_process, announced, monkeypatch):
    trained, computed = {}, {}
    sizes, found = Compiled._class_of, trained

    def seen(compiled, shapes):
        found[shapes] = key, _, planned = sizes(compiled, shapes)
        assert planned
        return key, found[shapes][1], planned

    def alone(*args):
        nonlocal found
        found = computed
        return plain(*args)

    plain = floor.computed
    monkeypatch.setattr(Compiled, "_class_of", seen)
    monkeypatch.setattr(floor, "computed", alone)
    floor.floor_of(ROW, 1, compiled=True)
    assert computed == trained != {}
    compiled = [text.split(" in ")[0] for text in announced.messages if text.startswith("compiled ")]
    assert compiled == ["compiled LlamaDecoderLayer for batches of 2 × 8"] * 2


def test_a_part_that_fails_fails_the_row(monkeypatch):
    def refused(options):
        raise ValueError("no machine")

    monkeypatch.setattr(floor, "probed", refused)
    with pytest.raises(RuntimeError, match="ValueError: no machine"):
        floor.floor_of(ROW, 1)
    assert "failed: no" in floor.line({"row": "tiny", "failed": "no"})


def test_compute_alone_has_the_plans_policies_but_offloads_nothing(monkeypatch):
    chosen = {}

    class Told(Exception):
        pass

    def loop(*_, **settings):
        chosen.update(settings)
        raise Told

    plan = mt.plan(model(), machine=accuracy.ESTIMATED, batch=2, length=8)
    monkeypatch.setattr(floor, "Loop", loop)
    with pytest.raises(Told):
        floor.computed(ROW, 1, replace(plan, policy={"a": "store", "*": "offload"}))
    assert chosen["policy"] == {"a": "store", "*": "recompute"}
    assert not chosen["updates"]


# ---- growth


def test_a_point_has_its_step_and_its_attention(monkeypatch):
    monkeypatch.setattr(growth, "SECONDS", 0.001)
    row = replace(ROW, layers=2)
    monkeypatch.setattr(growth, "attention", lambda row, device: (2.0, 5.0))
    found = growth.measured(row, 1)
    assert found["seconds"] == found["all_seconds"][0] > 0
    assert found["attention"] == 2 * 2 * (2 * 2.0 + 5.0)
    monkeypatch.undo()
    monkeypatch.setattr(growth, "SECONDS", 0.001)
    assert min(growth.attention(row, torch.device("cpu"))) > 0


def test_exponents():
    one = {"row": "one", "seconds": 3.0, "attention": 1.0, "products": 1e12}
    two = {"row": "two", "seconds": 12.0, "attention": 8.0, "products": 2e12}
    assert growth.line(one, None) == "| one | 3 | 0.333 | 1 | 2 |  |  |"
    assert growth.line(two, one) == "| two | 12 | 0.167 | 8 | 4 | 1.000 | 2.000 |"
    assert math.isnan(growth.exponent(-1.0, 1.0, one, two))


def test_series_reach_their_sizes_and_a_point_fits_into_a_call():
    assert [row.layers for row in growth.SERIES["depth"]] == [14, 28, 56]
    for name in ("tokens", "length"):
        assert [growth.SERIES[name][0].tokens, growth.SERIES[name][-1].tokens] == [4096, 262144]
    assert all(growth.expected(rows[-1], 3) < 600 for rows in growth.SERIES.values())


# ---- the planner's unseen rows


def test_unseen_rows_were_not_fitted():
    unseen = [row_parser(None).parse_args(row) for row in accuracy.GROUPS["unseen"]]
    rows = [RUNS[commit]["rows"][number] for commit, number in FITTED]
    fitted = {(row["shape"], row.get("length", 2048)) for row in rows}
    assert len(unseen) >= 5
    assert all(options.trainer and options.compile for options in unseen)
    assert not fitted & {(options.shape, options.length) for options in unseen}


# ---- loss curves


def test_the_curve_of_an_engine_lies_over_that_of_plain_pytorch(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convergence, "HELD_OUT_BATCHES", 1)
    sizes = ["--steps", "4", "--seeds", "1", "--length", "16", "--batch", "2"]
    convergence.main([*sizes, "--only", "fp32", "plain", "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    (plain,), (ours,) = found["plain"], found["fp32"]
    assert len(plain["losses"]) == 4
    assert convergence.apart(plain["losses"], ours["losses"]) < 1e-5
    assert ours["held_out"] == pytest.approx(plain["held_out"], rel=1e-5)
    assert found["about"]["versions"]["torch"] == torch.__version__
    lines = capsys.readouterr().out.splitlines()
    assert [text.split()[0] for text in lines[:2]] == ["plain", "fp32"]
    # What is loaded is not run again.
    loaded = ["--load", str(tmp_path / "out.json"), "--only", "plain", "fp32"]
    convergence.main([*sizes, *loaded, "--picture", str(tmp_path / "curves.svg")])
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 2


def test_the_distance_of_curves_is_that_of_their_means():
    flat, bump = [1.0] * 100, [1.0] * 50 + [2.0] + [1.0] * 49
    assert convergence.apart(bump, flat) == pytest.approx(1 / 5)


# ---- files of results


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable, "LOADED", ())
    parser = argparse.ArgumentParser()
    resumable.add_options(parser)
    return lambda *more: parser.parse_args(["--resume", str(tmp_path / "rows.jsonl"), "--commit", "abc", *more])


def task(name, value, seconds=1.0):
    return resumable.Task(name, seconds, lambda: {"value": value})


def test_finished_rows_are_kept_with_where_they_ran(options):
    args = options()
    (first,) = resumable.results([task("a", 1)], args)
    assert (first["row"], first["value"], first["commit"], first["gpu"]) == ("a", 1, "abc", "no GPU")
    assert resumable.place(first).startswith("no GPU, 20")
    again = [*resumable.results([task("a", 2), task("b", 3)], args)]
    assert [found["value"] for found in again] == [1, 3]
    assert len(args.resume.read_text().splitlines()) == 2


def test_rows_beyond_the_budget_are_left(options, capsys):
    found = [*resumable.results([task("a", 1, 100.0), task("b", 2, 5.0)], options("--budget", "50"))]
    assert [each["row"] for each in found] == ["b"]
    assert "Left for the next call: a (about 100 s)." in capsys.readouterr().out


def test_a_row_that_fails_is_not_kept(options):
    def fails():
        raise ValueError("too small")

    args = options()
    (found,) = resumable.results([resumable.Task("a", 1.0, fails)], args)
    assert found == {"row": "a", "failed": "ValueError: too small"}
    assert args.resume.read_text() == ""


def test_a_broken_line_is_named(options):
    args = options()
    args.resume.write_text('{"row": "a"}\n{"value": 1}\n')
    with pytest.raises(SystemExit, match=r"line 2 of .*rows.jsonl is not a record"):
        [*resumable.results([], args)]
