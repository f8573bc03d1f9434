"""Jobs beside training: `python -m dray.train.outputs JOB.json`; contract/trainer/image_tasks.py lists them."""
