"""`benchmarks.peers` trains a row as each peer does, resumes, keeps to its budget, and reports."""

import json
import math
import os
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import replace
from xml.etree import ElementTree

import psutil
import pytest
from benchmarks import peer_report, peer_steps, peers
from benchmarks.peer_rows import ROWS, ZERO3_BYTES, ZERO3_SPARE, flops, row_of, zero3_layers
from benchmarks.row import WARM
from tests.unit.planner.made_up import cpu_only

TINY = replace(ROWS["tiny"], length=16)
SVG = "{http://www.w3.org/2000/svg}"
GIB = 1 << 30


def run(arguments, capsys):
    """Run the rows of a command line. Returns what it prints."""
    args = peers.parsed(arguments)
    peers.run_pairs(args.rows, args.peers, args)
    return capsys.readouterr().out


def command(result, before=""):
    """A peer that prints a result."""
    return shlex.join([sys.executable, "-c", f"{before}\nprint('starting')\nprint({json.dumps(result)!r})"])


def record(row, peer, seconds, **more):
    found = {"row": row, "peer": peer, "title": ROWS[row].title(), "work": ROWS[row].work(), "ram_gib": 5.0,
             "vram_gib": 9.0, "date": "2030-01-02 03:04", "commit": "abc", "gpu": "a GPU"}  # fmt: skip
    return found | peers.rates(ROWS[row], {"all_seconds": seconds} if seconds else {"failed": ""}) | more


# ---- the peers


def test_plain_pytorch_trains_the_same_with_and_without_checkpointing():
    eager, stored = (peer_steps.run(name, TINY, steps=2) for name in ("eager", "stored"))
    assert len(eager["losses"]) == WARM + 2
    assert len(eager["all_seconds"]) == len(stored["all_seconds"]) == 2
    assert eager["losses"] == stored["losses"]
    assert (eager["config"]["checkpointing"], stored["config"]["checkpointing"]) == (True, False)
    assert "no FP32 master" in eager["config"]["numerics"]


def test_ours_trains_through_the_trainer_with_its_own_plan():
    trained = peer_steps.ours(TINY, 2, cpu_only())
    # Random tokens on random weights: about the logarithm of the vocabulary.
    assert trained.losses == pytest.approx([math.log(512)], abs=0.2)
    assert len(trained.seconds) == 2
    assert {"compute", "h2d", "d2h", "update"} <= set(trained.lanes)
    assert trained.lanes["h2d"]["gb_per_s"] > 0
    assert set(trained.lanes["compute"]) == {"busy", "waited"}
    assert sum(trained.config["plan"]["windows"]) == TINY.micro
    assert "policy" in trained.config["settings"]


def test_a_peer_runs_in_a_process_of_its_own(tmp_path, capsys):
    file = tmp_path / "peers.jsonl"
    once = ["--steps", "1", "--limit", "3600"]  # a machine that is busy takes its time
    text = run(["tiny", "--peers", "eager", *once, "--resume", str(file), "--commit", "abc"], capsys)
    (found,) = map(json.loads, file.read_text().splitlines())
    assert found["seconds"] == found["all_seconds"][0]
    assert found["tokens"] == 2 * 2 * 64
    assert found["tokens_per_second"] == 256 / found["seconds"]
    assert found["ram_gib"] > 0.1
    assert found["versions"]["torch"]
    assert found["commit"] == "abc"
    assert "plain PyTorch, checkpointing" in text


# ---- running, resuming, failing


def test_finished_pairs_are_skipped_and_failed_ones_on_request(tmp_path, capsys):
    file = tmp_path / "peers.jsonl"
    common = ["tiny", "--peers", "upstream", "--resume", str(file), "--upstream-command"]
    assert "it ended with: ValueError: no" in run([*common, command({}, "raise ValueError('no')")], capsys)
    good = command({"all_seconds": [3.0, 1.0, 2.0]})
    assert "ValueError: no" in run([*common, good], capsys)
    assert len(file.read_text().splitlines()) == 1
    assert "| 2 |" in run([*common, good, "--retry"], capsys)
    assert "| 2 |" in run([*common, command({"all_seconds": [9.0]})], capsys)
    assert [json.loads(text).get("seconds") for text in file.read_text().splitlines()] == [None, 2.0]


def test_a_command_gets_the_row(tmp_path, capsys):
    read = "import json, os; row = json.loads(os.environ['PEERS_ROW']); assert (row['batch'], row['steps']) == (2, 7)"
    arguments = ["tiny", "--peers", "upstream", "--steps", "7", "--upstream", str(tmp_path), "--upstream-command"]
    within = f"{read}; assert os.getcwd() == {str(tmp_path)!r}"
    assert "| 4 |" in run([*arguments, command({"all_seconds": [4.0]}, within)], capsys)


def test_the_others_go_on_after_one_that_fails(tmp_path, capsys):
    (tmp_path / "deepspeed.py").write_text("raise ImportError('no kernels\\nmore')\n")
    arguments = ["tiny", "--peers", "zero3,upstream", "--upstream-command", command({"all_seconds": [2.0]})]
    text = run([*arguments, "--peer-path", str(tmp_path)], capsys)
    assert "| DeepSpeed ZeRO-3 offload | ImportError: no kernels |" in text
    assert "| MegaTrain upstream | 2 |" in text


def test_a_peer_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ModuleNotFoundError, match=r"DeepSpeed is not installed; .* --peer-path"):
        peer_steps.run("zero3", ROWS["tiny"], steps=1)


def test_rows_that_differ_in_our_settings_alone_share_the_other_peers(tmp_path, capsys):
    file = tmp_path / "peers.jsonl"
    arguments = ["--peers", "upstream", "--resume", str(file), "--upstream-command"]
    run(["7b", *arguments, command({"all_seconds": [2.0]})], capsys)
    assert "| 2 |" in run(["7b-24", *arguments, command({"all_seconds": [5.0]})], capsys)
    assert "| 5 |" in run(["7b-8k-24", *arguments, command({"all_seconds": [5.0]})], capsys)


def test_a_pair_beyond_the_budget_is_left(tmp_path, capsys):
    file = tmp_path / "peers.jsonl"
    arguments = ["tiny", "--peers", "upstream", "--resume", str(file), "--upstream-command"]
    estimate = peers.expected(ROWS["tiny"], "upstream", 5)
    text = run([*arguments, command({"all_seconds": [2.0]}), "--budget", str(estimate - 1)], capsys)
    assert f"Left for the next call: tiny upstream (about {estimate:.0f} s)." in text
    assert file.read_text() == ""
    assert "| 2 |" in run([*arguments, command({"all_seconds": [2.0]}), "--budget", str(estimate + 60)], capsys)


def test_a_pair_that_the_budget_cuts_off_is_left_and_one_over_its_own_limit_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "expected", lambda *_: 0.1)
    file = tmp_path / "peers.jsonl"
    arguments = ["tiny", "--peers", "upstream", "--resume", str(file), "--upstream-command", "sleep 60"]
    assert "tiny upstream (took more than" in run([*arguments, "--budget", "0.3", "--limit", "30"], capsys)
    assert file.read_text() == ""
    assert "stopped after 0 s" in run([*arguments, "--limit", "0.3"], capsys)
    assert len(file.read_text().splitlines()) == 1


def test_what_a_peer_started_ends_with_it():
    ended = peers.watched(["sh", "-c", "sleep 600 & echo $!; wait"], dict(os.environ), None, limit=2)
    assert ended.out_of_time
    with suppress(psutil.NoSuchProcess):  # its new parent may not have collected it yet
        started, end = psutil.Process(int(ended.output)), time.monotonic() + 300
        while started.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "it still runs"
            time.sleep(0.01)


def test_a_peer_without_its_parent_ends_before_it_trains():
    process = os.fork()
    if process == 0:
        peers.child("eager", TINY, 10**6, parent=-1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1


def test_a_peer_that_a_signal_ends_says_so():
    ended = peers.watched([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}, None, limit=30)
    assert ended.reason.startswith("ended by SIGKILL at ")


def test_a_peer_that_uses_up_the_ram_is_ended(monkeypatch):
    monkeypatch.setattr(peers, "SPARE", 1 << 60)
    ended = peers.watched(["sleep", "60"], {}, None, limit=30)
    assert ended.reason.startswith("out of RAM: ")
    assert not ended.out_of_time


@pytest.mark.parametrize("text", ["{", "[]", '{"peer": "ours"}'])
def test_a_broken_line_of_the_file_is_named(tmp_path, text):
    file = tmp_path / "peers.jsonl"
    file.write_text(json.dumps(record("7b", "ours", [1.0])) + "\n" + text + "\n")
    with pytest.raises(SystemExit, match=r"line 2 of .*peers.jsonl is not a record"):
        peers.records(file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["7b", "--peers", "none"], "unknown: none"), (["8b"], "unknown: 8b"), ([], "name a row"),
     (["7b", "--peers", "upstream"], "needs --upstream-command"), (["7b", "--steps", "0"], "at least 1")],
)  # fmt: skip
def test_wrong_options_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit):
        peers.parsed(arguments)
    assert words in capsys.readouterr().err


# ---- arithmetic


def test_flops_count_active_experts_and_the_head_once():
    row = ROWS["30b-a3b"]
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768
    tokens = 4 * 4 * 2048
    assert flops(row) == (6 * (6 * layer + 151936 * 2048) * tokens, 6 * 6 * 4096 * 2048 * tokens)


def test_the_depth_that_zero3_fits_is_the_largest_that_does():
    ram = 125 * GIB
    row = ROWS["14b-width-40"]
    layers = zero3_layers(replace(row, layers=1).described(), ram)
    needed = [ZERO3_BYTES * replace(row, layers=n).described().parameters + ZERO3_SPARE for n in (layers, layers + 1)]
    assert needed[0] <= ram < needed[1]
    assert row_of("14b-width-40", 7).title() == "7 layers of qwen2.5-14b, 4 of 4 × 2048 tokens, max_vram_gb=40"


# ---- reports

RESULTS = [
    record("7b", "ours", [2.0], lanes={"h2d": {"busy": 1.0, "waited": 0.25, "gb_per_s": 50.0}}),
    record("7b-24", "ours", [4.0], config={"numerics": "exact"}),
    record("7b", "stored", None, failed="OutOfMemoryError: CUDA out of memory | x"),
    record("7b", "zero3", [5.0]),
    record("1.5b", "eager", [1.0]),
]


def test_the_table_has_ratios_failures_and_lanes():
    lines = peer_report.table(RESULTS).splitlines()
    assert [text for text in lines if text.startswith("###")] == [
        f"### {title}" for title in (ROWS["7b"].title(), ROWS["7b-24"].title(), ROWS["1.5b"].work())
    ]
    zero3 = [text for text in lines if "ZeRO-3" in text]
    assert [text.split(" | ")[-1] for text in zero3] == ["2.50× |", "1.25× |"]
    assert sum("| OutOfMemoryError: CUDA out of memory \\| x |" in text for text in lines) == 2
    assert "| h2d | 1.000 | 0.250 | 50.0 |" in lines
    assert "- MegaTrain: exact." in lines
    tables = [text for text in lines if text.startswith("| ") and "lane" not in text and "h2d" not in text]
    assert {text.replace("\\|", "").count("|") for text in tables} == {10}


def test_rows_and_peers_can_be_selected():
    assert peer_report.selected(RESULTS, [], []) == RESULTS
    chosen = peer_report.selected(RESULTS, ["7b-24"], ["ours", "zero3"])
    assert chosen == [RESULTS[1], RESULTS[3]]


def test_the_picture_has_a_bar_for_every_result_and_stays_inside():
    picture = ElementTree.fromstring(peer_report.picture(RESULTS))
    bars = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("class") != "back"]
    # The record of ZeRO-3 serves two rows.
    assert len(bars) == 5
    widths = [float(bar.get("width")) for bar in bars]
    assert widths[0] == pytest.approx(2.5 * widths[1], rel=1e-2)
    assert [bar.get("class") for bar in bars].count("ours") == 2
    texts = [text for text in picture.iter(f"{SVG}text") if text.text]
    assert sum(text.text == "out of memory" for text in texts) == 2
    _, _, width, height = map(float, picture.get("viewBox").split())
    for text in texts:
        # A character is about 7 pixels wide.
        start = float(text.get("x")) - (7 * len(text.text) if text.get("text-anchor") == "end" else 0)
        assert start >= 0
        assert start + 7 * len(text.text) <= width + 7
        assert float(text.get("y")) < height
    assert "prefers-color-scheme: dark" in picture.find(f"{SVG}style").text
    with pytest.raises(SystemExit, match="no results"):
        peer_report.picture([])
