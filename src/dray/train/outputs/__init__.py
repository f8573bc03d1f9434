"""Jobs beside training: `python -m dray.train.outputs JOB.json`; contract/jobs.py lists them."""
