"""What is made of a run beside its training: `python -m dray.train.outputs JOB.json`; contract/jobs.py has the jobs."""
