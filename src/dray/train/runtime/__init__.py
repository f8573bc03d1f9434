"""What a run does beside its steps: beats, stops, slow ranks, compiled code, settings of torch."""
