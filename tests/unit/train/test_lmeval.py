"""`dray model eval RUN --tasks`: what lm-eval is asked, by a stand-in for it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import dray
from dray.contract.trainer import image_tasks

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from trainings import Forks, Run

pytestmark = pytest.mark.torch
STAND_IN = """
import json, sys
def cli_evaluate():
    if "nosuch" in sys.argv:
        raise ValueError("Tasks not found: nosuch")
    if "--nosuch" in sys.argv:
        sys.exit(2)
    print(json.dumps(sys.argv))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    return Run(forks, tmp_path_factory.mktemp("my runs") / "mine", 1, steps="steps=2").end().folder


def evaluate(run: Path, *words: str, lm_eval: Path | None = None) -> tuple[int, str]:
    if lm_eval:
        (lm_eval / "lm_eval").mkdir()
        (lm_eval / "lm_eval" / "__init__.py").touch()
        (lm_eval / "lm_eval" / "__main__.py").write_text(STAND_IN)
        words = (f"env.PYTHONPATH={lm_eval}", *words)
    ended = dray("model", "eval", run, *words, cwd="/")
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
def test_lm_eval_gets_the_model_the_tasks_and_its_own_options_last(run: Path, tmp_path: Path) -> None:
    code, shown = evaluate(run, "--tasks", "hellaswag,arc_easy", "--", "--num_fewshot", "5", lm_eval=tmp_path)
    assert code == 0, shown
    model = run / "checkpoints" / "final"
    settings = {"pretrained": str(model), "dtype": "auto", "trust_remote_code": False, "parallelize": False}
    assert json.loads(shown) == [
        *("lm_eval", "run", "--model", "hf", "--model_args", json.dumps(settings)),
        *("--tasks", "hellaswag,arc_easy", "--device", "cpu", "--batch_size", "1"),
        *("--output_path", "results.json", "--num_fewshot", "5"),
    ]
    assert (run / "lm-eval").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("--tasks", "nosuch"), "dray: lm-eval cannot evaluate this\n  where:  --tasks nosuch\n"),
        (("--tasks", "hellaswag", "--", "--nosuch"), "found:  ValueError: options that it refuses, as it says above\n"),
    ],
)
def test_what_lm_eval_refuses_is_no_defect_of_dray(run: Path, tmp_path: Path, words: tuple, refused: str) -> None:
    code, shown = evaluate(run, *words, lm_eval=tmp_path)
    assert (code, refused in shown) == (78, True), shown


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("--tasks", "hellaswag", "data.test=x.txt"), "wanted: settings of env, pass_env, image, layer\n"),
        (("--", "--num_fewshot", "5"), "options after -- are for lm-eval\n  found:  --num_fewshot 5\n"),
    ],
)
def test_what_has_no_effect_is_refused(run: Path, words: tuple, refused: str) -> None:
    code, shown = evaluate(run, *words)
    assert (code, refused in shown) == (78, True), shown


def test_an_image_without_lm_eval_names_the_layer(run: Path, tmp_path: Path, forks: Forks) -> None:
    model = str(run / "checkpoints" / "final")
    job = image_tasks.LmEval(model, "hellaswag", [], "cuda", 1, trust_remote_code=False)
    code, shown = forks.job(job, tmp_path / "job")
    assert code == 78
    assert "dray image layer cuda --pip lm-eval --wheels wheels --name lm-eval\n" in shown


def test_results_of_a_run_that_is_read_only_are_here(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dray.cli import model
    from dray.runs import local

    folders = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model.os, "access", lambda *_: False)
    monkeypatch.setattr(local, "run_in_image", lambda *_, folder, **__: folders.append(folder) or 0)
    plan, final = local.ended_run(run)
    job = image_tasks.LmEval(str(final), "hellaswag", [], "cpu", 1, trust_remote_code=False)
    model._lm_eval(plan.recipe, job, "bare")
    assert folders == [tmp_path / "lm-eval"]


def test_a_masked_model_has_no_next_token(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dray.cli import model
    from dray.contract.findings import ConfigError
    from dray.runs import local

    plan, final = local.ended_run(run)
    masked = plan.recipe.with_values("train", objective="masked")
    job = image_tasks.LmEval(str(final), "hellaswag", [], "cpu", 1, trust_remote_code=False)
    with pytest.raises(ConfigError, match="lm-eval's tasks are for models that predict the next token"):
        model._lm_eval(masked, job, "bare")
