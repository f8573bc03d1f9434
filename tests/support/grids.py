"""A recipe whose best setting is plain on any machine, and how a search is held against the grid."""

from __future__ import annotations

from collections.abc import Sequence

from dray.planning import tune_search
from dray.runs import study
from dray.runs.study import Row

# Eight micro-batches of one row take far longer than one of eight.
_RECIPE = """\
name = "tiny"
launcher = "python"
ranks_per_node = 2

[env]
OMP_NUM_THREADS = "1"

[preflight]
when = "never"

[batch]
global_size = 16
per_device = 1

[data]
sequence_length = 64

%s
[train]
steps = 100
lr = 1e-3
warmup_steps = 20
precision = "fp32"
objective = "%s"
"""
_GPT2 = """\
[model.config]
n_layer = 2
n_embd = 64
n_head = 2
n_positions = 64
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
"""
_BERT = """\
[model]
type = "bert"

[model.config]
num_hidden_layers = 2
hidden_size = 64
num_attention_heads = 2
intermediate_size = 256
max_position_embeddings = 64
hidden_dropout_prob = 0.0
attention_probs_dropout_prob = 0.0
"""
CAUSAL, MASKED = _RECIPE % (_GPT2, "causal"), _RECIPE % (_BERT, "masked")


def among_the_best(by_search: Sequence[Row], by_grid: Sequence[Row]) -> bool:
    """As the grid has measured what the search has found: not beaten by more than noise."""
    best = study.best_row(by_search)
    assert best
    figures = {tuple(row.values.items()): study.figure(row) for row in by_grid}
    found = figures[tuple(best.values.items())]
    return found is not None and not any(figure and tune_search.beats(figure, found) for figure in figures.values())
