"""Jobs beside training: `python -m dray.train.outputs JOB.json`; contract/image_tasks.py lists them."""
