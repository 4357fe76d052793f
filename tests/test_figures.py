"""Tests: plots/figures.py: are the numbers drawn the numbers logged? Made-up runs, no training."""
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

PLOTS = Path(__file__).parents[1] / "plots"
sys.path.insert(0, str(PLOTS))
import figures  # noqa: E402
import table  # noqa: E402

COLUMNS = """step reward accuracy eval_accuracy eval_low eval_high eval_sampled eval_lenient pg_loss
    value_loss entropy ref_kl approx_kl clip_frac grad_norm lr response_len truncated_frac tied_frac
    kl_coef explained_var gen_rounds groups_dropped expert_entropy sampler_gap samples tokens
    t_sample t_logp t_update t_total mem_gb""".split()


def write_run(folder, script="grpo", settings=None, **columns):
    """A run's folder with every column of the real thing; empty are those not given, and None."""
    folder.mkdir(parents=True)
    steps = range(len(next(iter(columns.values()))))
    with (folder / "metrics.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        for step in steps:
            rows.writerow({"step": step} | {name: column[step] for name, column in columns.items()})
    about = {"script": script, "config": settings or {}, "command": "", "versions": {}}
    (folder / "config.json").write_text(json.dumps(about))
    return figures.load_run(folder)


@pytest.fixture
def seeds(tmp_path):
    """Three GRPO runs of 0, 1 and 2 x a ramp in entropy; evaluations at steps 0 and 2."""
    return [write_run(tmp_path / f"grpo-{seed}", settings={"seed": seed, "lr": 1e-6},
                      entropy=[0.5 + seed * step for step in range(4)],
                      eval_accuracy=[0.2 + seed / 10, None, 0.5 + seed / 10, None],
                      eval_low=[0.1, None, 0.4, None], eval_high=[0.4, None, 0.7, None],
                      eval_sampled=[0.1, None, 0.3, None], t_sample=[30.0] * 4, t_logp=[6.0] * 4,
                      t_update=[12.0] * 4, t_total=[60.0 + seed] * 4) for seed in range(3)]


def panel(runs, column, smooth=1):
    """The axes of one panel."""
    ax = Figure().subplots()
    figures.draw_panel(ax, figures.group_runs(runs), column, smooth)
    return ax


def band(ax):
    """{x: (lowest, highest)} of the shaded band."""
    x, y = ax.collections[0].get_paths()[0].vertices.T
    return {float(at): (y[x == at].min(), y[x == at].max()) for at in np.unique(x)}


def test_seeds_become_a_mean_and_their_range(seeds):
    ax = panel(seeds, "entropy")
    assert len(ax.lines) == 1
    assert ax.lines[0].get_xdata() == pytest.approx([0, 1, 2, 3])
    assert ax.lines[0].get_ydata() == pytest.approx([0.5, 1.5, 2.5, 3.5])
    assert band(ax)[3] == pytest.approx((0.5, 6.5))


def test_seeds_are_averaged_only_where_all_have_been(seeds, tmp_path):
    seeds.append(write_run(tmp_path / "grpo-9", entropy=[4.5, 5.5]))  # still at step 1
    seeds.append(write_run(tmp_path / "grpo-10", reward=[0.0]))  # no entropy yet: not counted
    ax = panel(seeds, "entropy")
    assert ax.lines[0].get_xdata() == pytest.approx([0, 1])
    assert ax.lines[0].get_ydata() == pytest.approx([(3 * 0.5 + 4.5) / 4, (3 * 1.5 + 5.5) / 4])


def test_held_out_accuracy_of_one_run_has_its_wilson_interval(seeds):
    ax = panel(seeds[:1], "eval_accuracy")
    greedy, sampled = ax.lines
    assert greedy.get_xdata() == pytest.approx([0, 2])  # evaluations only every few steps
    assert greedy.get_ydata() == pytest.approx([0.2, 0.5])
    assert band(ax) == {0: pytest.approx((0.1, 0.4)), 2: pytest.approx((0.4, 0.7))}
    assert sampled.get_ydata() == pytest.approx([0.1, 0.3])
    assert (greedy.get_linestyle(), sampled.get_linestyle()) == ("-", "--")
    assert greedy.get_color() == sampled.get_color()


def test_held_out_accuracy_of_seeds_has_their_range(seeds):
    ax = panel(seeds, "eval_accuracy")
    assert ax.lines[0].get_ydata() == pytest.approx([0.3, 0.6])
    assert band(ax)[2] == pytest.approx((0.5, 0.7))


def test_bars_show_the_last_value_and_the_range(seeds):
    ax = panel(seeds, "final_accuracy")
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([60])
    assert ax.lines[0].get_xdata() == pytest.approx([50, 70])
    assert panel(seeds[:1], "final_accuracy").lines[0].get_xdata() == pytest.approx([40, 70])
    minutes = panel(seeds, "stage_time")  # 4 steps of 60, 61 and 62 seconds
    assert [bar.get_width() for bar in minutes.patches] == pytest.approx([4 * 61 / 60])


def test_stages_stack_up(seeds):
    ax = panel(seeds, "t_total")
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([30, 6, 12])
    assert [bar.get_x() for bar in ax.patches] == pytest.approx([0, 30, 36])


def test_smoothing_looks_back_only_and_leaves_evaluations_alone(seeds):
    run = seeds[2:]  # entropy 0.5, 2.5, 4.5, 6.5
    assert panel(run, "entropy", 3).lines[0].get_ydata() == pytest.approx([0.5, 1.5, 2.5, 4.5])
    assert panel(run, "eval_accuracy", 3).lines[0].get_ydata() == pytest.approx([0.4, 0.7])
    groups = figures.group_runs(run)
    caption = figures.make_figure(groups, ["entropy"], 3)._supxlabel.get_text()
    assert "trailing mean over 3 steps" in caption and "Wilson" not in caption
    assert "trailing" not in figures.make_figure(groups, ["eval_accuracy"], 3)._supxlabel.get_text()


def test_a_line_still_being_written_is_left_out(seeds, tmp_path):
    file = tmp_path / "grpo-0" / "metrics.csv"
    whole = file.read_text()
    file.write_text(whole + "4,0.12,0.1")
    assert figures.load_run(file.parent)["step"] == pytest.approx([0, 1, 2, 3])
    file.write_text(whole + whole.splitlines()[-1].replace("0.5", "0.75") + "\n")
    assert figures.load_run(file.parent)["entropy"] == pytest.approx([0.5, 0.5, 0.5, 0.75])


def test_a_share_of_zero_has_a_place_on_the_log_axis(tmp_path):
    ax = panel([write_run(tmp_path / "gspo-1", "gspo", clip_frac=[0.0, 0.001, 0.1])], "clip_frac")
    zero, small, large = ax.transData.transform([(0, 0), (0, 0.001), (0, 0.1)])[:, 1]
    assert ax.get_ylim()[0] == 0
    assert large - small == pytest.approx(2 * (small - ax.transData.transform((0, 1e-4))[1]))
    assert small > zero


def test_labels_and_looks(seeds, tmp_path):
    runs = [*seeds, write_run(tmp_path / "x", "ppo.py", reward=[1]),
            figures.load_run(tmp_path / "grpo-0", "by hand")]
    (tmp_path / "dapo-3").mkdir()
    (tmp_path / "dapo-3" / "metrics.csv").write_text("step,reward\n0,1\n")
    runs.append(figures.load_run(tmp_path / "dapo-3"))  # no config.json: the folder's name
    groups = figures.group_runs(runs)
    assert [*map(len, groups.values())] == [1, 3, 1, 1]
    assert list(groups) == ["PPO", "GRPO", "DAPO", "by hand"]
    assert figures.styles(["GSPO", "GRPO"])["GRPO"] == figures.styles(["GRPO"])["GRPO"]
    looks = figures.styles([str(n) for n in range(56)]).values()
    assert len({(look["color"], look["marker"]) for look in looks}) == 56


def test_one_legend_and_no_empty_panels(seeds, tmp_path):
    runs = [*seeds, write_run(tmp_path / "dapo-1", "dapo", reward=[1, 1])]
    panels = figures.choose_panels(runs, list(figures.PANELS))
    assert panels == ["eval_accuracy", "final_accuracy", "stage_time", "reward", "entropy",
                      "t_total"]
    figure = figures.make_figure(figures.group_runs(runs), panels)
    assert len(figure.axes) == len(panels)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["GRPO", "DAPO", "greedy", "sampled"]
    assert "range over 1 or 3 seeds" in figure._supxlabel.get_text()


def test_the_command_without_a_display(seeds, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    command = [sys.executable, "-W", "error", PLOTS / "figures.py", tmp_path / "grpo-0",
               f"a = b={tmp_path / 'grpo-1'}", "--out", tmp_path / "out" / "new", "--smooth", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert imread(tmp_path / "out" / "new" / "accuracy.png").shape[1] == 900
    assert imread(tmp_path / "out" / "new" / "curves.png").std() > 0.05


def test_a_run_that_has_just_begun(tmp_path):
    run = write_run(tmp_path / "ppo-1", "ppo", reward=[0.1, float("inf")])  # inf: a gap
    assert panel([run], "reward").lines[0].get_ydata() == pytest.approx([0.1])
    figures.main([str(tmp_path / "ppo-1"), "--out", str(tmp_path)])
    assert (tmp_path / "curves.png").exists() and not (tmp_path / "accuracy.png").exists()


def test_runs_that_are_not_only_seeds_are_named(seeds, tmp_path, capsys):
    arguments = ["--columns", "entropy", "--out", str(tmp_path)]
    figures.main([*(str(tmp_path / f"grpo-{n}") for n in range(3)), *arguments])
    assert "differ" not in capsys.readouterr().out
    write_run(tmp_path / "grpo-4", settings={"seed": 4, "lr": 1e-5}, entropy=[1.0])
    figures.main([str(tmp_path / "grpo-0"), str(tmp_path / "grpo-4"), *arguments])
    assert "GRPO: drawn as seeds, but the runs differ in lr\n" in capsys.readouterr().out
    table.main([str(tmp_path / "grpo-0"), str(tmp_path / "grpo-4")])
    assert "GRPO: drawn as seeds, but the runs differ in lr\n" in capsys.readouterr().err


def test_a_folder_of_runs_among_runs_is_left_out(tmp_path, capsys):
    """`runs/*`, once plots/claims.py has put its own there."""
    write_run(tmp_path / "grpo-1", reward=[0.1])
    write_run(tmp_path / "claims" / "grpo-s0", reward=[0.9])
    (run,) = figures.load_runs(map(str, sorted(tmp_path.iterdir())))
    assert run["reward"] == pytest.approx([0.1])
    assert capsys.readouterr().err == f"left out, a folder of runs: {tmp_path / 'claims'}\n"
    with pytest.raises(ValueError, match="no metrics.csv in"):
        figures.load_runs([str(tmp_path / "claims")])


def test_a_run_that_only_evaluated_is_left_out(seeds, tmp_path, capsys):
    """It would be a third seed that never learns."""
    write_run(tmp_path / "idle", settings={"steps": 0}, eval_accuracy=[0.1], t_total=[None])
    runs = figures.load_runs([str(tmp_path / "grpo-0"), str(tmp_path / "idle")])
    assert len(runs) == 1 and runs[0].settings["seed"] == 0
    assert "--steps 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match="only evaluated"):
        figures.load_runs([str(tmp_path / "idle")])


def test_a_mistake_in_the_table_is_one_line_too(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        table.main([str(tmp_path / "nowhere")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"table.py: no folder {tmp_path / 'nowhere'}\n"


@pytest.mark.parametrize("content, arguments, complaint", [
    (None, [], "no metrics.csv in RUN"),
    ("", [], "RUN/metrics.csv is empty"),
    ("step,reward\n", [], "has no numeric rows"),
    ("step,reward\nx,y\n", [], "has no numeric rows"),
    ("reward,entropy\n1,2\n", [], "has no numeric rows"),
    ("step,reward\n0,1\n", ["--columns", "rewrad"], "no column rewrad"),
    ("step,reward,entropy\n0,1,\n", ["--columns", "entropy"], "every column is empty"),
    ("step,reward\n0,1\n", ["--smooth", "x"], "--smooth"),
    ("step,reward\n0,1\n", ["nowhere"], "no folder nowhere")])
def test_a_mistake_is_one_line_and_status_2(tmp_path, capsys, content, arguments, complaint):
    run = tmp_path / "run-1"
    run.mkdir()
    if content is not None:
        (run / "metrics.csv").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        figures.main([str(run), *arguments])
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert said.count("\n") == 1 and complaint.replace("RUN", str(run)) in said
